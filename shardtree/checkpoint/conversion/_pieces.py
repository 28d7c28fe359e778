"""How a destination is cut: pieces of tensors, and batches of pieces that are written one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from math import prod
from typing import Any

from ...errors import KeyMismatch, ShapeError, error_text
from ...mapping import ShardedObject, ShardedTensor
from ...plans import grouped
from ..comparison._boxes import box_shape, boxes

Counts = Sequence[int]
Cutting = Callable[[ShardedTensor], Counts | None] | Mapping[str, Counts] | None
"""Into how many pieces each axis is cut: a function from a whole tensor, or patterns of keys; None to leave it open."""

_OBJECTS = 64  # in a batch: how large they are isn't known before they are read
_MOST_PIECES = 2**20  # of a tensor: one that a file says is larger than any storage isn't planned on piece by piece


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """What is written in one go.

    Attributes:
        tensors: pieces of tensors.
        objects: sharded objects.
    """

    tensors: tuple[ShardedTensor, ...] = ()
    objects: tuple[ShardedObject, ...] = ()

    @property
    def nbytes(self) -> int:
        """The length in bytes of the pieces."""
        return sum(_nbytes(shard) for shard in self.tensors)


def batches_of(
    tensors: Sequence[ShardedTensor], objects: Sequence[ShardedObject], layout: Cutting, most_bytes: int
) -> list[Batch]:
    """Return what is written one after the other, at least one batch.

    Args:
        tensors: boxes of tensors, in the order in which they are written.
        objects: come first, some at a time, so that a format that can't hold them says so before anything is written.
        layout: how whole tensors are cut; those that it leaves open are cut where they are larger than a batch.
        most_bytes: in a batch, unless a piece that `layout` asks for is larger.

    Raises:
        KeyMismatch: `layout` has a pattern that fits no key.
        ShapeError: `layout` gives something else than a count for each axis.
    """
    counts_of = _counts_function(layout, tensors)
    batches = [Batch((), tuple(objects[start : start + _OBJECTS])) for start in range(0, len(objects), _OBJECTS)]
    pieces = (piece for shard in tensors for piece in _pieces(shard, counts_of(shard), most_bytes))
    batches += [Batch(tuple(group)) for group in grouped(pieces, _nbytes, most_bytes)]
    return batches or [Batch()]


def _nbytes(shard: ShardedTensor) -> int:
    return prod(shard.local_shape) * shard.dtype.itemsize


def _counts_function(layout: Cutting, tensors: Sequence[ShardedTensor]) -> Callable[[ShardedTensor], Counts | None]:
    if layout is None:
        return lambda shard: None
    if callable(layout):
        return layout
    if not isinstance(layout, Mapping) or not all(isinstance(pattern, str) for pattern in layout):
        expected = "a function from a shard, or a dict from patterns of keys, to counts of pieces"
        raise ShapeError(error_text("convert: layout", found=repr(layout)[:200], expected=expected))
    nothing = [repr(pattern) for pattern in layout if not any(fnmatchcase(shard.key, pattern) for shard in tensors)]
    if nothing:
        raise KeyMismatch(error_text("convert: layout has patterns that fit no key of the output", offenders=nothing))
    patterns = dict(layout)
    return lambda shard: next((patterns[each] for each in patterns if fnmatchcase(shard.key, each)), None)


def _pieces(shard: ShardedTensor, counts: Counts | None, most_bytes: int) -> Iterator[ShardedTensor]:
    is_whole = shard.local_shape == shard.global_shape
    if counts is not None and is_whole:
        cell = _cell(shard, counts)
    elif _nbytes(shard) > most_bytes:
        cell = box_shape(shard.local_shape, max(1, most_bytes // shard.dtype.itemsize))
    else:
        yield shard
        return
    fragments = _fragments(shard.local_shape, cell) if is_whole else None
    if not prod(shard.local_shape):
        yield shard
    count = prod(-(-size // max(step, 1)) for size, step in zip(shard.local_shape, cell, strict=True))
    if count > _MOST_PIECES:
        what = f"convert: {shard.key!r} of shape {shard.global_shape} would be written in too many pieces"
        raise ShapeError(error_text(what, found=count, expected=f"at most {_MOST_PIECES}", fix="Write larger pieces."))
    for offset, shape in boxes(shard.local_shape, cell):
        yield _piece(shard, offset, shape, fragments)


def _cell(shard: ShardedTensor, counts: Any) -> tuple[int, ...]:
    shape = shard.local_shape
    listed = tuple(counts) if isinstance(counts, (tuple, list)) else ()
    if len(listed) != len(shape) or not all(type(count) is int and count > 0 for count in listed):
        expected = f"{len(shape)} counts of pieces, one for each axis of {shape}"
        raise ShapeError(error_text(f"convert: layout of {shard.key!r}", found=repr(counts)[:200], expected=expected))
    return tuple(max(1, -(-size // count)) for size, count in zip(shape, listed, strict=True))


def _fragments(shape: tuple[int, ...], cell: tuple[int, ...]) -> tuple[int, ...] | None:
    regular = all(size % step == 0 for size, step in zip(shape, cell, strict=True))
    return tuple(size // step for size, step in zip(shape, cell, strict=True)) if regular else None


def _piece(
    shard: ShardedTensor, offset: tuple[int, ...], shape: tuple[int, ...], fragments: tuple[int, ...] | None
) -> ShardedTensor:
    index = tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))
    prepended = shard.prepend_axis_num
    moved = zip(shard.global_offset[prepended:], offset, strict=True)
    return replace(
        shard,
        data=shard.data[index],
        local_shape=shape,
        global_offset=(*shard.global_offset[:prepended], *(first + start for first, start in moved)),
        axis_fragmentations=fragments,
    )
