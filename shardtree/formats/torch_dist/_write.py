"""The writer of a rank's data file: archives one after the other, each with the CRC32 of its tensor's bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod

import numpy as np
import torch

from ...errors import CheckpointingException, error_text
from ...kit import (
    Buffer,
    Column,
    LazyTensor,
    PendingSave,
    ShardColumns,
    ShardedObject,
    ShardedTensor,
    box_column,
    check_storable,
    checked_data,
    crc32_behind,
    make_folder,
    naming_data_of,
    select_rows,
    shard_boxes,
    shard_columns,
    sync_folder,
    tensor_buffers,
    volumes,
    write_hashed,
)
from ..archives import archive_head, archive_length, archive_tail, encode_archive

# This section makes the layout of a rank's data file, which is known before a byte is written.

ALIGNMENT = 64
"""Alignment of archives in the file, and so also of their tensors' bytes, which archives align in themselves."""


@dataclass(frozen=True, slots=True, eq=False)
class ArchivedBox:
    """A box of a shard, which is written as an archive of one tensor.

    Attributes:
        shard: Shard that the box is a part of.
        shape: Shape of the box and of the archived tensor, prepended axes included.
        begin: Offset of the box in a flat shard's data, in elements; -1 for a shard that is a box itself.
    """

    shard: ShardedTensor
    shape: tuple[int, ...]
    begin: int

    @property
    def data(self) -> torch.Tensor | LazyTensor:
        """The shard's elements inside this box."""
        data: torch.Tensor | LazyTensor = self.shard.data
        return data if self.begin < 0 else data[self.begin : self.begin + prod(self.shape)]


@dataclass(frozen=True, slots=True, eq=False)
class FileLayout:
    """One rank's data file: objects first, then pieces of tensors, each an archive at a multiple of `ALIGNMENT`.

    Attributes:
        objects: Unique key and archive of each object; the archive contains a list with the object alone.
        pieces: Boxes of the rank's shards.
        columns: The same boxes as columns, one row for each.
        byte: Offset of each archive, objects first, int64 (archives,).
        length: Length of each archive, int64 (archives,).
    """

    objects: tuple[tuple[str, bytes], ...]
    pieces: tuple[ArchivedBox, ...]
    columns: ShardColumns
    byte: Column
    length: Column


