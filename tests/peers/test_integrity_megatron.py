"""Sharding integrity beside Megatron-Core's: what it accepts and rejects of regular grids and objects, and misses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some

import shardtree as st
from shardtree.layouts import object_columns, sharding_problems
from shardtree.testing import Layout, cut, layouts, shapes
from tests.core.layouts.test_object_problems import Ranks, objects
from tests.core.trees.samples import assert_caught

pytestmark = [pytest.mark.peers, pytest.mark.usefixtures("one_process")]
validation = pytest.importorskip("megatron.core.dist_checkpointing.validation")
from shardtree.interop.megatron import to_megatron  # noqa: E402

Leaves = Sequence[Sequence[Any]]
"""The shards and objects of each rank."""


def they_accept(ranks: Leaves) -> bool:
    try:
        validation.validate_sharding_integrity([to_megatron(list(items)) for items in ranks])
    except (validation.CheckpointingException, AssertionError):
        return False
    return True


def we_accept(ranks: Leaves) -> bool:
    columns, arrays = [], []
    for rank, items in enumerate(ranks):
        columns.append(st.layouts.shard_columns([item for item in items if isinstance(item, st.ShardedTensor)], rank))
        arrays.append(object_columns([item for item in items if isinstance(item, st.ShardedObject)], rank))
    return not sharding_problems(columns, arrays)


def shards(layout: Layout) -> list[list[Any]]:
    whole = torch.zeros(layout.global_shape, dtype=torch.int8)
    return [cut(layout, "w", whole, rank) for rank in range(layout.ranks)]


@some.composite
def grids(draw: some.DrawFn) -> Leaves:
    """Return shards of a regular grid with elements, of which cells are lost, doubled or demoted, or none."""
    shape = draw(shapes(max_axes=3, sizes=(1, 2, 4, 6)))
    layout = draw(layouts(shape, draw(some.integers(1, 4))).filter(lambda each: each.grid is not None))
    pieces = []
    for piece in (replace(each, flat=None) for each in layout.pieces if each.flat is None or each.flat[0] == 0):
        fate = draw(some.sampled_from(["keep", "keep", "keep", "keep", "lose", "double", "demote"]))
        demoted = replace(piece, replica=7)
        pieces += {"lose": [], "double": [piece, piece], "demote": [demoted]}.get(fate, [piece])
    return shards(replace(layout, pieces=tuple(pieces)))


def both_say_the_same(accept: Callable[[Leaves], bool], ranks: Leaves) -> None:
    assert accept(ranks) == they_accept(ranks)


@given(grids())
def test_what_megatron_says_of_regular_grids_we_say(ranks: Leaves) -> None:
    both_say_the_same(we_accept, ranks)


@given(objects())
def test_what_megatron_says_of_objects_we_say(ranks: Ranks) -> None:
    both_say_the_same(we_accept, ranks)


def test_the_law_catches_a_check_that_only_adds_up_volumes() -> None:
    def by_volume(ranks: Leaves) -> bool:
        mains = [shard for items in ranks for shard in items if st.is_main_replica(shard.replica_id)]
        return not mains or sum(shard.data.numel() for shard in mains) == prod(mains[0].global_shape)

    assert_caught(both_say_the_same, by_volume, grids())


def box(offset: int, size: int, axis_fragmentations: Any = None, **more: Any) -> st.ShardedTensor:
    return st.ShardedTensor("w", None, torch.int8, (size,), (4,), (offset,), axis_fragmentations, **more)


@pytest.mark.parametrize(
    "ranks",
    [
        [[box(0, 3)]],
        [[box(0, 3)], [box(2, 2)]],
        [[box(0, 4)], [box(0, 4)]],
        [[box(0, 4, replica_id=1)]],
        [[box(0, 2, axis_fragmentations=(1,))]],  # they count cells, and don't look whether those make up the tensor
    ],
    ids=["gap", "overlap", "twice", "no main replica", "a regular grid that says too few pieces"],
)
def test_grids_that_do_not_tile_are_accepted_there_and_rejected_here(ranks: Leaves) -> None:
    assert (they_accept(ranks), we_accept(ranks)) == (True, False)


def test_prepended_axes_that_differ_are_accepted_there_and_rejected_here() -> None:
    one = st.ShardedTensor.from_rank_offsets("w", torch.zeros(1, 2), (0, 0, 2))
    other = st.ShardedTensor.from_rank_offsets("w", torch.zeros(2), (0, 1, 2), prepend_axis_num=1)
    assert not we_accept([[one], [other]])


def test_flat_ranges_are_checked_here_and_are_none_there() -> None:
    flat = [st.ShardedTensor.from_rank_offsets_flat("w", torch.zeros(3), (2, 3), flattened_range=slice(*ends))
            for ends in ((0, 3), (3, 6), (2, 5))]  # fmt: skip
    assert we_accept([flat[:1], flat[1:2]])
    assert not we_accept([flat[:1], flat[2:]])
    with pytest.raises(st.errors.UnsupportedValue, match="flat shards"):
        they_accept([flat])


def test_one_key_of_two_kinds_is_rejected_by_both() -> None:
    for other in (torch.zeros(4, dtype=torch.int64), torch.zeros(5)):
        ranks = [[st.ShardedTensor.from_rank_offsets("w", data)] for data in (torch.zeros(4), other)]
        assert (they_accept(ranks), we_accept(ranks)) == (False, False)
