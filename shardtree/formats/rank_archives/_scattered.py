"""Tensors that aren't stored in row-major order: channels_last, transposed, expanded, conjugated lazily.

A file's box of such a tensor is called scattered, and is read by its strides. A checkpoint's index gives it a made-up
offset, beyond the end of its file, by which `in_order` recognises it in a load plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from operator import add, mul, sub

import numpy as np

from ...errors import CorruptCheckpoint, error_text
from ...kit import (
    Checkpoint,
    LoadPlan,
    ReadCost,
    Reader,
    ReadReport,
    ShardedTensor,
    Verify,
    shard_boxes,
    shard_columns,
)
from ..archives import StoredTensor, box_of, fill_tensor, reach, read_crc32
from ._files import opened_at


@dataclass(frozen=True, slots=True, eq=False)
class Scattered:
    """A box of a tensor that a file stores in another order than row-major.

    Attributes:
        offset: Offset of the box in the tensor.
        tensor: The box as a stored tensor, with its strides in the file.
    """

    offset: tuple[int, ...]
    tensor: StoredTensor


ByKey = Mapping[str, Sequence[Scattered]]
"""Boxes that are not stored in row-major order, by the key of their tensor."""


_MOST_EXPANDED_BYTES = 32 * 1024 * 1024
"""Upper bound of the bytes of expanded tensors beyond the length of all files: a crafted file could ask for any."""


def too_large(pieces: Sequence[tuple[str, StoredTensor]], nbytes: int) -> dict[str, str]:
    """Return the reasons that expanded tensors are refused, by key.

    An expanded tensor (stride 0) has more elements than are stored. Tensors are refused once the bytes that expansion
    adds, summed over the pieces so far, exceed `nbytes` plus 32 MiB.

    Args:
        pieces: Key and stored tensor of each piece that is not stored in row-major order.
        nbytes: Total length of all files.
    """
    reasons, total = dict[str, str](), 0
    for key, tensor in pieces:
        size = prod(tensor.shape) * tensor.dtype.itemsize
        total += max(0, size - reach(tensor))
        if size > reach(tensor) and total > _MOST_EXPANDED_BYTES + nbytes:
            reasons[key] = f"{size} bytes, expanded from {reach(tensor)} that are stored: save tensor.contiguous()"
    return reasons


def in_order(plan: LoadPlan, lengths: Sequence[int]) -> LoadPlan:
    """Return a load plan without the reads of scattered boxes, which are not stored in row-major order.

    Args:
        plan: Plan in which scattered boxes have made-up offsets, beyond the end of their file.
        lengths: Lengths of the files, in bytes.
    """
    ends = np.array(lengths, dtype=np.int64)
    runs, strided = (rows.byte < ends[rows.file] for rows in (plan.runs, plan.strided))
    return plan if runs.all() and strided.all() else plan.select(runs, strided)


def read_scattered(checkpoint: Checkpoint, scattered: ByKey, shards: Sequence[ShardedTensor]) -> ReadReport:
    """Fill the parts of shards that are not stored in row-major order, and return a report of the reads.

    Args:
        checkpoint: The open checkpoint.
        scattered: Boxes that are not stored in row-major order, by the key of their tensor.
        shards: Shards to fill.

    Raises:
        CorruptCheckpoint: Bytes are missing, or the checksum of a record differs.
    """
    report, checked = ReadReport(), dict[tuple[str, int], bool]()
    for shard in shards:
        for (shape, stride, element), tensor in _parts(scattered.get(shard.key, ()), shard):
            memory = shard.data.view(-1)[element:].as_strided(shape, stride)
            record, where = (tensor.file, tensor.record.begin), checkpoint.storage.where(tensor.file)
            with opened_at(checkpoint, tensor) as reader:
                known = checked.get(record, False)
                is_checked = checked[record] = known or check_record(reader, tensor, checkpoint.options.verify, where)
                fill_tensor(reader.read, tensor, memory, f"load: {where!r}")
            checkpoint.options.progress(memory.nbytes)
            report += ReadReport(memory.nbytes, int(is_checked), int(not is_checked), 1)
    return report


def scattered_cost(scattered: ByKey, shards: Sequence[ShardedTensor]) -> ReadCost:
    """Return the cost of reading the parts of shards that are not stored in row-major order.

    Each part is read from its first byte to its last.
    """
    cost = ReadCost()
    for shard in shards:
        for _, tensor in _parts(scattered.get(shard.key, ()), shard):
            cost += ReadCost(prod(tensor.shape) * tensor.dtype.itemsize, reach(tensor), 1, 1)
    return cost


Place = tuple[tuple[int, ...], tuple[int, ...], int]
"""A view of a shard's memory: shape, stride and first element."""


def _parts(scattered: Sequence[Scattered], shard: ShardedTensor) -> Iterator[tuple[Place, StoredTensor]]:
    """Yield the intersections of a shard with boxes that are not stored in row-major order.

    Each intersection is a pair: a view of the shard's memory, and the part of the stored box that fills the view.
    """
    if not scattered:
        return
    columns = shard_columns([shard])
    boxes = shard_boxes(columns.offset, columns.shape, columns.start, columns.stop)
    beyond = boxes.offset.shape[1] - len(shard.global_shape)  # Columns have an axis even for tensors without axes.
    offsets, shapes = boxes.offset[:, beyond:].tolist(), boxes.shape[:, beyond:].tolist()
    for (offset, shape, position), part in product(
        zip(offsets, shapes, boxes.position.tolist(), strict=True), scattered
    ):
        first = tuple(map(max, offset, part.offset))
        ends = map(min, map(add, offset, shape), map(add, part.offset, part.tensor.shape))
        lengths = tuple(map(sub, ends, first))
        if min(lengths, default=1) > 0:
            stride = tuple(prod(shape[axis + 1 :]) for axis in range(len(shape)))
            element = position + sum(map(mul, map(sub, first, offset), stride))
            inside = tuple(map(sub, first, part.offset))
            yield (lengths, stride, element), box_of(part.tensor, (inside, lengths))


def check_record(reader: Reader, tensor: StoredTensor, verify: Verify, where: str) -> bool:
    """Compare a tensor's record with its checksum if `verify` asks for it, and return whether it was compared.

    Args:
        reader: Reader of the tensor's file.
        tensor: Tensor, or the box of it that is read.
        verify: Option of the load: "whole" compares records that are read whole, "all" compares every record.
        where: Path or URL of the file, for errors.

    Raises:
        CorruptCheckpoint: The checksum differs.
    """
    record = tensor.record
    is_whole = (tensor.begin, reach(tensor)) == (record.begin, record.nbytes)
    if not record.crc32 or not (verify == "all" or (verify == "whole" and is_whole)):
        return False
    end = record.begin + record.nbytes
    if read_crc32(reader, record.begin, end) != record.crc32:
        heading = f"load: {where!r} is not what was saved: a tensor's checksum differs"
        fix = "The medium or a later program damaged it; load another checkpoint."
        raise CorruptCheckpoint(error_text(heading, offenders=[f"bytes {record.begin} to {end}"], fix=fix))
    return True
