"""The laws of layouts, loads, writes and contiguous buffers, checked by counting bytes and elements."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from itertools import product
from math import prod
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from ..core.layouts import ShardColumns, check_access, join_columns, shard_columns
from ..core.mapping import ShardedTensor
from ..core.plans import LoadPlan, Runs, StoredChunks, Strided
from ..optim.buffers import BufferPlan, buffer_slices, flat_shards
from ._bits import assemble, carried, check_equal, check_same
from ._law_purity import check_pure
from ._layouts import Layout, cut
from ._tensors import random_bits, shapes

Element = tuple[int, ...]
"""Global index of an element."""


def check_load_plan(requests: ShardColumns, chunks: StoredChunks, plan: LoadPlan) -> None:
    """Raise unless a plan fills each requested byte once, from the right stored byte, and reads no more.

    The reference visits every element, so keep shapes small.

    Args:
        requests: Shards to fill.
        chunks: Stored chunks without overlaps.
        plan: The result of `plan_load`.

    Raises:
        AssertionError: A byte is read wrongly, twice, or not at all; the error names the shard and the byte.

    Examples:
        >>> import torch, shardtree as st
        >>> half = st.layouts.shard_columns([st.ShardedTensor.from_rank_offsets("w", torch.zeros(2), (0, 1, 2))])
        >>> at = np.array([0])
        >>> stored = StoredChunks(at, at[:, None], at[:, None] + 4, at - 1, at - 1, at, at)
        >>> check_load_plan(half, stored, st.core.plans.plan_load(half, stored))
    """
    expected = _expected_sources(requests, chunks)
    sources: dict[tuple[int, int], tuple[int, int]] = {}
    for target, source in (*_run_bytes(plan.runs), *_strided_bytes(plan.strided)):
        assert target not in sources, f"byte {target[1]} of shard {target[0]} is read twice"
        sources[target] = source
    for target in expected.keys() | sources.keys():
        where, right = sources.get(target), expected.get(target)
        assert where == right, f"byte {target[1]} of shard {target[0]} comes from {where}, and is stored at {right}"
    assert plan.bytes_read == len(expected), f"the plan says {plan.bytes_read} bytes, and needs {len(expected)}"
    sizes = requests.item_size[requests.key].tolist()
    counts = np.bincount([shard for shard, _ in expected], minlength=len(requests)).tolist()
    elements = [count // size for count, size in zip(counts, sizes, strict=True)]
    assert plan.covered.tolist() == elements, f"covered is {plan.covered.tolist()}, expected {elements}"


def check_writes(columns: ShardColumns, ranks: int, writes: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> None:
    """Raise unless each shard with a main replica is written once, by a rank that holds it, and writes are balanced.

    Balanced means: among ranks that hold the same shards, none writes more bytes of them than the mean plus the
    largest shard.

    Args:
        columns: The shards of all ranks.
        ranks: Number of ranks.
        writes: Mask of the shards that are written, bool (shards,).

    Raises:
        AssertionError: The writes are wrong or unbalanced; the error names the shard or the ranks.

    Examples:
        >>> import torch, shardtree as st
        >>> columns = st.layouts.shard_columns([st.ShardedTensor.from_rank_offsets("w", torch.zeros(2))])
        >>> check_writes(columns, 1, st.core.plans.level_writes(columns, 1))
    """
    # A greedy assignment of shards guarantees this limit; an optimal balance would be a packing problem.
    size = columns.elements * columns.item_size[columns.key]
    rows: dict[tuple[object, ...], list[int]] = {}
    for row in range(len(columns)):
        box = columns.offset[row].tolist(), columns.shape[row].tolist(), int(columns.start[row]), int(columns.stop[row])
        rows.setdefault((columns.keys[int(columns.key[row])], *map(str, box)), []).append(row)
    loads: dict[frozenset[int], list[np.ndarray[tuple[int], np.dtype[np.int64]]]] = {}
    for place, copies in rows.items():
        writers = [row for row in copies if writes[row]]
        expected = int(any(columns.main[row] for row in copies))
        assert len(writers) == expected, f"{place} is written {len(writers)} times, expected {expected}"
        holders = frozenset(int(columns.rank[row]) for row in copies)
        for row in writers:
            loads.setdefault(holders, []).append(np.eye(ranks, dtype=np.int64)[columns.rank[row]] * size[row])
    for holders, parts in loads.items():
        load, largest = np.sum(parts, axis=0), max(int(part.max()) for part in parts)
        limit = load.sum() / len(holders) + largest
        assert load.max() <= limit, f"ranks {sorted(holders)} write {load[sorted(holders)].tolist()}, at most {limit}"


def shard_elements(columns: ShardColumns | StoredChunks, row: int) -> list[Element]:
    """Return the global indices of a shard's or chunk's elements, in memory order.

    Args:
        columns: Shards, or stored chunks.
        row: Index of the shard or chunk in the columns.

    Examples:
        >>> import torch, shardtree as st
        >>> whole = st.ShardedTensor.from_rank_offsets("w", torch.zeros(3), (0, 1, 2))
        >>> shard_elements(st.layouts.shard_columns([whole]), 0)
        [(3,), (4,), (5,)]
    """
    begin, shape = columns.offset[row].tolist(), columns.shape[row].tolist()
    inside = list(product(*(range(low, low + size) for low, size in zip(begin, shape, strict=True))))
    start = int(columns.start[row])
    return inside if start < 0 else inside[start : int(columns.stop[row])]


def _expected_sources(requests: ShardColumns, chunks: StoredChunks) -> dict[tuple[int, int], tuple[int, int]]:
    """Map each requested byte, as (shard, byte), to its location (file, byte); bytes that aren't stored are omitted."""
    axes = max(requests.offset.shape[1], chunks.offset.shape[1])

    def aligned(element: Element) -> Element:
        return (*(0,) * (axes - len(element)), *element)

    # A table of all stored elements avoids arithmetic on boxes and strides, which is under test.
    places: dict[tuple[int, Element], tuple[int, int]] = {}
    for row in range(len(chunks.key)):
        size = int(requests.item_size[chunks.key[row]])
        for number, element in enumerate(shard_elements(chunks, row)):
            place = int(chunks.file[row]), int(chunks.byte[row]) + number * size
            places[int(chunks.key[row]), aligned(element)] = place
    sources: dict[tuple[int, int], tuple[int, int]] = {}
    for row in range(len(requests)):
        key, size = int(requests.key[row]), int(requests.item_size[requests.key[row]])
        for number, element in enumerate(shard_elements(requests, row)):
            if (key, aligned(element)) in places:
                file, byte = places[key, aligned(element)]
                sources |= {(row, number * size + i): (file, byte + i) for i in range(size)}
    return sources


