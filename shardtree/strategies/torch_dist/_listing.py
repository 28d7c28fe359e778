"""The content of `.metadata`, checked and in columns: an index for planning loads, and where each archive lies."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from ...codec import check_storable
from ...errors import CheckpointingException, CorruptCheckpoint, MetadataError, error_text
from ...geometry import Column, box_column
from ...layouts import ShardColumns, TensorKind
from ...mapping import ShardedObject
from ...storage import StoredFile
from .._manifest import MANIFEST_FILE
from .._values import Checkpoint
from ..index import Index, build_index, index_problem, text_columns
from ._metadata_file import INDEX_FILE, Ints, MetadataFile, Place, TensorEntry, read_metadata_file

# Archives of torch.save in data files, numbered in the order of files and bytes

_MOST_BYTES = 2.0**60  # so that sums of places and sizes stay within int64


@dataclass(frozen=True, slots=True, eq=False)
class Archives:
    """All archives of a checkpoint.

    Attributes:
        names: the key of each one's tensor, or the name of its object.
        shapes: of each one's tensor, None for an object.
        start: where each one's payload begins in a virtual file of nothing but payloads, int64 (archives,).
        payload: in bytes; an object is all payload, int64 (archives,).
        file: number of the file, int64 (archives,).
        byte: where the archive begins in the file, int64 (archives,).
        length: of the archive, in bytes, int64 (archives,).
        files: names of the files.
        refused: why an archive can't be read, by its number.
        virtual: the virtual file.
    """

    names: Sequence[str]
    shapes: Sequence[Ints | None]
    start: Column
    payload: Column
    file: Column
    byte: Column
    length: Column
    files: tuple[str, ...]
    refused: Mapping[int, str]
    virtual: StoredFile

    def at(self, byte: Column) -> Column:
        """Return the numbers of the archives in which bytes of the virtual file lie, int64 (bytes,)."""
        return np.asarray(np.searchsorted(self.start, byte, side="right") - 1, dtype=np.int64)


def archives_of(
    names: Sequence[str], places: Sequence[Place], shapes: Sequence[Ints | None], payload: Column
) -> tuple[Archives, Column]:
    """Return archives in the order in which they lie, and each given one's number there, int64 (archives,).

    Args:
        names: key of the tensor, or name of the object, of each.
        places: where each lies.
        shapes: of each one's tensor, None for an object.
        payload: bytes of each tensor; objects follow after the tensors, and an object is all payload.

    Raises:
        ValueError: a place isn't a range of a file, or they are too large.
    """
    files = sorted({place.file for place in places})
    for name in files:
        name.encode()  # raises UnicodeEncodeError, a ValueError; the storage refuses other bad names
    numbers = {name: number for number, name in enumerate(files)}
    file = np.array([numbers[place.file] for place in places], dtype=np.int64)
    byte = np.array([place.byte for place in places], dtype=np.int64)
    length = np.array([place.length for place in places], dtype=np.int64)
    payload = np.append(payload, length[payload.size :])
    for column in (byte, length, payload):
        if (column < 0).any() or (column > _MOST_BYTES).any() or payload.astype(np.float64).sum() > _MOST_BYTES:
            raise ValueError("an archive's place or size is out of range")
    order = np.lexsort((byte, file))
    number = np.empty_like(order)
    number[order] = np.arange(order.size)
    payload = payload[order]
    end = np.cumsum(payload + 1)
    archives = Archives(
        names=[names[row] for row in order.tolist()],
        shapes=[shapes[row] for row in order.tolist()],
        start=end - payload - 1,
        payload=payload,
        file=file[order],
        byte=byte[order],
        length=length[order],
        files=tuple(files),
        refused={int(number[row]): place.refusal for row, place in enumerate(places) if place.refusal},
        virtual=StoredFile("archives", int(end[-1]) if end.size else 0),
    )
    return archives, number


# Flat shards as Megatron-Core 0.8 to 0.15 stored them: ranges of flattened grid cells


@dataclass(frozen=True, slots=True, eq=False)
class Boxes:
    """The chunks of one tensor: boxes of it, or flat ranges of such boxes.

    Attributes:
        global_shape: of the tensor.
        offsets: of each box.
        shapes: of each box.
        starts: first element of each flat range, -1 for a whole box.
        stops: one past its last element, -1 for a whole box.
    """

    global_shape: Ints
    offsets: list[Ints]
    shapes: list[Ints]
    starts: list[int]
    stops: list[int]


def true_boxes(entry: TensorEntry) -> Boxes:
    """Return the boxes of a stored tensor's chunks in the tensor that was sharded.

    A tensor that was cut into a grid of cells, each of which ranks shared as flat ranges, was stored as one of shape
    (grid, elements of a cell), with the true shape beside it in `.metadata`.

    Raises:
        ValueError: the chunks aren't ranges of such cells.

    Examples:
        >>> entry = TensorEntry(None, (2, 1, 24), [(1, 0, 9)], [(1, 1, 15)], [], grid_shape=(8, 6))
        >>> boxes = true_boxes(entry)
        >>> boxes.global_shape, boxes.offsets, boxes.shapes, boxes.starts, boxes.stops
        ((8, 6), [(4, 0)], [(4, 6)], [9], [24])
    """
    if entry.grid_shape is None:
        none = [-1] * len(entry.offsets)
        return Boxes(entry.shape, entry.offsets, entry.shapes, none, none)
    cell = _cell(entry.shape, entry.grid_shape)
    for offset, shape in zip(entry.offsets, entry.shapes, strict=True):
        if shape[:-1] != (1,) * len(cell) or not 0 <= offset[-1] <= offset[-1] + shape[-1] <= entry.shape[-1]:
            raise ValueError(f"its chunk {shape} at {offset} isn't a range of one cell of {entry.shape}")
    offsets = [tuple(at * size for at, size in zip(offset, cell, strict=False)) for offset in entry.offsets]
    starts = [offset[-1] for offset in entry.offsets]
    stops = [start + shape[-1] for start, shape in zip(starts, entry.shapes, strict=True)]
    return Boxes(entry.grid_shape, offsets, [cell] * len(offsets), starts, stops)


def _cell(stored: Ints, shape: Ints) -> Ints:
    """Return the shape of one cell of a grid."""
    fits = len(stored) == len(shape) + 1 and all(
        count > 0 and size % count == 0 for size, count in zip(shape, stored, strict=False)
    )
    cell = tuple(size // count for size, count in zip(shape, stored, strict=False)) if fits else ()
    if not fits or prod(cell) != stored[-1]:
        raise ValueError(f"it is stored as {stored}, which isn't a grid of flattened cells of {shape}")
    return cell


# Two backends with one format of tensors: Megatron-Core's, and that of torch.distributed.checkpoint (DCP) itself. They
# differ in what isn't sharded, and in the file that commits.

TORCH_DIST, DCP = ("torch_dist", 1), ("dcp", 1)


COMMON_OBJECT = "common_state/shard_0_1"
"""The object in which newer releases of Megatron-Core keep the common state."""


_MOST_NUMBERS = 2**25
"""The most numbers in a column: boxes get as many axes as the widest tensor, so one crafted entry could fill memory."""


@dataclass(frozen=True, slots=True, eq=False)
class Listing:
    """What is in a checkpoint and where.

    Loads are planned on one virtual file of all payloads, with a byte between two of them so that no run spans both:
    where a payload begins in its archive isn't known before the archive is opened.

    Attributes:
        index: of tensors and objects; its only file is the virtual one.
        archives: that hold them.
        contents: of `.metadata`.
        unknown: why a tensor can't be read, by its key; such tensors aren't in the index.
        values: the numbers of archives of plain values and objects, by name.
    """

    index: Index
    archives: Archives
    contents: MetadataFile
    unknown: Mapping[str, str]
    values: Mapping[str, int]


def read_listing(checkpoint: Checkpoint) -> Listing:
    """Return what is in a checkpoint and where, read once.

    Raises:
        CorruptCheckpoint: `.metadata` isn't sound.
        UnsafeFile: it names something that it never needs, and `allow_pickle` isn't given.
    """
    if "listing" not in checkpoint.memo:
        # Parsed once: the safe reader of pickles handles a few million opcodes a second.
        contents = read_metadata_file(checkpoint)
        try:
            checkpoint.memo["listing"] = _listing(contents, _hidden(checkpoint))
        except (ValueError, OverflowError) as error:
            where = checkpoint.storage.where(INDEX_FILE)
            fix = "It was damaged or made by another program; load another checkpoint."
            text = error_text(f"open: {where!r} is not sound", found=str(error)[:300], fix=fix)
            raise CorruptCheckpoint(text) from error
    listing: Listing = checkpoint.memo["listing"]
    return listing


def index_on_files(listing: Listing) -> Index:
    """Return the index with the data files in place of the virtual one; a chunk begins there where its archive does.

    For people alone: a chunk's elements come after the head of its archive, whose length isn't known.
    """
    index, archives = listing.index, listing.archives
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


def is_object(name: str) -> bool:
    """Return whether a name is the unique key of a sharded object.

    Examples:
        >>> is_object("rng_state/shard_0.1_1.2"), is_object("optimizer.step")
        (True, False)
    """
    try:
        ShardedObject.empty_from_unique_key(name)
    except MetadataError:
        return False
    return True


def _hidden(checkpoint: Checkpoint) -> frozenset[str]:
    """Return the objects that aren't the user's: the one with the common state, if that has no file of its own."""
    fields = checkpoint.fields
    in_object = (fields.get("common_backend"), fields.get("common_backend_version")) == TORCH_DIST
    return frozenset({COMMON_OBJECT} if in_object else ())


def _listing(contents: MetadataFile, hidden: frozenset[str]) -> Listing:
    boxes, unknown = _readable(contents.tensors)
    columns = _columns(contents.tensors, boxes)
    names = [key for key, found in boxes.items() for _ in found.offsets] + list(contents.values)
    entries = [contents.tensors[key] for key in boxes]
    places = [place for entry in entries for place in entry.places] + list(contents.values.values())
    shapes = [shape for entry in entries for shape in entry.shapes] + [None] * len(contents.values)
    payload = columns.elements * columns.item_size[columns.key] if len(columns) else np.zeros(0, dtype=np.int64)
    archives, number = archives_of(names, places, shapes, payload)
    values = dict(zip(contents.values, number[len(columns) :].tolist(), strict=True))
    objects = [
        (name, 0, int(archives.start[at]), int(archives.length[at]))
        for name, at in values.items()
        if name not in hidden and is_object(name)
    ]
    start = archives.start[number[: len(columns)]]
    index = build_index(columns, np.zeros_like(start), start, files=[archives.virtual], objects=objects)
    if problem := index_problem(index):
        raise ValueError(problem)
    return Listing(index, archives, contents, unknown, values)


def _readable(tensors: Mapping[str, TensorEntry]) -> tuple[dict[str, Boxes], dict[str, str]]:
    """Return where the chunks of tensors lie, by key, sorted; and why those of others can't be read."""
    boxes, unknown = {}, {}
    for key in sorted(tensors):
        entry = tensors[key]
        try:
            if entry.dtype is None:
                raise ValueError("this torch lacks its dtype")
            check_storable(entry.dtype, "its dtype")
            boxes[key] = true_boxes(entry)
        except (CheckpointingException, ValueError) as error:
            unknown[key] = str(error)
    return boxes, unknown


