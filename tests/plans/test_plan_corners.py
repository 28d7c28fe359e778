"""Plans at their edges: what is flat, doubled, beyond, of another kind, or there twenty times."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch

import shardtree as st
from shardtree import Mesh, PartitionSpec, ShardedObject, ShardedTensor
from shardtree.layouts import ShardColumns, TensorKind, join_columns, shard_columns
from shardtree.plans import Runs, level_writes, plan_load, plan_reshard, runs_plan
from shardtree.plans._load import StoredChunks
from shardtree.trees import HOLE
from tests.plans.reshard_layouts import mesh_layout
from tests.plans.test_reshard_cases import ALL, CASES, flat, plan_of

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


def told(plan: st.ReshardPlan, rows: Any = slice(None), **columns: Any) -> list[str]:
    """Return what is wrong with some of a plan's transfers, changed in some columns."""
    chosen = {field.name: getattr(plan.transfers, field.name)[rows] for field in fields(plan.transfers)}
    changed = {name: np.full_like(chosen[name], value) for name, value in columns.items()}
    wrong = replace(plan, transfers=replace(plan.transfers, **(chosen | changed)))
    return [str(problem) for problem in wrong.check()]


def test_flat_shards_that_are_not_filled_are_told_in_flat_ranges() -> None:
    plan = plan_of("flat ranges to flat ranges")
    assert told(plan, slice(0, 0)) == [
        "'w' (rank 0): shard 0, elements [0:5] of [0:6, 0:4]: 0 elements are written, of 5",
        "'w' (rank 1): shard 1, elements [5:15] of [0:6, 0:4]: 0 elements are written, of 10",
        "'w' (rank 2): shard 2, elements [15:24] of [0:6, 0:4]: 0 elements are written, of 9",
    ]
    (first, *_) = replace(plan, transfers=replace(plan.transfers)).check() or (None,)
    assert first is None


@pytest.mark.parametrize(("ranks", "more"), [(20, 0), (21, 1), (25, 5)])
def test_twenty_shards_that_are_not_filled_are_told(ranks: int, more: int) -> None:
    plan = plan_reshard(*(mesh_layout(Mesh(dp=ranks), PartitionSpec(), (2, 2)) for _ in range(2)))
    lines = told(plan, slice(0, 0))
    assert lines[0] == "'w' (rank 0): shard 0, [0:2, 0:2]: 0 elements are written, of 4"
    assert lines[20:] == ([f"'transfers': and {more} more shards aren't written once"] if more else [])
    wrong = told(plan, nbytes=7)
    assert [line for line in wrong if "transfers" in line] == (
        [f"'transfers': and {more} more has another number of bytes than is said"] if more else []
    )


def test_tensors_of_another_kind_are_told() -> None:
    plan = plan_of("nothing moves")
    other = replace(plan, target=replace(plan.target, kinds=(TensorKind(torch.int32, (6, 4), 0),)))
    (problem,) = other.check()
    assert str(problem) == "'w': is (6, 4) float32 in the source and (6, 4) int32 in the target"
    stray = told(plan, source=-1), told(plan, target=2), told(plan, hop=-1), told(plan, target=-1)
    assert {tuple(lines) for lines in stray} == {("'transfers': 2 transfers of shards that there aren't",)}


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


def test_every_reason_of_a_refusal_has_its_way_out() -> None:
    beyond = replace(ALL, global_offset=(2, 0), allow_shape_mismatch=True)
    with pytest.raises(st.IntegrityError) as caught:
        plan_reshard([[beyond], [replace(beyond)]], [[ALL]])
    assert "includes its padding.\n  Where several hold" in str(caught.value)


@pytest.mark.parametrize("shard", [flat(0, 24), ALL])
def test_sizes_are_counted_by_range_or_box(shard: ShardedTensor) -> None:
    many = replace(
        shard, local_shape=(2**31, 2**29), global_shape=(2**31, 2**29), data=None, flattened_range=shard.flattened_range
    )
    if shard.flattened_range is None:
        with pytest.raises(st.ShapeError, match="too large"):
            plan_reshard([[many]], [[]])
    else:
        with pytest.raises(st.ShapeError, match="too large"):
            plan_reshard([[replace(many, flattened_range=slice(0, 2**60))]], [[]])


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


def deep_tree() -> Any:
    tree: Any = {"w": data_of(ALL)}
    for _ in range(3000):
        tree = {"a": tree}
    return tree


@pytest.mark.parametrize(
    "call", [lambda: st.reshard([deep_tree()], [{"w": ALL}]), lambda: st.reshard([{"w": data_of(ALL)}], [deep_tree()])]
)
def test_trees_that_are_too_deep_are_refused(call: Callable[[], Any]) -> None:
    with pytest.raises(st.TreeError, match="reshard: the tree is too deep"):
        call()


@pytest.mark.parametrize("side", [0, 1])
def test_dtensors_are_refused_on_both_sides(side: int) -> None:
    class Cut(torch.Tensor):
        placements = ()

    trees = [[{"w": data_of(ALL)}], [{"w": ALL}]]
    trees[side] = [{"w": data_of(ALL), "d": Cut()}]
    with pytest.raises(st.TreeError, match=r"reshard: DTensors where shards are meant\n  tree\['d'\]\n"):
        st.reshard(*trees)


