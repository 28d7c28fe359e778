"""Plans of contiguous buffers: the law of holders, packing beside a reference that packs element by element, tables."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import lcm, prod
from typing import Any

import pytest
import torch
from hypothesis import example, given

from shardtree.buffers import BufferPlace, BufferPlan, BufferRange, plan_buffers
from shardtree.mapping import ShardedTensor
from shardtree.testing import BufferOptions, buffer_options, check_buffer_plan, glu
from tests.core.trees.samples import assert_caught

MEGATRON = {"align": 64, "bucket_align": 128}


def packed(
    shapes: dict[str, tuple[int, ...]],
    data_parallel: int,
    bucket_size: int | None = None,
    align: int = 1,
    bucket_align: int = 1,
    order: Any = None,
    alone: Any = (),
) -> tuple[dict[str, tuple[int, int]], list[tuple[int, int]]]:
    """Return where each parameter starts, with its bucket, and the buckets: appends one element after the other."""
    buffer: list[str | None] = []
    places: dict[str, tuple[int, int]] = {}
    buckets: list[tuple[int, int]] = []
    begin, filled = 0, False

    def close() -> None:
        nonlocal begin, filled
        while len(buffer) % lcm(data_parallel, bucket_align):
            buffer.append(None)
        buckets.append((begin, len(buffer)))
        begin, filled = len(buffer), False

    for name in shapes if order is None else order:
        if name in alone and filled:
            close()
        while len(buffer) % align:
            buffer.append(None)
        places[name] = (len(buffer), len(buckets))
        buffer += [name] * prod(shapes[name])
        filled = True
        if name in alone or (bucket_size is not None and len(buffer) - begin >= bucket_size):
            close()
    if filled:
        close()
    return places, buckets


def check_packing(plan: Callable[..., BufferPlan], drawn: BufferOptions) -> None:
    shapes, options = drawn
    found = plan(shapes, **options)
    places, buckets = packed(shapes, **options)
    assert {place.name: (place.start, place.bucket) for place in found.places} == places
    assert list(found.buckets) == buckets
    assert {place.name: place.shape for place in found.places} == shapes


@given(buffer_options())
@example(({"p0": (), "p1": (0, 3), "p2": (4,)}, {"data_parallel": 8, "bucket_size": 1}))
@example(({"p0": (5,), "p1": (0,)}, {"data_parallel": 2, "align": 8, "bucket_align": 3}))
def test_parameters_are_packed_one_after_the_other(drawn: BufferOptions) -> None:
    check_packing(plan_buffers, drawn)


@given(buffer_options())
@example(({"p0": (0,)}, {"data_parallel": 3}))
@example(({"p0": (0,), "p1": (2,), "p2": (0,)}, {"data_parallel": 7, "bucket_align": 1}))
def test_every_element_is_in_exactly_one_ranks_range(drawn: BufferOptions) -> None:
    shapes, options = drawn
    check_buffer_plan(plan_buffers(shapes, **options))


def unaligned(shapes: Any, **options: Any) -> BufferPlan:
    return plan_buffers(shapes, **{**options, "align": 1})


def never_closed(shapes: Any, **options: Any) -> BufferPlan:
    return plan_buffers(shapes, **{**options, "bucket_size": None})


@pytest.mark.parametrize("broken", [unaligned, never_closed])
def test_the_law_of_packing_catches(broken: Callable[..., BufferPlan]) -> None:
    assert_caught(check_packing, broken, buffer_options())


class Forgetful(BufferPlan):
    """The last rank has nothing."""

    __slots__ = ()

    def ranges(self, rank: int) -> tuple[BufferRange, ...]:
        return () if rank == self.data_parallel - 1 else super().ranges(rank)


class Displaced(BufferPlan):
    """Another range of the parameter than the one that lies in the rank's slice."""

    __slots__ = ()

    def ranges(self, rank: int) -> tuple[BufferRange, ...]:
        return tuple(
            replace(part, flattened_range=slice(0, part.flattened_range.stop - part.flattened_range.start))
            for part in super().ranges(rank)
        )


def check_with(kind: type[BufferPlan], drawn: BufferOptions) -> None:
    shapes, options = drawn
    plan = plan_buffers(shapes, **options)
    check_buffer_plan(kind(plan.data_parallel, plan.places, plan.buckets))


@pytest.mark.parametrize("broken", [Forgetful, Displaced])
def test_the_law_of_holders_catches(broken: type[BufferPlan]) -> None:
    assert_caught(check_with, broken, buffer_options())


