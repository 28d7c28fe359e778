"""Checking an index: its columns come from a file and aren't used before it is known that they fit each other."""

from __future__ import annotations

from itertools import islice
from operator import ge
from pathlib import PurePosixPath
from typing import Any

import numpy as np

from ...geometry import Column, volumes
from ._columns import COLUMNS, Index, item_sizes, texts

_MATRICES = {"key_shape", "chunk_offset", "chunk_shape"}
_MOST_AXES = 256
_MOST_BYTES = 2.0**62  # in all files together, so that sums of lengths stay within int64


def index_problem(index: Index) -> str | None:
    """Return what is wrong with an index, None if loads can be planned on it without further checks.

    Whether all blocks need hashes is checked by each format.
    """
    # In this order: each check relies on what the ones before it have made sure of.
    tables = _kinds(index) or _lengths(index) or _texts(index) or _keys(index) or _files(index) or _places(index)
    return tables or _fingerprints(index)


def _kinds(index: Index) -> str | None:
    for name in COLUMNS:
        column = getattr(index, name)
        kind = "uint64" if name == "block_hash" else "uint8" if name.endswith("_text") else "int64"
        if column.dtype.name != kind or column.ndim != (2 if name in _MATRICES else 1):
            return f"column {name!r} is {column.dtype.name} {column.shape}"
    axes = {getattr(index, name).shape[1] for name in _MATRICES}
    return None if len(axes) == 1 and 1 <= max(axes) <= _MOST_AXES else f"the boxes' columns have {axes} axes"


def _fingerprints(index: Index) -> str | None:
    column = index.x_fingerprint
    if column is None or (column.dtype.name == "uint64" and column.shape == index.key_axes.shape):
        return None
    return f"column 'x_fingerprint' is {column.dtype.name} {column.shape}"


def _lengths(index: Index) -> str | None:
    rows = {"key": "key_axes", "chunk": "chunk_key", "object": "object_file", "file": "file_length", "dtype": ""}
    for name in COLUMNS:
        group, _, what = name.partition("_")
        if group not in rows or what == "text":
            continue
        if group == "dtype" or name == "file_block" or (what == "start" and group != "chunk"):
            expected = getattr(index, f"{group}_start").size
        else:
            expected = getattr(index, rows[group]).size
        if len(getattr(index, name)) != expected:
            return f"column {name!r} has {len(getattr(index, name))} rows where {expected} are needed"
    counts = (("key", index.key_axes), ("object", index.object_file), ("file", index.file_length))
    wrong = [group for group, column in counts if getattr(index, f"{group}_start").size != column.size + 1]
    return f"the texts of {wrong} don't fit their rows" if wrong else None


def _texts(index: Index) -> str | None:
    for group in ("key", "dtype", "object", "file"):
        start, text = getattr(index, f"{group}_start"), getattr(index, f"{group}_text")
        if not start.size or start[0] != 0 or start[-1] != text.size or (np.diff(start) < 1).any():
            return f"the texts of {group!r} don't tile their column"
        names = texts(text, start)
        # Keys are found by bisection, which needs them sorted and each once.
        if group in ("key", "object") and any(map(ge, names, islice(names, 1, None))):
            return f"the texts of {group!r} aren't sorted, each once"
    # Raises if they aren't text. An unknown dtype is an error of its own tensor alone: the others still load.
    texts(index.dtype_text, index.dtype_start)
    return None


def _keys(index: Index) -> str | None:
    keys, axes = index.key_axes.size, index.key_shape.shape[1]
    if keys and not (index.key_axes.min() >= 0 and index.key_axes.max() <= axes):
        return "a tensor has more axes than its shape"
    if ((index.key_prepended < 0) | (index.key_prepended > index.key_axes)).any():
        return "a tensor has more prepended axes than axes"
    if ((index.key_dtype < 0) | (index.key_dtype >= index.dtype_start.size - 1)).any():
        return "a dtype's number is out of range"
    padding = np.arange(axes) < axes - index.key_axes[:, None]
    if (index.key_shape < 0).any() or (index.key_shape[padding] != 1).any() or _too_large(index.key_shape):
        return "a global shape is out of range"
    return None


