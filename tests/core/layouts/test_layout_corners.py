"""Layouts at their edges: nothing held, one of each, what is empty, and what there is very much of."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch

from shardtree.core.layouts import (
    access_problems,
    common_problems,
    join_objects,
    kind_problems,
    object_problems,
    select_rows,
    write_problems,
)
from shardtree.core.offences import offence_lines
from shardtree.layouts import (
    AxisSplit,
    Coverage,
    Mesh,
    PartitionSpec,
    Problem,
    ShardColumns,
    TensorKind,
    abstract_at,
    coverage,
    join_columns,
    mesh_columns,
    mesh_shards,
    shard,
    shard_columns,
    sharding_problems,
    unshard,
)
from shardtree.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory
from shardtree.meshes import mesh_shard, rank_leaf
from shardtree.objects import reshard_objects

FULL = torch.arange(24.0).reshape(4, 6)
W = ShardedTensor.from_rank_offsets("w", FULL)
KIND = TensorKind(torch.float32, (4, 6), 0)
MESH, ROWS = Mesh(dp=2, tp=2), PartitionSpec("tp")


def rows_of(indices: list[int], size: int, key: str = "w") -> ShardColumns:
    """Return single rows of a tensor, each on a rank of its own."""
    shards = [
        ShardedTensor(key, None, torch.float32, (1, 2), (size, 2), (index, 0), axis_fragmentations=None)
        for index in indices
    ]
    return join_columns([shard_columns([one], rank) for rank, one in enumerate(shards)])


def test_nobody_has_no_problems() -> None:
    assert access_problems(join_columns([])) == write_problems(join_columns([])) == ()
    assert object_problems(join_objects([])) == kind_problems([]) == sharding_problems([]) == ()
    assert unshard([{}, {}]) == {}
    assert common_problems({}) == ()


@pytest.mark.parametrize(("faults", "last"), [(20, None), (21, "and 1 more place"), (30, "and 10 more places")])
def test_of_many_faults_twenty_are_told_and_the_rest_counted(faults: int, last: str | None) -> None:
    one, other = rows_of(list(range(0, 2 * faults, 2)), 2 * faults, "a"), rows_of([0, 2], 4, "b")
    found = [problem for problem in access_problems(join_columns([one, other])) if problem.key == "a"]
    assert [problem.box for problem in found[:20]] == [(slice(row, row + 1), slice(0, 2)) for row in range(1, 40, 2)]
    assert [str(problem) for problem in found[20:]] == ([f"'a': {last}"] if last else [])
    assert all(problem == Problem("a", (), str(last)) for problem in found[20:])
    assert [problem.box for problem in access_problems(join_columns([one, other])) if problem.key == "b"] == [
        (slice(1, 2), slice(0, 2)),
        (slice(3, 4), slice(0, 2)),
    ]


def test_three_problems_of_a_key_are_listed() -> None:
    problems = [Problem(key, (), f"{key}{number}") for key, count in (("a", 5), ("b", 3)) for number in range(count)]
    assert offence_lines(problems) == [
        "'a': a0",
        "'a': a1",
        "'a': a2",
        "'a': and 2 more",
        "'b': b0",
        "'b': b1",
        "'b': b2",
    ]
    assert offence_lines([Problem(("a", 0), (1, 2, 4), "differs")]) == ["tree['a'][0] (ranks 1, 2, 4): differs"]
    assert offence_lines([]) == []


def test_a_coverage_counts_tensors_that_nobody_holds() -> None:
    layout = mesh_columns(dict.fromkeys("ab", KIND), MESH, dict.fromkeys("ab", ROWS))
    found = coverage(select_rows(layout, np.flatnonzero(layout.key == 0)))
    assert (found.once.tolist(), found.twice.tolist(), found.missing.tolist()) == ([24, 0], [0, 0], [0, 24])
    assert found.copies.tolist() == [2, 0]
    assert {column.dtype for column in (found.once, found.twice, found.missing)} == {np.dtype(np.int64)}
    empty = coverage([{"e": ShardedTensor.from_rank_offsets("e", torch.zeros(0, 3))}] * 1)
    assert (empty.copies.tolist(), empty.once.tolist(), empty.is_complete) == ([1], [0], True)
    assert isinstance(found, Coverage)


@pytest.mark.parametrize(
    ("shape", "spec", "grid"),
    [
        ((4, 6), PartitionSpec("tp"), (2, 1)),
        ((4, 6), PartitionSpec(("dp", "tp"), None), (4, 1)),
        ((4, 6), PartitionSpec("dp", "tp"), (2, 2)),
        ((4, 6), PartitionSpec(None, ("dp", "tp")), None),
        ((5, 6), PartitionSpec("tp"), None),
        ((0, 6), PartitionSpec(), (1, 1)),
        ((8, 6), PartitionSpec((AxisSplit("tp", 2),)), None),
        ((8, 6), PartitionSpec((AxisSplit("dp"), AxisSplit("tp", 2))), None),
        ((4, 6), PartitionSpec((AxisSplit("dp", 2), AxisSplit("tp"))), (4, 1)),
        ((), PartitionSpec(), ()),
    ],
)
def test_equal_parts_in_a_row_are_a_grid(shape: tuple[int, ...], spec: PartitionSpec, grid: Any) -> None:
    parts = mesh_shards(shape, MESH, spec)
    assert {part.grid for part in parts} == {grid}
    assert [part.rank for part in parts] == [0, 1, 2, 3]


def test_any_mapping_is_a_tree_to_be_sharded() -> None:
    trees = shard(MappingProxyType({"w": FULL}), Mesh(tp=2), ROWS)
    assert [tree["w"].global_offset for tree in trees] == [(0, 0), (2, 0)]


def test_one_key_may_stand_for_a_tensor_with_and_without_data() -> None:
    for tree in ({"a": W, "b": W.without_data()}, {"a": W.without_data(), "b": W}):
        trees = shard(tree, Mesh(tp=2), ROWS)
        assert [trees[1][path].replica_id for path in "ab"] == [0, 2]


@pytest.mark.parametrize("padded", [False, True])
def test_the_boxes_of_a_part_are_padded_as_the_part_is(padded: bool) -> None:
    for spec in (PartitionSpec((AxisSplit("tp", 2),)), ROWS):
        part = mesh_shard((8, 6), Mesh(tp=2), spec, 1)
        assert part is not None
        made = rank_leaf("w", None, torch.int8, part, allow_shape_mismatch=padded)
        shards = made.build() if isinstance(made, ShardedTensorFactory) else [made]
        assert [(one.allow_shape_mismatch, one.dtype, one.data) for one in shards] == [
            (padded, torch.int8, None)
        ] * len(shards)
    assert not rank_leaf("w", None, torch.int8, part).allow_shape_mismatch  # type: ignore[union-attr]


def test_a_single_element_beyond_the_tensor_is_told() -> None:
    one = ShardedTensor("w", None, torch.int8, (1,), (3,), (3,), axis_fragmentations=None, allow_shape_mismatch=True)
    none = replace(one, local_shape=(0,), global_offset=(5,))
    assert "beyond the global shape (3,)" in write_problems(shard_columns([one, one]))[0].what
    assert write_problems(shard_columns([none])) == ()


def test_copies_of_objects_bring_no_more_memory_along_than_they_need() -> None:
    big = torch.arange(1000.0)
    value = {"view": big[:2], "list": [1]}
    value["same"] = value["view"]
    item = ShardedObject("o", value, (1,), (0,))
    (found,) = reshard_objects([item], [replace(item, data=None)])
    assert found.data["view"].untyped_storage().nbytes() == 8
    assert found.data["same"] is found.data["view"] and found.data["list"] is not value["list"]
    trained = torch.ones(2, requires_grad=True)
    (found,) = reshard_objects([replace(item, data=[trained * 2, trained])], [item])
    assert [each.requires_grad for each in found.data] == [True, True]
    assert found.data[0].tolist() == [2, 2] and found.data[0].is_leaf


def test_shards_without_elements_need_no_data() -> None:
    nothing = replace(W, data=None, local_shape=(0, 6), global_offset=(4, 0), axis_fragmentations=None)
    assert torch.equal(unshard([{"w": W}, {"w": nothing}])["w"], FULL)


def flat_in(rows: tuple[int, int], stop: int, key: str = "w", size: int = 4) -> ShardedTensor:
    """Return the first elements of the flattened rows of a tensor with six columns."""
    shape = (rows[1] - rows[0], 6)
    place = (shape, (size, 6), (rows[0], 0))
    return ShardedTensor(
        key,
        None,
        torch.int8,
        *place,
        axis_fragmentations=None,
        flattened_range=slice(0, stop),
        allow_shape_mismatch=True,
    )


def test_flat_ranges_are_told_as_such_beside_tensors_that_are_padded() -> None:
    beyond, inside = flat_in((2, 6), 12, "a"), flat_in((0, 4), 12, "b")
    _, *found = access_problems(shard_columns([beyond, inside]))
    assert [(problem.key, problem.box, problem.flat) for problem in found] == [
        ("a", (slice(0, 2), slice(0, 6)), None),
        ("b", (slice(0, 4), slice(0, 6)), slice(12, 24)),
    ]
    assert len(access_problems(shard_columns([flat_in((2, 6), 6, "a")]))) == 3


def test_copies_that_are_written_twice_are_told_with_their_holders() -> None:
    (problem,) = write_problems(shard_columns([replace(W, replica_id=1)] * 2))
    assert problem.what.endswith(": rank 0 [0:4, 0:6], rank 0 [0:4, 0:6]")


def test_a_rank_s_own_abstract_tree_has_the_keys_that_are_asked_for() -> None:
    assert abstract_at({"a": FULL}, MESH, ROWS, 1, key=lambda path: f"own.{path[0]}")["a"].key == "own.a"
