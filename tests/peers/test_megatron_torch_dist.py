"""Beside Megatron-Core: it loads what shardtree saves as `torch_dist`, and the other way round, in other layouts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import shardtree as st
from shardtree import mapping
from shardtree.interop.megatron import from_megatron
from tests.peers.lens_state import STORED, lens_tree
from tests.peers.model_state import CONTENT, KINDS, cleared, common, differences, rank_tree, whole
from tests.peers.test_megatron_dp_reshardable import run_script

pytest.importorskip("megatron.core.dist_checkpointing")
pytestmark = [pytest.mark.peers, pytest.mark.torchrun, pytest.mark.slow]

SCRIPT = Path(__file__).parent / "scripts" / "megatron_torch_dist.py"
LAYOUTS = [(1, 1), (2, 1), (4, 1), (2, 2)]
"""Tensor-parallel and pipeline-parallel sizes to load in."""

LOADS = [
    "load:1:1:ours",
    "load:2:1:ours",
    "load all:4:1:ours",
    "load:2:2:ours",
    "load:1:1:stages",
    "load:4:1:stages",
    "load all:2:2:stages",
    "look:1:1:stages",
    "lenses:1:1:lenses",
]
"""What Megatron-Core loads: sizes and checkpoint; all of it where objects lie in the same grid."""


def state(tp: int, pp: int, rank: int, *, flat: bool = False) -> dict[str, Any]:
    return {"model": rank_tree(mapping, tp, pp, rank % tp, rank // tp, flat=flat), **common()}


def save(folder: Path, tp: int, pp: int) -> None:
    """Save with optimizer states cut flat, as a distributed optimizer has them."""

    def one_rank(world: Any) -> None:
        st.save(state(tp, pp, world.rank, flat=True), folder, ("torch_dist", 1), content_metadata=CONTENT, world=world)

    st.simulate(tp * pp, one_rank)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both libraries' checkpoints, and what Megatron-Core found in ours."""
    folder = tmp_path_factory.mktemp("torch_dist")
    save(folder / "ours", 4, 1)
    save(folder / "stages", 2, 2)
    save(folder / "damaged", 1, 1)
    damage(folder / "damaged" / "__0_0.distcp")
    steps = ["save:2:1:theirs", "save:1:2:their-stages", *LOADS, "load:1:1:damaged"]
    (folder / "results.json").write_text(run_script(SCRIPT, folder, *steps))
    return folder


def damage(file: Path) -> None:
    """Flip a bit in the elements of one tensor."""
    data = bytearray(file.read_bytes())
    place = data.index(whole("embedding.weight").numpy().tobytes())
    data[place] ^= 1
    file.write_bytes(data)


@pytest.mark.slow
@pytest.mark.parametrize("step", LOADS)
def test_megatron_core_loads_what_shardtree_saved(folder: Path, step: str) -> None:
    assert json.loads((folder / "results.json").read_text())[step] == []


@pytest.mark.slow
def test_the_comparison_catches_a_flipped_bit(folder: Path) -> None:
    (difference,) = json.loads((folder / "results.json").read_text())["load:1:1:damaged"]
    assert "embedding.weight" in difference


@pytest.mark.parametrize("name", ["theirs", "their-stages"])
@pytest.mark.parametrize(("tp", "pp"), LAYOUTS)
def test_shardtree_loads_what_megatron_core_saved(folder: Path, tp: int, pp: int, name: str) -> None:
    def one_rank(world: Any) -> list[str]:
        target = cleared(mapping, state(tp, pp, world.rank))
        loaded = st.load(target, folder / name, world=world)
        expected = {**state(tp, pp, world.rank), "content_metadata": CONTENT}
        del expected["model"]["rng"]
        return differences(expected, loaded)

    assert st.simulate(tp * pp, one_rank) == [[]] * (tp * pp)


@pytest.mark.parametrize("name", ["ours", "stages", "theirs", "their-stages"])
def test_every_tensor_is_there_whole(folder: Path, name: str) -> None:
    found = st.load_plain_tensors(folder / name)
    assert differences({key: whole(key) for key in KINDS}, found) == []
    assert st.load_content_metadata(folder / name) == CONTENT


def test_shardtree_loads_what_megatron_core_saved_through_lenses(folder: Path) -> None:
    states = ("", "optimizer.state.exp_avg.", "optimizer.state.exp_avg_sq.")
    stored = {state + key for state in states for key in STORED}
    assert set(st.load_tensors_metadata(folder / "lenses")) == stored
    loaded = st.load(from_megatron(lens_tree(zeros=True)), folder / "lenses")
    expected = {name: factory.data for name, factory in lens_tree().items()}
    assert differences(expected, loaded) == []


def test_shardtree_loads_objects_that_megatron_core_saved(folder: Path) -> None:
    opened = st.open_checkpoint(folder / "their-stages")
    assert [opened[f"rng_state/shard_{stage}.0_2.1"].data for stage in range(2)] == [[{"seed": 1000}], [{"seed": 1001}]]
