"""BufferPlan: each parameter's position in a contiguous buffer, and the ranges of the buffer that each rank has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import torch

from ...core.geometry import Column, integer, refuse
from ...errors import KeyMismatch, MetadataError, error_text, plural, shorten, table_lines

# Text of plans.

_LINES = 32


def plan_lines(
    parameters: int, padding: int, buckets: Sequence[Sequence[int]], shares: Sequence[Sequence[int]]
) -> list[str]:
    """Return the lines of a plan's text: a summary, a table of buckets and a table of ranks, up to 32 lines each.

    Args:
        parameters: Number of parameters.
        padding: Number of the buffer's elements that belong to no parameter.
        buckets: Row for each bucket: start, stop, number of parameters, number of their elements, and length of one
            rank's slice.
        shares: Row for each rank: number of parameters with elements on the rank, and number of these elements.

    Examples:
        >>> for line in plan_lines(2, 1, [(0, 10, 2, 9, 5)], [(1, 5), (2, 4)]):
        ...     print(line)
        2 parameters of 9 elements, 1 of padding (10.0 %): 1 bucket, cut for 2 ranks
        bucket  from  to  parameters  elements  padding  a rank's slice
             0     0  10           2         9        1               5
        rank  parameters  elements  padding
           0           1         5        0
           1           2         4        1
    """
    size = buckets[-1][1] if buckets else 0
    share = f"{100 * padding / max(size, 1):.1f} %"
    counts = f"{plural(parameters, 'parameter')} of {size - padding:,} elements, {padding:,} of padding ({share})"
    head = f"{counts}: {plural(len(buckets), 'bucket')}, cut for {plural(len(shares), 'rank')}"
    slice_length = sum(bucket[4] for bucket in buckets)
    spans = [(n, at, to, count, full, to - at - full, part) for n, (at, to, count, full, part) in enumerate(buckets)]
    ranks = [(rank, count, elements, slice_length - elements) for rank, (count, elements) in enumerate(shares)]
    lines = _lines(("bucket", "from", "to", "parameters", "elements", "padding", "a rank's slice"), spans)
    return [head, *(lines if buckets else []), *_lines(("rank", "parameters", "elements", "padding"), ranks)]


def place_lines(rows: Sequence[tuple[int, slice, slice]]) -> list[str]:
    """Return the lines of a table with each rank's range of a parameter, up to 32 lines.

    Args:
        rows: Row for each rank: the rank, its range of the flattened parameter, and the position of this range in the
            rank's slice of the bucket.

    Examples:
        >>> place_lines([(1, slice(0, 3), slice(1, 4))])
        ['rank  of the parameter  of its slice', '   1             [0:3]         [1:4]']
    """
    texts = [(rank, _text(flat), _text(own)) for rank, flat, own in rows]
    return _lines(("rank", "of the parameter", "of its slice"), texts)


def _text(part: slice) -> str:
    return f"[{part.start}:{part.stop}]"


def _lines(head: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    cells = [head, *([f"{cell:,}" if isinstance(cell, int) else str(cell) for cell in row] for row in rows)]
    heading, *lines = table_lines(cells)
    return [heading, *shorten(lines, _LINES)]


@dataclass(frozen=True, slots=True)
class BufferPlace:
    """The position of one parameter in the buffer.

    Attributes:
        name: Name of the parameter.
        shape: Shape of the parameter, which is flattened in row-major order.
        bucket: Index of the bucket that contains the parameter.
        start: Offset of the parameter's first element in the buffer.
    """

    name: str
    shape: tuple[int, ...]
    bucket: int
    start: int

    @property
    def stop(self) -> int:
        """End of the parameter's elements in the buffer, exclusive."""
        return self.start + prod(self.shape)


@dataclass(frozen=True, slots=True)
class BufferRange:
    """The elements of one parameter that one rank has.

    Attributes:
        name: Name of the parameter.
        rank: Data-parallel rank.
        bucket: Index of the parameter's bucket.
        taken: Range of these elements within the rank's slice of that bucket.
        flattened_range: Range of these elements within the row-major flattened parameter.
    """

    name: str
    rank: int
    bucket: int
    taken: slice
    flattened_range: slice


