"""Beside torch.distributed.tensor: a rank's part of a tensor has the shape and the beginning that a DTensor's has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardtree.layouts import AxisSplit, Mesh, PartitionSpec, RankShard, mesh_shards
from tests.core.trees.samples import assert_caught

pytestmark = pytest.mark.peers

Cuts = tuple[int | None, int]
"""The tensor's axis that one axis of the mesh cuts, None where it replicates; and a split factor, 0 for none."""


@st.composite
def questions(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], list[Cuts]]:
    """Return a strategy for shapes, meshes and how each of their axes cuts: evenly or not, one after the other."""
    shape = tuple(draw(st.lists(st.integers(0, 13), min_size=1, max_size=3)))
    mesh = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    axis = st.none() | st.integers(0, len(shape) - 1)
    return shape, mesh, [(draw(axis), draw(st.integers(0, 4))) for _ in mesh]


def parts(shape: tuple[int, ...], mesh: tuple[int, ...], cuts: Sequence[Cuts]) -> tuple[RankShard, ...]:
    names = "abc"[: len(mesh)]
    entries: list[list[AxisSplit]] = [[] for _ in shape]
    for name, (axis, factor) in zip(names, cuts, strict=True):
        if axis is not None:
            entries[axis].append(AxisSplit(name, factor or 1))
    sizes = dict(zip(names, mesh, strict=True))
    return mesh_shards(shape, Mesh(**sizes), PartitionSpec(*(tuple(entry) or None for entry in entries)))


def check_as_dtensor(find: Callable[..., tuple[RankShard, ...]], question: tuple[Any, ...]) -> None:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
    from torch.distributed.tensor.placement_types import _StridedShard

    shape, mesh, cuts = question
    places: list[Any] = [
        Replicate() if axis is None else _StridedShard(axis, split_factor=factor) if factor else Shard(axis)
        for axis, factor in cuts
    ]
    sizes = Mesh(**dict(zip("abc", mesh, strict=False)))
    for part in find(shape, mesh, cuts):
        coordinates = list(sizes.coordinates(part.rank).values())
        local_shape, offset = _compute_local_shape_and_global_offset(shape, mesh, coordinates, places)
        assert part.shape == local_shape
        assert 0 in local_shape or part.boxes[0].offset == offset


@pytest.mark.slow
@settings(max_examples=150)
@given(questions())
def test_parts_are_those_of_dtensor(question: tuple[Any, ...]) -> None:
    check_as_dtensor(parts, question)


def without_factors(shape: Any, mesh: Any, cuts: Sequence[Cuts]) -> tuple[RankShard, ...]:
    return parts(shape, mesh, [(axis, 0) for axis, _ in cuts])


@pytest.mark.parametrize("fault", [without_factors])
def test_the_law_catches(fault: Callable[..., Any]) -> None:
    assert_caught(check_as_dtensor, fault, questions())
