"""Plans at their edges: what is flat, doubled, beyond, of another kind, or there twenty times."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import shardtree as st
from shardtree import LocalNonpersistentObject, ShardedObject, ShardedTensor, ShardedTensorFactory
from shardtree.layouts import ShardColumns, join_columns, shard_columns
from shardtree.plans import (
    copy_transfers,
    level_writes,
    plan_load,
    plan_reshard,
)
from shardtree.plans._in_memory import first_sources
from shardtree.plans._load import StoredChunks
from shardtree.trees import HOLE
from tests.plans.test_reshard_cases import ALL, CASES, box, plan_of

FULL = torch.arange(24.0).reshape(6, 4)


def data_of(shard: ShardedTensor) -> ShardedTensor:
    """Return a shard with its elements of the whole."""
    part = FULL[shard.global_slice()]
    if shard.flattened_range is not None:
        part = part.reshape(-1)[shard.flattened_range]
    return replace(shard, data=part.clone())


@pytest.mark.parametrize("name", [name for name in CASES if name != "two tensors"])
def test_every_case_is_carried_out(name: str) -> None:
    sources, targets = ([{str(n): one for n, one in enumerate(own)} for own in side] for side in CASES[name])
    full = [{path: data_of(shard) for path, shard in tree.items()} for tree in sources]
    for tree, asked in zip(st.reshard(full, targets), targets, strict=True):
        assert {path: shard.data.tolist() for path, shard in tree.items()} == {
            path: data_of(shard).data.tolist() for path, shard in asked.items()
        }


def test_a_problem_holds_the_box_that_it_is_about() -> None:
    plan = plan_of("nothing moves")
    wrong = replace(plan, transfers=replace(plan.transfers, nbytes=plan.transfers.nbytes + 1))
    assert [problem.box for problem in wrong.check()] == [(slice(0, 2), slice(0, 4)), (slice(3, 5), slice(0, 4))]
    assert [problem.ranks for problem in wrong.check()] == [(0,), (1,)]
    unfilled = replace(plan_of("flat ranges to boxes"), transfers=plan_of("nothing is wanted").transfers)
    (problem, _) = unfilled.check()
    assert (problem.box, problem.flat) == ((slice(0, 3), slice(0, 4)), None)
    (problem, *_) = replace(plan_of("boxes to flat ranges"), transfers=plan_of("nothing is wanted").transfers).check()
    assert (problem.box, problem.flat) == ((slice(0, 6), slice(0, 4)), slice(0, 7))


def test_new_memory_is_made_where_the_target_or_its_source_is() -> None:
    made: list[torch.device] = []

    def empty(shape: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        made.append(device)
        return torch.empty(shape, dtype=dtype)

    source = [{"w": data_of(ALL)}]
    st.reshard(source, [{"w": ALL}], empty=empty)
    st.reshard(source, [{"w": replace(ALL, data=torch.empty(6, 4, device="meta"))}], empty=empty)
    st.reshard(source, [{"w": replace(ALL, global_offset=(6, 0), local_shape=(0, 4))}], empty=empty)
    assert [device.type for device in made] == ["cpu", "cpu", "cpu"]


def test_trees_of_any_shape_come_back() -> None:
    source = [[data_of(ALL), {"step": [3]}]]
    assert st.reshard(source, [[ALL, {"step": [0]}]])[0][1] == {"step": [3]}
    assert torch.equal(st.reshard([{"w": data_of(ALL)}], [(ALL,)])[0][0].data, FULL)
    assert st.reshard({0: {"w": data_of(ALL), "step": 3}}, {5: {"v": [ALL]}, 2: {}})[2] == {"step": 3}
    rng = ShardedObject("rng", {"a": 1}, (1,), (0,))
    (tree,) = st.reshard([{"rng": rng, "w": data_of(ALL)}], [{"deep": {"rng": replace(rng, data=None), "x": HOLE}}])
    assert tree["deep"]["rng"].data == {"a": 1}


def chunks_of(columns: ShardColumns) -> StoredChunks:
    """Return shards as chunks of a file each, one behind the other."""
    start = (
        np.cumsum(columns.elements * columns.item_size[columns.key]) - columns.elements * columns.item_size[columns.key]
    )
    return StoredChunks(
        columns.key, columns.offset, columns.shape, columns.start, columns.stop, np.zeros_like(columns.key), start
    )


VECTOR = ShardedTensor.from_rank_offsets("v", torch.arange(4.0))
MATRIX = ShardedTensor.from_rank_offsets("w", FULL)


def test_tensors_of_few_axes_are_loaded_beside_those_of_many() -> None:
    few, many = shard_columns([VECTOR]), shard_columns([VECTOR, MATRIX])
    assert plan_load(few, chunks_of(many)).covered.tolist() == [4]
    assert plan_load(many, chunks_of(few)).covered.tolist() == [4, 0]
    (runs,) = (plan_load(columns, chunks_of(other)).runs for columns, other in [(many, few)])
    assert (runs.byte.tolist(), runs.target.tolist(), runs.length.tolist()) == ([0], [0], [16])


def test_a_tensor_in_one_piece_is_one_run_beside_one_that_is_not() -> None:
    whole = ShardedTensor.from_rank_offsets("a", torch.zeros(2, 3, 4))
    stored = ShardedTensor.from_rank_offsets("b", torch.zeros(2, 3, 4))
    part = replace(stored, data=None, local_shape=(2, 2, 2), axis_fragmentations=None)
    plan = plan_load(shard_columns([whole, part]), chunks_of(shard_columns([whole, stored])))
    assert (plan.runs.target.tolist(), plan.runs.length.tolist()) == ([0], [96])
    assert plan.strided.target.tolist() == [1]


def test_the_largest_tensors_are_dealt_first_and_back_and_forth() -> None:
    def writers(sizes: dict[str, int]) -> dict[str, int]:
        held = [ShardedTensor.from_rank_offsets(key, torch.zeros(size)) for key, size in sizes.items()]
        columns = join_columns([shard_columns(held, rank) for rank in (0, 1)])
        rows = np.flatnonzero(level_writes(columns, 2))
        return {columns.keys[columns.key[row]]: int(columns.rank[row]) for row in rows}

    assert writers({"a": 1, "b": 10, "c": 1}) == {"b": 0, "a": 1, "c": 1}
    eight = dict(zip("abcdefgh", range(80, 0, -10), strict=True))
    assert [writers(eight)[key] for key in eight] == [0, 1, 1, 0, 0, 1, 1, 0]


def test_pieces_of_a_shard_come_row_by_row() -> None:
    quarters = [box(rows, columns) for rows in ((0, 3), (3, 6)) for columns in ((0, 2), (2, 4))]
    plan = plan_reshard([[one] for one in quarters], [[], [], [], [], [ALL]])
    assert plan.transfers.offset.tolist() == [[0, 0], [0, 2], [3, 0], [3, 2]]
    assert first_sources(plan) == {0: 0}


def test_memory_of_any_strides_is_filled_also_where_tensors_have_fewer_axes() -> None:
    wide = torch.zeros(8)[::2]
    plan = plan_reshard([[VECTOR, MATRIX]], [[VECTOR]])
    copy_transfers(plan, np.arange(len(plan.transfers)), {0: VECTOR.data}, {0: wide})
    assert wide.tolist() == [0, 1, 2, 3]
    turned = torch.zeros(4, 6).t()
    plan = plan_reshard([[VECTOR, MATRIX]], [[MATRIX]])
    copy_transfers(plan, np.arange(len(plan.transfers)), {1: FULL.t().contiguous().t()}, {0: turned})
    assert torch.equal(turned, FULL)
    square = ShardedTensor.from_rank_offsets("v", torch.arange(4.0).reshape(2, 2))
    cube = ShardedTensor.from_rank_offsets("w", torch.zeros(2, 2, 2))
    memory = torch.zeros(2, 2).t()
    plan = plan_reshard([[square, cube]], [[square]])
    copy_transfers(plan, np.arange(len(plan.transfers)), {0: square.data}, {0: memory})
    assert torch.equal(memory, square.data)


def test_objects_that_a_factory_makes_are_merged_as_their_values() -> None:
    def build(key: str, data: Any, *_: Any) -> Any:
        return {"w": replace(ALL, data=data), "o": ShardedObject("o", {"step": 3}, (1,), (0,))}

    factory = ShardedTensorFactory("f", FULL, build, lambda built: (built["o"], built["w"].sum().item()))
    (tree,) = st.reshard([{"f": factory}], [{"f": factory}])
    assert tree["f"].data == ({"step": 3}, 276)


def test_where_nobody_has_plain_values_a_target_keeps_its_own() -> None:
    (tree,) = st.reshard([{}], [{"step": LocalNonpersistentObject(3)}])
    assert tree["step"].unwrap() == 3
