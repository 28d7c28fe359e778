"""Transfers within this process's memory: boxes of shards are copied or converted into other shards, or buffers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import repeat

import numpy as np
import torch

from ...core.geometry import Column, row_major_strides, widen
from ...core.layouts import ShardColumns, select_rows
from ...core.lazy import INTEGERS, as_integers
from ...core.plans import convert
from ...errors import KeyMismatch, ShapeError, UnsupportedValue, error_text
from ._plan import ReshardPlan

# Boxes of elements in memory of any strides, and copies between them.

Memories = Mapping[int, torch.Tensor]
"""The tensor of each shard, by its row in a plan's `source` or `target`."""

CARRIERS = INTEGERS | {16: torch.complex128}
"""Dtypes that torch copies bit for bit, by item size; some others it can't copy."""

_AT_ONCE = 65_536
"""For so many boxes at a time numbers become Python objects, which take several times the memory of columns."""


@dataclass(frozen=True, slots=True, eq=False)
class Boxes:
    """Boxes of elements, one a row, in the data of shards as `Transfers` counts it.

    Attributes:
        row: the shard, int64 (boxes,).
        element: the first, in the shard's row-major data, int64 (boxes,).
        stride: of that data, in elements along each axis, int64 (boxes, axes).
        shape: int64 (boxes, axes).
    """

    row: Column
    element: Column
    stride: Column
    shape: Column


@dataclass(frozen=True, slots=True, eq=False)
class Regions:
    """Boxes of elements, located in storages.

    Attributes:
        memory: for each box, a tensor that shares the storage.
        begin: first element, counted from the storage's beginning, int64 (boxes,).
        stride: in elements along each axis, int64 (boxes, axes).
    """

    memory: list[torch.Tensor]
    begin: Column
    stride: Column


def copy_boxes(shape: Column, source: Regions, target: Regions) -> None:
    """Copy each box from one region to the other: every byte once, without a buffer, also between devices.

    Args:
        shape: int64 (boxes, axes).
        source: where they are.
        target: where they go.
    """
    for to, data in zip(region_views(shape, target), region_views(shape, source), strict=True):
        to.copy_(data)


def region_views(shape: Column, regions: Regions) -> Iterator[torch.Tensor]:
    """Yield each box of a region as a view, in the dtype of its memory.

    Args:
        shape: int64 (boxes, axes).
        regions: where they are.
    """
    for first in range(0, len(shape), _AT_ONCE):
        rows = slice(first, first + _AT_ONCE)
        columns = (each[rows].tolist() for each in (shape, regions.stride, regions.begin))
        yield from map(torch.as_strided, regions.memory[rows], *columns)


def select_regions(regions: Regions, rows: Column) -> Regions:
    """Return the given boxes, in the order given."""
    return Regions([regions.memory[row] for row in rows.tolist()], regions.begin[rows], regions.stride[rows])


def shard_regions(columns: ShardColumns, boxes: Boxes, memories: Memories) -> Regions:
    """Return where boxes of shards lie in the tensors that hold the shards.

    Args:
        columns: the shards.
        boxes: of their data.
        memories: each shard's tensor, strided in any way, on any device. Contiguous ones may have any shape.

    Raises:
        KeyMismatch: a shard has no tensor.
        ShapeError: a tensor has another dtype than its shard, or another number of elements.
        UnsupportedValue: it isn't dense, or its dtype is quantised.
    """
    rows, number = np.unique(boxes.row, return_inverse=True)
    sizes = select_rows(columns, rows).elements.tolist()
    pairs = zip(rows.tolist(), sizes, strict=True)
    words = [_integer_view(columns, row, elements, memories) for row, elements in pairs]
    first = np.array([memory.storage_offset() for memory in words], dtype=np.int64)[number]
    plain = np.array([memory.is_contiguous() for memory in words], dtype=np.bool_)[number]
    flat = columns.start[boxes.row] >= 0
    # Contiguous memory, or memory of one axis, keeps a box's row-major strides, times the distance of neighbours. What
    # has strides of its own is located index by index below.
    scale = np.array([memory.stride(0) if memory.ndim == 1 else 1 for memory in words], dtype=np.int64)[number]
    scale = np.where(plain, 1, scale)
    others = np.flatnonzero(~plain & ~flat)
    begin, stride = first + boxes.element * scale, boxes.stride * scale[:, None]
    if others.size:
        own = np.stack([_strides(memory, boxes.shape.shape[1]) for memory in words])[number[others]]
        shape = widen(columns.shape, own.shape[1], 1)[boxes.row[others]]
        index = boxes.element[others][:, None] // row_major_strides(shape) % shape
        begin[others], stride[others] = first[others] + (index * own).sum(axis=1), own
    return Regions([words[place] for place in number.tolist()], begin, stride)