def _columns(tensors: Mapping[str, TensorEntry], boxes: Mapping[str, Boxes]) -> ShardColumns:
    kinds = tuple(_kind(tensors[key], found) for key, found in boxes.items())
    counts = [len(found.offsets) for found in boxes.values()]
    chunks = sum(counts)
    if chunks * max((len(kind.global_shape) for kind in kinds), default=0) > _MOST_NUMBERS:
        raise ValueError(f"{chunks} chunks of too many axes")
    return ShardColumns(
        keys=tuple(boxes),
        kinds=kinds,
        key=np.repeat(np.arange(len(counts)), counts),
        offset=box_column([offset for found in boxes.values() for offset in found.offsets], fill=0),
        shape=box_column([shape for found in boxes.values() for shape in found.shapes], fill=1),
        start=_int64([start for found in boxes.values() for start in found.starts]),
        stop=_int64([stop for found in boxes.values() for stop in found.stops]),
        rank=np.zeros(chunks, dtype=np.int64),
        main=np.ones(chunks, dtype=np.bool_),
    )


def _kind(entry: TensorEntry, boxes: Boxes) -> TensorKind:
    assert entry.dtype is not None
    return TensorKind(entry.dtype, boxes.global_shape, 0)


def _int64(values: Sequence[int]) -> Column:
    return np.array(values, dtype=np.int64)


# Which files a checkpoint of archives consists of.

_DATA_FILE = re.compile(r"__\d+_\d+\.distcp")


def list_files(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Return the names of the index, the ranks' data files, and Megatron-Core's list of hashes."""
    own = (name for name in checkpoint.storage.names() if _DATA_FILE.fullmatch(name))
    return INDEX_FILE, MANIFEST_FILE, *own
