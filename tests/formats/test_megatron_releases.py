"""What each release of Megatron-Core saved of a small GPT with its optimizer, in both of its formats.

The folders are those of `tests/fixtures/make_megatron.py`, packed; they need no Megatron-Core.
"""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import shardtree as st
from shardtree.interop.megatron_optimizer import model_space
from tests.formats.optimizer_formats import FIXTURES, LAYOUTS, wrong_in_layout

RELEASES = [path.name.removeprefix("megatron_gpt_").removesuffix(".tar.xz") for path in FIXTURES.glob("*gpt_*.tar.xz")]
KINDS = ("dp_reshardable", "fully_reshardable")
MASTER = "optimizer.state.param."


@pytest.fixture(scope="module", params=sorted(RELEASES))
def release(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("release") / str(request.param)
    with tarfile.open(FIXTURES / f"megatron_gpt_{request.param}.tar.xz") as packed:
        packed.extractall(folder, filter="data")
    return folder


def held(release: Path) -> dict[str, torch.Tensor]:
    """Return the states that the live optimizers held, whole, and the weights: masters, as the model has them."""
    states = load_file(release / "truth.safetensors")
    masters = {key.removeprefix(MASTER): value for key, value in states.items() if key.startswith(MASTER)}
    return states | {key: value.to(torch.bfloat16) for key, value in masters.items()}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_weights_and_states_load_in_other_layouts(release: Path, kind: str, layout: str) -> None:
    assert wrong_in_layout(release / kind, held(release), layout) == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_damaged_and_the_common_state_is_read(release: Path, kind: str) -> None:
    assert st.verify(release / kind, report=lambda _: None) == ()
    common = st.load_common_state_dict(release / kind)
    assert common["content_metadata"] == {"distrib_optim_sharding_type": kind}
    assert common["optimizer"]["param_state_sharding_type"] == kind
    # From 0.19 on it is an object beside the tensors, and metadata.json names no format for it.
    assert (release / kind / "common.pt").exists() == (release.name < "0.19")


@pytest.mark.slow
def test_what_is_converted_is_what_the_release_itself_writes(release: Path, tmp_path: Path) -> None:
    """No key, value or number of a group is missing or another: the release's own other format is the proof."""
    ours, theirs = tmp_path / "full", release / "fully_reshardable"
    opened = st.open_checkpoint(release / "dp_reshardable")
    st.convert(release / "dp_reshardable", ours, backend="torch_dist", **model_space(opened))
    assert st.load_common_state_dict(ours) == st.load_common_state_dict(theirs)
    found, expected = st.load_plain_tensors(ours), st.load_plain_tensors(theirs)
    assert found.keys() == expected.keys()
    assert [key for key, value in expected.items() if not torch.equal(found[key], value)] == []
    assert st.load_sharded_metadata(ours).keys() >= st.load_sharded_metadata(theirs).keys()


def test_releases_are_there() -> None:
    assert sorted(RELEASES) == ["0.16.1", "0.17.1", "0.18.2", "0.19.2"]
