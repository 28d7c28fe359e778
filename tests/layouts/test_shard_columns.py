"""Shards as columns: what a row says, how ranks' columns are joined, and shards taken apart into boxes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import prod

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardtree.errors import IntegrityError
from shardtree.layouts import BoxColumns, join_columns, select_rows, shard_boxes, shard_columns
from shardtree.mapping import ShardedTensor, is_main_replica
from shardtree.testing import Layout, cut, layouts, shapes
from tests.trees.samples import assert_caught

LAYOUTS = st.tuples(shapes(max_axes=3, sizes=(1, 2, 3, 5, 0)), st.integers(1, 4)).flatmap(lambda args: layouts(*args))


def held(layout: Layout, key: str = "w") -> list[list[ShardedTensor]]:
    """Return each rank's shards of a tensor whose elements count up."""
    whole = torch.arange(prod(layout.global_shape)).view(layout.global_shape)
    return [cut(layout, key, whole, rank) for rank in range(layout.ranks)]


@given(LAYOUTS, LAYOUTS)
def test_a_row_says_of_a_shard_where_it_lies_and_who_holds_it(one: Layout, other: Layout) -> None:
    ranks = [held(one, "b"), held(other, "a")]
    shards = [(shard, rank) for rank in range(4) for tensor in ranks for shard in (tensor[rank : rank + 1] or [[]])[0]]
    parts = [shard_columns([shard for shard, holder in shards if holder == rank], rank) for rank in range(4)]
    columns = join_columns(parts)
    assert len(columns) == len(shards)
    assert columns.keys == tuple(sorted({shard.key for shard, _ in shards}))
    for row, (shard, rank) in enumerate(shards):
        axes, box = len(shard.global_shape), (1,) * shard.prepend_axis_num + shard.local_shape
        assert columns.keys[columns.key[row]] == shard.key
        assert columns.kinds[columns.key[row]].global_shape == shard.global_shape
        assert columns.offset[row].tolist() == [0] * (columns.offset.shape[1] - axes) + list(shard.global_offset)
        assert columns.shape[row].tolist() == [1] * (columns.shape.shape[1] - axes) + list(box)
        flat = shard.flattened_range
        assert (columns.start[row], columns.stop[row]) == ((-1, -1) if flat is None else (flat.start, flat.stop))
        assert (columns.rank[row], bool(columns.main[row])) == (rank, is_main_replica(shard.replica_id))
        assert columns.elements[row] == shard.data.numel()
        assert columns.item_size[columns.key[row]] == 8


def tile_their_shards(split: Callable[..., BoxColumns], layout: Layout) -> None:
    """Read the boxes from the whole tensor: in order, they must be the shards' own data."""
    whole = torch.arange(prod(layout.global_shape)).view(layout.global_shape)
    shards = [shard for rank in held(layout) for shard in rank]
    columns = shard_columns(shards)
    boxes = split(columns.offset, columns.shape, columns.start, columns.stop)
    whole = whole.view((1,) * (columns.offset.shape[1] - whole.ndim) + layout.global_shape)
    for row, shard in enumerate(shards):
        own = np.flatnonzero(boxes.shard == row)
        found = []
        for box in own:
            assert boxes.position[box] == len(found)
            spans = zip(boxes.offset[box].tolist(), boxes.shape[box].tolist(), strict=True)
            found += whole[tuple(slice(low, low + size) for low, size in spans)].reshape(-1).tolist()
        assert found == shard.data.reshape(-1).tolist()
    assert boxes.shard.tolist() == sorted(boxes.shard.tolist())


@given(LAYOUTS)
def test_boxes_of_a_shard_hold_its_elements_in_order(layout: Layout) -> None:
    tile_their_shards(shard_boxes, layout)


def test_boxes_catch_flat_ranges_that_forget_their_offset() -> None:
    def at_the_origin(offset: np.ndarray, *rest: np.ndarray) -> BoxColumns:
        return shard_boxes(np.where(rest[1][:, None] >= 0, 0, offset), *rest)

    assert_caught(tile_their_shards, at_the_origin, LAYOUTS)


@given(LAYOUTS, st.randoms(use_true_random=False))
def test_selecting_rows_commutes_with_describing_them(layout: Layout, random: object) -> None:
    shards = held(layout)[0]
    order = list(range(len(shards)))
    random.shuffle(order)  # type: ignore[attr-defined]
    one, other = (
        select_rows(shard_columns(shards), np.array(order, dtype=np.int64)),
        shard_columns([shards[row] for row in order]),
    )
    for name in ("key", "offset", "shape", "start", "stop", "rank", "main"):
        assert getattr(one, name).tolist() == getattr(other, name).tolist()


def test_nobody_holds_anything() -> None:
    for columns in (shard_columns([]), join_columns([]), join_columns([shard_columns([]), shard_columns([], 1)])):
        assert (len(columns), columns.keys, columns.offset.shape) == (0, (), (0, 1))
        assert columns.elements.tolist() == []


@pytest.mark.parametrize(
    "change",
    [{"dtype": torch.float64, "data": None}, {"global_shape": (6,), "axis_fragmentations": None}],
    ids=["dtype", "shape"],
)
def test_shards_of_one_key_that_disagree_are_named(change: dict[str, object]) -> None:
    shard = ShardedTensor.from_rank_offsets("w", torch.zeros(2), (0, 0, 2))
    other = replace(shard, **change)
    with pytest.raises(IntegrityError, match=r"on rank 1\n  'w': \(4,\) float32, "):
        shard_columns([shard, other], 1)
    with pytest.raises(IntegrityError, match=r"'w' \(ranks 0, 3\): \(4,\) float32 on rank 0, .* on rank 3"):
        join_columns([shard_columns([shard]), shard_columns([other], 3)])


def test_prepended_axes_must_agree() -> None:
    one = ShardedTensor.from_rank_offsets("w", torch.zeros(2), prepend_axis_num=1)
    other = ShardedTensor.from_rank_offsets("w", torch.zeros(1, 2))
    with pytest.raises(IntegrityError, match="with 1 prepended"):
        join_columns([shard_columns([one]), shard_columns([other], 1)])
