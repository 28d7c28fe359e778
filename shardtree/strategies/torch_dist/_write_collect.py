"""What all ranks wrote, put together and checked on rank 0 before anything says that it is there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...errors import IntegrityError, StorageError, StrategyError, error_text
from ...geometry import Column
from ...layouts import ShardColumns, join_columns, select_rows, write_problems
from ...storage import Storage
from .._object_checks import check_objects_written
from .._values import Draft
from ._write import Written

Archive = tuple[str, int, int]
"""A file's name, the archive's first byte there, and its length in bytes."""


@dataclass(frozen=True, slots=True, eq=False)
class Stored:
    """Everything that a checkpoint's ranks wrote.

    Attributes:
        columns: boxes of tensors, sorted by key and offset, no two alike.
        files: the data files' names.
        file: number of each box's file, int64 (boxes,).
        byte: where its archive begins, int64 (boxes,).
        length: of its archive in bytes, int64 (boxes,).
        objects: each object's archive by unique key, sorted.
    """

    columns: ShardColumns
    files: tuple[str, ...]
    file: Column
    byte: Column
    length: Column
    objects: dict[str, Archive]


def collect(storage: Storage, written: Sequence[Written]) -> Stored:
    """Return what the ranks wrote, by rank, as one.

    Raises:
        StorageError: a file isn't there as its rank wrote it.
        IntegrityError: ranks disagree about a tensor, two wrote the same element or object, or a tensor is named like
            an object.
    """
    _check_files(storage, written)
    columns = join_columns([part.columns for part in written])
    problems = write_problems(columns)
    if problems:
        fix = "Give replicas different replica_ids, and keep shards inside their tensor's global shape."
        what = "save: shards that can't lie in one checkpoint"
        raise IntegrityError(error_text(what, offenders=map(str, problems), fix=fix))
    number = np.cumsum([0, *(part.file is not None for part in written)])
    file = np.concatenate([np.full(len(part.columns), base) for part, base in zip(written, number, strict=False)])
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
    """Return the rows by key, then offset, without a second of the same: empty chunks may lie where others do."""
    order = np.lexsort((*columns.offset.T[::-1], columns.key))
    place = np.column_stack([columns.key, columns.offset])[order]
    again = np.zeros(order.size, dtype=np.bool_)
    again[1:] = (place[1:] == place[:-1]).all(axis=1)
    return order[~again]


def _objects(written: Sequence[Written], keys: Sequence[str]) -> dict[str, Archive]:
    rows = sorted((key, part.file or "", byte, length) for part in written for key, byte, length in part.objects)
    check_objects_written([row[0] for row in rows], keys)
    return {key: (file, byte, length) for key, file, byte, length in rows}


def stored_by(draft: Draft, backend: str) -> Stored:
    """Return what the sharded strategy of a backend remembered of its files.

    Raises:
        StrategyError: another strategy wrote the shards.
    """
    stored = draft.memo.get(backend)
    if isinstance(stored, Stored):
        return stored
    fix = f"Save the shards with ({backend!r}, 1) too, or leave the common strategy out."
    raise StrategyError(error_text(f"save: no shards were written in the format {backend!r}", fix=fix))
