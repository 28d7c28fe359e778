"""The laws of contiguous buffers: plans, and conversions between slices, shards and parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from math import prod
from typing import Any

import torch
from hypothesis import strategies as st

from ..buffers import BufferPlan, buffer_slices, flat_shards
from ..mapping import ShardedTensor
from ._bits import assemble, carried, check_same, first_difference
from ._law_purity import check_pure
from ._tensors import shapes


def check_buffer_plan(plan: BufferPlan) -> None:
    """Raise unless each element of each parameter is in exactly one rank's range, at the position in the plan.

    Counts element by element, so keep shapes small.

    Args:
        plan: what `plan_buffers` returned.

    Raises:
        AssertionError: names the parameter, and the elements on no rank or several, or at another position.

    Examples:
        >>> from shardtree.buffers import plan_buffers
        >>> check_buffer_plan(plan_buffers({"w": (4, 3), "b": (), "empty": (0, 2)}, data_parallel=5, bucket_size=8))
    """
    _check_buckets(plan)
    held: dict[str, list[int]] = {place.name: [] for place in plan.places}
    places = {place.name: place for place in plan.places}
    ranges = [part for rank in range(plan.data_parallel) for part in plan.ranges(rank)]
    for part in ranges:
        first, length = plan.buckets[part.bucket][0], plan.slice_lengths[part.bucket]
        in_slice = range(length)[part.taken]
        in_parameter = range(prod(places[part.name].shape))[part.flattened_range]
        positions = [first + part.rank * length + number for number in in_slice]
        elements = [places[part.name].start + number for number in in_parameter]
        assert positions == elements, f"rank {part.rank}: {part.name!r}: {part.taken} isn't {part.flattened_range}"
        held[part.name] += in_parameter
    for name, numbers in held.items():
        elements = list(range(prod(places[name].shape)))
        wrong = [number for number in {*numbers, *elements} if numbers.count(number) != 1][:10]
        assert sorted(numbers) == elements, f"{name!r}: elements on no rank or several: {wrong}"
        known = [part for part in ranges if part.name == name]
        assert list(plan.holders(name)) == known, f"{name!r}: found holders {plan.holders(name)}, expected {known}"
        assert elements or len(known) == 1, f"{name!r} has no elements, and is on {len(known)} ranks"


def _check_buckets(plan: BufferPlan) -> None:
    """Raise unless buckets are adjacent, can be cut evenly, and contain their parameters in order, without overlaps."""
    end = 0
    for number, (start, stop) in enumerate(plan.buckets):
        assert start == end, f"bucket {number} starts at {start}, expected {end}"
        assert (stop - start) % plan.data_parallel == 0, f"bucket {number} can't be cut in {plan.data_parallel}"
        end = stop
    position = 0
    for place in plan.places:
        first, last = plan.buckets[place.bucket]
        assert max(position, first) <= place.start, f"{place.name!r} starts at {place.start}, in what is before it"
        assert place.stop <= last, f"{place.name!r} ends at {place.stop}, its bucket at {last}"
        position = place.stop
    lost = sum(prod(place.shape) for place in plan.places) + plan.padding - end
    assert not lost, f"{lost} elements are neither parameters nor padding"


def check_flat_shards(
    plan: BufferPlan,
    tensors: Mapping[str, torch.Tensor],
    *,
    shards: Callable[..., Any] = flat_shards,
    slices: Callable[..., Any] = buffer_slices,
) -> None:
    """Raise unless all ranks' flat shards make up the parameters, bit for bit, and can be packed into the same slices.

    The reference packs the buffer element by element. Arguments must not change, and shards must be views of slices.

    Args:
        plan: of these tensors.
        tensors: the whole parameters, all of one dtype; or one state of each parameter.
        shards: called as ``shards(plan, rank, slices, parameters, prefix=...)``.
        slices: called as ``slices(plan, rank, tree, dtype=...)``.

    Raises:
        AssertionError: names the rank and the bucket, or the parameter, and the difference.

    Examples:
        >>> from shardtree.buffers import plan_buffers
        >>> tensors = {"w": torch.arange(12.0).view(4, 3), "b": torch.ones(3)}
        >>> check_flat_shards(plan_buffers(tensors, data_parallel=4, align=4), tensors)
    """
    parameters = {name: ShardedTensor.from_rank_offsets(name, tensor) for name, tensor in tensors.items()}
    given = packed_slices(plan, tensors)
    trees = []
    for rank, own in enumerate(given):
        tree = check_pure(partial(shards, prefix="state"), plan, rank, own, parameters)
        names = [part.name for part in plan.ranges(rank)]
        assert list(tree) == names, f"rank {rank}: found shards of {list(tree)}, expected {names}"
        # Copies would double the memory of an optimizer's state while it is saved.
        memory = {part.untyped_storage().data_ptr() for part in own}
        copies = [name for name, leaf in tree.items() if leaf.data.untyped_storage().data_ptr() not in memory]
        assert not copies, f"rank {rank}: copies, not views: {', '.join(copies)}"
        loaded = {name: carried(leaf.data).clone().view(leaf.dtype) for name, leaf in tree.items()}
        dtype = own[0].dtype if own else torch.float32
        back = check_pure(partial(slices, dtype=dtype), plan, rank, loaded)
        assert len(back) == len(own), f"rank {rank}: found {len(back)} slices, expected {len(own)}"
        for bucket, (found, expected) in enumerate(zip(back, own, strict=True)):
            differ = first_difference(found, expected)
            assert differ is None, f"rank {rank}, bucket {bucket}: there and back, {differ}"
        trees.append(tree)
    whole = {f"state.{name}": tensor for name, tensor in tensors.items()}
    check_same("shards don't make up the parameters", assemble(trees), whole)


def packed_slices(plan: BufferPlan, tensors: Mapping[str, torch.Tensor]) -> list[list[torch.Tensor]]:
    """Return each rank's slices, one for each bucket, of a buffer that is filled element by element; padding is 0.

    Args:
        plan: of these tensors.
        tensors: the whole parameters, all of one dtype.

    Examples:
        >>> from shardtree.buffers import plan_buffers
        >>> tensors = {"w": torch.arange(1, 4), "b": torch.tensor(4)}
        >>> packed_slices(plan_buffers(tensors, data_parallel=2, align=4), tensors)
        [[tensor([1, 2, 3])], [tensor([0, 4, 0])]]
    """
    # As a list of Python numbers: the code under test uses views and slices, so the reference uses neither.
    elements = [0] * (plan.buckets[-1][1] if plan.buckets else 0)
    for place in plan.places:
        for number, element in enumerate(carried(tensors[place.name]).reshape(-1).tolist()):
            elements[place.start + number] = element
    dtype = next(iter(tensors.values())).dtype if tensors else torch.float32
    carrier = carried(torch.empty(0, dtype=dtype, device="cpu")).dtype
    lengths = [(start, (stop - start) // plan.data_parallel) for start, stop in plan.buckets]
    return [
        [
            torch.tensor(
                elements[start + rank * length : start + (rank + 1) * length], dtype=carrier, device="cpu"
            ).view(dtype)
            for start, length in lengths
        ]
        for rank in range(plan.data_parallel)
    ]


# Strategies for contiguous buffers, as plain data: parameters' shapes, and options.

_SIZES = (1, 2, 3, 5, 4, 0)

BufferOptions = tuple[dict[str, tuple[int, ...]], dict[str, Any]]
"""Parameters' shapes by name, and the keywords of `plan_buffers`."""


@st.composite
def buffer_options(draw: st.DrawFn, most_ranks: int = 8) -> BufferOptions:
    """Return a strategy for arguments of `plan_buffers`: shapes by name, and options; it shrinks to no parameters.

    These include scalars, parameters without elements, more ranks than elements, and no parameters at all.

    Args:
        draw: Hypothesis's own.
        most_ranks: the largest number of data-parallel ranks.

    Examples:
        >>> from hypothesis import find
        >>> find(buffer_options(), lambda drawn: len(drawn[0]) > 1)[0]
        {'p0': (), 'p1': ()}
    """
    drawn = draw(st.lists(shapes(max_axes=3, sizes=_SIZES), max_size=5))
    parameters = {f"p{number}": shape for number, shape in enumerate(drawn)}
    names = list(parameters)
    return parameters, {
        "data_parallel": draw(st.integers(1, most_ranks)),
        "bucket_size": draw(st.none() | st.integers(1, 40)),
        "align": draw(st.sampled_from([1, 2, 3, 8])),
        "bucket_align": draw(st.sampled_from([1, 2, 5, 8])),
        "order": draw(st.none() | st.permutations(names)),
        "alone": draw(st.sets(st.sampled_from(names), max_size=2)) if names else (),
    }
