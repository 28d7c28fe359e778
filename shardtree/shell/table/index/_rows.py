"""The rows that follow from an index of which box lies where: loads, metadata, verify and removal; and LOAD_COMMON."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from ....core.codec import decode_tree
from ....core.geometry import Column
from ....core.mapping import ShardedObject, ShardedTensor
from ....core.plans import Runs, runs_plan
from ....errors import CheckpointingException, CorruptCheckpoint
from ...storage import ReadReport, Storage, can, locked, remove_files, sync_folder
from .._actions import Strategies, StrategyAction
from .._checks import check_objects_known
from .._findings import Damage, Finding
from .._metadata import checked_name, read_checked, read_metadata, replace_metadata, write_checked
from .._save_folders import is_save_file, noted
from .._traits import FormatTraits
from .._values import Checkpoint
from ._columns import Index, find_texts, text_columns, texts
from ._damage import files_findings
from ._file import encode_index, read_index
from ._load import load_from_index, read_planned
from ._metadata import IndexMetadata

# The rows


ReadIndex = Callable[[Checkpoint], Index]
"""Returns the index of a checkpoint; raises CorruptCheckpoint if that can't be read."""


def rows_from_index(backend: str, version: int, read_index: ReadIndex) -> Strategies:
    """Return the rows of a format that can say where its bytes are: LOAD_SHARDED, _OBJECTS, _METADATA, VERIFY.

    Loads read only the bytes that are needed, straight into the targets' memory; each stored chunk has to be row-major
    bytes at one place in one file. Objects are stored as `item_bytes` encodes them.

    Args:
        backend: the format's name.
        version: the format's version.
        read_index: called once for an open checkpoint.

    Examples:
        >>> rows = rows_from_index("tar", 1, read_index)
        >>> sorted(action.value for action, *_ in rows)
        ['load_metadata', 'load_objects', 'load_sharded', 'verify']
    """

    def load_sharded(checkpoint: Checkpoint, shards: Sequence[ShardedTensor]) -> ReadReport:
        """Fill each shard's data, a contiguous tensor, in place, and return what was read."""
        return load_from_index(checkpoint, checkpoint.once(read_index), shards)

    def load_objects(checkpoint: Checkpoint, objects: Sequence[ShardedObject]) -> list[Any]:
        """Return the data of each sharded object, in order."""
        return objects_from_index(checkpoint, checkpoint.once(read_index), objects) if objects else []

    def load_metadata(checkpoint: Checkpoint) -> Mapping[str, ShardedTensor | ShardedObject]:
        """Return every stored tensor by key, and object by unique key, whole and without data."""
        return IndexMetadata(checkpoint.once(read_index))

    def verify(checkpoint: Checkpoint) -> tuple[Finding, ...]:
        """Return which blocks of the indexed files aren't as they were saved, and which have no hash."""
        return verify_index(checkpoint, read_index)

    return {
        (StrategyAction.LOAD_SHARDED, backend, version): load_sharded,
        (StrategyAction.LOAD_OBJECTS, backend, version): load_objects,
        (StrategyAction.LOAD_METADATA, backend, version): load_metadata,
        (StrategyAction.VERIFY, backend, version): verify,
    }


def rows_of_saves(backend: str, version: int) -> Strategies:
    """Return the rows of a format that saves by `save_with_index`: all but SAVE_SHARDED, and those of a common state.

    They are `rows_from_index`'s, REMOVE_SHARDED and LIST_FILES, and DESCRIBE: all files are in the save's own folder.

    Examples:
        >>> rows = rows_of_saves("tar", 1)
        >>> (StrategyAction.LIST_FILES, "tar", 1) in rows, (StrategyAction.SAVE_SHARDED, "tar", 1) in rows
        (True, False)
    """
    return {
        **rows_from_index(backend, version, read_index),
        (StrategyAction.REMOVE_SHARDED, backend, version): remove_sharded,
        (StrategyAction.LIST_FILES, backend, version): list_files,
        (StrategyAction.DESCRIBE, backend, version): lambda: FormatTraits(in_save_folder=True, fills_devices=True),
    }


