"""The content of `.metadata`, checked and in columns: an index for planning loads, and where each archive lies."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import PurePosixPath

import numpy as np

from ...errors import CheckpointingException
from ...kit import (
    Checkpoint,
    Column,
    Index,
    ShardColumns,
    StoredFile,
    TensorKind,
    build_index,
    check_storable,
    collector_paused,
    index_problem,
    int64,
    stored_columns,
    text_columns,
)
from ..manifest import MANIFEST_FILE
from ..unique_keys import is_object
from ._metadata_content import ArchivePlaces, MetadataFile, TensorEntry
from ._metadata_file import INDEX_FILE, read_metadata_file, unsound
from ._pickled_columns import Ints

# This section numbers torch.save's archives in data files, in the order of files and bytes.

_SUMMABLE_BYTES = 2.0**60  # Sums of offsets and sizes below this bound fit int64.


@dataclass(frozen=True, slots=True, eq=False)
class Archives:
    """All archives of a checkpoint. A payload is the bytes of an archive's tensor, or an object's whole archive.

    Attributes:
        names: Key of each archive's tensor, or name of its object.
        chunk: Row of `shapes` with each archive's shape, -1 for an object, int64 (archives,).
        shapes: Shapes of chunks, right-aligned, int64 (chunks, axes).
        axes: Number of axes of each shape, int64 (chunks,).
        start: Offset of each payload in a virtual file, which joins all payloads, int64 (archives,).
        payload: Length of each payload in bytes, int64 (archives,).
        file: Number of each archive's file, int64 (archives,).
        byte: Offset of each archive in its file, int64 (archives,).
        length: Length of each archive in bytes, int64 (archives,).
        files: Names of the files.
        refusals: Reason that an archive can't be read, by its number.
        virtual: The virtual file, which loads are planned on.
    """

    names: Sequence[str]
    chunk: Column
    shapes: Column
    axes: Column
    start: Column
    payload: Column
    file: Column
    byte: Column
    length: Column
    files: tuple[str, ...]
    refusals: Mapping[int, str]
    virtual: StoredFile

    def shape(self, number: int) -> Ints | None:
        """Return the shape of an archive's tensor; None for an object."""
        row = int(self.chunk[number])
        return None if row < 0 else tuple(self.shapes[row, self.shapes.shape[1] - int(self.axes[row]) :].tolist())

    def at(self, byte: Column) -> Column:
        """Return the number of the archive at each offset in the virtual file of all payloads, int64 (offsets,)."""
        return np.asarray(np.searchsorted(self.start, byte, side="right") - 1, dtype=np.int64)


def archives_of(
    names: Sequence[str], places: ArchivePlaces, rows: Column, shapes: Column, axes: Column, payload: Column
) -> tuple[Archives, Column]:
    """Return the archives sorted by file and offset, and each given archive's index among them, int64 (archives,).

    Args:
        names: Key of each archive's tensor, or name of its object; archives of tensors come first.
        places: Places that `.metadata` lists, in any order.
        rows: Index of each archive in `places`, int64 (archives,).
        shapes: Shape of each archived tensor, right-aligned, int64 (tensors, axes).
        axes: Number of axes of each shape, int64 (tensors,).
        payload: Length of each tensor in bytes, int64 (tensors,); an object's payload is its whole archive.

    Raises:
        ValueError: A place isn't a range of a file, two places share bytes, or archives are too large.
    """
    files = sorted({places.file[row] for row in rows.tolist()})
    for name in files:
        name.encode()  # This may raise UnicodeEncodeError, a ValueError; the storage refuses other bad names.
    numbers = {name: number for number, name in enumerate(files)}
    file = np.fromiter((numbers[places.file[row]] for row in rows.tolist()), dtype=np.int64, count=rows.size)
    byte, length = places.byte[rows], places.length[rows]
    payload = np.append(payload, length[payload.size :])
    for column in (byte, length, payload):
        if (column < 0).any() or (column > _SUMMABLE_BYTES).any() or payload.astype(np.float64).sum() > _SUMMABLE_BYTES:
            raise ValueError("an archive's place or size is out of range")
    order = np.lexsort((byte, file))
    _check_apart(files, names, file[order], byte[order], length[order], order)
    number = np.empty_like(order)
    number[order] = np.arange(order.size)
    payload = payload[order]
    end = np.cumsum(payload + 1)
    archives = Archives(
        names=[names[row] for row in order.tolist()],
        chunk=np.where(order < axes.size, order, -1),
        shapes=shapes,
        axes=axes,
        start=end - payload - 1,
        payload=payload,
        file=file[order],
        byte=byte[order],
        length=length[order],
        files=tuple(files),
        refusals={int(number[row]): places.refusals[place] for row, place in _refusal_rows(places, rows)},
        virtual=StoredFile("archives", int(end[-1]) if end.size else 0),
    )
    return archives, number


