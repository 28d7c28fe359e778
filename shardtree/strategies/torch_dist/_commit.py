"""The commit: the index, and the file that makes a folder a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ...errors import StorageError, StrategyError, TreePath, error_text
from ...geometry import Column
from ...layouts import ShardColumns, check_stored_shards, join_columns, select_rows
from ...storage import Storage, remove_folder
from .._checks import check_objects_written
from .._traits import METADATA_FILE
from .._values import Fields, PendingSave
from ._listing import DCP, TORCH_DIST
from ._metadata_file import INDEX_FILE
from ._metadata_write import Archive, Stored, encode_index_file
from ._write import Written

# What all ranks wrote, combined and checked on rank 0 before any file refers to it


def collect(storage: Storage, written: Sequence[Written]) -> Stored:
    """Return what all ranks wrote, given by rank, as one value.

    Raises:
        StorageError: a file isn't there as its rank wrote it.
        IntegrityError: ranks disagree about a tensor, two wrote the same element or object, or a tensor is named like
            an object.
    """
    _check_files(storage, written)
    columns = join_columns([part.columns for part in written])
    check_stored_shards(columns)
    # A rank with nothing to write has no file, and no number.
    number = np.cumsum([0, *(part.file is not None for part in written)])
    file = np.concatenate([np.full(len(part.columns), base) for part, base in zip(written, number, strict=False)])
    # Readers of DCP look archives up by key and offset: two of the same would be one of them, by chance.
    rows = _sorted_once(columns)
    return Stored(
        select_rows(columns, rows),
        tuple(part.file for part in written if part.file is not None),
        file[rows],
        np.concatenate([part.byte for part in written])[rows],
        np.concatenate([part.length for part in written])[rows],
        _objects(written, columns.keys),
    )


def _check_files(storage: Storage, written: Sequence[Written]) -> None:
    for rank, part in enumerate(written):
        found = None if part.file is None else storage.length(part.file)
        if part.file is not None and found != part.file_length:
            fix = "Every rank must see the same folder; use shared storage."
            what = f"save: rank 0 doesn't see {storage.where(part.file)!r} as rank {rank} wrote it"
            raise StorageError(error_text(what, found=found, expected=f"{part.file_length} bytes", fix=fix))


def _sorted_once(columns: ShardColumns) -> Column:
    """Return the rows by key, then offset, each place once."""
    # Only chunks without elements can repeat a place, and readers look archives up by place.
    order = np.lexsort((*columns.offset.T[::-1], columns.key))
    place = np.column_stack([columns.key, columns.offset])[order]
    again = np.zeros(order.size, dtype=np.bool_)
    again[1:] = (place[1:] == place[:-1]).all(axis=1)
    return order[~again]


def _objects(written: Sequence[Written], keys: Sequence[str]) -> dict[str, Archive]:
    rows = sorted((key, part.file or "", byte, length) for part in written for key, byte, length in part.objects)
    check_objects_written([row[0] for row in rows], keys)
    return {key: (file, byte, length) for key, file, byte, length in rows}


@dataclass(frozen=True, slots=True)
class StoredValue:
    """A plain value of the common state.

    Attributes:
        name: its path, joined by dots.
        path: where it stands in the common tree.
        archive: where it is stored.
    """

    name: str
    path: TreePath
    archive: Archive


@dataclass(slots=True, eq=False)
class Saving:
    """What the rows of one save have found out and done on a rank, for those that come after.

    Attributes:
        backend: of the two, the one that the shards are saved in.
        stored: what all ranks have stored, once rank 0 has checked it.
        values: the plain values of the common state, once they are written.
        names: of the files that rank 0 has begun to write before the commit; a save that fails removes them.
    """

    backend: str
    stored: Stored | None = None
    values: tuple[StoredValue, ...] = ()
    names: list[str] = field(default_factory=list)


def stored_by(pending: PendingSave, backend: str) -> tuple[Saving, Stored]:
    """Return the state of a save whose shards are in a backend's format, and what was stored of these.

    Raises:
        StrategyError: another strategy wrote the shards.
    """
    state = pending.state
    if isinstance(state, Saving) and state.backend == backend and state.stored is not None:
        return state, state.stored
    fix = f"Save the shards with ({backend!r}, 1) too, or leave the common strategy out."
    raise StrategyError(error_text(f"save: no shards were written in the format {backend!r}", fix=fix))


_MEGATRON_FIELDS = ("sharded_backend", "sharded_backend_version", "common_backend", "common_backend_version")


def commit(pending: PendingSave, fields: Fields) -> None:
    """Write the index, then metadata.json with the four fields that Megatron-Core knows."""
    # No field of our own: Megatron-Core refuses a metadata.json with any other.
    (saving, stored), durable = stored_by(pending, TORCH_DIST[0]), pending.options.durable
    remove_folder(pending.storage, pending.save_id)
    saving.names.append(INDEX_FILE)
    # The index first: with metadata.json alone, Megatron-Core would open a folder that it can't read.
    pending.storage.replace(INDEX_FILE, encode_index_file(stored, pending.save_id), durable=durable)
    # Otherwise the caller writes metadata.json: with another format's common state it needs more fields, and the
    # checkpoint can't be Megatron-Core's in any case.
    if fields["common_backend"] == "torch":
        data = json.dumps({name: fields[name] for name in _MEGATRON_FIELDS}).encode()
        pending.storage.replace(METADATA_FILE, data, durable=durable)


def commit_dcp(pending: PendingSave, fields: Fields) -> None:
    """Write the index, which makes the folder a checkpoint of torch.distributed.checkpoint."""
    saving, stored = stored_by(pending, DCP[0])
    remove_folder(pending.storage, pending.save_id)
    # A path of one entry: a key with dots may be a dict in a dict or a parameter's name, and doesn't say which.
    paths = {key: (key,) for key in (*stored.columns.keys, *stored.objects)}
    paths |= {value.name: value.path for value in saving.values}
    archives = {value.name: value.archive for value in saving.values}
    data = encode_index_file(stored, pending.save_id, archives, paths)
    pending.storage.replace(INDEX_FILE, data, durable=pending.options.durable)
