"""The commit: the index, and the file that makes a folder a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np

from ...errors import StorageError, StrategyError, error_text
from ...geometry import Column
from ...layouts import ShardColumns, check_stored_shards, join_columns, select_rows
from ...storage import Storage
from .._checks import check_objects_written
from .._traits import METADATA_FILE
from .._values import Fields, PendingSave
from ._common import VALUES
from ._listing import DCP, TORCH_DIST
from ._metadata_file import INDEX_FILE
from ._metadata_write import Archive, Stored, encode_index_file
from ._write import Written, note

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


def stored_by(pending: PendingSave, backend: str) -> Stored:
    """Return what the sharded strategy of a backend left in the memo about its files.

    Raises:
        StrategyError: another strategy wrote the shards.
    """
    stored = pending.memo.get(backend)
    if isinstance(stored, Stored):
        return stored
    fix = f"Save the shards with ({backend!r}, 1) too, or leave the common strategy out."
    raise StrategyError(error_text(f"save: no shards were written in the format {backend!r}", fix=fix))


_MEGATRON_FIELDS = ("sharded_backend", "sharded_backend_version", "common_backend", "common_backend_version")


def commit(pending: PendingSave, fields: Fields) -> None:
    """Write the index, then metadata.json with the four fields that Megatron-Core knows."""
    # No field of our own: Megatron-Core refuses a metadata.json with any other.
    stored, durable = stored_by(pending, TORCH_DIST[0]), pending.options.durable
    pending.storage.remove_folder(pending.save_id)
    # The index first: with metadata.json alone, Megatron-Core would open a folder that it can't read.
    pending.storage.replace(note(pending, INDEX_FILE), encode_index_file(stored, pending.save_id), durable=durable)
    # Otherwise the caller writes metadata.json: with another format's common state it needs more fields, and the
    # checkpoint can't be Megatron-Core's in any case.
    if fields["common_backend"] == "torch":
        data = json.dumps({name: fields[name] for name in _MEGATRON_FIELDS}).encode()
        pending.storage.replace(METADATA_FILE, data, durable=durable)


def commit_dcp(pending: PendingSave, fields: Fields) -> None:
    """Write the index, which makes the folder a checkpoint of torch.distributed.checkpoint."""
    stored, values = stored_by(pending, DCP[0]), pending.memo.get(VALUES, ())
    pending.storage.remove_folder(pending.save_id)
    # A path of one entry: a key with dots may be a dict in a dict or a parameter's name, and doesn't say which.
    paths = {key: (key,) for key in (*stored.columns.keys, *stored.objects)}
    paths |= {value.name: value.path for value in values}
    archives = {value.name: value.archive for value in values}
    data = encode_index_file(stored, pending.save_id, archives, paths)
    pending.storage.replace(INDEX_FILE, data, durable=pending.options.durable)