def objects_from_index(checkpoint: Checkpoint, index: Index, objects: Sequence[ShardedObject]) -> list[Any]:
    """Return the data of each sharded object, in order.

    Raises:
        KeyMismatch: the checkpoint lacks some.
        CorruptCheckpoint: stored bytes aren't what was saved.
        UnsafeFile: one was pickled, and `allow_pickle` isn't given.
    """
    unique_keys = [item.unique_key for item in objects]
    numbers = find_texts(index.object_text, index.object_start, unique_keys)
    check_objects_known(unique_keys, [number >= 0 for number in numbers])
    rows = np.array(numbers, dtype=np.int64)
    memories = [torch.empty(length, dtype=torch.uint8, device="cpu") for length in index.object_length[rows].tolist()]
    order = np.lexsort((index.object_byte[rows], index.object_file[rows]))
    file, byte, length = (getattr(index, f"object_{name}")[rows[order]] for name in ("file", "byte", "length"))
    plan = runs_plan(Runs(file, byte, order, np.zeros(order.size, dtype=np.int64), length))
    # Always whole blocks: a tensor with a flipped bit has a number that is a little wrong, an object is another one.
    options = replace(checkpoint.options, verify="all" if checkpoint.options.verify else None)
    read_planned(replace(checkpoint, options=options), index, plan, memories)
    return [_decoded_object(memory, key, checkpoint) for memory, key in zip(memories, unique_keys, strict=True)]


def load_common(checkpoint: Checkpoint) -> Any:
    """Return the stored common tree, with holes where shards were, of formats that have it in the common codec."""
    data, _ = read_checked(checkpoint, "common")
    options = checkpoint.options
    return decode_tree(data, types=options.types, allow_pickle=options.allow_pickle)


def _decoded_object(memory: torch.Tensor, unique_key: str, checkpoint: Checkpoint) -> Any:
    options = checkpoint.options
    try:
        return decode_tree(memoryview(memory.numpy()), types=options.types, allow_pickle=options.allow_pickle)
    except CheckpointingException as error:
        error.add_note(f"tree is the data of ShardedObject {unique_key!r}")
        raise


def verify_index(checkpoint: Checkpoint, read_index: ReadIndex) -> tuple[Finding, ...]:
    """Return which blocks of the indexed files aren't as they were saved, and which have no hash.

    Args:
        checkpoint: what is checked.
        read_index: returns its index; its error is the only finding, since the hashes are in the index.
    """
    try:
        index = checkpoint.once(read_index)
    except CorruptCheckpoint as error:
        return (Damage(checked_name(checkpoint, "index"), str(error)),)
    return tuple(files_findings(checkpoint, index))


_INDEX_FILE = re.compile(r"index-(\d{1,9})\.safetensors")


def remove_sharded(checkpoint: Checkpoint, key_prefix: str) -> None:
    """Remove every stored tensor and object whose key begins with a prefix, and the data files that become unused."""
    before, fields = read_metadata(checkpoint.storage)
    old = read_index(replace(checkpoint, fields=fields))
    new = without_prefix(old, key_prefix)
    if new is old:
        return
    old_name = fields["index"]["name"]
    name = _next_name(checkpoint.storage, old_name)
    # The new index is whole on the medium before metadata.json names it, and only then do files go: a crash in
    # between leaves a checkpoint that is as before, or as it should be with a few files too many.
    with noted(checkpoint.storage, name.rpartition("/")[0]):
        fields["index"] = write_checked(checkpoint.storage, name, encode_index(new), durable=True)
    sync_folder(checkpoint.storage, name.rpartition("/")[0])
    with locked(checkpoint.storage):
        replace_metadata(checkpoint.storage, before, fields, durable=True)
    # Guards against a crafted index that names other files: only names that a save gives are removed.
    remove_files(
        checkpoint.storage, [file for file in (*sorted(unused_files(old, new)), old_name) if is_save_file(file)]
    )


def _next_name(storage: Storage, name: str) -> str:
    """Return the name of the index that follows the one of this name."""
    folder, slash, _ = name.rpartition("/")
    matches = (_INDEX_FILE.fullmatch(other) for other in storage.names(folder))
    number = max((int(match[1]) for match in matches if match), default=0) + 1
    # What an earlier removal has sent may arrive yet, under the next number: it mustn't replace this one's index.
    number += secrets.randbelow(10**9) if can(storage).late_requests else 0
    return f"{folder}{slash}index-{number}.safetensors"


def list_files(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Return the names of the files of a save's folder that a save writes."""
    folder = checkpoint.fields.get("save_id")
    names = checkpoint.storage.names(folder) if isinstance(folder, str) and folder else ()
    return tuple(name for name in (f"{folder}/{last}" for last in names) if is_save_file(name))


def unused_files(old: Index, new: Index) -> set[str]:
    """Return the files that only the old of two indexes refers to."""
    return set(texts(old.file_text, old.file_start)) - set(texts(new.file_text, new.file_start))


# An index without some of its tensors and objects, and without the files that become unused

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
    return _without_unused_files(replace(thinner, chunk_key=chunk_key, x_fingerprint=fingerprints))


def _columns_of_group(index: Index, group: str, rows: Rows) -> dict[str, Any]:
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