def target_regions(columns: ShardColumns, boxes: Boxes, memories: Memories) -> Regions:
    """Return `shard_regions` of tensors that are written.

    Raises:
        KeyMismatch: as `shard_regions`.
        ShapeError: as `shard_regions`, or a tensor is conjugated or negated lazily, so that it can't be written.
        UnsupportedValue: as `shard_regions`.
    """
    rows = (row for row in np.unique(boxes.row).tolist() if row in memories)
    lazy = [row for row in rows if memories[row].is_conj() or memories[row].is_neg()]
    if lazy:
        what, fix = "reshard: targets that are conjugated or negated lazily", "Give .resolve_conj().resolve_neg()."
        raise ShapeError(error_text(what, offenders=[_name(columns, row) for row in lazy], fix=fix))
    return shard_regions(columns, boxes, memories)


def _strides(memory: torch.Tensor, axes: int) -> Column:
    own = memory.stride()
    return np.array([*repeat(0, axes - len(own)), *own][-axes:], dtype=np.int64)


def _integer_view(columns: ShardColumns, row: int, elements: int, memories: Memories) -> torch.Tensor:
    """Return a shard's tensor as integers of its item size, after checking that it is the shard's."""
    if row not in memories:
        fix = "Give the tensor of each shard that the rank holds, by its row."
        raise KeyMismatch(error_text(f"reshard: no memory for {_name(columns, row)}, row {row}", fix=fix))
    memory = memories[row]
    kind = columns.kinds[int(columns.key[row])]
    if (memory.dtype, memory.numel()) != (kind.dtype, elements):
        found, expected = f"{tuple(memory.shape)} {memory.dtype}", f"{elements} elements of {kind.dtype}"
        raise ShapeError(error_text(f"reshard: not the data of {_name(columns, row)}", found=found, expected=expected))
    if memory.layout is not torch.strided or memory.is_quantized or memory.is_nested:
        found, fix = f"{memory.layout} {memory.dtype}", "Give .to_dense() of it, or its parts as tensors of their own."
        raise UnsupportedValue(
            error_text(f"reshard: {_name(columns, row)} isn't a dense tensor of plain bits", found=found, fix=fix)
        )
    return as_integers(memory)


def _name(columns: ShardColumns, row: int) -> str:
    skip = columns.offset.shape[1] - len(columns.kinds[int(columns.key[row])].global_shape)
    place = tuple(columns.offset[row].tolist()[skip:])
    return f"{columns.keys[int(columns.key[row])]!r} at {place} of rank {int(columns.rank[row])}"


def copy_transfers(plan: ReshardPlan, rows: Column, sources: Memories, targets: Memories) -> None:
    """Write transfers into target shards, directly from their sources.

    Args:
        plan: what moves.
        rows: of its transfers, those of each hop in the order in which they are written.
        sources: the data of source shards, by row.
        targets: written: the data of target shards, by row.
    """
    transfers = plan.transfers
    # Hop by hop, since later ones read what earlier ones have written.
    for hop in np.unique(transfers.hop[rows]).tolist():
        columns, memories = (plan.target, targets) if hop else (plan.source, sources)
        each = rows[transfers.hop[rows] == hop]
        shape = transfers.shape[each]
        source = Boxes(transfers.source[each], transfers.source_element[each], transfers.source_stride[each], shape)
        target = Boxes(transfers.target[each], transfers.target_element[each], transfers.target_stride[each], shape)
        into = target_regions(plan.target, target, targets)
        write_boxes(plan, each, shape, shard_regions(columns, source, memories), into)


def write_boxes(plan: ReshardPlan, rows: Column, shape: Column, source: Regions, target: Regions) -> None:
    """Write boxes of transfers bit for bit, or converted where they come from a shard of another dtype.

    Args:
        plan: what moves.
        rows: the transfer that each box is of, int64 (boxes,).
        shape: int64 (boxes, axes).
        source: where they are, in the dtype that they have there.
        target: where they go, as the target's dtype: a shard, or a send buffer.

    Raises:
        ShapeError: an integer doesn't fit the target's dtype.
    """
    casts = _casts(plan, rows)
    if not casts:
        return copy_boxes(shape, source, target)
    key = plan.transfers.key[rows]
    # What is passed on was converted before its first hop.
    is_cast = (plan.transfers.hop[rows] == 0) & np.isin(key, list(casts))
    own, rest = np.flatnonzero(is_cast), np.flatnonzero(~is_cast)
    ends = (region_views(shape[own], select_regions(one, own)) for one in (source, target))
    for number, out, into in zip(key[own].tolist(), *ends, strict=True):
        before, after = casts[number]
        convert(plan.target.keys[number], out.view(before), into.view(after), doing="reshard")
    return copy_boxes(shape[rest], select_regions(source, rest), select_regions(target, rest))


def _casts(plan: ReshardPlan, rows: Column) -> dict[int, tuple[torch.dtype, torch.dtype]]:
    """Return the dtypes before and after of the tensors that change theirs in the given transfers, by number."""
    transfers = plan.transfers
    first = rows[transfers.hop[rows] == 0]  # at later hops data comes from target shards, which have the target's dtype
    key, at = np.unique(transfers.key[first], return_index=True)
    source_key = plan.source.key[transfers.source[first[at]]]
    pairs = zip(key.tolist(), source_key.tolist(), strict=True)
    dtypes = {number: (plan.source.kinds[one].dtype, plan.target.kinds[number].dtype) for number, one in pairs}
    return {number: (before, after) for number, (before, after) in dtypes.items() if before != after}