@dataclass(frozen=True, slots=True)
class BufferPlan:
    """Layout of parameters in a contiguous buffer, as `plan_buffers` returns it; prints as tables.

    The buffer consists of buckets. Each bucket is cut into slices of equal length, one for each data-parallel rank. All
    sizes and offsets are in elements.

    Attributes:
        data_parallel: Number of ranks that share each bucket.
        places: Positions of the parameters, in the buffer's order.
        buckets: (start, stop) of each bucket in the buffer; buckets are consecutive.
    """

    # Tuples are used instead of columns: a buffer has thousands of parameters, not millions of chunks, and a plan is
    # compared, hashed and printed whole.
    data_parallel: int
    places: tuple[BufferPlace, ...]
    buckets: tuple[tuple[int, int], ...]

    @property
    def elements(self) -> int:
        """Number of elements of all parameters."""
        return sum(prod(place.shape) for place in self.places)

    @property
    def padding(self) -> int:
        """Number of elements of the buffer that belong to no parameter."""
        return (self.buckets[-1][1] if self.buckets else 0) - self.elements

    @property
    def slice_lengths(self) -> tuple[int, ...]:
        """Number of elements in a rank's slice, by bucket."""
        return tuple((stop - start) // self.data_parallel for start, stop in self.buckets)

    def ranges(self, rank: int) -> tuple[BufferRange, ...]:
        """Return the ranges of parameters that a rank has, in the buffer's order.

        Parameters without elements on the rank are left out. But a parameter that has no elements at all gets an empty
        range on one rank, so that it is stored.

        Args:
            rank: Data-parallel rank.

        Raises:
            MetadataError: There is no such rank.

        Examples:
            >>> from shardtree.buffers import plan_buffers
            >>> plan = plan_buffers({"w": (2, 3), "b": (3,)}, data_parallel=2)
            >>> [(part.name, part.taken, part.flattened_range) for part in plan.ranges(1)]
            [('w', slice(0, 1, None), slice(5, 6, None)), ('b', slice(1, 4, None), slice(0, 3, None))]
        """
        rank = checked_rank(self, rank)
        return tuple(self._range(place, rank) for place in self.places if rank in self._ranks(place))

    def holders(self, name: str) -> tuple[BufferRange, ...]:
        """Return a parameter's ranges on the ranks that have elements of it, in the order of ranks.

        Raises:
            KeyMismatch: The parameter isn't in the buffer.

        Examples:
            >>> from shardtree.buffers import plan_buffers
            >>> plan = plan_buffers({"w": (2, 3), "b": (3,)}, data_parallel=2)
            >>> [(part.rank, part.flattened_range) for part in plan.holders("w")]
            [(0, slice(0, 5, None)), (1, slice(5, 6, None))]
        """
        place = self._place(name)
        return tuple(self._range(place, rank) for rank in self._ranks(place))

    def explain(self, name: str) -> str:
        """Return a text with a parameter's position in the buffer, and each rank's range of it.

        Raises:
            KeyMismatch: The parameter isn't in the buffer.

        Examples:
            >>> from shardtree.buffers import plan_buffers
            >>> print(plan_buffers({"w": (2, 3), "b": (3,)}, data_parallel=2).explain("b"))
            'b' (3,): [6:9] of the buffer, in bucket 0
            rank  of the parameter  of its slice
               1             [0:3]         [1:4]
        """
        place = self._place(name)
        head = f"{name!r} {place.shape}: [{place.start}:{place.stop}] of the buffer, in bucket {place.bucket}"
        rows = [(part.rank, part.flattened_range, part.taken) for part in self.holders(name)]
        return "\n".join([head, *place_lines(rows)])

    def __str__(self) -> str:
        rows = [[0, 0, length] for length in self.slice_lengths]
        for place in self.places:
            rows[place.bucket][0] += 1
            rows[place.bucket][1] += prod(place.shape)
        buckets = [(*span, *row) for span, row in zip(self.buckets, rows, strict=True)]
        return "\n".join(plan_lines(len(self.places), self.padding, buckets, self._rank_counts().tolist()))

    def _rank_counts(self) -> Column:
        """Return the number of parameters on each rank, and the number of their elements there, int64 (ranks, 2)."""
        # Computed from each parameter's first and last rank, without listing the ranges of all ranks in between.
        counts = np.zeros((self.data_parallel, 2), dtype=np.int64)
        for place in self.places:
            ranks, (first, length) = self._ranks(place), self._share(place)
            counts[ranks.start : ranks.stop] += (1, length)
            counts[ranks.start, 1] -= place.start - (first + ranks.start * length)
            counts[ranks.stop - 1, 1] -= first + ranks.stop * length - place.stop
        return counts

    def _place(self, name: str) -> BufferPlace:
        for place in self.places:
            if place.name == name:
                return place
        fix = "Pass the name of one of `plan.places`."
        heading = f"BufferPlan: no parameter {name!r} in the buffer"
        raise KeyMismatch(error_text(heading, expected=f"one of {len(self.places)} names", fix=fix))

    def _share(self, place: BufferPlace) -> tuple[int, int]:
        """Return the start of a parameter's bucket and the length of a rank's slice of the bucket, both in elements."""
        start, stop = self.buckets[place.bucket]
        return start, (stop - start) // self.data_parallel

    def _ranks(self, place: BufferPlace) -> range:
        """Return the ranks that have a range of a parameter; one rank for a parameter without elements."""
        first, length = self._share(place)
        if not length:  # a bucket without elements
            return range(1)
        # A parameter without elements at the end of its bucket would belong to a rank that doesn't exist.
        begin = min((place.start - first) // length, self.data_parallel - 1)
        return range(begin, max(begin + 1, -(-(place.stop - first) // length)))

    def _range(self, place: BufferPlace, rank: int) -> BufferRange:
        first, length = self._share(place)
        begin = first + rank * length
        low, high = max(place.start, begin), min(place.stop, begin + length)
        own, flat = slice(low - begin, high - begin), slice(low - place.start, high - place.start)
        return BufferRange(place.name, rank, place.bucket, own, flat)


def checked_rank(plan: BufferPlan, rank: int) -> int:
    """Return a rank as an int, after checking that the plan has it.

    Raises:
        MetadataError: The plan doesn't have the rank.

    Examples:
        >>> checked_rank(BufferPlan(2, (), ()), 1)
        1
    """
    number = integer("BufferPlan", "rank", rank)
    if not 0 <= number < plan.data_parallel:
        expected = f"a data-parallel rank, 0 to {plan.data_parallel - 1}"
        fix = "Pass the rank's number in its data-parallel group, not in the world."
        refuse("BufferPlan", "rank", number, expected, fix, error=MetadataError)
    return number


def check_plan(plan: object, doing: str) -> None:
    """Raise MetadataError unless the argument is a BufferPlan.

    Examples:
        >>> check_plan(BufferPlan(2, (), ()), "flat_shards")
    """
    if not isinstance(plan, BufferPlan):
        fix = "Pass the result of plan_buffers as the first argument."
        raise MetadataError(
            error_text(f"{doing}: `plan` is no BufferPlan", found=type(plan).__name__, expected="a BufferPlan", fix=fix)
        )


def check_dtype(dtype: object, doing: str) -> None:
    """Raise MetadataError unless the argument is a `torch.dtype`.

    Examples:
        >>> check_dtype(torch.float32, "flat_targets")
    """
    if not isinstance(dtype, torch.dtype):
        found, fix = type(dtype).__name__, "Pass a dtype such as torch.float32."
        raise MetadataError(
            error_text(f"{doing}: dtype is not a torch.dtype", found=found, expected="a torch.dtype", fix=fix)
        )