def chunks_of(columns: ShardColumns) -> StoredChunks:
    """Return shards as chunks of a file each, one behind the other."""
    start = (
        np.cumsum(columns.elements * columns.item_size[columns.key]) - columns.elements * columns.item_size[columns.key]
    )
    return StoredChunks(
        columns.key, columns.offset, columns.shape, columns.start, columns.stop, np.zeros_like(columns.key), start
    )


@pytest.mark.parametrize("name", [name for name in CASES if name != "two tensors"])
@pytest.mark.parametrize("shortest_run", [1, 8, 10**6])
def test_what_a_load_plan_reads_is_what_was_asked_for(name: str, shortest_run: int) -> None:
    """Carried out on bytes: a stored file is the shards' own bytes, a target is filled from it."""
    sources, targets = ([data_of(shard) for own in side for shard in own if shard.data_shape] for side in CASES[name])
    stored, asked = shard_columns(sources), shard_columns(targets)
    file = np.concatenate([shard.data.reshape(-1).numpy() for shard in sources]).view(np.uint8)
    plan = plan_load(asked, chunks_of(stored), shortest_run=shortest_run)
    filled = [np.zeros(shard.data.numel() * 4, dtype=np.uint8) for shard in targets]
    runs = plan.runs
    for byte, target, at, length in zip(runs.byte, runs.target, runs.target_byte, runs.length, strict=True):
        filled[target][at : at + length] = file[byte : byte + length]
    each = plan.strided
    for row, shape in enumerate(each.shape.tolist()):
        source = np.lib.stride_tricks.as_strided(file[each.byte[row] :].view(np.float32), shape, each.stride[row] * 4)
        memory = filled[each.target[row]][each.target_byte[row] :].view(np.float32)
        np.lib.stride_tricks.as_strided(memory, shape, each.target_stride[row] * 4)[:] = source
    covered = plan.covered.tolist()
    for shard, found, count in zip(targets, filled, covered, strict=True):
        if count == shard.data.numel():
            assert found.view(np.float32).tolist() == shard.data.reshape(-1).tolist()
    if not plan.doubled.size:
        assert covered == [shard.data.numel() for shard in targets]
    assert plan.bytes_read == sum(covered) * 4


def test_runs_that_touch_are_read_at_once() -> None:
    def columns(*rows: tuple[int, int, int, int, int]) -> Runs:
        return Runs(*np.array(rows, dtype=np.int64).reshape(-1, 5).T)

    def merged(runs: Runs) -> list[tuple[int, ...]]:
        found = runs_plan(runs).runs
        return list(zip(*(getattr(found, field.name).tolist() for field in fields(found)), strict=True))

    assert merged(columns((0, 4, 0, 4, 4), (0, 0, 0, 0, 4))) == [(0, 0, 0, 0, 8)]
    assert merged(columns((0, 0, 0, 0, 4), (1, 4, 0, 4, 4))) == [(0, 0, 0, 0, 4), (1, 4, 0, 4, 4)]
    assert merged(columns((0, 0, 0, 0, 4), (0, 4, 1, 4, 4))) == [(0, 0, 0, 0, 4), (0, 4, 1, 4, 4)]
    assert merged(columns((0, 0, 0, 0, 4), (0, 5, 0, 4, 4))) == [(0, 0, 0, 0, 4), (0, 5, 0, 4, 4)]
    assert merged(columns((0, 0, 0, 0, 4), (0, 4, 0, 9, 4))) == [(0, 0, 0, 0, 4), (0, 4, 0, 9, 4)]
    assert merged(columns()) == []
    plan = runs_plan(columns((0, 0, 0, 0, 4)))
    assert (plan.bytes_read, plan.covered.tolist(), plan.doubled.tolist()) == (4, [], [])
    assert plan.strided.shape.shape == (0, 1)


def test_large_tensors_of_few_holders_leave_the_small_ones_to_others() -> None:
    def held(rank: int, *sizes: tuple[str, int]) -> ShardColumns:
        return shard_columns(
            [ShardedTensor.from_rank_offsets(key, torch.zeros(size), replica_id=rank) for key, size in sizes], rank
        )

    columns = join_columns(
        [held(0, ("a", 100), ("c", 8)), held(1, ("b", 10), ("c", 8)), held(2, ("c", 8), ("d", 1), ("e", 2))]
    )
    columns.main[columns.key == columns.keys.index("b")] = True
    for key in "de":
        columns.main[columns.key == columns.keys.index(key)] = True
    rows = np.flatnonzero(level_writes(columns, 3))
    assert {columns.keys[columns.key[row]]: int(columns.rank[row]) for row in rows} == {
        "a": 0,
        "b": 1,
        "c": 2,
        "d": 2,
        "e": 2,
    }
    columns.main[:] = columns.key == columns.keys.index("c")
    assert np.flatnonzero(level_writes(columns, 3)).size == 1
