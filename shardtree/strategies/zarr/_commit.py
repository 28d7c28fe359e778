"""The end of a save, on rank 0: the index of all chunk files, then the group, then metadata.json."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from ...codec import canonical_json
from ...errors import StorageError, error_text
from ...geometry import Column
from ...layouts import ShardColumns
from ...storage import Hashes, StoredFile, digest
from .._metadata import replace_metadata
from .._object_checks import check_objects_written
from .._values import Draft, Fields
from ..base import StrategyAction, register_default_strategy
from ..index import build_index
from ._blobs import FOLDER, Document, blob, encode_columns, group_document, write_blob, write_document
from ._common import BACKEND, VERSION
from ._group import Rows, array_columns, chunk_rows, inner_cells
from ._layout import Placed, placed
from ._shard_index import inner_counts
from ._v3 import NODE_FILE, OURS, encode_v3

_MEMO = "zarr"


@dataclass(frozen=True, slots=True, eq=False)
class Written:
    """What one rank wrote.

    Attributes:
        files: name, length in bytes and block hashes of each file, no hashes where others wrote it too; the file of
            the rank's objects comes last, if there is one.
        objects: unique key of each object, where it begins in that file, and its length in bytes.
    """

    files: tuple[tuple[str, int, Hashes | None], ...]
    objects: tuple[tuple[str, int, int], ...]


def write_index(draft: Draft, columns: ShardColumns, written: Sequence[Written]) -> Fields:
    """Write the index, and return what metadata.json says about it; on rank 0.

    Args:
        draft: what is being saved.
        columns: the shards that all ranks wrote.
        written: what each rank wrote.

    Raises:
        StorageError: rank 0 doesn't see a file as it was written.
        IntegrityError: two ranks wrote the same object, or a tensor has the name of one.
    """
    files = {name: StoredFile(name, length, hashes) for part in written for name, length, hashes in part.files}
    _check_seen(draft, files)
    number = {name: position for position, name in enumerate(files)}
    parts = sorted(placed(columns), key=lambda part: part.array.key)
    rows = [_rows(part, number) for part in parts]
    arrays = [part.array for part in parts]
    objects = [
        (unique_key, number[part.files[-1][0]], begin, length)
        for part in written
        for unique_key, begin, length in part.objects
    ]
    check_objects_written([key for key, *_ in objects], {array.key for array in arrays})
    kinds = dict(zip(columns.keys, columns.kinds, strict=True))
    stored = array_columns(arrays, rows)
    stored = replace(stored, kinds=tuple(kinds[key] for key in stored.keys))
    file, byte = (np.concatenate([_none(), *(getattr(one, name) for one in rows)]) for name in ("file", "byte"))
    data = encode_columns(build_index(stored, file, byte, files=list(files.values()), objects=objects))
    name, document = blob("index", len(data))
    write_blob(draft.storage, name, [memoryview(data)], document, durable=draft.options.durable)
    draft.memo[_MEMO] = _members(parts, written) | {f"{FOLDER}/index": document}
    return {"save_id": draft.save_id, "index": {"name": name, "length": len(data), "digest": digest(data)}}


def _check_seen(draft: Draft, files: dict[str, StoredFile]) -> None:
    for file in files.values():
        found = draft.storage.length(file.name)
        if found != file.length:
            what = f"save: rank 0 doesn't see {draft.storage.where(file.name)!r} as it was written"
            fix = "Every rank must see the same folder; use shared storage."
            raise StorageError(error_text(what, found=found, expected=f"{file.length} bytes", fix=fix))


def _rows(part: Placed, number: dict[str, int]) -> Rows:
    array, cells = part.array, part.cells
    file = np.array([number[array.file_name(tuple(cell))] for cell in cells.tolist()], dtype=np.int64)
    if array.inner is None:
        return chunk_rows(array, cells, array.step, file)
    each = prod(inner_counts(array))
    numbers = np.arange(each, dtype=np.int64)
    places = np.concatenate([inner_cells(array, cell, numbers) for cell in cells])
    begin = np.tile(numbers * (prod(array.inner) * array.dtype.itemsize), len(cells))
    return chunk_rows(array, places, array.inner, np.repeat(file, each), begin)


def _members(parts: Sequence[Placed], written: Sequence[Written]) -> dict[str, Document]:
    members = {part.array.name: encode_v3(part.array) for part in parts}
    for rank, part in enumerate(written):
        if part.objects:
            members[f"{FOLDER}/objects/{rank}"] = object_blob(rank, part.files[-1][1], part.objects)[1]
    return members


def object_blob(rank: int, length: int, places: Sequence[tuple[str, int, int]]) -> tuple[str, Document]:
    """Return the name of the file of a rank's objects, and the zarr.json of its array, which says where each lies."""
    return blob(f"objects/{rank}", length, {OURS: {"objects": [list(place) for place in places]}})


@register_default_strategy(StrategyAction.COMMIT, BACKEND, VERSION)
def commit(draft: Draft, fields: Fields) -> None:
    """Write the group's zarr.json, with the metadata of all arrays in it, and last metadata.json; on rank 0."""
    members = dict(draft.memo.get(_MEMO, {}))
    common = fields.get("common")
    if isinstance(common, dict) and str(common.get("name")).startswith(f"{FOLDER}/common/"):
        members[f"{FOLDER}/common"] = blob("common", int(common["length"]))[1]
    has_objects = any(name.startswith(f"{FOLDER}/objects/") for name in members)
    groups = [FOLDER, f"{FOLDER}/objects"] if has_objects else [FOLDER]
    for folder in groups:
        write_document(draft.storage, folder, group_document(), durable=draft.options.durable)
        members[folder] = group_document()
    ordered = {name: members[name] for name in sorted(members)}
    data = canonical_json(group_document(ordered))
    # In one step: a torn one would be taken for a checkpoint that is damaged, and no save could go there.
    draft.storage.replace(NODE_FILE, data, durable=draft.options.durable)
    if draft.options.durable:
        for folder in (*groups, ""):
            draft.storage.sync_folder(folder)
    entry = {"name": NODE_FILE, "length": len(data), "digest": digest(data)}
    replace_metadata(draft.storage, draft.before, {**fields, "group": entry}, durable=draft.options.durable)


def group_files() -> tuple[str, ...]:
    """Return the names of the files that say which folders are groups."""
    return NODE_FILE, f"{FOLDER}/{NODE_FILE}", f"{FOLDER}/objects/{NODE_FILE}"


def _none() -> Column:
    return np.zeros(0, dtype=np.int64)
