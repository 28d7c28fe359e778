"""What one rank's data file looks like: which archive lies where, before a byte is written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np
import torch

from ...codec import archive_length, check_storable, encode_archive
from ...errors import CheckpointingException
from ...geometry import Column, box_column, volumes, widen
from ...layouts import ShardColumns, select_rows, shard_boxes, shard_columns
from ...lazy import LazyTensor
from ...mapping import ShardedObject, ShardedTensor

ALIGNMENT = 64
"""Archives begin at multiples of this, and their tensors' bytes too: archives keep them at multiples inside."""


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """A box of a shard on its way into a file, where it becomes an archive of one tensor.

    Attributes:
        shard: what it is part of.
        shape: of the box and of the archived tensor, prepended axes included.
        begin: the first element of a flat shard's data that belongs to it, -1 for a shard that is a box itself.
    """

    shard: ShardedTensor
    shape: tuple[int, ...]
    begin: int

    @property
    def data(self) -> torch.Tensor | LazyTensor:
        """The shard's elements that lie in the box."""
        data: torch.Tensor | LazyTensor = self.shard.data
        return data if self.begin < 0 else data[self.begin : self.begin + prod(self.shape)]


@dataclass(frozen=True, slots=True, eq=False)
class FileLayout:
    """One rank's data file: objects first, then pieces of tensors, each an archive at a multiple of `ALIGNMENT`.

    Attributes:
        objects: unique key and encoded list of one, for each object.
        pieces: the boxes of the rank's shards.
        columns: the same boxes as columns, a row a piece.
        byte: where each archive begins, objects first, int64 (archives,).
        length: of each archive, int64 (archives,).
    """

    objects: tuple[tuple[str, bytes], ...]
    pieces: tuple[Piece, ...]
    columns: ShardColumns
    byte: Column
    length: Column


def file_layout(shards: Sequence[ShardedTensor | ShardedObject], rank: int, *, allow_pickle: bool) -> FileLayout:
    """Return the layout of the file that a rank writes for its shards.

    Args:
        shards: tensor shards with data, and objects.
        rank: who writes them.
        allow_pickle: whether objects that the codec can't hold are pickled.

    Raises:
        UnsupportedValue: a dtype or an object can't be stored.
    """
    tensors = [shard for shard in shards if isinstance(shard, ShardedTensor)]
    for shard in tensors:
        check_storable(shard.dtype, f"save: {shard.key!r}")
    objects = tuple(
        (item.unique_key, _encoded(item, allow_pickle)) for item in shards if isinstance(item, ShardedObject)
    )
    pieces, columns = _pieces(tensors, shard_columns(tensors, rank))
    lengths = [len(data) for _, data in objects]
    lengths += [archive_length(piece.shard.dtype, piece.shape) for piece in pieces]
    length = np.array(lengths, dtype=np.int64)
    room = -(-length // ALIGNMENT) * ALIGNMENT
    return FileLayout(objects, pieces, columns, np.cumsum(room) - room, length)


def _encoded(item: ShardedObject, allow_pickle: bool) -> bytes:
    try:
        return encode_archive([item.data], allow_pickle=allow_pickle)
    except CheckpointingException as error:
        error.add_note(f"tree[0] is the data of ShardedObject {item.unique_key!r}")
        raise


def _pieces(shards: Sequence[ShardedTensor], columns: ShardColumns) -> tuple[tuple[Piece, ...], ShardColumns]:
    """Return the boxes that shards consist of, a flat range taken apart, and the columns of these."""
    boxes = shard_boxes(columns.offset, columns.shape, columns.start, columns.stop)
    no_range = np.full(boxes.shard.size, -1, dtype=np.int64)
    whole = replace(
        select_rows(columns, boxes.shard), offset=boxes.offset, shape=boxes.shape, start=no_range, stop=no_range
    )
    kept = np.flatnonzero((volumes(boxes.shape) > 0) | (_is_empty(columns)[columns.key[boxes.shard]]))
    pieces = []
    for row in kept.tolist():
        shard = shards[int(boxes.shard[row])]
        axes = len(shard.global_shape)
        shape = tuple(boxes.shape[row, boxes.shape.shape[1] - axes :].tolist())
        pieces.append(Piece(shard, shape, -1 if shard.flattened_range is None else int(boxes.position[row])))
    return tuple(pieces), select_rows(whole, kept)


def _is_empty(columns: ShardColumns) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Return which tensors have no elements: they have nothing but empty chunks to be known by, bool (keys,)."""
    shapes = widen(box_column([kind.global_shape for kind in columns.kinds], fill=1), columns.offset.shape[1], 1)
    return np.asarray(volumes(shapes) == 0)