def file_layout(shards: Sequence[ShardedTensor | ShardedObject], rank: int, *, allow_pickle: bool) -> FileLayout:
    """Return the layout of the file that a rank writes for its shards.

    Args:
        shards: Tensor shards with data, and objects.
        rank: Rank that writes the file.
        allow_pickle: True to pickle objects that the codec can't store.

    Raises:
        UnsupportedValue: A dtype or an object can't be stored.
    """
    tensors = [shard for shard in shards if isinstance(shard, ShardedTensor)]
    for shard in tensors:
        check_storable(shard.dtype, f"save: {shard.key!r}")
    objects = tuple(
        (item.unique_key, _encode(item, allow_pickle)) for item in shards if isinstance(item, ShardedObject)
    )
    # Objects are encoded before anything is written, so that one that can't be stored fails the save at its start.
    pieces, columns = _pieces(tensors, shard_columns(tensors, rank))
    lengths = [len(data) for _, data in objects]
    lengths += [archive_length(piece.shard.dtype, piece.shape) for piece in pieces]
    # All lengths are known beforehand, so that the local storage can reserve room in one step.
    length = np.array(lengths, dtype=np.int64)
    room = -(-length // ALIGNMENT) * ALIGNMENT
    return FileLayout(objects, pieces, columns, np.cumsum(room) - room, length)


def _encode(item: ShardedObject, allow_pickle: bool) -> bytes:
    with naming_data_of(item.unique_key, "tree[0]"):
        return encode_archive([item.data], allow_pickle=allow_pickle)


def _pieces(shards: Sequence[ShardedTensor], columns: ShardColumns) -> tuple[tuple[ArchivedBox, ...], ShardColumns]:
    """Return the boxes to write for shards, several for a flat range, and the same boxes as columns."""
    # Flat ranges are written as boxes, since megatron-core 0.16 dropped flat ranges, and older releases read both.
    boxes = shard_boxes(columns.offset, columns.shape, columns.start, columns.stop)
    no_range = np.full(boxes.shard.size, -1, dtype=np.int64)
    whole = replace(
        select_rows(columns, boxes.shard), offset=boxes.offset, shape=boxes.shape, start=no_range, stop=no_range
    )
    rows = np.flatnonzero((volumes(boxes.shape) > 0) | (_is_empty(columns)[columns.key[boxes.shard]]))
    pieces = []
    for row in rows.tolist():
        shard = shards[int(boxes.shard[row])]
        axes = len(shard.global_shape)
        shape = tuple(boxes.shape[row, boxes.shape.shape[1] - axes :].tolist())
        pieces.append(ArchivedBox(shard, shape, -1 if shard.flattened_range is None else int(boxes.position[row])))
    return tuple(pieces), select_rows(whole, rows)


def _is_empty(columns: ShardColumns) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Return a mask of the tensors without elements, bool (keys,). Empty chunks of other tensors aren't stored."""
    shapes = box_column([kind.global_shape for kind in columns.kinds], fill=1)
    return np.asarray(volumes(shapes) == 0)


_ZEROS = memoryview(bytes(64))


@dataclass(frozen=True, slots=True, eq=False)
class RankFile:
    """Data file of a rank, sent to rank 0 for the commit.

    Attributes:
        file: Name of the data file; None if the rank had nothing to write.
        file_length: Length of the file in bytes.
        columns: Boxes that the rank wrote, one row for each archive.
        byte: Offset of each archive, int64 (boxes,).
        length: Length of each archive in bytes, int64 (boxes,).
        objects: Unique key of each object, with offset and length of its archive in bytes.
    """

    file: str | None
    file_length: int
    columns: ShardColumns
    byte: Column
    length: Column
    objects: tuple[tuple[str, int, int], ...]


def data_file(rank: int, number: int = 0) -> str:
    """Return the name of a rank's data file; `number` counts the files of one rank.

    Examples:
        >>> data_file(3)
        '__3_0.distcp'
    """
    return f"__{rank}_{number}.distcp"


def write_file(pending: PendingSave, layout: FileLayout) -> RankFile:
    """Write a rank's data file, unless it would be empty, and return its contents. This isn't a collective."""
    # The folder is made again, since an abandoned request, whose folder was removed, may run once more.
    make_folder(pending.storage, pending.save_id, durable=pending.options.durable)
    count = len(layout.objects)
    places = zip(layout.byte[:count].tolist(), layout.length[:count].tolist(), strict=True)
    objects = tuple((key, *place) for (key, _), place in zip(layout.objects, places, strict=True))
    name, length = (None, 0) if not layout.byte.size else (data_file(pending.world.rank), _write(pending, layout))
    return RankFile(name, length, layout.columns, layout.byte[count:], layout.length[count:], objects)


def _write(pending: PendingSave, layout: FileLayout) -> int:
    name, durable = data_file(pending.world.rank), pending.options.durable
    nbytes = int(layout.byte[-1] + layout.length[-1])
    buffers, progress = _buffers(layout), pending.options.progress
    file = write_hashed(
        pending.storage, name, buffers, length=nbytes, durable=durable, checksums=False, progress=progress
    )
    if durable:
        sync_folder(pending.storage)
    return file.length


def _buffers(layout: FileLayout) -> Iterator[Buffer]:
    archives = [data for _, data in layout.objects]
    ends = np.concatenate([[0], layout.byte + layout.length])
    gaps = iter((layout.byte - ends[:-1]).tolist())
    for data in archives:
        yield _ZEROS[: next(gaps)]
        yield memoryview(data)
    for piece, length in zip(layout.pieces, layout.length[len(archives) :].tolist(), strict=True):
        yield _ZEROS[: next(gaps)]
        yield from _piece_buffers(piece, length)


def _piece_buffers(piece: ArchivedBox, length: int) -> Iterator[Buffer]:
    """Yield the bytes of a piece's archive; its CRC32 is computed by another thread, one buffer behind at most."""
    checked_data(piece.shard)
    head = archive_head(piece.shard.dtype, piece.shape)
    yield memoryview(head)
    nbytes = len(head)
    checksum: Callable[[], int] = partial(int, 0)
    for buffer in tensor_buffers(piece.data):
        checksum = crc32_behind(buffer, checksum())
        yield buffer
        nbytes += buffer.nbytes
    tail = archive_tail(piece.shard.dtype, piece.shape, checksum())
    yield memoryview(tail)
    if nbytes + len(tail) != length:
        found, expected = f"an archive of {nbytes + len(tail)} bytes", f"an archive of {length} bytes"
        heading = f"save: the data of {piece.shard.key!r} changed in size during the save"
        raise CheckpointingException(error_text(heading, found=found, expected=expected))