def _run_bytes(runs: Runs) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    columns = (runs.file, runs.byte, runs.target, runs.target_byte, runs.length)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    return [((to, at + i), (file, byte + i)) for file, byte, to, at, length in rows for i in range(length)]


def _strided_bytes(pieces: Strided) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    pairs = []
    for row in range(len(pieces.file)):
        file, to, size = (int(column[row]) for column in (pieces.file, pieces.target, pieces.item_size))
        for place in np.ndindex(*pieces.shape[row].tolist()):
            byte = int(pieces.byte[row]) + int(np.dot(place, pieces.stride[row])) * size
            at = int(pieces.target_byte[row]) + int(np.dot(place, pieces.target_stride[row])) * size
            pairs += [((to, at + i), (file, byte + i)) for i in range(size)]
    return pairs


# The law of layouts.


def check_layout(layout: Layout) -> None:
    """Raise unless a layout's main replicas tile the tensor, and the shards that it cuts assemble to the same tensor.

    Args:
        layout: The layout of a tensor that is small enough to be checked element by element.

    Raises:
        IntegrityError: An element has no main replica, or several.
        AssertionError: The assembled tensor differs, or replicas of it do; the error names the difference.

    Examples:
        >>> from shardtree.testing import even_layout
        >>> check_layout(even_layout((4, 6), 3, axis=1))
    """
    whole = random_bits(layout.global_shape, torch.int16, 1)
    trees = [cut(layout, "w", whole, rank) for rank in range(layout.ranks)]
    check_access(join_columns([shard_columns(tree, rank) for rank, tree in enumerate(trees)]))
    check_equal("pieces of 'w'", assemble(trees)["w"], whole)


