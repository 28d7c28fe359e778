"""From what each rank wrote to the global index."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ...errors import IntegrityError, error_text
from ...geometry import Column
from ...layouts import join_columns, write_problems
from ...storage import StoredFile
from .._object_checks import check_objects_written
from ..index import Index, build_index
from ._totals import fingerprint_column
from ._written import Written


def collect_index(written: Sequence[Written]) -> Index:
    """Return the index of a checkpoint, given what its ranks wrote.

    Raises:
        IntegrityError: ranks disagree about a tensor, two wrote the same object, or a tensor is named like one.
    """
    columns = join_columns([part.columns for part in written])
    problems = write_problems(columns)
    if problems:
        fix = "Give replicas different replica_ids, and keep shards inside their tensor's global shape."
        what = "save: shards that can't lie in one checkpoint"
        raise IntegrityError(error_text(what, offenders=map(str, problems), fix=fix))
    first_file = np.cumsum([0, *(len(part.files) for part in written)])
    files = [
        StoredFile(name, length, hashes)
        for part in written
        for name, length, hashes in zip(part.files, part.lengths, part.hashes, strict=True)
    ]
    index = build_index(
        columns,
        _joined([part.file + base for part, base in zip(written, first_file, strict=False)]),
        _joined([part.byte for part in written]),
        files=files,
        objects=_objects(written, first_file, columns.keys),
    )
    return replace(index, x_fingerprint=fingerprint_column(columns, [part.totals for part in written]))


def _objects(written: Sequence[Written], first_file: Column, keys: Sequence[str]) -> list[tuple[str, int, int, int]]:
    rows = sorted(
        (key, file + int(base), byte, length)
        for part, base in zip(written, first_file, strict=False)
        for key, file, byte, length in part.objects
    )
    check_objects_written([row[0] for row in rows], keys)
    return rows


def _joined(columns: Sequence[Column]) -> Column:
    return np.concatenate([*columns, np.zeros(0, dtype=np.int64)])
