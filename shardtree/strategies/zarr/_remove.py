"""Removing tensors and objects from a zarr folder of ours: a new index first, then the arrays that it needs no more."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from ...codec import canonical_json, parse_json
from ...errors import CorruptCheckpoint, StrategyError, error_text
from ...storage import Storage, digest
from .._checked import read_checked
from .._metadata import read_metadata, replace_metadata
from .._values import Checkpoint
from ..base import StrategyAction, register_default_strategy
from ..index import Index, texts, without_prefix
from ._blobs import FOLDER, Document, blob, decode_columns, encode_columns, group_document, write_blob
from ._common import BACKEND, VERSION
from ._load import is_own
from ._names import array_name
from ._v3 import NODE_FILE

_CHUNK_FILE = re.compile(r"(?P<folder>.+)/c(\.\d+)*")
_INDEX_FOLDER = re.compile(rf"{FOLDER}/index(-(?P<number>\d{{1,9}}))?")


@register_default_strategy(StrategyAction.REMOVE_SHARDED, BACKEND, VERSION)
def remove_sharded(checkpoint: Checkpoint, key_prefix: str) -> None:
    """Remove every stored tensor and object whose key begins with a prefix, and the arrays that become unused.

    Raises:
        StrategyError: another program wrote the arrays.
    """
    storage = checkpoint.storage
    if not is_own(checkpoint.fields):
        fix = "Remove the arrays' folders."
        raise StrategyError(error_text(f"remove: no save of ours wrote {storage.where()!r}", fix=fix))
    before, fields = read_metadata(storage)
    current = replace(checkpoint, fields=fields, memo={})
    old = decode_columns(*read_checked(current, "index"))
    new = without_prefix(old, key_prefix)
    if new is old:
        return
    members, unused = group_members(current), _unused(old, new)
    gone = (_folders(old, new) | folders_of(unused)).intersection(members)
    old_index = str(fields["index"]["name"]).rpartition("/")[0]
    data = encode_columns(new)
    name, document = blob(_next_index(old_index), len(data))
    write_blob(storage, name, [memoryview(data)], document, durable=True)
    gone.add(old_index)
    kept = {folder: each for folder, each in members.items() if folder not in gone}
    kept[name.rpartition("/")[0]] = document
    group = canonical_json(group_document({folder: kept[folder] for folder in sorted(kept)}))
    fields["index"] = {"name": name, "length": len(data), "digest": digest(data)}
    fields["group"] = {"name": NODE_FILE, "length": len(group), "digest": digest(group)}
    # Other programs find all arrays that they are told of, whenever this ends.
    replace_metadata(storage, before, fields, durable=True)
    storage.replace(NODE_FILE, group, durable=True)
    _remove(storage, unused, gone)


def _unused(old: Index, new: Index) -> set[str]:
    """Return the files that only the old index refers to."""
    return set(texts(old.file_text, old.file_start)) - set(texts(new.file_text, new.file_start))


def _folders(old: Index, new: Index) -> set[str]:
    """Return the folders of the tensors that only the old index has."""
    keys = set(texts(old.key_text, old.key_start)) - set(texts(new.key_text, new.key_start))
    return {array_name(key) for key in keys}


def group_members(checkpoint: Checkpoint) -> dict[str, Document]:
    """Return the metadata of all arrays and groups, by folder, as the group's zarr.json has it.

    Raises:
        CorruptCheckpoint: the file isn't what was saved.
    """
    data, where = read_checked(checkpoint, "group")
    node: Any = parse_json(data, where)
    for name in ("consolidated_metadata", "metadata"):
        node = node.get(name) if isinstance(node, dict) else None
    if not isinstance(node, dict):
        raise CorruptCheckpoint(error_text(f"open: {where!r} is not sound", expected="the metadata of all arrays"))
    return node


def folders_of(files: Iterable[str]) -> set[str]:
    """Return the folders of those files whose names are those of chunks.

    Examples:
        >>> sorted(folders_of(["w/c.0.1", "w/c.0.0", "s/c", "notes/cat.0"]))
        ['s', 'w']
    """
    return {found["folder"] for found in map(_CHUNK_FILE.fullmatch, files) if found}


def _next_index(folder: str) -> str:
    """Return the name of the index that follows the one in a folder."""
    found = _INDEX_FOLDER.fullmatch(folder)
    return f"index-{int(found['number'] or 0) + 1 if found else 1}"


def _remove(storage: Storage, files: Iterable[str], folders: Iterable[str]) -> None:
    # An index may have been made by somebody else: what no save wrote stays.
    for name in sorted(name for name in files if _CHUNK_FILE.fullmatch(name)):
        storage.remove(name)
    for folder in sorted(folders):
        storage.remove(f"{folder}/{NODE_FILE}")
        if _INDEX_FOLDER.fullmatch(folder):
            storage.remove(f"{folder}/c.0")
        storage.remove_folder(folder)