# Contiguous buffers: plans, and conversions between slices, shards and parameters.


def check_buffer_plan(plan: BufferPlan) -> None:
    """Raise unless each element of each parameter is in exactly one rank's range, at the planned position.

    Counts element by element, so keep shapes small.

    Args:
        plan: The result of `plan_buffers`.

    Raises:
        AssertionError: An element is on no rank, on several, or at another position; the error names it
            and its parameter.

    Examples:
        >>> from shardtree.buffers import plan_buffers
        >>> check_buffer_plan(plan_buffers({"w": (4, 3), "b": (), "empty": (0, 2)}, data_parallel=5, bucket_size=8))
    """
    _check_buckets(plan)
    numbers_of: dict[str, list[int]] = {place.name: [] for place in plan.places}
    places = {place.name: place for place in plan.places}
    ranges = [part for rank in range(plan.data_parallel) for part in plan.ranges(rank)]
    for part in ranges:
        first, length = plan.buckets[part.bucket][0], plan.slice_lengths[part.bucket]
        in_slice = range(length)[part.taken]
        in_parameter = range(prod(places[part.name].shape))[part.flattened_range]
        positions = [first + part.rank * length + number for number in in_slice]
        elements = [places[part.name].start + number for number in in_parameter]
        assert positions == elements, f"rank {part.rank}: {part.name!r}: {part.taken} is not {part.flattened_range}"
        numbers_of[part.name] += in_parameter
    for name, numbers in numbers_of.items():
        elements = list(range(prod(places[name].shape)))
        wrong = [number for number in {*numbers, *elements} if numbers.count(number) != 1][:10]
        assert sorted(numbers) == elements, f"{name!r}: elements on no rank or several: {wrong}"
        holders = [part for part in ranges if part.name == name]
        assert list(plan.holders(name)) == holders, f"{name!r}: found holders {plan.holders(name)}, expected {holders}"
        assert elements or len(holders) == 1, f"{name!r} has no elements, and is on {len(holders)} ranks"


def _check_buckets(plan: BufferPlan) -> None:
    """Raise unless buckets are adjacent, can be cut evenly, and contain their parameters in order, without overlaps."""
    end = 0
    for number, (start, stop) in enumerate(plan.buckets):
        assert start == end, f"bucket {number} starts at {start}, expected {end}"
        assert (stop - start) % plan.data_parallel == 0, f"bucket {number} cannot be cut in {plan.data_parallel}"
        end = stop
    position = 0
    for place in plan.places:
        first, last = plan.buckets[place.bucket]
        least = max(position, first)
        assert least <= place.start, f"{place.name!r} starts at {place.start}, expected at least {least}"
        assert place.stop <= last, f"{place.name!r} ends at {place.stop}, its bucket at {last}"
        position = place.stop
    excess = sum(prod(place.shape) for place in plan.places) + plan.padding - end
    assert not excess, f"{excess} elements are neither parameters nor padding"


