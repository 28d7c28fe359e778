"""From shards and where they lie to an index: how every format's metadata becomes the columns that loads plan on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...codec import dtype_name
from ...geometry import Column, box_column, volumes, widen
from ...layouts import ShardColumns
from ...storage import StoredFile
from ._columns import Index
from ._texts import text_columns

ObjectRow = tuple[str, int, int, int]
"""An object's unique key, the number of its file, its first byte there and its length in bytes."""


def build_index(
    columns: ShardColumns,
    file: Column,
    byte: Column,
    *,
    files: Sequence[StoredFile],
    objects: Sequence[ObjectRow] = (),
) -> Index:
    """Return the index of stored shards and objects.

    Args:
        columns: the shards, in any order; who holds them doesn't matter.
        file: the number of each one's file, int64 (shards,).
        byte: where each begins in its file, int64 (shards,).
        files: the files, with their block hashes where there are any.
        objects: the objects, in any order.

    Examples:
        >>> import torch, shardtree as st
        >>> columns = st.shard_columns([st.ShardedTensor.from_rank_offsets("w", torch.zeros(2, 3))])
        >>> index = build_index(columns, np.array([0]), np.array([64]), files=[StoredFile("w.bin", 88)])
        >>> index.chunk_byte.tolist(), index.chunk_length.tolist()
        ([64], [24])
    """
    order = np.lexsort((columns.start, *columns.offset.T[::-1], columns.key))
    key = columns.key[order]
    key_text, key_start = text_columns(columns.keys)
    dtypes = sorted({dtype_name(kind.dtype) for kind in columns.kinds})
    number = {name: position for position, name in enumerate(dtypes)}
    dtype_text, dtype_start = text_columns(dtypes)
    shapes = widen(box_column([kind.global_shape for kind in columns.kinds], fill=1), columns.offset.shape[1], 1)
    offset, shape = widen(columns.offset, shapes.shape[1], 0), widen(columns.shape, shapes.shape[1], 1)
    elements = np.where(columns.start < 0, volumes(shape), columns.stop - columns.start)
    rows = sorted(objects)
    object_text, object_start = text_columns([row[0] for row in rows])
    numbers = np.array([row[1:] for row in rows], dtype=np.int64).reshape(-1, 3)
    file_text, file_start = text_columns([one.name for one in files])
    hashes = [np.zeros(0, dtype=np.uint64) if one.hashes is None else one.hashes for one in files]
    return Index(
        key_text=key_text,
        key_start=key_start,
        key_axes=_int64([len(kind.global_shape) for kind in columns.kinds]),
        key_prepended=_int64([kind.prepend_axis_num for kind in columns.kinds]),
        key_dtype=_int64([number[dtype_name(kind.dtype)] for kind in columns.kinds]),
        key_shape=shapes,
        dtype_text=dtype_text,
        dtype_start=dtype_start,
        chunk_key=key,
        chunk_offset=offset[order],
        chunk_shape=shape[order],
        chunk_start=columns.start[order],
        chunk_stop=columns.stop[order],
        chunk_file=file[order],
        chunk_byte=byte[order],
        chunk_length=(elements * columns.item_size[columns.key])[order],
        object_text=object_text,
        object_start=object_start,
        object_file=numbers[:, 0],
        object_byte=numbers[:, 1],
        object_length=numbers[:, 2],
        file_text=file_text,
        file_start=file_start,
        file_length=_int64([one.length for one in files]),
        file_block=np.cumsum([0, *(one.size for one in hashes)], dtype=np.int64),
        block_hash=np.concatenate([*hashes, np.zeros(0, dtype=np.uint64)]),
    )


def _int64(values: Sequence[int]) -> Column:
    return np.array(values, dtype=np.int64)
