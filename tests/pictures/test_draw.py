"""draw: what it takes, how it prints and shows itself, and what it writes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import shardtree as st
from shardtree.core.layouts import tree_columns
from shardtree.errors import KeyMismatch
from shardtree.pictures import Picture
from shardtree.retention import SavedStep, keep_last

MODEL = {"w": torch.arange(48.0).reshape(8, 6), "b": torch.arange(6.0)}
MESH = st.Mesh(tp=2)
TREES = st.shard(MODEL, MESH, st.P("tp"))
HELD = st.ShardedTensor.from_rank_offsets("w", torch.zeros(4, 2))
PLAN = st.plan_reshard(TREES, st.abstract(MODEL, st.Mesh(dp=2), st.P(None)))
SERIES = st.CheckpointSeries(st.storage.MemoryStorage())


@pytest.fixture(scope="module")
def opened() -> Any:
    folder = st.storage.MemoryStorage()
    st.simulate(2, lambda world: st.save(TREES[world.rank], folder, world=world))
    return st.open_checkpoint(folder)


@pytest.mark.parametrize(
    ("arguments", "title"),
    [
        ((TREES,), "2 tensors on 2 ranks"),
        ((dict(enumerate(TREES)), "w"), "'w' (8, 6) float32"),
        ((tree_columns(TREES), "b"), "'b' (6,) float32"),
        ((TREES[0],), "one rank's 2 tensors"),
        ((TREES[1]["w"],), "'w' (8, 6) float32"),
        ((MESH,), "Mesh(tp=2)"),
        ((MESH, st.P("tp")), "Mesh(tp=2), cut by PartitionSpec('tp')"),
        ((st.lenses.transposed(), HELD), "'w' (4, 2): held and stored"),
        ((st.lenses.transposed(), [HELD, HELD]), "'w' (4, 2): held and stored"),
        ((st.lenses.as_factory(HELD, st.lenses.transposed()),), "'w' (4, 2): held and stored"),
        ((PLAN, "w"), "2 tensors on 2 ranks: 216 B move, at least 216 B must"),
        ((PLAN.schedule(),), "1 step: 216 B move"),
        (([SavedStep(1), SavedStep(2)], keep_last(1)), "2 steps, 1 of them goes"),
        ((SERIES,), "no steps yet"),
        ((Picture("mine", ()),), "mine"),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_each_kind_is_drawn(arguments: tuple[Any, ...], title: str) -> None:
    drawing = st.draw(*arguments)
    assert drawing.picture.title.startswith(title)
    assert str(drawing) == repr(drawing) and repr(drawing).startswith(title)
    assert drawing._repr_svg_() == drawing._repr_html_() == drawing.svg()


def test_a_stored_tensor_shows_its_files_and_reads_no_element(opened: Any) -> None:
    for drawing in (st.draw(opened, "w"), st.draw(opened["w"])):
        (plane,), (files,) = drawing.picture.rows
        assert [cell.title.split("/")[-1] for cell in plane.cells] == [f"{n:05}-of-00002.safetensors" for n in (0, 1)]
        assert sum(bar.amount for bar in files.bars) == MODEL["w"].nbytes
    assert st.draw(opened).picture.title == "2 tensors in 2 files, 216 B"


def test_a_stored_tensor_that_was_changed_is_a_shard(opened: Any) -> None:
    half = opened["w"].narrow(0, 0, 4)[0]
    assert st.draw(replace(HELD, data=None)).picture.title == "'w' (4, 2) float32"
    (cell,) = st.draw(half).picture.rows[0][0].cells
    assert cell.title == "[0:4, 0:6] this shard"


def test_a_plan_is_drawn_by_each_name_that_it_explains() -> None:
    def shard(key: str, rows: int) -> st.ShardedTensor:
        return st.ShardedTensor.from_rank_offsets(key, torch.zeros(rows, 2))

    lens = st.lenses.gate_and_up(tensor_parallel=1, part="gate_up", names=("gate", "up"))
    engine = {"model": {"fused": st.lenses.as_factory(shard("mlp.gate_up", 8), lens)}}
    plan = st.plan_reshard({0: {name: shard(name, 4) for name in ("mlp.gate", "mlp.up")}}, {0: {}, 1: engine})
    names = [*plan.target.keys, *plan.names]
    assert {"mlp.gate", "mlp.gate_up", "model.fused"} <= set(names)
    for name in names:
        drawn = [plane.heading for row in st.draw(plan, name).picture.rows[:-1] for plane in row]
        for key in plan.explain(name).kinds:
            assert any(repr(key) in heading for heading in drawn), name
    with pytest.raises(KeyMismatch, match=r"Did you mean 'model\.fused'"):
        st.draw(plan, "model.fuse")
