"""Removing tensors and objects from a saved checkpoint: a new index first, then the files that it needs no more."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np

from ...geometry import Column
from ...storage import Storage
from .._metadata import read_metadata, replace_metadata
from .._values import Checkpoint
from ..base import StrategyAction, register_default_strategy
from ..index import Index, text_columns, texts
from ._clean import is_save_file
from ._files import write_checked
from ._index_file import encode_index
from ._load import read_index
from ._save import BACKEND, VERSION

_INDEX = re.compile(r"index-(\d{1,9})\.safetensors")

Rows = np.ndarray[tuple[int], np.dtype[np.bool_]]


@register_default_strategy(StrategyAction.REMOVE_SHARDED, BACKEND, VERSION)
def remove_sharded(checkpoint: Checkpoint, key_prefix: str) -> None:
    """Remove every stored tensor and object whose key begins with a prefix, and the data files that become unused."""
    before, fields = read_metadata(checkpoint.storage)
    old_name = fields["index"]["name"]
    old = read_index(replace(checkpoint, fields=fields))
    new = without_prefix(old, key_prefix)
    if new is old:
        return
    name = _next_name(checkpoint.storage, fields["index"]["name"])
    fields["index"] = write_checked(checkpoint.storage, name, encode_index(new), durable=True)
    checkpoint.storage.sync_folder(name.rpartition("/")[0])
    replace_metadata(checkpoint.storage, before, fields, durable=True)
    unused = set(texts(old.file_text, old.file_start)) - set(texts(new.file_text, new.file_start))
    for file in (*sorted(unused), old_name):
        # An index may have been made by somebody else: what no save wrote stays.
        if is_save_file(file):
            checkpoint.storage.remove(file)


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
    return _without_unused_files(replace(thinner, chunk_key=_renumbered(keep_key)[thinner.chunk_key]))


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


def _next_name(storage: Storage, name: str) -> str:
    """Return the name of the index that follows the one of this name."""
    folder, slash, _ = name.rpartition("/")
    numbers = (_INDEX.fullmatch(other) for other in storage.names(folder))
    number = max((int(found[1]) for found in numbers if found), default=0)
    return f"{folder}{slash}index-{number + 1}.safetensors"
