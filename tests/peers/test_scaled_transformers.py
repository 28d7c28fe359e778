"""No plain weight of transformers' types is taken for a quantised one, neither by a cast nor by `recode`."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch

import shardtree as st
from shardtree.core.trees import scaled_values, those_of
from shardtree.quantised import recode
from tests.peers.small_transformers import small_model
from tests.peers.test_traces_huggingface import entries

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore::UserWarning")]

FP8 = torch.float8_e4m3fn


def check_plain(state: Mapping[str, torch.Tensor]) -> None:
    """A model's own weights are numbers by themselves; also if each matrix were stored in FP8."""
    as_fp8 = {key: FP8 if each.ndim > 1 and each.is_floating_point() else each.dtype for key, each in state.items()}
    for dtypes in ({key: each.dtype for key, each in state.items()}, as_fp8):
        assert scaled_values(dtypes, those_of(dtypes)) == {}
    recode(torch.bfloat16)({key: st.ShardedTensor.from_rank_offsets(key, each) for key, each in state.items()})


@pytest.mark.slow
def test_weights_of_every_type_with_a_converter_are_plain() -> None:
    transformers = pytest.importorskip("transformers", minversion="5")
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    names = list(entries(converted=True))
    assert len(names) >= 80
    failures = {}
    for name in names:
        try:
            check_plain(small_model(name).state_dict())
        except Exception as error:  # all are told together
            failures[name] = f"{type(error).__name__}: {error}"
    assert failures == {}


def test_the_check_catches_scales_beside_a_weight() -> None:
    with pytest.raises(AssertionError):
        check_plain({"w": torch.ones(2, 2), "w_scale": torch.ones(2)})
