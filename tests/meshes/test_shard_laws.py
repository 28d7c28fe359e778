"""Laws of trees cut for a mesh: shard and unshard are inverses, columns tell the same, data are views."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given

import shardtree.layouts as layouts
from shardtree.core.layouts import tree_columns
from shardtree.core.trees import empty_data
from shardtree.layouts import (
    AxisSplit,
    Mesh,
    PartitionSpec,
    ShardColumns,
    coverage,
    mesh_columns,
    sharding_problems,
)
from shardtree.mapping import ShardedTensor, ShardedTensorFactory
from shardtree.testing import STORABLE_DTYPES, first_difference, mesh_cases, outline, random_bits
from shardtree.testing import MeshCase as Case
from shardtree.trees import apply_factories, diff, leaves_with_paths, map_shards, without_data
from tests.core.trees.samples import assert_caught

Shard = Callable[..., list[Any]]
CASES = mesh_cases()


def rows(columns: ShardColumns) -> list[tuple[Any, ...]]:
    """Return what each row of columns says, sorted: equal lists are equal layouts."""
    boxes = np.concatenate([columns.offset, columns.shape, columns.start[:, None], columns.stop[:, None]], axis=1)
    table = zip(columns.key.tolist(), boxes.tolist(), columns.rank.tolist(), columns.main.tolist(), strict=True)
    return sorted((columns.keys[key], str(columns.kinds[key]), *row) for key, *row in table)


def by_rank(shard: Shard, case: Case) -> dict[int, Any]:
    tree = {**case.whole, "step": 3}
    return dict(zip(case.mesh.ranks, shard(tree, case.mesh, dict(case.specs)), strict=True))


def check_unshard_undoes_shard(shard: Shard, case: Case) -> None:
    whole = layouts.unshard(by_rank(shard, case))
    assert outline(dict(sorted(whole.items()))) == outline(dict(sorted({**case.whole, "step": 3}.items())))


def check_columns(shard: Shard, case: Case) -> None:
    kinds = {key: layouts.TensorKind(whole.dtype, tuple(whole.shape), 0) for key, whole in case.whole.items()}
    columns = mesh_columns(kinds, case.mesh, case.specs)
    assert rows(columns) == rows(tree_columns(by_rank(shard, case)))
    assert rows(columns) == rows(layouts.layout_of(case.whole, case.mesh, dict(case.specs)))


def check_tiles(shard: Shard, case: Case) -> None:
    columns = tree_columns(by_rank(shard, case))
    assert sharding_problems([columns]) == ()
    assert coverage(columns).is_complete


def memory(tensor: torch.Tensor) -> tuple[int, int]:
    first = tensor.untyped_storage().data_ptr()
    return first, first + tensor.untyped_storage().nbytes()


def check_views(shard: Shard, case: Case) -> None:
    """One box lies in the given tensor's memory; several in that of the rank's own tensor."""
    for tree in by_rank(shard, case).values():
        for _, leaf in leaves_with_paths(tree):
            if isinstance(leaf, ShardedTensor):
                assert memory(leaf.data) == memory(case.whole[leaf.key])
            elif isinstance(leaf, ShardedTensorFactory):
                assert all(memory(part.data) == memory(leaf.data) for part in leaf.build())


@given(CASES)
def test_unshard_undoes_shard(case: Case) -> None:
    check_unshard_undoes_shard(layouts.shard, case)


@given(CASES)
def test_columns_are_those_of_the_trees(case: Case) -> None:
    check_columns(layouts.shard, case)


@given(CASES)
def test_main_replicas_tile_each_tensor(case: Case) -> None:
    check_tiles(layouts.shard, case)


@given(CASES)
def test_shards_are_views(case: Case) -> None:
    check_views(layouts.shard, case)


def check_alone(shard: Shard, case: Case) -> None:
    for rank, tree in by_rank(shard, case).items():
        alone = layouts.shard_at({**case.whole, "step": 3}, case.mesh, dict(case.specs), rank)
        assert not diff(tree, alone)


@pytest.mark.slow
@given(CASES)
def test_each_rank_can_cut_for_itself(case: Case) -> None:
    check_alone(layouts.shard, case)


def check_abstract(shard: Shard, case: Case) -> None:
    without_memory = {key: empty_data(whole.shape, whole.dtype, "meta") for key, whole in case.whole.items()}
    targets = [
        layouts.abstract({**one, "step": 3}, case.mesh, dict(case.specs)) for one in (case.whole, without_memory)
    ]
    for number, (rank, tree) in enumerate(by_rank(shard, case).items()):
        target = layouts.abstract_at({**case.whole, "step": 3}, case.mesh, dict(case.specs), rank)
        assert not diff(without_data(tree), without_data(target))
        assert not diff(target, targets[0][number])
        assert not diff(target, targets[1][number])
        leaves = [leaf for _, leaf in leaves_with_paths(apply_factories(target)) if isinstance(leaf, ShardedTensor)]
        assert all(leaf.data.is_meta for leaf in leaves)


@given(CASES)
def test_abstract_is_shard_without_data(case: Case) -> None:
    check_abstract(layouts.shard, case)


def check_copies(parts: Callable[..., Any], case: Case) -> None:
    for key, whole in case.whole.items():
        spec = case.specs[key]
        held = [part for part in parts(tuple(whole.shape), case.mesh, spec) if 0 not in part.shape]
        left_out = [size for axis, size in case.mesh.axes if axis not in spec.axes and axis not in dict(spec.at)]
        ids = {(part.spans, part.replica_id) for part in held}
        spans = [part.spans for part in held]
        assert len(ids) == len(held)
        assert all(spans.count(one) == prod(left_out) for one in spans)


@given(CASES)
def test_each_element_has_a_copy_for_each_place_along_what_the_spec_leaves_out(case: Case) -> None:
    check_copies(layouts.mesh_shards, case)


def test_the_law_of_copies_catches_axes_that_are_forgotten() -> None:
    def of_first_ranks(shape: Any, mesh: Mesh, spec: PartitionSpec) -> Any:
        return layouts.mesh_shards(shape, mesh, spec)[:2]

    assert_caught(check_copies, of_first_ranks, CASES)


def test_every_dtype_comes_back_bit_for_bit() -> None:
    spec = PartitionSpec((AxisSplit("dp", 2), AxisSplit("tp")), None)
    for dtype in STORABLE_DTYPES:
        whole = random_bits((7, 2), dtype, seed=3)
        back = layouts.unshard(layouts.shard({"w": whole}, Mesh(dp=2, tp=2), spec))["w"]
        assert first_difference(back, whole) is None


def unnumbered(tree: Any, mesh: Mesh, specs: Any) -> list[Any]:
    """Forget to number replicas."""
    trees = layouts.shard(tree, mesh, specs)
    return [
        map_shards(lambda leaf: replace(leaf, replica_id=0) if hasattr(leaf, "replica_id") else leaf, t) for t in trees
    ]


def exchanged(tree: Any, mesh: Mesh, specs: Any) -> list[Any]:
    """Give the first two ranks each other's data."""
    trees = layouts.shard(tree, mesh, specs)
    if len(trees) < 2:
        return trees
    return [map_data_of(trees[0], trees[1]), map_data_of(trees[1], trees[0]), *trees[2:]]


def map_data_of(tree: Any, other: Mapping[str, Any]) -> Any:
    def with_others(leaf: Any) -> Any:
        if not isinstance(leaf, ShardedTensor) or not isinstance(other.get(leaf.key), ShardedTensor):
            return leaf
        data = other[leaf.key].data
        return replace(leaf, data=data) if data.shape == leaf.data.shape else leaf

    return map_shards(with_others, tree)


def copied(tree: Any, mesh: Mesh, specs: Any) -> list[Any]:
    """Copy the tensors before they are cut."""
    return layouts.shard(
        {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in tree.items()}, mesh, specs
    )


def one_lost(tree: Any, mesh: Mesh, specs: Any) -> list[Any]:
    """Lose the last rank's shards."""
    trees = layouts.shard(tree, mesh, specs)
    return [*trees[:-1], {"step": 3}]


@pytest.mark.parametrize(
    ("law", "fault"),
    [
        (check_unshard_undoes_shard, exchanged),
        (check_columns, unnumbered),
        (check_tiles, one_lost),
        (check_views, copied),
        (check_alone, exchanged),
        (check_abstract, unnumbered),
    ],
)
def test_the_laws_catch(law: Callable[..., None], fault: Shard) -> None:
    assert_caught(law, fault, CASES)