@pytest.mark.parametrize(
    ("places", "buckets", "words"),
    [
        ([("w", (4,), 0, 0)], [(0, 4), (5, 8)], "bucket 1 starts at 5, expected 4"),
        ([("w", (4,), 0, 0)], [(0, 5)], "cannot be cut in 2"),
        ([("w", (4,), 0, 0), ("b", (2,), 0, 3)], [(0, 6)], "'b' starts at 3, expected at least 4"),
        ([("w", (4,), 0, 0)], [(0, 2), (2, 4)], "'w' ends at 4, its bucket at 2"),
    ],
)
def test_the_law_of_holders_names_what_is_wrong(places: Any, buckets: Any, words: str) -> None:
    with pytest.raises(AssertionError, match=words):
        check_buffer_plan(BufferPlan(2, tuple(BufferPlace(*place) for place in places), tuple(buckets)))


def test_a_plan_is_a_value() -> None:
    shapes = {"w": (3, 5), "b": (5,)}
    one, other = (plan_buffers(shapes, data_parallel=4, **MEGATRON) for _ in range(2))
    assert one == other
    assert hash(one) == hash(other)
    assert one != plan_buffers(shapes, data_parallel=5, **MEGATRON)
    assert (one.elements, one.padding, one.slice_lengths) == (20, 108, (32,))


def test_what_has_a_shape_may_be_planned() -> None:
    weight = torch.zeros(4, 2)
    shard = ShardedTensor.from_rank_offsets("w", torch.zeros(1, 4, 2)[0], (0, 1, 2), prepend_axis_num=1)
    described = {
        "shape": (4, 2),
        "size": weight.size(),
        "list": [4, 2],
        "tensor": weight,
        "parameter": torch.nn.Parameter(weight),
        "meta": torch.empty(4, 2, device="meta"),
        "shard": shard.without_data(),
        "factory": glu("g", weight),
    }
    assert {place.shape for place in plan_buffers(described, data_parallel=3).places} == {(4, 2)}


def test_it_prints_as_two_tables() -> None:
    shapes = {"embedding": (50, 8), "w": (8, 8), "b": (8,)}
    plan = plan_buffers(shapes, data_parallel=3, bucket_size=64, order=reversed(shapes), **MEGATRON)
    assert str(plan) == (
        "3 parameters of 472 elements, 680 of padding (59.0 %): 2 buckets, cut for 3 ranks\n"
        "bucket  from     to  parameters  elements  padding  a rank's slice\n"
        "     0     0    384           2        72      312             128\n"
        "     1   384  1,152           1       400      368             256\n"
        "rank  parameters  elements  padding\n"
        "   0           3       328       56\n"
        "   1           1       144      240\n"
        "   2           0         0      384"
    )


@given(buffer_options())
def test_what_is_printed_of_each_rank_is_what_it_has(drawn: BufferOptions) -> None:
    shapes, options = drawn
    plan = plan_buffers(shapes, **options)
    lines = str(plan).split("\n")[-plan.data_parallel :]
    held = [[part.flattened_range for part in plan.ranges(rank)] for rank in range(plan.data_parallel)]
    counts = [(rank, len(own), sum(flat.stop - flat.start for flat in own)) for rank, own in enumerate(held)]
    assert [tuple(map(int, line.split()[:3])) for line in lines] == counts


def test_long_plans_are_shortened() -> None:
    plan = plan_buffers({f"w{n}": (2,) for n in range(50)}, data_parallel=40, bucket_size=1)
    lines = str(plan).split("\n")
    assert (len(lines), lines.count("and 18 more"), lines[-1]) == (1 + 34 + 34, 1, "and 8 more")


def test_who_has_a_parameter() -> None:
    plan = plan_buffers({"b": (2,), "w": (4, 3)}, data_parallel=3)
    assert [(part.rank, part.taken, part.flattened_range) for part in plan.holders("w")] == [
        (0, slice(2, 5), slice(0, 3)),
        (1, slice(0, 5), slice(3, 8)),
        (2, slice(0, 4), slice(8, 12)),
    ]
    assert plan.explain("w") == (
        "'w' (4, 3): [2:14] of the buffer, in bucket 0\n"
        "rank  of the parameter  of its slice\n"
        "   0             [0:3]         [2:5]\n"
        "   1             [3:8]         [0:5]\n"
        "   2            [8:12]         [0:4]"
    )


def test_no_parameters_make_no_buffer() -> None:
    plan = plan_buffers({}, data_parallel=4)
    assert (plan.buckets, plan.ranges(3), plan.padding) == ((), (), 0)
    assert str(plan).startswith("0 parameters of 0 elements, 0 of padding (0.0 %): 0 buckets, cut for 4 ranks\nrank")
