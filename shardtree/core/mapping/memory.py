"""Checks of leaves' tensors: a tensor still fits its leaf, can be written, and shares no memory with others.

A donated tensor is a target's tensor that a load fills in place.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import gcd, prod

import numpy as np
import torch

from ...errors import ShapeError, error_text
from ..lazy import INTEGERS, flat_bytes
from ._elements import is_wrapper, lacks_memory
from ._read_only import refuse_read_only as refuse_read_only
from ._tensor import ShardedTensor

# Checks of one tensor: whether it still fits its leaf, and can be written.


def check_unchanged(doing: str, shard: ShardedTensor, tensor: torch.Tensor) -> None:
    """Raise unless a tensor still has the shape and dtype of its shard, and still has memory.

    Args:
        doing: Name of the operation, for the message.
        shard: Shard of the tensor.
        tensor: Tensor that the shard holds.

    Raises:
        ShapeError: The tensor was changed since the shard was built.

    Examples:
        >>> shard = ShardedTensor.from_rank_offsets("w", torch.zeros(2))
        >>> check_unchanged("load", shard, shard.data)
    """
    shape = tuple(tensor.shape)
    freed = lacks_memory(tensor)
    if (shape, tensor.dtype) == (shard.data_shape, shard.dtype) and not freed:
        return
    heading = f"{doing}: the tensor of {shard.key!r} was changed after its shard was built"
    found, expected = f"{shape} {tensor.dtype}{', freed' * freed}", f"{shard.data_shape} {shard.dtype}"
    fix = "Build the shard from the tensor as it is now."
    raise ShapeError(error_text(heading, found=found, expected=expected, fix=fix))


def check_writable(doing: str, shard: ShardedTensor, tensor: torch.Tensor) -> None:
    """Raise unless a donated tensor can be filled in place: it must be dense, and its elements must not share memory.

    Args:
        doing: Name of the operation, for the message.
        shard: Shard of the tensor.
        tensor: Tensor that the shard holds.

    Raises:
        ShapeError: The tensor isn't dense, is a wrapper subclass, or has elements that share memory.

    Examples:
        >>> shard = ShardedTensor.from_rank_offsets("w", torch.zeros(1).expand(4))
        >>> check_writable("load", shard, shard.data)
        Traceback (most recent call last):
        shardtree.errors.ShapeError: load: elements of the donated tensor of 'w' share memory
          Donate a tensor without overlapping elements; expand() and unfold() return views with such elements.
    """
    # A load writes through views, which sparse layouts don't have.
    if tensor.layout is not torch.strided:
        fix = "Donate a dense tensor, as .to_dense() gives, or do not donate this one."
        raise ShapeError(error_text(f"{doing}: the donated tensor of {shard.key!r} is {tensor.layout}", fix=fix))
    if is_wrapper(tensor):
        fix = "Donate its inner tensors, or do not donate this one."
        heading = f"{doing}: the donated tensor of {shard.key!r} is a wrapper subclass around inner tensors"
        raise ShapeError(error_text(heading, found=type(tensor).__name__, fix=fix))
    if _may_overlap(tensor):
        fix = "Donate a tensor without overlapping elements; expand() and unfold() return views with such elements."
        raise ShapeError(error_text(f"{doing}: elements of the donated tensor of {shard.key!r} share memory", fix=fix))


def _may_overlap(tensor: torch.Tensor) -> bool:
    """Return whether two elements of a tensor may share memory.

    They may if the stride of one axis is no larger than the extent of all axes with smaller strides.
    """
    if tensor.is_contiguous():
        return False
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride <= reach:
            return True
        reach += stride * (size - 1) if size > 1 else 0
    return False


def overwrite(old: torch.Tensor, new: torch.Tensor) -> None:
    """Copy the elements of `new` into `old` bit for bit, without autograd.

    Both are dense tensors of the same shape and dtype.

    Examples:
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> overwrite(weight, torch.ones(2))
        >>> weight.tolist()
        [1.0, 1.0]
    """
    old, new = old.detach(), new.detach()
    if not (old.is_conj() or old.is_neg()):  # as integers, since torch can't copy every dtype
        word = INTEGERS.get(old.itemsize, old.dtype)
        old, new = old.view(word), new.resolve_conj().resolve_neg().view(word)
    old.copy_(new)


# Aliasing between donated tensors: filling one would overwrite what another has received.

_MOST_CELLS = 10_000_000

_Bytes = tuple[int, list[tuple[int, int]]]


@dataclass(frozen=True, slots=True, eq=False)
class _Span:
    """The address range of a tensor's elements.

    Attributes:
        shard: Shard of the tensor.
        tensor: Dense tensor.
        begin: Address of its first byte.
        end: Address after its last byte.
        written: Whether the tensor is donated, so that the operation writes it; if not, it is only read.
    """

    shard: ShardedTensor
    tensor: torch.Tensor
    begin: int
    end: int
    written: bool


def check_no_aliases(
    doing: str,
    donated: Sequence[tuple[ShardedTensor, torch.Tensor]],
    read: Sequence[tuple[ShardedTensor, torch.Tensor]] = (),
) -> None:
    """Raise if a donated tensor shares memory with another tensor; tied weights are allowed.

    Tied weights are donated tensors with exactly the same elements in memory and equal boxes: `fill_once` compares
    their loaded values later. Tensors are checked against each other if their address ranges, from first to last byte,
    intersect. Storages aren't compared, since tensors of other libraries may have the same memory in several storages.

    Args:
        doing: Name of the operation, for the message.
        donated: Shards with their dense tensors; the elements of one tensor don't share memory.
        read: Shards with dense tensors that the operation reads meanwhile; they may share memory among themselves.

    Raises:
        ShapeError: Two tensors share memory, or are interleaved too finely for a check in reasonable time.

    Examples:
        >>> matrix = torch.zeros(4, 6)
        >>> halves = {"left": matrix[:, :3], "right": matrix[:, 3:]}
        >>> pairs = [(ShardedTensor.from_rank_offsets(key, half), half) for key, half in halves.items()]
        >>> check_no_aliases("load", pairs)
    """
    clashes = [clash for group in _intersecting(donated, read) for clash in _clashes(group)]
    if clashes:
        fix = f"Donate tensors with memory of their own, or {doing} without donate."
        raise ShapeError(error_text(f"{doing}: donated tensors share memory", offenders=clashes, fix=fix))


def _intersecting(
    donated: Sequence[tuple[ShardedTensor, torch.Tensor]], read: Sequence[tuple[ShardedTensor, torch.Tensor]]
) -> Iterator[list[_Span]]:
    """Yield groups of two or more tensors on one device whose address ranges overlap, directly or through others.

    Donated tensors come first in each group.
    """
    every = [*donated, *read]
    device = np.array([tensor.get_device() for _, tensor in every], dtype=np.int64)
    begin = np.array([tensor.data_ptr() for _, tensor in every], dtype=np.int64)
    end = begin + np.array([_reach(tensor) for _, tensor in every], dtype=np.int64)
    for number in np.unique(device).tolist():
        rows = np.flatnonzero((device == number) & (begin > 0) & (begin < end))
        rows = rows[np.argsort(begin[rows], kind="stable")]
        # A tensor that begins after the ends of all earlier ones begins another group.
        cuts = np.flatnonzero(begin[rows][1:] >= np.maximum.accumulate(end[rows])[:-1]) + 1
        sizes = np.diff(cuts, prepend=0, append=rows.size)
        for first, size in zip(*(column[sizes > 1].tolist() for column in (np.append(0, cuts), sizes)), strict=True):
            group: list[int] = sorted(rows[first : first + size].tolist())
            yield [_Span(*every[row], int(begin[row]), int(end[row]), row < len(donated)) for row in group]


def _reach(tensor: torch.Tensor) -> int:
    """Return the number of bytes from a tensor's first byte to its last; 0 for a tensor without elements."""
    if tensor.is_contiguous() or not tensor.numel():
        return tensor.nbytes
    return (1 + sum(stride * (size - 1) for stride, size in _axes(tensor))) * tensor.itemsize