def _files(index: Index) -> str | None:
    blocks = index.file_block
    if (index.file_length < 0).any() or blocks[0] != 0 or blocks[-1] != index.block_hash.size:
        return "the files' lengths or blocks are out of range"
    return "the files' blocks are out of order" if (np.diff(blocks) < 0).any() else None


def _places(index: Index) -> str | None:
    key = index.chunk_key
    if key.size and (key[0] < 0 or key[-1] >= index.key_axes.size or (np.diff(key) < 0).any()):
        return "a chunk's key is out of range"
    offset, shape = index.chunk_offset, index.chunk_shape
    if (offset < 0).any() or (shape < 0).any() or (offset > index.key_shape[key]).any():
        return "a chunk's box is out of range"
    if (shape > index.key_shape[key] - offset).any():
        return "a chunk's box reaches beyond its tensor"
    start, stop = index.chunk_start, index.chunk_stop
    whole = (start == -1) & (stop == -1)
    if not (whole | ((start >= 0) & (start <= stop) & (stop <= volumes(shape)))).all():
        return "a chunk's flat range is out of range"
    elements = np.where(whole, volumes(shape), stop - start)
    size = item_sizes(index)[index.key_dtype[key]]
    if ((size >= 0) & (elements * size != index.chunk_length)).any():
        return "a chunk's length isn't that of its elements"
    chunks = _outside(index, index.chunk_file, index.chunk_byte, index.chunk_length)
    objects = _outside(index, index.object_file, index.object_byte, index.object_length)
    return "a chunk or object reaches beyond its file" if chunks or objects else None


def shared_bytes_problem(index: Index) -> str | None:
    """Return what is wrong if bytes of a file belong to more than one chunk or object, or a file is listed twice."""
    # No save writes that, and it guards against a small file that becomes gigabytes of tensors. Names are compared by
    # their parts: "a//b" is the same file as "a/b".
    names = texts(index.file_text, index.file_start)
    if len({"/".join(PurePosixPath(name).parts) for name in names}) != len(names):
        return "a file is there twice"
    file = np.concatenate([index.chunk_file, index.object_file])
    begin = np.concatenate([index.chunk_byte, index.object_byte])
    length = np.concatenate([index.chunk_length, index.object_length])
    if index.file_length.astype(np.float64).sum() > _MOST_BYTES:
        return "the files are longer than any storage is large"
    return "two chunks or objects share bytes of a file" if overlap(index.file_length, file, begin, length) else None


def overlap(file_length: Column, file: Column, begin: Column, length: Column) -> bool:
    """Return whether any byte ranges of files overlap; each lies in its file, int64 (ranges,) each.

    Examples:
        >>> ten, zero = np.array([10, 10]), np.array([0, 0])
        >>> overlap(ten, np.array([0, 1]), zero, ten), overlap(ten, zero, np.array([0, 4]), np.array([5, 5]))
        (False, True)
    """
    base = np.cumsum(file_length) - file_length
    rows = np.flatnonzero(length)
    place = (base[file] + begin)[rows]
    # Disjoint ranges begin and end alternately, so starts and ends can be sorted apart: two sorts of plain numbers take
    # a fraction of the time of one sort of rows.
    return bool((np.sort(place)[1:] < np.sort(place + length[rows])[:-1]).any())


def _outside(index: Index, file: Any, byte: Any, length: Any) -> bool:
    if ((file < 0) | (file >= index.file_length.size) | (byte < 0) | (length < 0)).any():
        return True
    return bool((byte > index.file_length[file] - length).any()) if file.size else False


def _too_large(shape: Any) -> bool:
    """Return whether a tensor has more bytes than an int64 counts."""
    with np.errstate(over="ignore"):
        return bool((np.prod(np.maximum(shape, 1).astype(np.float64), axis=1) > 2.0**58).any())
