"""Plans at their edges: what is flat, doubled, beyond, of another kind, or there twenty times."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch

import shardtree as st
from shardtree import LocalNonpersistentObject, Mesh, PartitionSpec, ShardedObject, ShardedTensor, ShardedTensorFactory
from shardtree.layouts import ShardColumns, TensorKind, join_columns, shard_columns
from shardtree.plans import (
    Runs,
    find_mismatches,
    level_writes,
    plan_exchange,
    plan_load,
    plan_reshard,
    runs_plan,
    with_relays,
)
from shardtree.plans._load import StoredChunks
from shardtree.plans.moving import copy_transfers
from shardtree.plans.moving._reshard import first_sources
from shardtree.plans.resharding._summary import steps_table
from shardtree.trees import HOLE
from tests.plans.reshard_layouts import mesh_layout
from tests.plans.test_reshard_cases import ALL, CASES, COPY, TOP, box, flat, plan_of

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
        [f"'transfers': and {more} more has another number of bytes than stated"] if more else []
    )


def test_tensors_of_another_kind_are_told() -> None:
    plan = plan_of("nothing moves")
    other = replace(plan, target=replace(plan.target, kinds=(TensorKind(torch.int32, (6, 4), 0),)))
    (problem,) = other.check()
    assert str(problem) == "'w': is (6, 4) float32 in the source and (6, 4) int32 in the target"
    stray = told(plan, source=-1), told(plan, target=2), told(plan, hop=-1), told(plan, target=-1)
    assert {tuple(lines) for lines in stray} == {("'transfers': 2 transfers of shards that don't exist",)}


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
    with pytest.raises(st.errors.IntegrityError) as caught:
        plan_reshard([[beyond], [replace(beyond)]], [[ALL]])
    assert "includes its padding.\n  Where several hold" in str(caught.value)


@pytest.mark.parametrize("shard", [flat(0, 24), ALL])
def test_sizes_are_counted_by_range_or_box(shard: ShardedTensor) -> None:
    many = replace(
        shard, local_shape=(2**31, 2**29), global_shape=(2**31, 2**29), data=None, flattened_range=shard.flattened_range
    )
    if shard.flattened_range is None:
        with pytest.raises(st.errors.ShapeError, match="too large"):
            plan_reshard([[many]], [[]])
    else:
        with pytest.raises(st.errors.ShapeError, match="too large"):
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
    with pytest.raises(st.errors.TreeError, match="reshard: the tree is too deep"):
        call()


@pytest.mark.parametrize("side", [0, 1])
def test_dtensors_are_refused_on_both_sides(side: int) -> None:
    class Cut(torch.Tensor):
        placements = ()

    trees = [[{"w": data_of(ALL)}], [{"w": ALL}]]
    trees[side] = [{"w": data_of(ALL), "d": Cut()}]
    with pytest.raises(st.errors.TreeError, match=r"reshard: objects where shards are meant\n  tree\['d'\]: Cut\n"):
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


def test_runs_of_a_later_file_are_joined_too() -> None:
    columns = np.array([(0, 0, 0, 0, 4), (1, 0, 0, 4, 4), (1, 4, 0, 8, 4)]).T
    runs = runs_plan(Runs(*columns)).runs
    assert (runs.file.tolist(), runs.length.tolist()) == ([0, 1], [4, 8])


def test_nothing_is_exchanged_for_shards_without_elements() -> None:
    empty = ShardedTensor.from_rank_offsets("e", torch.zeros(0, 3))
    columns = join_columns([shard_columns([MATRIX, empty, replace(MATRIX, key="a")], rank) for rank in (0, 1)])
    assert plan_exchange(columns, 2).passed_on.transfers.nbytes.tolist() == [96, 96]


def test_the_largest_tensors_are_dealt_first_and_back_and_forth() -> None:
    def writers(sizes: dict[str, int]) -> dict[str, int]:
        held = [ShardedTensor.from_rank_offsets(key, torch.zeros(size)) for key, size in sizes.items()]
        columns = join_columns([shard_columns(held, rank) for rank in (0, 1)])
        rows = np.flatnonzero(level_writes(columns, 2))
        return {columns.keys[columns.key[row]]: int(columns.rank[row]) for row in rows}

    assert writers({"a": 1, "b": 10, "c": 1}) == {"b": 0, "a": 1, "c": 1}
    eight = dict(zip("abcdefgh", range(80, 0, -10), strict=True))
    assert [writers(eight)[key] for key in eight] == [0, 1, 1, 0, 0, 1, 1, 0]


def test_what_two_want_and_what_three_want_is_passed_on() -> None:
    plan = plan_reshard([[ALL], [], [], []], [[], [ALL], [COPY], [replace(TOP, replica_id=1)]])
    passed_on = with_relays(plan, shortest_cut=8)
    assert not passed_on.check() and passed_on.sent[0] == 96


def test_copies_within_a_rank_take_one_hop() -> None:
    plan = with_relays(plan_of("boxes of a rank overlap"), shortest_cut=8)
    assert (
        sorted(set(plan.transfers.hop.tolist()))
        == [0, 1]
        == sorted(set(plan_of("boxes of a rank overlap").transfers.hop.tolist()))
    )


def test_pieces_of_a_shard_come_row_by_row() -> None:
    quarters = [box(rows, columns) for rows in ((0, 3), (3, 6)) for columns in ((0, 2), (2, 4))]
    plan = plan_reshard([[one] for one in quarters], [[], [], [], [], [ALL]])
    assert plan.transfers.offset.tolist() == [[0, 0], [0, 2], [3, 0], [3, 2]]
    assert first_sources(plan) == {0: 0}


def test_the_source_may_hold_more_tensors_of_more_axes_than_are_asked_for() -> None:
    plan = plan_reshard([[MATRIX], [VECTOR, replace(MATRIX, key="a", replica_id=0)]], [[VECTOR], []])
    assert (plan.links, plan.check()) == ({(1, 0): 16}, ())
    one = ShardedTensor.from_rank_offsets("s", torch.tensor(3.0))
    assert plan_reshard([[one], []], [[], [one]]).links == {(0, 1): 4}


def test_who_has_a_tensor_twice_sends_no_more_of_it() -> None:
    sources = [[VECTOR], [ALL, COPY], [COPY], []]
    plan = plan_reshard(sources, [[VECTOR], [], [], [ALL]], shortest_cut=8)
    assert (plan.sent[1], plan.sent[2]) == (48, 48)


def test_the_last_of_thirty_two_steps_ends_the_table() -> None:
    def table(steps: int) -> list[str]:
        return steps_table(np.arange(steps), *(np.full(steps, number) for number in (0, 1, 8)))

    assert len(table(32)) == 33 and table(32)[-1].split()[0] == "31"
    assert len(table(33)) == 34 and table(33)[-1] == "and 1 more"


def test_an_element_past_a_flat_range_is_told() -> None:
    plan = plan_of("boxes to flat ranges")
    moved = plan.transfers
    row = int(np.flatnonzero((moved.target == 0) & (moved.offset[:, 0] == 1))[0])
    shape = moved.shape.copy()
    assert shape[row].tolist() == [1, 3]
    shape[row] = 1, 4
    wrong = replace(plan, transfers=replace(moved, shape=shape))
    assert any("isn't in the shard that it goes to" in str(problem) for problem in wrong.check())


def test_the_stride_of_a_single_index_makes_no_difference() -> None:
    plan = plan_of("boxes to flat ranges")
    stride = np.where(plan.transfers.shape == 1, 99, plan.transfers.source_stride)
    assert (stride == 99).any()
    assert not replace(plan, transfers=replace(plan.transfers, source_stride=stride)).check()


@pytest.mark.parametrize(("span", "size"), [(slice(0, 1000), "4e+03"), (slice(1000, 3000), "8e+03")])
def test_too_large_flat_shards_are_told_by_their_range(span: slice, size: str) -> None:
    many = replace(flat(0, 24), local_shape=(2**31, 2**31), global_shape=(2**31, 2**31), flattened_range=span)
    with pytest.raises(
        st.errors.ShapeError, match=rf"the source's shards.*\n  'w' .* float32: {re.escape(size)} bytes"
    ):
        plan_reshard([[many]], [[]])


def test_the_largest_of_those_that_are_too_large_come_first() -> None:
    def large(key: str, rows: int, copy: int = 0) -> ShardedTensor:
        shape = (rows, 2**29)
        return replace(ALL, key=key, local_shape=shape, global_shape=shape, replica_id=copy)

    with pytest.raises(st.errors.ShapeError, match=r"(?s)the source's.*'b'.*'a'"):
        plan_reshard([[large("a", 2**10), large("b", 2**31)]], [[]])
    with pytest.raises(st.errors.ShapeError, match="the target's shards are too large"):
        plan_reshard([[large("a", 2**30)]], [[large("a", 2**30)], [large("a", 2**30, 1)]])


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


def test_a_tensor_of_fewer_axes_is_named_by_its_own() -> None:
    plan = plan_reshard([[VECTOR, MATRIX]], [[VECTOR, MATRIX]])
    with pytest.raises(st.errors.KeyMismatch, match=r"no memory for 'v' at \(0,\) of rank 0"):
        copy_transfers(plan, np.arange(len(plan.transfers)), {}, {0: torch.zeros(4), 1: torch.zeros(6, 4)})


def test_a_plain_value_that_cannot_be_copied_is_told() -> None:
    with pytest.raises(st.CheckpointingException, match=r"^reshard: a plain value"):
        st.reshard([{"w": data_of(ALL), "x": (number for number in range(3))}], [{"w": ALL}])


def test_objects_that_a_factory_makes_are_merged_as_their_values() -> None:
    def build(key: str, data: Any, *_: Any) -> Any:
        return {"w": replace(ALL, data=data), "o": ShardedObject("o", {"step": 3}, (1,), (0,))}

    factory = ShardedTensorFactory("f", FULL, build, lambda built: (built["o"], built["w"].sum().item()))
    (tree,) = st.reshard([{"f": factory}], [{"f": factory}])
    assert tree["f"].data == ({"step": 3}, 276)


def test_where_nobody_has_plain_values_a_target_keeps_its_own() -> None:
    (tree,) = st.reshard([{}], [{"step": LocalNonpersistentObject(3)}])
    assert tree["step"].unwrap() == 3


def test_each_tensor_that_does_not_fit_is_told() -> None:
    stored = {key: TensorKind(torch.float32, (1,), 0) for key in "vw"}
    assert [found.key for found in find_mismatches([VECTOR, MATRIX], stored)] == ["v", "w"]