def check_flat_shards(
    plan: BufferPlan,
    tensors: Mapping[str, torch.Tensor],
    *,
    shards: Callable[..., Any] = flat_shards,
    slices: Callable[..., Any] = buffer_slices,
) -> None:
    """Raise unless all ranks' flat shards make up the parameters, bit for bit, and packing them gives the same slices.

    The reference packs the buffer element by element. The functions must not change their arguments, and shards must be
    views of the slices.

    Args:
        plan: The plan of these tensors.
        tensors: Whole parameters by name, all of one dtype; or one optimizer state of each parameter.
        shards: Function under test that returns a rank's slices as shards by name, called as
            ``shards(plan, rank, slices, parameters, prefix=...)``.
        slices: Function under test that packs shards into a rank's slices, called as
            ``slices(plan, rank, tree, dtype=...)``.

    Raises:
        AssertionError: A result is wrong; the error names the rank and the bucket, or the parameter, and the
            difference.

    Examples:
        >>> from shardtree.buffers import plan_buffers
        >>> tensors = {"w": torch.arange(12.0).view(4, 3), "b": torch.ones(3)}
        >>> check_flat_shards(plan_buffers(tensors, data_parallel=4, align=4), tensors)
    """
    parameters = {name: ShardedTensor.from_rank_offsets(name, tensor) for name, tensor in tensors.items()}
    buffers = packed_slices(plan, tensors)
    trees = []
    for rank, parts in enumerate(buffers):
        tree = check_pure(partial(shards, prefix="state"), plan, rank, parts, parameters)
        names = [part.name for part in plan.ranges(rank)]
        assert list(tree) == names, f"rank {rank}: found shards of {list(tree)}, expected {names}"
        # Copies would double the memory of an optimizer's state while it is saved.
        memory = {part.untyped_storage().data_ptr() for part in parts}
        copies = [name for name, leaf in tree.items() if leaf.data.untyped_storage().data_ptr() not in memory]
        assert not copies, f"rank {rank}: copies, not views: {', '.join(copies)}"
        clones = {name: carried(leaf.data).clone().view(leaf.dtype) for name, leaf in tree.items()}
        dtype = parts[0].dtype if parts else torch.float32
        back = check_pure(partial(slices, dtype=dtype), plan, rank, clones)
        assert len(back) == len(parts), f"rank {rank}: found {len(back)} slices, expected {len(parts)}"
        for bucket, (found, expected) in enumerate(zip(back, parts, strict=True)):
            check_equal(f"rank {rank}, bucket {bucket}: there and back", found, expected)
        trees.append(tree)
    whole = {f"state.{name}": tensor for name, tensor in tensors.items()}
    check_same("shards do not make up the parameters", assemble(trees), whole)


def packed_slices(plan: BufferPlan, tensors: Mapping[str, torch.Tensor]) -> list[list[torch.Tensor]]:
    """Return each rank's slices of the packed buffer, one for each bucket; padding is 0.

    The buffer is packed element by element, as the reference for functions that use views.

    Args:
        plan: The plan of these tensors.
        tensors: Whole parameters by name, all of one dtype.

    Examples:
        >>> from shardtree.buffers import plan_buffers
        >>> tensors = {"w": torch.arange(1, 4), "b": torch.tensor(4)}
        >>> packed_slices(plan_buffers(tensors, data_parallel=2, align=4), tensors)
        [[tensor([1, 2, 3])], [tensor([0, 4, 0])]]
    """
    # The buffer is a list of Python numbers: the code under test uses views and slices, so the reference uses neither.
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
        draw: Hypothesis's draw function, which callers don't pass.
        most_ranks: Upper bound on the number of data-parallel ranks.

    Examples:
        >>> from hypothesis import find
        >>> find(buffer_options(), lambda drawn: len(drawn[0]) > 1)[0]
        {'p0': (), 'p1': ()}
    """
    all_shapes = draw(st.lists(shapes(max_axes=3, sizes=_SIZES), max_size=5))
    parameters = {f"p{number}": shape for number, shape in enumerate(all_shapes)}
    names = list(parameters)
    return parameters, {
        "data_parallel": draw(st.integers(1, most_ranks)),
        "bucket_size": draw(st.none() | st.integers(1, 40)),
        "align": draw(st.sampled_from([1, 2, 3, 8])),
        "bucket_align": draw(st.sampled_from([1, 2, 5, 8])),
        "order": draw(st.none() | st.permutations(names)),
        "alone": draw(st.sets(st.sampled_from(names), max_size=2)) if names else (),
    }
