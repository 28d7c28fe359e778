"""The global index in columns: which tensor, which box, which file, which byte."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from ...geometry import Column
from ...storage import Hashes

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True, eq=False)
class Index:
    """Everything about a checkpoint but the elements. Texts are utf-8, one after the other, with where each starts.

    Attributes:
        key_text: tensors' keys, sorted, uint8 (characters,).
        key_start: int64 (keys + 1,).
        key_axes: rank of each tensor, int64 (keys,).
        key_prepended: how many of the axes are prepended, int64 (keys,).
        key_dtype: number of the dtype's name, int64 (keys,).
        key_shape: global shapes, right-aligned, int64 (keys, axes).
        dtype_text: names of the dtypes, uint8 (characters,).
        dtype_start: int64 (dtypes + 1,).
        chunk_key: number of the key, ascending, int64 (chunks,).
        chunk_offset: right-aligned, int64 (chunks, axes).
        chunk_shape: right-aligned, int64 (chunks, axes).
        chunk_start: first element of the flat range, -1 for a whole box, int64 (chunks,).
        chunk_stop: int64 (chunks,).
        chunk_file: number of the file, int64 (chunks,).
        chunk_byte: where the chunk begins in the file, int64 (chunks,).
        chunk_length: in bytes, int64 (chunks,).
        object_text: objects' unique keys, sorted, uint8 (characters,).
        object_start: int64 (objects + 1,).
        object_file: int64 (objects,).
        object_byte: int64 (objects,).
        object_length: int64 (objects,).
        file_text: names inside the checkpoint, uint8 (characters,).
        file_start: int64 (files + 1,).
        file_length: in bytes, int64 (files,).
        file_block: number of each file's first block hash, int64 (files + 1,).
        block_hash: XXH3-64 of each block, file by file, uint64 (blocks,).
        x_fingerprint: of each tensor, uint64 (keys,); None where the save was asked for none.
    """

    key_text: Bytes
    key_start: Column
    key_axes: Column
    key_prepended: Column
    key_dtype: Column
    key_shape: Column
    dtype_text: Bytes
    dtype_start: Column
    chunk_key: Column
    chunk_offset: Column
    chunk_shape: Column
    chunk_start: Column
    chunk_stop: Column
    chunk_file: Column
    chunk_byte: Column
    chunk_length: Column
    object_text: Bytes
    object_start: Column
    object_file: Column
    object_byte: Column
    object_length: Column
    file_text: Bytes
    file_start: Column
    file_length: Column
    file_block: Column
    block_hash: Hashes
    x_fingerprint: Hashes | None = None


OPTIONAL_COLUMNS = ("x_fingerprint",)
COLUMNS = tuple(field.name for field in fields(Index) if field.name not in OPTIONAL_COLUMNS)