def _axes(tensor: torch.Tensor) -> list[tuple[int, int]]:
    """Return (stride, size) of each axis with more than one index, smallest stride first."""
    return sorted(axis for axis in zip(tensor.stride(), tensor.shape, strict=True) if axis[1] > 1)


def _clashes(group: Sequence[_Span]) -> Iterator[str]:
    """Yield texts that name pairs of tensors in a group that share memory.

    The group's address range is divided into cells, as large as the tensors' strides allow. Each donated tensor in turn
    marks the cells that it covers. A tensor that covers a marked cell shares memory with the tensor that marked it.
    Tensors that are only read mark no cells.
    """
    distinct: dict[tuple[object, ...], _Span] = {}
    targets = {(span.shard.key, _identity(span.shard, span.tensor)) for span in group if span.written}
    for span in group:
        identity = _identity(span.shard, span.tensor)
        if span.written:
            distinct.setdefault(identity, span)
        elif (span.shard.key, identity) not in targets:
            distinct.setdefault((span.shard.key, identity), span)
    spans = list(distinct.values())
    if len(spans) == 1 or not spans[0].written:
        return
    begin, end = min(span.begin for span in spans), max(span.end for span in spans)
    layouts = [_bytes(span) for span in spans]
    # Columns of one matrix interleave: comparing ranges of addresses would refuse them, and a map of single bytes would
    # take as much memory as the tensors.
    cell = gcd(*(span.begin - begin for span in spans), *(number for layout in layouts for number in _lengths(layout)))
    if (end - begin) // cell > _MOST_CELLS:
        yield f"{_name(spans[0])} and {_name(spans[1])}, or are too finely interleaved to check"
        return
    owners = torch.zeros((end - begin) // cell, dtype=torch.int32, device="cpu")
    for number, (span, (run, axes)) in enumerate(zip(spans, layouts, strict=True)):
        shape, strides = [size for _, size in axes], [stride // cell for stride, _ in axes]
        cells = owners.as_strided([*shape, run // cell], [*strides, 1], (span.begin - begin) // cell)
        if other := int(cells.max()):
            yield f"{_name(spans[other - 1])} and {_name(span)}{'' if span.written else ', which is read'}"
        if span.written:
            cells.fill_(number + 1)


def _bytes(span: _Span) -> _Bytes:
    """Return the length of the contiguous runs of bytes in a span's tensor, and the axes along which they repeat.

    Each axis is a pair (stride in bytes, size); the smallest stride is first.
    """
    tensor = span.tensor
    axes = [(stride * tensor.itemsize, size) for stride, size in _axes(tensor) if stride]
    run = tensor.itemsize
    while axes and axes[0][0] == run:
        run = prod(axes.pop(0))
    return run, axes


def _lengths(layout: _Bytes) -> Iterable[int]:
    run, axes = layout
    return run, *(stride for stride, _ in axes)


def _identity(shard: ShardedTensor, tensor: torch.Tensor) -> tuple[object, ...]:
    """Return a dict key that is equal for two shards with equal boxes and exactly the same elements in memory."""
    flat = shard.flattened_range
    box = (shard.global_offset, shard.local_shape, flat and (flat.start, flat.stop))
    # The stride of an axis with one element has no effect: views of the same elements may differ in it.
    steps = tuple(step if size > 1 else 0 for step, size in zip(tensor.stride(), tensor.shape, strict=True))
    view = (tensor.data_ptr(), tensor.shape, steps, tensor.dtype, tensor.is_conj(), tensor.is_neg())
    return tensor.device, *box, *view


def _name(span: _Span) -> str:
    return f"{span.shard.key!r} at {span.shard.global_offset}"


# Tied weights: the same memory under several keys. It is filled once, if the loaded values of all keys are equal.

_Donated = Sequence[tuple[ShardedTensor, torch.Tensor | None]]


def tied(donated: _Donated) -> list[list[int]]:
    """Return the groups of tied shards: they have different keys, but equal boxes and the same elements in memory.

    Args:
        donated: Pairs of a shard and its tensor, which is None if the shard has no elements in memory.

    Returns:
        A list of indices into `donated` for each group.

    Examples:
        >>> weight, own = torch.zeros(2), torch.zeros(2)
        >>> held = {"embedding": weight, "norm": own, "output": weight}
        >>> tied([(ShardedTensor.from_rank_offsets(key, data), data) for key, data in held.items()])
        [[0, 2]]
    """
    places = [
        (number, shard, tensor)
        for number, (shard, tensor) in enumerate(donated)
        if tensor is not None and tensor.layout is torch.strided and tensor.numel()
    ]
    groups: dict[tuple[object, ...], list[int]] = {}
    if len({tensor.data_ptr() for _, _, tensor in places}) < len(places):
        for number, shard, tensor in places:
            groups.setdefault(_identity(shard, tensor), []).append(number)
    return [group for group in groups.values() if len({donated[number][0].key for number in group}) > 1]


def fill_once(doing: str, donated: _Donated, results: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
    """Copy the loaded values of each group of tied shards once into the memory that they share.

    Args:
        doing: Name of the operation, for the message.
        donated: Pairs of a shard and its tensor, which is None if the shard has no elements in memory.
        results: Loaded tensor of each shard; loaded tensors of tied shards are contiguous, in memory of their own.

    Returns:
        The donated tensor of each tied shard, by the shard's index in `donated`.

    Raises:
        ShapeError: The loaded values of two keys that share memory differ; no tied tensor was written.
    """
    groups = tied(donated)
    differ = [
        f"{donated[number][0].key!r} and {donated[group[0]][0].key!r}"
        for group in groups
        for number in group[1:]
        if not torch.equal(*(flat_bytes(results[position]) for position in (number, group[0])))
    ]
    if differ:
        heading = f"{doing}: donated tensors share memory, but their new values differ"
        fix = "Donate separate tensors for these keys (this unties the weights), or leave out all keys but one."
        raise ShapeError(error_text(heading, offenders=differ, fix=fix))
    for group in groups:
        overwrite(donated[group[0]][1], results[group[0]])  # type: ignore[arg-type]
    return {number: donated[number][1] for group in groups for number in group}  # type: ignore[misc]


# Factories: if their parts are views that make up the factory's tensor, filling the parts has filled the tensor.


def is_all_of(parts: Sequence[torch.Tensor], whole: torch.Tensor) -> bool:
    """Return whether tensors are views that together make up a whole tensor.

    The tensors must not share elements with each other: only their sizes and addresses are checked.

    Examples:
        >>> fused = torch.zeros(4, 2)
        >>> is_all_of(fused.chunk(2), fused), is_all_of([fused[:3]], fused), is_all_of([fused.clone()], fused)
        (True, False, False)
    """
    if not parts or whole.layout is not torch.strided or sum(part.numel() for part in parts) != whole.numel():
        return False
    begin, end = whole.data_ptr(), whole.data_ptr() + _reach(whole)
    return all(
        part.layout is torch.strided
        and (part.device, part.itemsize) == (whole.device, whole.itemsize)
        and (not part.numel() or begin <= part.data_ptr() <= part.data_ptr() + _reach(part) <= end)
        for part in parts
    )
