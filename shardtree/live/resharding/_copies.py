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

# Boxes of elements in memory with any strides, and copies between them.

Memories = Mapping[int, torch.Tensor]
"""Tensors of shards, by row in a plan's `source` or `target`."""

CARRIERS = INTEGERS | {16: torch.complex128}
"""Dtypes that torch copies bit for bit, by item size; some other dtypes it can't copy."""

_AT_ONCE = 65_536
"""Number of boxes whose columns become Python objects at a time; these take several times the memory of columns."""


@dataclass(frozen=True, slots=True, eq=False)
class Boxes:
    """Boxes within the data of shards, one per row; offsets and strides have the same meaning as in `Transfers`.

    Attributes:
        row: Row of the shard in the plan's `source` or `target`, int64 (boxes,).
        element: Offset of the box's first element in the shard's row-major data, int64 (boxes,).
        stride: Strides of the shard's data along each axis, in elements, int64 (boxes, axes).
        shape: Shape of each box, int64 (boxes, axes).
    """

    row: Column
    element: Column
    stride: Column
    shape: Column


@dataclass(frozen=True, slots=True, eq=False)
class Regions:
    """Strided regions of memory, one for each box: the offset and strides of a view into a storage.

    Attributes:
        memory: Any tensor on the region's storage and with its dtype, for each box.
        begin: Offset of the region's first element from the start of the storage, in elements, int64 (boxes,).
        stride: Strides of the region along each axis, in elements, int64 (boxes, axes).
    """

    memory: list[torch.Tensor]
    begin: Column
    stride: Column


def copy_boxes(shape: Column, source: Regions, target: Regions) -> None:
    """Copy each box from its source region to its target region, which may be on another device.

    Args:
        shape: Shape of each box, int64 (boxes, axes).
        source: Regions to read.
        target: Regions to write.
    """
    for to, data in zip(region_views(shape, target), region_views(shape, source), strict=True):
        to.copy_(data)


def region_views(shape: Column, regions: Regions) -> Iterator[torch.Tensor]:
    """Yield a strided view of each box's region.

    Args:
        shape: Shape of each box, int64 (boxes, axes).
        regions: Region of each box; the view has the dtype of the region's tensor in ``regions.memory``.
    """
    for first in range(0, len(shape), _AT_ONCE):
        rows = slice(first, first + _AT_ONCE)
        columns = (each[rows].tolist() for each in (shape, regions.stride, regions.begin))
        yield from map(torch.as_strided, regions.memory[rows], *columns)


def select_regions(regions: Regions, rows: Column) -> Regions:
    """Return the regions at the given rows, in the order of `rows`."""
    return Regions([regions.memory[row] for row in rows.tolist()], regions.begin[rows], regions.stride[rows])


def shard_regions(columns: ShardColumns, boxes: Boxes, memories: Memories) -> Regions:
    """Return the memory region of each box, in the tensor that holds the box's shard.

    Args:
        columns: Shards, one per row.
        boxes: Boxes in the shards' data.
        memories: Tensor of each shard, with any strides, on any device. A contiguous tensor may have another shape
            than its shard.

    Raises:
        KeyMismatch: A shard has no tensor.
        ShapeError: A tensor has another dtype or another number of elements than its shard.
        UnsupportedValue: A tensor isn't dense, or its dtype is quantised.
    """
    rows, number = np.unique(boxes.row, return_inverse=True)
    sizes = select_rows(columns, rows).elements.tolist()
    pairs = zip(rows.tolist(), sizes, strict=True)
    words = [_integer_view(columns, row, elements, memories) for row, elements in pairs]
    first = np.array([memory.storage_offset() for memory in words], dtype=np.int64)[number]
    plain = np.array([memory.is_contiguous() for memory in words], dtype=np.bool_)[number]
    flat = columns.start[boxes.row] >= 0
    # In contiguous memory, or memory of one axis, a box keeps its row-major strides, times the distance of neighbours.
    # Boxes in memory with other strides are located index by index below.
    scale = np.array([memory.stride(0) if memory.ndim == 1 else 1 for memory in words], dtype=np.int64)[number]
    scale = np.where(plain, 1, scale)
    others = np.flatnonzero(~plain & ~flat)
    begin, stride = first + boxes.element * scale, boxes.stride * scale[:, None]
    if others.size:
        memory_strides = np.stack([_strides(memory, boxes.shape.shape[1]) for memory in words])[number[others]]
        shape = widen(columns.shape, memory_strides.shape[1], 1)[boxes.row[others]]
        index = boxes.element[others][:, None] // row_major_strides(shape) % shape
        begin[others], stride[others] = first[others] + (index * memory_strides).sum(axis=1), memory_strides
    return Regions([words[place] for place in number.tolist()], begin, stride)


def target_regions(columns: ShardColumns, boxes: Boxes, memories: Memories) -> Regions:
    """Return the memory region of each box, as `shard_regions` does, after checking that it can be written.

    Raises:
        KeyMismatch: A shard has no tensor.
        ShapeError: A tensor doesn't fit its shard, or is lazily conjugated or negated, so that it can't be written.
        UnsupportedValue: A tensor isn't dense, or its dtype is quantised.
    """
    rows = (row for row in np.unique(boxes.row).tolist() if row in memories)
    lazy = [row for row in rows if memories[row].is_conj() or memories[row].is_neg()]
    if lazy:
        heading = "reshard: target tensors are lazily conjugated or negated"
        fix = "Pass the result of their .resolve_conj().resolve_neg()."
        raise ShapeError(error_text(heading, offenders=[_name(columns, row) for row in lazy], fix=fix))
    return shard_regions(columns, boxes, memories)