def _check_apart(
    files: Sequence[str], names: Sequence[str], file: Column, byte: Column, length: Column, order: Column
) -> None:
    """Raise ValueError if two archives share bytes of a file, or if a file has two names.

    Args:
        files: Names of the files.
        names: Names of the archives, not sorted.
        file: Index of each archive's file in `files`, int64 (archives,); all columns are sorted by file and offset.
        byte: Offset of each archive in its file, int64 (archives,).
        length: Length of each archive, int64 (archives,).
        order: Index of each archive's name in `names`, int64 (archives,).
    """
    if len({"/".join(PurePosixPath(name).parts) for name in files}) != len(files):
        raise ValueError("a file has two names")
    shared = np.flatnonzero((file[1:] == file[:-1]) & (byte[:-1] + length[:-1] > byte[1:]) & (length[1:] > 0))
    if shared.size:
        first, second = (names[row][:200] for row in order[shared[0] : shared[0] + 2].tolist())
        raise ValueError(f"{first!r} and {second!r} share bytes of {files[int(file[shared[0]])]!r}")


def _refusal_rows(places: ArchivePlaces, rows: Column) -> Iterator[tuple[int, int]]:
    """Yield ``(index in rows, index in places)`` for each unreadable archive; `rows` are indices in `places`."""
    if places.refusals:
        yield from ((row, place) for row, place in enumerate(rows.tolist()) if place in places.refusals)


# This section handles flat shards of Megatron-Core 0.8 to 0.15, which are ranges of flattened grid cells.


@dataclass(frozen=True, slots=True, eq=False)
class ChunkBoxes:
    """The chunks of a tensor: boxes, or flat ranges of boxes.

    Attributes:
        global_shape: Global shape of the tensor.
        offsets: Offset of each box, int64 (boxes, axes).
        shapes: Shape of each box, int64 (boxes, axes).
        flat: First element of each flat range and one past its last, int64 (boxes, 2); None for whole boxes.
    """

    global_shape: Ints
    offsets: Column
    shapes: Column
    flat: Column | None


def true_boxes(entry: TensorEntry) -> ChunkBoxes:
    """Return the boxes of a stored tensor's chunks in the original tensor.

    Older Megatron-Core cut a tensor into a grid of equal cells and flattened each cell. The stored tensor has the shape
    (cells along each axis..., elements of a cell); its chunks are ranges of cells. `.metadata` has the original shape.

    Raises:
        ValueError: The chunks aren't ranges of such cells.

    Examples:
        >>> offset, shape = np.array([[1, 0, 9]]), np.array([[1, 1, 15]])
        >>> entry = TensorEntry(None, (2, 1, 24), offset, shape, np.array([0]), grid_shape=(8, 6))
        >>> boxes = true_boxes(entry)
        >>> boxes.global_shape, boxes.offsets.tolist(), boxes.shapes.tolist()
        ((8, 6), [[4, 0]], [[4, 6]])
        >>> boxes.flat.tolist()
        [[9, 24]]
    """
    if entry.grid_shape is None:
        return ChunkBoxes(entry.shape, entry.offsets, entry.shapes, None)
    cell = _cell(entry.shape, entry.grid_shape)
    start, stop = entry.offsets[:, -1], entry.offsets[:, -1] + entry.shapes[:, -1]
    in_grid = (entry.offsets[:, :-1] >= 0) & (entry.offsets[:, :-1] < entry.shape[:-1]) & (entry.shapes[:, :-1] == 1)
    in_cell = in_grid.all(axis=1) & (start >= 0) & (start <= stop) & (stop <= entry.shape[-1])
    if not in_cell.all():
        at, size = entry.boxes[int(np.argmin(in_cell))]
        raise ValueError(f"its chunk {size} at {at} is not a range of one cell of {entry.shape}")
    shape = np.array(cell, dtype=np.int64)
    offsets, shapes = entry.offsets[:, :-1] * shape, np.tile(shape, (len(start), 1))
    return ChunkBoxes(entry.grid_shape, offsets, shapes, np.stack([start, stop], axis=1))


