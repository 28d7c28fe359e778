"""Native checkpoints as somebody hostile makes them: any columns, common state and metadata, and every hash right."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import shardtree as st
from shardtree.core.codec import HeaderEntry, encode_header
from shardtree.shell.storage import BLOCK_BYTES, digest
from shardtree.shell.table import encode_metadata
from shardtree.shell.table.index import Index, decode_index, encode_index, text_columns
from tests.fuzz.seeds import write_files

SAVE = "save-20260102T030405-0123456789abcdef"
DATA = f"{SAVE}/00000-of-00001.safetensors"
INDEX = f"{SAVE}/index-0.safetensors"
COMMON = f"{SAVE}/common.safetensors"


def _sound() -> tuple[bytes, Index, bytes]:
    """Return data file, index and common file of a small checkpoint."""
    tree = {
        "w": st.ShardedTensor.from_rank_offsets("w", torch.arange(24.0).reshape(4, 6)),
        "b": st.ShardedTensor.from_rank_offsets("b", torch.arange(8, dtype=torch.int8)),
        "rng": st.ShardedObject("rng", {"seed": 1}, (1,), (0,)),
        "step": 7,
    }
    storage = st.storage.MemoryStorage()
    st.save(tree, storage, options=st.SaveOptions(durable=False))
    fields = json.loads(storage.read("metadata.json"))
    index = decode_index(memoryview(storage.read(fields["index"]["name"])), "index")
    (data,) = (name for name in storage.names(fields["save_id"]) if "-of-" in name)
    return storage.read(f"{fields['save_id']}/{data}"), index, storage.read(fields["common"]["name"])


SOUND_DATA, _index, SOUND_COMMON = _sound()


def texts(group: str, names: list[str]) -> dict[str, Any]:
    """Return the two columns that hold texts."""
    text, start = text_columns(names)
    return {f"{group}_text": text, f"{group}_start": start}


SOUND_INDEX = replace(_index, **texts("file", [DATA]))


def common_of(structure: Any, *blobs: tuple[str, list[int], bytes]) -> bytes:
    """Return a common file of any structure, as JSON or as text, with the entries "0", "1", … beside it."""
    text = structure if isinstance(structure, bytes) else json.dumps(structure).encode()
    named = [*((str(n), *blob) for n, blob in enumerate(blobs)), ("structure", "U8", [len(text)], text)]
    entries, at = [], 0
    for name, tag, shape, data in named:
        entries.append(HeaderEntry(name, tag, tuple(shape), at, at + len(data)))
        at += len(data)
    return encode_header(entries) + b"".join(data for *_, data in named)


def hashed(index: Index, data: bytes) -> Index:
    """Return an index of one data file, with the lengths and hashes of that file."""
    blocks = [int(digest(data[at : at + BLOCK_BYTES]), 16) for at in range(0, len(data), BLOCK_BYTES)]
    return replace(
        index,
        file_length=np.array([len(data)]),
        file_block=np.array([0, len(blocks)]),
        block_hash=np.array(blocks, dtype=np.uint64),
    )


def forge(
    folder: Path,
    *,
    columns: dict[str, Any] | None = None,
    index: bytes | None = None,
    common: bytes = SOUND_COMMON,
    data: bytes = SOUND_DATA,
    fields: dict[str, Any] | None = None,
    files: dict[str, bytes] | None = None,
) -> Path:
    """Write a checkpoint whose hashes are all right, whatever else is.

    Args:
        folder: where to.
        columns: of the index, instead of the sound ones.
        index: the index file as bytes, instead of columns.
        common: the common file.
        data: the data file; the index has its hashes.
        fields: of metadata.json, instead of the sound ones.
        files: more files, by name.
    """
    if index is None:
        index = encode_index(replace(hashed(SOUND_INDEX, data), **(columns or {})))
    described = {
        "sharded_backend": "safetensors",
        "sharded_backend_version": 1,
        "common_backend": "safetensors",
        "common_backend_version": 1,
        "save_id": SAVE,
        "index": {"name": INDEX, "length": len(index), "digest": digest(index)},
        "common": {"name": COMMON, "length": len(common), "digest": digest(common)},
    }
    made = {DATA: data, INDEX: index, COMMON: common, "metadata.json": encode_metadata(described | (fields or {}))}
    return write_files(folder, made | (files or {}))


def chunks(key: Any, offset: Any, shape: Any, byte: Any, item: int) -> dict[str, Any]:
    """Return the columns of chunks of whole boxes in the one data file.

    Args:
        key: numbers of the tensors (chunks,).
        offset: (chunks, axes).
        shape: (chunks, axes).
        byte: where each begins in the file (chunks,).
        item: bytes of an element.
    """
    key, offset, shape = (np.asarray(column, dtype=np.int64) for column in (key, offset, shape))
    return {
        "chunk_key": key,
        "chunk_offset": offset,
        "chunk_shape": shape,
        "chunk_start": np.full(key.size, -1),
        "chunk_stop": np.full(key.size, -1),
        "chunk_file": np.zeros(key.size, np.int64),
        "chunk_byte": np.broadcast_to(np.asarray(byte, dtype=np.int64), key.shape).copy(),
        "chunk_length": shape.prod(axis=1) * item,
    }


def tensors(names: list[str], shape: Any, dtype: str = "uint8") -> dict[str, Any]:
    """Return the columns of tensors of one dtype.

    Args:
        names: sorted.
        shape: (tensors, axes).
        dtype: its name.
    """
    shape = np.asarray(shape, dtype=np.int64)
    nothing = np.zeros(0, np.int64)
    return {
        **texts("key", names),
        **texts("dtype", [dtype]),
        **texts("object", []),
        "object_file": nothing,
        "object_byte": nothing,
        "object_length": nothing,
        "key_axes": np.full(len(names), shape.shape[1]),
        "key_prepended": np.zeros(len(names), np.int64),
        "key_dtype": np.zeros(len(names), np.int64),
        "key_shape": shape,
    }
