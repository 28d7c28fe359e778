"""Flat shards as the boxes that they consist of, and back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import prod
from typing import Any

import torch
from hypothesis import example, given
from hypothesis import strategies as st

import shardtree
from shardtree.lenses import boxes_of, flat_of
from shardtree.mapping import ShardedTensor
from shardtree.testing import assemble, check_pure, first_difference, random_bits, shapes
from tests.core.trees.samples import assert_caught


@st.composite
def flat_ranges(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int, int]:
    """Return a strategy for a box's shape, how many prepended axes it lacks, and a flat range of it."""
    shape = draw(shapes(max_axes=4, sizes=(1, 2, 3, 4, 5, 0)))
    start = draw(st.integers(0, prod(shape)))
    return shape, draw(st.integers(0, 1)), start, draw(st.integers(start, prod(shape)))


def flat_shard(shape: tuple[int, ...], prepended: int, start: int, stop: int) -> ShardedTensor:
    """Return a flat range of a box in the middle of a larger tensor."""
    data = random_bits((stop - start,), torch.float32, 3)
    around = tuple(size + 3 for size in shape)
    offset, front = tuple(range(len(shape)))[: len(shape)], (2,) * prepended
    offset = tuple(min(number, 3) for number in offset)
    return ShardedTensor(
        "w",
        data,
        torch.float32,
        shape,
        (4,) * prepended + around,
        (*front, *offset),
        None,
        (0, 1),
        prepended,
        flattened_range=slice(start, stop),
    )


def elements(shard: ShardedTensor) -> dict[int, int]:
    """Return the elements that a shard holds, by their numbers in the global tensor, as bits."""
    number = torch.arange(prod(shard.global_shape)).view(shard.global_shape)[shard.global_slice()].reshape(-1)
    held = number if shard.flattened_range is None else number[shard.flattened_range]
    return dict(zip(held.tolist(), shard.data.reshape(-1).view(torch.int32).tolist(), strict=True))


def check_boxes(boxes: Callable[[ShardedTensor], Any], drawn: tuple[Any, ...]) -> None:
    shard = flat_shard(*drawn)
    found = check_pure(boxes, shard)
    assert len(found) <= max(1, 2 * len(shard.local_shape) - 1)
    held: dict[int, int] = {}
    for box in found:
        assert box.flattened_range is None
        assert (box.key, box.replica_id, box.prepend_axis_num) == (shard.key, shard.replica_id, shard.prepend_axis_num)
        assert not held.keys() & elements(box).keys()
        held |= elements(box)
        assert not box.data.numel() or box.data.untyped_storage().data_ptr() == shard.data.untyped_storage().data_ptr()
    assert list(held.items()) == list(elements(shard).items())


@given(flat_ranges())
@example(((), 0, 0, 1))
@example(((), 0, 0, 0))
@example(((0, 3), 1, 0, 0))
def test_the_boxes_of_a_flat_range_hold_its_elements_in_order(drawn: tuple[Any, ...]) -> None:
    check_boxes(boxes_of, drawn)


def test_the_law_of_boxes_catches() -> None:
    def moved(shard: ShardedTensor) -> Any:
        return [replace(box, global_offset=shard.global_offset) for box in boxes_of(shard)]

    def without_first(shard: ShardedTensor) -> Any:
        return boxes_of(shard)[1:]

    def copies(shard: ShardedTensor) -> Any:
        return [replace(box, data=box.data.clone()) for box in boxes_of(shard)]

    for broken in (moved, without_first, copies):
        assert_caught(check_boxes, broken, flat_ranges())


def check_back(back: Callable[..., ShardedTensor], drawn: tuple[Any, ...]) -> None:
    shard = flat_shard(*drawn)
    found = back(shard.without_data(), [box.data.clone() for box in boxes_of(shard)])
    assert found.without_data() == shard.without_data()
    differ = first_difference(found.data, shard.data)
    assert differ is None, differ


@given(flat_ranges())
@example(((), 0, 0, 1))
@example(((2, 2), 0, 1, 1))
def test_boxes_make_the_flat_range_again(drawn: tuple[Any, ...]) -> None:
    check_back(flat_of, drawn)


def test_the_law_of_the_way_back_catches() -> None:
    def reversed_boxes(shard: ShardedTensor, tensors: Any) -> ShardedTensor:
        parts = [tensor.reshape(-1) for tensor in tensors]
        return replace(shard, data=torch.cat([torch.empty(0), *parts[::-1]]))

    assert_caught(check_back, reversed_boxes, flat_ranges())


def test_what_is_saved_in_boxes_loads_as_the_flat_range() -> None:
    whole = torch.arange(35.0).view(5, 7)
    cuts = [slice(0, 4), slice(4, 23), slice(23, 35)]
    flat = [ShardedTensor.from_rank_offsets_flat("w", whole.view(-1)[cut], (5, 7), flattened_range=cut) for cut in cuts]
    trees = [{"w": list(boxes_of(shard))} for shard in flat]
    assert torch.equal(assemble(trees)["w"], whole)
    place = shardtree.storage.MemoryStorage()
    shardtree.simulate(3, lambda world: shardtree.save(trees[world.rank], place, world=world))
    loaded = shardtree.load([shard.without_data() for shard in flat], place)
    assert torch.equal(torch.cat(loaded), whole.view(-1))


def test_a_box_is_its_own_box() -> None:
    shard = ShardedTensor.from_rank_offsets("w", torch.zeros(2, 3))
    assert boxes_of(shard) == (shard,)
    assert flat_of(shard, [torch.ones(2, 3)]).data.sum() == 6