def _strides(memory: torch.Tensor, axes: int) -> Column:
    own = memory.stride()
    return np.array([*repeat(0, axes - len(own)), *own][-axes:], dtype=np.int64)


def _integer_view(columns: ShardColumns, row: int, elements: int, memories: Memories) -> torch.Tensor:
    """Return a shard's tensor as integers of the same item size, after checking its dtype, size and layout."""
    if row not in memories:
        fix = "Pass {row: tensor} with all shards that the rank holds; the row is a shard's index in the plan."
        raise KeyMismatch(error_text(f"reshard: no tensor for {_name(columns, row)}, row {row}", fix=fix))
    memory = memories[row]
    kind = columns.kinds[int(columns.key[row])]
    if (memory.dtype, memory.numel()) != (kind.dtype, elements):
        found, expected = f"{tuple(memory.shape)} {memory.dtype}", f"{elements} elements of {kind.dtype}"
        heading = f"reshard: wrong size or dtype of the tensor for {_name(columns, row)}"
        raise ShapeError(error_text(heading, found=found, expected=expected))
    if memory.layout is not torch.strided or memory.is_quantized or memory.is_nested:
        found, fix = f"{memory.layout} {memory.dtype}", "Pass its .to_dense(), or its parts as separate tensors."
        raise UnsupportedValue(
            error_text(f"reshard: {_name(columns, row)} is not a plain dense tensor", found=found, fix=fix)
        )
    return as_integers(memory)


def _name(columns: ShardColumns, row: int) -> str:
    skip = columns.offset.shape[1] - len(columns.kinds[int(columns.key[row])].global_shape)
    place = tuple(columns.offset[row].tolist()[skip:])
    return f"{columns.keys[int(columns.key[row])]!r} at {place} of rank {int(columns.rank[row])}"


def copy_transfers(plan: ReshardPlan, rows: Column, sources: Memories, targets: Memories) -> None:
    """Write transfers into target shards, directly from their sources.

    Args:
        plan: Plan of the transfers.
        rows: Rows of the transfers to write. Hop 0 reads source shards, later hops read target shards. Hops are written
            in ascending order, and each hop's transfers in the order of `rows`.
        sources: Data of source shards, by row.
        targets: Tensors of target shards, by row, to write into.
    """
    transfers = plan.transfers
    # Transfers go hop by hop, since later ones read elements that earlier ones have written.
    for hop in np.unique(transfers.hop[rows]).tolist():
        columns, memories = (plan.target, targets) if hop else (plan.source, sources)
        rows_of_hop = rows[transfers.hop[rows] == hop]
        shape = transfers.shape[rows_of_hop]
        source = Boxes(
            transfers.source[rows_of_hop],
            transfers.source_element[rows_of_hop],
            transfers.source_stride[rows_of_hop],
            shape,
        )
        target = Boxes(
            transfers.target[rows_of_hop],
            transfers.target_element[rows_of_hop],
            transfers.target_stride[rows_of_hop],
            shape,
        )
        into = target_regions(plan.target, target, targets)
        write_boxes(plan, rows_of_hop, shape, shard_regions(columns, source, memories), into)


def write_boxes(plan: ReshardPlan, rows: Column, shape: Column, source: Regions, target: Regions) -> None:
    """Write boxes of transfers bit for bit, or converted if they come from a shard of another dtype.

    Args:
        plan: Plan of the transfers.
        rows: Row of each box's transfer in the plan, int64 (boxes,).
        shape: Shape of each box, int64 (boxes, axes).
        source: Regions to read, in their shards' dtypes.
        target: Regions to write, in the target's dtype: in a shard or a send buffer.

    Raises:
        ShapeError: An integer doesn't fit the target's dtype.
    """
    casts = _casts(plan, rows)
    if not casts:
        return copy_boxes(shape, source, target)
    key = plan.transfers.key[rows]
    # Relayed data was converted before its first hop.
    is_cast = (plan.transfers.hop[rows] == 0) & np.isin(key, list(casts))
    cast, copied = np.flatnonzero(is_cast), np.flatnonzero(~is_cast)
    ends = (region_views(shape[cast], select_regions(regions, cast)) for regions in (source, target))
    for number, out, into in zip(key[cast].tolist(), *ends, strict=True):
        before, after = casts[number]
        convert(plan.target.keys[number], out.view(before), into.view(after), doing="reshard")
    return copy_boxes(shape[copied], select_regions(source, copied), select_regions(target, copied))


def _casts(plan: ReshardPlan, rows: Column) -> dict[int, tuple[torch.dtype, torch.dtype]]:
    """Return the dtypes before and after the cast of each cast tensor, by its index in the plan's `target.keys`."""
    transfers = plan.transfers
    first = rows[transfers.hop[rows] == 0]  # at later hops data comes from target shards, which have the target's dtype
    key, at = np.unique(transfers.key[first], return_index=True)
    source_key = plan.source.key[transfers.source[first[at]]]
    pairs = zip(key.tolist(), source_key.tolist(), strict=True)
    dtypes = {number: (plan.source.kinds[one].dtype, plan.target.kinds[number].dtype) for number, one in pairs}
    return {number: (before, after) for number, (before, after) in dtypes.items() if before != after}
