"""An index without some of its tensors and objects, and without the files that nothing needs then."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from ...geometry import Column
from ._columns import Index
from ._texts import text_columns, texts

Rows = np.ndarray[tuple[int], np.dtype[np.bool_]]


def without_prefix(index: Index, key_prefix: str) -> Index:
    """Return the index without the tensors, objects and files that a prefix takes away; itself if that is nothing."""
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