def _cell(stored_shape: Ints, shape: Ints) -> Ints:
    """Return the shape of a cell of a tensor that is stored as (cells along each axis..., elements of a cell)."""
    fits = len(stored_shape) == len(shape) + 1 and all(
        count > 0 and size % count == 0 for size, count in zip(shape, stored_shape, strict=False)
    )
    cell = tuple(size // count for size, count in zip(shape, stored_shape, strict=False)) if fits else ()
    if not fits or prod(cell) != stored_shape[-1]:
        raise ValueError(f"it is stored with shape {stored_shape}, which is not a grid of flattened cells of {shape}")
    return cell


# Two backends share one format of tensors: Megatron-Core's, and that of torch.distributed.checkpoint (DCP) itself. They
# differ in the form of the common state, and in the file that commits a save.

TORCH_DIST, DCP = ("torch_dist", 1), ("dcp", 1)


COMMON_OBJECT = "common_state/shard_0_1"
"""Unique key of the object that has the common state of newer releases of Megatron-Core."""


_MOST_NUMBERS = 2**25
"""Upper bound of the numbers in a column: all boxes get the axes of the widest tensor, which a crafted file chooses."""


@dataclass(frozen=True, slots=True, eq=False)
class ArchiveListing:
    """Tensors, objects and values of a checkpoint, with the archives that hold them.

    Loads are planned on one virtual file of all payloads, since a payload's offset in its archive is only known once
    the archive is opened. One unused byte between payloads keeps each read from spanning two.

    Attributes:
        index: Index of tensors and objects; its only file is the virtual one.
        archives: Archives of the tensors, objects and values.
        contents: Content of `.metadata`.
        unknown: Reason that a tensor can't be read, by its key; such tensors aren't in the index.
        values: Number of the archive of each plain value and object, by name.
    """

    index: Index
    archives: Archives
    contents: MetadataFile
    unknown: Mapping[str, str]
    values: Mapping[str, int]


def read_listing(checkpoint: Checkpoint) -> ArchiveListing:
    """Return the listing of an open checkpoint, which is read on the first call only.

    Raises:
        CorruptCheckpoint: `.metadata` isn't sound.
        UnsafeFile: `.metadata` names a class that doesn't belong in it, and `allow_pickle` isn't given.
    """
    return checkpoint.once(parse)


def parse(checkpoint: Checkpoint) -> ArchiveListing:
    """Parse `.metadata`. One rank calls this for all ranks, since a large file takes many seconds."""
    try:
        # Parsing makes an object for each tensor, which the collector would scan, and no garbage.
        with collector_paused():
            return _listing(read_metadata_file(checkpoint), _hidden_names(checkpoint))
    except (ValueError, OverflowError) as error:
        raise unsound(checkpoint.storage.where(INDEX_FILE), error) from error


def index_on_files(listing: ArchiveListing, index: Index) -> Index:
    """Return an index for display, with the data files in place of the virtual file that joins all payloads.

    The offset of a chunk is that of its archive: its elements come later, after a head of unknown length.
    """
    archives = listing.archives
    chunk, item = archives.at(index.chunk_byte), archives.at(index.object_byte)
    text, start = text_columns(archives.files)
    length = np.zeros(len(archives.files), dtype=np.int64)
    np.maximum.at(length, archives.file, archives.byte + archives.length)
    return replace(
        index,
        chunk_file=archives.file[chunk],
        chunk_byte=archives.byte[chunk],
        object_file=archives.file[item],
        object_byte=archives.byte[item],
        file_text=text,
        file_start=start,
        file_length=length,
        file_block=np.zeros(len(archives.files) + 1, dtype=np.int64),
    )


def _hidden_names(checkpoint: Checkpoint) -> frozenset[str]:
    """Return the names of objects that users don't see: the name of the common state's object, if there is one."""
    fields = checkpoint.fields
    in_object = (fields.get("common_backend"), fields.get("common_backend_version")) == TORCH_DIST
    return frozenset({COMMON_OBJECT} if in_object else ())


def _listing(contents: MetadataFile, hidden_names: frozenset[str]) -> ArchiveListing:
    tensors = {key: contents.tensors[key] for key in sorted(contents.tensors)}
    boxes, unknown = _readable(tensors)
    columns = _columns(tensors, boxes)
    names = [key for key, chunks in boxes.items() for _ in range(len(chunks.offsets))] + list(contents.values)
    entries = [tensors[key] for key in boxes]
    rows = np.concatenate([*(entry.places for entry in entries), int64(list(contents.values.values()))])
    axes = np.repeat(int64([len(entry.shape) for entry in entries]), [len(entry.places) for entry in entries])
    shapes = _right_aligned([entry.shapes for entry in entries], fill=1)
    payload = columns.elements * columns.item_size[columns.key] if len(columns) else np.zeros(0, dtype=np.int64)
    archives, number = archives_of(names, contents.places, rows, shapes, axes, payload)
    values = dict(zip(contents.values, number[len(columns) :].tolist(), strict=True))
    objects = [
        (name, 0, int(archives.start[at]), int(archives.length[at]))
        for name, at in values.items()
        if name not in hidden_names and is_object(name)
    ]
    start = archives.start[number[: len(columns)]]
    index = build_index(columns, np.zeros_like(start), start, files=[archives.virtual], objects=objects)
    if problem := index_problem(index):
        raise ValueError(problem)
    return ArchiveListing(index, archives, contents, unknown, values)


def _readable(tensors: Mapping[str, TensorEntry]) -> tuple[dict[str, ChunkBoxes], dict[str, str]]:
    """Return, by key, the boxes of readable tensors' chunks, and the reasons that other tensors can't be read."""
    boxes, unknown = {}, {}
    for key, entry in tensors.items():
        try:
            if entry.dtype is None:
                raise ValueError("this torch lacks its dtype")
            check_storable(entry.dtype, "its dtype")
            boxes[key] = true_boxes(entry)
        except (CheckpointingException, ValueError) as error:
            unknown[key] = str(error)
    return boxes, unknown


def _columns(tensors: Mapping[str, TensorEntry], boxes: Mapping[str, ChunkBoxes]) -> ShardColumns:
    kinds = {key: _kind(tensors[key], tensor_boxes) for key, tensor_boxes in boxes.items()}
    counts = [len(tensor_boxes.offsets) for tensor_boxes in boxes.values()]
    chunks = sum(counts)
    if chunks * max((len(kind.global_shape) for kind in kinds.values()), default=0) > _MOST_NUMBERS:
        raise ValueError(f"{chunks} chunks of too many axes")
    flat, end = np.full((chunks, 2), -1), np.cumsum(counts).tolist()
    for tensor_boxes, last in zip(boxes.values(), end, strict=True):
        if tensor_boxes.flat is not None:
            flat[last - len(tensor_boxes.flat) : last] = tensor_boxes.flat
    return stored_columns(
        kinds,
        np.repeat(np.arange(len(counts)), counts),
        _right_aligned([tensor_boxes.offsets for tensor_boxes in boxes.values()], fill=0),
        _right_aligned([tensor_boxes.shapes for tensor_boxes in boxes.values()], fill=1),
        flat[:, 0],
        flat[:, 1],
    )


def _right_aligned(parts: Sequence[Column], fill: int) -> Column:
    """Join columns after widening all to the largest number of axes, at least 1, with `fill` on the left."""
    width = max([1, *(part.shape[1] for part in parts)])
    if parts and all(part.shape[1] == width for part in parts):
        return np.concatenate(parts)
    column = np.full((sum(map(len, parts)), width), fill, dtype=np.int64)
    at = 0
    for part in parts:
        column[at : at + len(part), width - part.shape[1] :] = part
        at += len(part)
    return column


def _kind(entry: TensorEntry, boxes: ChunkBoxes) -> TensorKind:
    assert entry.dtype is not None
    return TensorKind(entry.dtype, boxes.global_shape, 0)


# This section lists the files of a checkpoint.

_DATA_FILE = re.compile(r"__\d+_\d+\.distcp")


META_FILE = "meta.pt"
"""Archive beside DCP's files with the rest of a checkpoint of Lightning: epoch, loops, callbacks, schedulers."""


def has_meta(checkpoint: Checkpoint) -> bool:
    """Return whether a folder of DCP's files also has Lightning's archive, meta.pt."""
    return checkpoint.fields["sharded_backend"] == "dcp" and checkpoint.storage.length(META_FILE) is not None


def list_files(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Return the names of all files: `.metadata`, integrity.json (hashes), the data files, and Lightning's meta.pt."""
    data_files = (name for name in checkpoint.storage.names() if _DATA_FILE.fullmatch(name))
    return INDEX_FILE, MANIFEST_FILE, *data_files, *([META_FILE] if has_meta(checkpoint) else [])
