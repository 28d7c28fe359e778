"""What `.metadata` says, checked and in columns: an index that loads plan on, and where each archive lies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ...codec import check_storable
from ...errors import CheckpointingException, CorruptCheckpoint, MetadataError, error_text
from ...geometry import Column, box_column
from ...layouts import ShardColumns, TensorKind
from ...mapping import ShardedObject
from .._values import Checkpoint
from ..index import Index, build_index, index_problem
from ._archives import Archives, archives_of
from ._backends import INDEX_FILE, TORCH_DIST
from ._flat import Boxes, true_boxes
from ._metadata_file import MetadataFile, TensorEntry, read_metadata_file

COMMON_OBJECT = "common_state/shard_0_1"
"""The object in which Megatron-Core keeps the common state since it writes no common.pt."""


_MOST_NUMBERS = 2**25
"""How many numbers a column may have: all boxes are held with as many axes as the tensor with most of them has."""


@dataclass(frozen=True, slots=True, eq=False)
class Listing:
    """What is in a checkpoint and where.

    A plan is made as if all payloads lay in one file, one after the other with a byte between two of them: where a
    payload begins in its archive is known only when that is looked at.

    Attributes:
        index: of tensors and objects; its only file is that imagined one.
        archives: that hold them.
        contents: what `.metadata` says.
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
    """Return the objects that aren't the user's: the one with the common state, where that has no file of its own."""
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
    index = build_index(columns, np.zeros_like(start), start, files=[archives.imagined], objects=objects)
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
                raise ValueError("this torch has no dtype like its own")
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
        raise ValueError(f"{chunks} chunks, and tensors of more axes than so many can have")
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
