"""Whether donated tensors keep out of each other's memory: if not, one is filled over what another has got."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import gcd, prod

import numpy as np
import torch

from ...errors import ShapeError, error_text
from .._tensor import ShardedTensor

_MOST_CELLS = 10_000_000

_Bytes = tuple[int, list[tuple[int, int]]]


@dataclass(frozen=True, slots=True, eq=False)
class _Span:
    """Where a donated tensor's elements are.

    Attributes:
        shard: whose tensor it is.
        tensor: the dense tensor, with elements that don't share memory.
        begin: address of its first byte.
        end: address behind its last byte.
        written: whether it is donated.
    """

    shard: ShardedTensor
    tensor: torch.Tensor
    begin: int
    end: int
    written: bool


def check_apart(
    doing: str,
    donated: Sequence[tuple[ShardedTensor, torch.Tensor]],
    read: Sequence[tuple[ShardedTensor, torch.Tensor]] = (),
) -> None:
    """Check that no donated tensor shares an element with another, save with one for the same box of the same key.

    Elements are compared only where ranges of addresses, from a tensor's first byte to its last, intersect: tensors
    of other libraries may have one memory in several storages.

    Args:
        doing: what is being done, for the message.
        donated: shards with their dense tensors; each tensor's own elements are known to be apart.
        read: shards with their dense tensors that are read meanwhile; these may share memory with each other.

    Raises:
        ShapeError: two share memory, or are interleaved in so fine a grain that it would take too long to tell.

    Examples:
        >>> matrix = torch.zeros(4, 6)
        >>> halves = {"left": matrix[:, :3], "right": matrix[:, 3:]}
        >>> check_apart("load", [(ShardedTensor.from_rank_offsets(key, half), half) for key, half in halves.items()])
    """
    clashes = [clash for group in _intersecting(donated, read) for clash in _clashes(group)]
    if clashes:
        fix = f"Donate tensors with memory of their own, or {doing} without donate."
        raise ShapeError(error_text(f"{doing}: donated tensors share memory", offenders=clashes, fix=fix))


def _intersecting(
    donated: Sequence[tuple[ShardedTensor, torch.Tensor]], read: Sequence[tuple[ShardedTensor, torch.Tensor]]
) -> Iterator[list[_Span]]:
    """Yield the groups of two or more tensors whose ranges of addresses hang together, the donated ones first."""
    every = [*donated, *read]
    device = np.array([tensor.get_device() for _, tensor in every], dtype=np.int64)
    begin = np.array([tensor.data_ptr() for _, tensor in every], dtype=np.int64)
    end = begin + np.array([_reach(tensor) for _, tensor in every], dtype=np.int64)
    for number in np.unique(device).tolist():
        rows = np.flatnonzero((device == number) & (begin > 0) & (begin < end))
        rows = rows[np.argsort(begin[rows], kind="stable")]
        # What begins behind all that came before it begins another group.
        cuts = np.flatnonzero(begin[rows][1:] >= np.maximum.accumulate(end[rows])[:-1]) + 1
        sizes = np.diff(cuts, prepend=0, append=rows.size)
        for first, size in zip(*(column[sizes > 1].tolist() for column in (np.append(0, cuts), sizes)), strict=True):
            group: list[int] = sorted(rows[first : first + size].tolist())
            yield [_Span(*every[row], int(begin[row]), int(end[row]), row < len(donated)) for row in group]


def _reach(tensor: torch.Tensor) -> int:
    """Return how many bytes there are from a tensor's first to its last; 0 where it has none."""
    if tensor.is_contiguous() or not tensor.numel():
        return tensor.nbytes
    return (1 + sum(stride * (size - 1) for stride, size in _axes(tensor))) * tensor.itemsize


def _axes(tensor: torch.Tensor) -> list[tuple[int, int]]:
    """Return stride and size of each axis that is longer than one, finest first."""
    return sorted(axis for axis in zip(tensor.stride(), tensor.shape, strict=True) if axis[1] > 1)


def _clashes(group: Sequence[_Span]) -> Iterator[str]:
    """Yield which tensors of a group share memory: each in turn is entered on a map of the group's bytes.

    The map's cells are as large as they can be, so that every run of bytes is of whole cells. What is only read is
    compared, but not entered.
    """
    named: dict[tuple[object, ...], _Span] = {}
    for span in group:
        named.setdefault(_identity(span), span)
    spans = list(named.values())
    if len(spans) == 1 or not spans[0].written:
        return
    begin, end = min(span.begin for span in spans), max(span.end for span in spans)
    layouts = [_bytes(span) for span in spans]
    cell = gcd(*(span.begin - begin for span in spans), *(number for layout in layouts for number in _lengths(layout)))
    if (end - begin) // cell > _MOST_CELLS:
        yield f"{_name(spans[0])} and {_name(spans[1])}, or are too finely interleaved to tell"
        return
    owners = torch.zeros((end - begin) // cell, dtype=torch.int32)
    for number, (span, (run, axes)) in enumerate(zip(spans, layouts, strict=True)):
        shape, strides = [size for _, size in axes], [stride // cell for stride, _ in axes]
        own = owners.as_strided([*shape, run // cell], [*strides, 1], (span.begin - begin) // cell)
        if other := int(own.max()):
            yield f"{_name(spans[other - 1])} and {_name(span)}{'' if span.written else ', which is read'}"
        if span.written:
            own.fill_(number + 1)


def _bytes(span: _Span) -> _Bytes:
    """Return a tensor's runs of contiguous bytes: how long each is, and the axes along which they repeat."""
    tensor = span.tensor
    axes = [(stride * tensor.itemsize, size) for stride, size in _axes(tensor) if stride]
    run = tensor.itemsize
    while axes and axes[0][0] == run:
        run = prod(axes.pop(0))
    return run, axes


def _lengths(layout: _Bytes) -> Iterable[int]:
    run, axes = layout
    return run, *(stride for stride, _ in axes)


def _identity(span: _Span) -> tuple[object, ...]:
    """Return what two tensors have in common that are filled alike: the same elements for the same box of one key."""
    shard, tensor = span.shard, span.tensor
    flat = shard.flattened_range
    box = (shard.key, shard.global_offset, shard.local_shape, flat and (flat.start, flat.stop))
    view = (span.begin, tensor.shape, tensor.stride(), tensor.dtype, tensor.is_conj(), tensor.is_neg())
    return *box, *view


def _name(span: _Span) -> str:
    return f"{span.shard.key!r} at {span.shard.global_offset}"
