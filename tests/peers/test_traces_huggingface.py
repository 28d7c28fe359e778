"""transformers' own loading, traced whole, for every entry of its mapping: renamings, converters, threads."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from math import prod
from typing import Any

import pytest
import torch

import shardtree as st
from tests.peers.small_transformers import small_model

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore::UserWarning")]  # of models so small

NOT_MADE = {
    "transformers has no such class": (
        "MtpModel PPChart2TableModel legacy mlcd mlcd_vision pp_chart2table xCLIPTextModel xCLIPVisionModel"
    ),
    "needs timm": "ConditionalDetrForSegmentation ConditionalDetrModel DetrForSegmentation DetrModel timm_wrapper",
    "its default configuration makes no small model": (
        "BeitForSemanticSegmentation Emu3Model MimiDecoderModel MimiModel Sapiens2ForImageMatting "
        "Sapiens2ForNormalEstimation Sapiens2ForPointmapEstimation Sapiens2ForPoseEstimation "
        "Sapiens2ForSemanticSegmentation VibeVoiceAsrModel emu3 gemma3n_text hunyuan_vl pp_doclayout_v2 "
        "pp_doclayout_v3 t5gemma2_encoder vibevoice_asr"
    ),
}
"""Entries that only rename, no model of which is made here, by cause. None is refused by a trace."""
QUICK = ("llama", "gemma2", "gpt_oss", "mixtral", "deepseek_v3", "qwen3_next", "nomic_bert", "kimi_linear")
"""Three that the mapping doesn't name, and five whose converters stack, fuse, split and compute at the start."""


PUBLISHED = re.compile(r"model\.thinker\.(?=audio_tower|visual)|(?<=model\.)thinker\.language_model\.")
"""What transformers 5.23 puts too much before the names of Omni models that it saves, and doesn't load."""


def entries(*, converted: bool) -> Iterator[str]:
    mapping = pytest.importorskip("transformers.conversion_mapping")
    listed = mapping._build_checkpoint_conversion_mapping()
    for name, found in sorted(listed.items()):
        if any(isinstance(each, mapping.WeightConverter) for each in found) is converted:
            yield name


def stored_of(model: Any) -> dict[str, torch.Tensor]:
    """Return a checkpoint of a model, in which no element is like another one of its tensor."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import revert_weight_conversion

    model._weight_conversions = get_model_conversion_mapping(model, add_legacy=False)
    tied = getattr(model, "all_tied_weights_keys", {})
    state = {
        name: torch.arange(each.numel()).add(number).to(each.dtype).reshape(each.shape)
        for number, (name, each) in enumerate(model.state_dict().items())
        if name not in tied
    }
    stored = revert_weight_conversion(model, state)
    return {PUBLISHED.sub("", name): each.contiguous() for name, each in stored.items()}


def check_there_and_back(entry: str, *, converts: bool) -> None:
    from transformers.core_model_loading import WeightConverter

    model = small_model(entry)
    stored, held, used = stored_of(model), dict[str, torch.Tensor](), list[Any]()

    def load(tensors: dict[str, torch.Tensor]) -> None:
        given = {"config": model.config, "state_dict": dict(tensors), "local_files_only": True}
        loaded = type(model).from_pretrained(None, **given)
        used[:] = [each for each in loaded._weight_conversions if isinstance(each, WeightConverter)]
        held.clear()
        held.update(loaded.state_dict())

    load(stored)
    eager = dict(held)
    assert used or not converts, "no converter was used"
    found = st.trace(load, stored, into=lambda: held)
    outputs = found(stored)
    assert outputs.keys() == eager.keys()
    assert [name for name, each in eager.items() if not torch.equal(outputs[name], each)] == []
    assert found.check() == ()
    elements = sum(prod(box.shape) for boxes in found.reads().values() for box in boxes)
    assert elements == sum(each.numel() for each in stored.values()), "each element is read once"
    back = found.inverse()(outputs)
    assert [name for name, each in stored.items() if not torch.equal(back[name], each)] == []


def failures(names: Iterable[str], *, converts: bool = False) -> dict[str, str]:
    transformers = pytest.importorskip("transformers", minversion="5")
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    transformers.utils.logging.disable_progress_bar()
    found = {}
    for name in names:
        try:
            check_there_and_back(name, converts=converts)
        except Exception as error:  # all are told together
            found[name] = f"{type(error).__name__}: {error}"
    return found


def test_common_models_are_traced_there_and_back() -> None:
    assert failures(QUICK) == {}


@pytest.mark.slow
def test_every_entry_with_a_converter_is_traced_there_and_back() -> None:
    names = list(entries(converted=True))
    assert len(names) >= 80
    assert failures(names, converts=True) == {}


@pytest.mark.slow
def test_every_entry_that_renames_is_traced_there_and_back_where_a_model_is_made() -> None:
    not_made = {name for names in NOT_MADE.values() for name in names.split()}
    assert failures(set(entries(converted=False)) - not_made) == {}
