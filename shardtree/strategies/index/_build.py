"""Building an index from shards and their places: any format's metadata becomes columns on which loads are planned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ...codec import dtype_name
from ...geometry import Column, box_column, volumes, widen
from ...layouts import ShardColumns
from ...storage import StoredFile
from ._columns import Index, text_columns, texts

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
        columns: the shards, in any order; their ranks don't matter.
        file: the number of each one's file, int64 (shards,).
        byte: where each begins in its file, int64 (shards,).
        files: the files, with their block hashes if they have any.
        objects: the objects, in any order.

    Examples:
        >>> import torch, shardtree as st
        >>> columns = st.layouts.shard_columns([st.ShardedTensor.from_rank_offsets("w", torch.zeros(2, 3))])
        >>> index = build_index(columns, np.array([0]), np.array([64]), files=[StoredFile("w.bin", 88)])
        >>> index.chunk_byte.tolist(), index.chunk_length.tolist()
        ([64], [24])
    """
    # Sorted by key, so that a tensor's chunks are neighbours: they are found by bisection.
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


# Removing tensors and objects from an index, and the files that become unused

Rows = np.ndarray[tuple[int], np.dtype[np.bool_]]


def without_prefix(index: Index, key_prefix: str) -> Index:
    """Return the index without the tensors and objects of a key prefix, and their files; itself if there are none."""
    keys = texts(index.key_text, index.key_start)
    objects = texts(index.object_text, index.object_start)
    keep_key = np.array([not key.startswith(key_prefix) for key in keys], dtype=np.bool_)
    keep_object = np.array([not key.startswith(key_prefix) for key in objects], dtype=np.bool_)
    if keep_key.all() and keep_object.all():
        return index
    keep_chunk = keep_key[index.chunk_key]
    kept_keys, key_start = text_columns([key for key, keep in zip(keys, keep_key, strict=True) if keep])
    kept_objects, object_start = text_columns([key for key, keep in zip(objects, keep_object, strict=True) if keep])
    kept = (
        _chosen(index, "key_", keep_key) | _chosen(index, "chunk_", keep_chunk) | _chosen(index, "object_", keep_object)
    )
    texts_of: dict[str, Any] = {
        "key_text": kept_keys,
        "key_start": key_start,
        "object_text": kept_objects,
        "object_start": object_start,
    }
    thinner = replace(index, **(kept | texts_of))
    fingerprints = None if index.x_fingerprint is None else index.x_fingerprint[keep_key]
    renumbered = _renumbered(keep_key)[thinner.chunk_key]
    return _without_unused_files(replace(thinner, chunk_key=renumbered, x_fingerprint=fingerprints))


def _chosen(index: Index, group: str, rows: Rows) -> dict[str, Any]:
    names = [name for name in Index.__slots__ if name.startswith(group) and name not in _TEXTS]
    return {name: getattr(index, name)[rows] for name in names}


_TEXTS = {"key_text", "key_start", "object_text", "object_start"}


def _without_unused_files(index: Index) -> Index:
    used = np.zeros(index.file_length.size, dtype=np.bool_)
    used[index.chunk_file] = True
    used[index.object_file] = True
    names = texts(index.file_text, index.file_start)
    text, start = text_columns([name for name, keep in zip(names, used, strict=True) if keep])
    blocks = np.diff(index.file_block)
    number = _renumbered(used)
    return replace(
        index,
        chunk_file=number[index.chunk_file],
        object_file=number[index.object_file],
        file_text=text,
        file_start=start,
        file_length=index.file_length[used],
        file_block=np.concatenate([[0], np.cumsum(blocks[used])]).astype(np.int64),
        block_hash=index.block_hash[np.repeat(used, blocks)],
    )


def _renumbered(keep: Rows) -> Column:
    return np.cumsum(keep, dtype=np.int64) - 1
