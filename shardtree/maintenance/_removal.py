"""Removal of stored keys from a checkpoint with an index: a new index is written, and unused files are removed."""

from __future__ import annotations

import re
import secrets
from dataclasses import replace
from typing import Any

import numpy as np

from ..core.geometry import Column
from ..shell.storage import Storage, can, locked, remove_files, sync_folder
from ..shell.table import Checkpoint, is_save_file, noted, read_metadata, replace_metadata, write_checked
from ..shell.table.index import Index, encode_index, read_index, text_columns

_INDEX_FILE = re.compile(r"index-(\d{1,9})\.safetensors")
_TEXTS = {"key_text", "key_start", "object_text", "object_start"}

Rows = np.ndarray[tuple[int], np.dtype[np.bool_]]


def remove_sharded(checkpoint: Checkpoint, key_prefix: str) -> None:
    """Remove all tensors and objects whose keys begin with a prefix, and the data files that nothing else uses."""
    before, fields = read_metadata(checkpoint.storage)
    old = read_index(replace(checkpoint, fields=fields))
    if (thinner := without_prefix(old, key_prefix)) is None:
        return
    new, unused = thinner
    old_name = fields["index"]["name"]
    name = _next_name(checkpoint.storage, old_name)
    # The new index is on the medium before metadata.json names it, and files are removed last: a crash in between
    # leaves either the old checkpoint, or the new one with a few unused files.
    with noted(checkpoint.storage, name.rpartition("/")[0]):
        fields["index"] = write_checked(checkpoint.storage, name, encode_index(new), durable=True)
    sync_folder(checkpoint.storage, name.rpartition("/")[0])
    with locked(checkpoint.storage):
        replace_metadata(checkpoint.storage, before, fields, durable=True)
    # A forged index may name other files: only files with names of a save are removed.
    remove_files(checkpoint.storage, [file for file in (*sorted(unused), old_name) if is_save_file(file)])


def _next_name(storage: Storage, name: str) -> str:
    """Return an unused file name for a new index, in the folder of the present index `name`."""
    folder, slash, _ = name.rpartition("/")
    matches = (_INDEX_FILE.fullmatch(other) for other in storage.names(folder))
    number = max((int(match[1]) for match in matches if match), default=0) + 1
    # A late request of an earlier removal may still write the next number: it must not replace this removal's index.
    number += secrets.randbelow(10**9) if can(storage).late_requests else 0
    return f"{folder}{slash}index-{number}.safetensors"


def without_prefix(index: Index, key_prefix: str) -> tuple[Index, set[str]] | None:
    """Return the index without the tensors and objects whose keys have a prefix, and the files that become unused.

    Returns None if no key has the prefix.
    """
    keys = index.keys()
    objects = index.object_names()
    keep_key = np.array([not key.startswith(key_prefix) for key in keys], dtype=np.bool_)
    keep_object = np.array([not key.startswith(key_prefix) for key in objects], dtype=np.bool_)
    if keep_key.all() and keep_object.all():
        return None
    keep_chunk = keep_key[index.chunk_key]
    kept_keys, key_start = text_columns([key for key, keep in zip(keys, keep_key, strict=True) if keep])
    kept_objects, object_start = text_columns([key for key, keep in zip(objects, keep_object, strict=True) if keep])
    columns = (
        _columns_of_group(index, "key_", keep_key)
        | _columns_of_group(index, "chunk_", keep_chunk)
        | _columns_of_group(index, "object_", keep_object)
    )
    texts_of: dict[str, Any] = {
        "key_text": kept_keys,
        "key_start": key_start,
        "object_text": kept_objects,
        "object_start": object_start,
    }
    thinner = replace(index, **(columns | texts_of))
    fingerprints = None if index.x_fingerprint is None else index.x_fingerprint[keep_key]
    chunk_key = _new_numbers(keep_key)[thinner.chunk_key]
    new = _without_unused_files(replace(thinner, chunk_key=chunk_key, x_fingerprint=fingerprints))
    return new, set(index.file_names()) - set(new.file_names())


def _columns_of_group(index: Index, group: str, rows: Rows) -> dict[str, Any]:
    names = [name for name in Index.__slots__ if name.startswith(group) and name not in _TEXTS]
    return {name: getattr(index, name)[rows] for name in names}


def _without_unused_files(index: Index) -> Index:
    used = np.zeros(index.file_length.size, dtype=np.bool_)
    used[index.chunk_file] = True
    used[index.object_file] = True
    names = index.file_names()
    text, start = text_columns([name for name, keep in zip(names, used, strict=True) if keep])
    blocks = np.diff(index.file_block)
    number = _new_numbers(used)
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


def _new_numbers(keep: Rows) -> Column:
    return np.cumsum(keep, dtype=np.int64) - 1
