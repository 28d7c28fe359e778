"""From what each rank wrote to the global index."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from ...codec import dtype_name
from ...errors import IntegrityError, explain
from ...geometry import Column, box_column, volumes, widen
from ...layouts import join_columns, write_problems
from ...storage import block_count
from ._index import Index, text_columns
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
        raise IntegrityError(explain(what, offenders=map(str, problems), fix=fix))
    first_file = np.cumsum([0, *(len(part.files) for part in written)])
    order = np.lexsort((columns.start, *columns.offset.T[::-1], columns.key))
    key = columns.key[order]
    lengths = np.array([length for part in written for length in part.lengths], dtype=np.int64)
    key_text, key_start = text_columns(columns.keys)
    dtypes = sorted({dtype_name(kind.dtype) for kind in columns.kinds})
    dtype_text, dtype_start = text_columns(dtypes)
    axes = columns.offset.shape[1]
    shapes = widen(box_column([kind.global_shape for kind in columns.kinds], fill=1), axes, 1)
    offset, shape = widen(columns.offset, shapes.shape[1], 0), widen(columns.shape, shapes.shape[1], 1)
    elements = np.where(columns.start < 0, volumes(shape), columns.stop - columns.start)
    file_text, file_start = text_columns([name for part in written for name in part.files])
    hashes = [hashes for part in written for hashes in part.hashes]
    return Index(
        key_text=key_text,
        key_start=key_start,
        key_axes=_int64([len(kind.global_shape) for kind in columns.kinds]),
        key_prepended=_int64([kind.prepend_axis_num for kind in columns.kinds]),
        key_dtype=_int64([dtypes.index(dtype_name(kind.dtype)) for kind in columns.kinds]),
        key_shape=shapes,
        dtype_text=dtype_text,
        dtype_start=dtype_start,
        chunk_key=key,
        chunk_offset=offset[order],
        chunk_shape=shape[order],
        chunk_start=columns.start[order],
        chunk_stop=columns.stop[order],
        chunk_file=_joined([part.file + base for part, base in zip(written, first_file, strict=False)])[order],
        chunk_byte=_joined([part.byte for part in written])[order],
        chunk_length=(elements * columns.item_size[columns.key])[order],
        **_object_columns(written, first_file, columns.keys),
        file_text=file_text,
        file_start=file_start,
        file_length=lengths,
        file_block=np.cumsum([0, *block_count_of(lengths)], dtype=np.int64),
        block_hash=np.concatenate([*hashes, np.zeros(0, dtype=np.uint64)]),
    )


def block_count_of(lengths: Column) -> list[int]:
    """Return how many blocks tile each file."""
    return [block_count(length) for length in lengths.tolist()]


def _object_columns(written: Sequence[Written], first_file: Column, keys: Sequence[str]) -> dict[str, Any]:
    rows = sorted(
        (key, file + int(base), byte, length)
        for part, base in zip(written, first_file, strict=False)
        for key, file, byte, length in part.objects
    )
    twice = [repr(one[0]) for one, other in pairwise(rows) if one[0] == other[0]]
    if twice:
        fix = "Give replicas different replica_ids."
        raise IntegrityError(explain("save: objects written by more than one main replica", offenders=twice, fix=fix))
    shared = sorted({key for key, *_ in rows}.intersection(keys))
    if shared:
        fix = "Rename the tensors: '<key>/shard_<offset>_<shape>' is how an object is named."
        raise IntegrityError(explain("save: tensors named like objects", offenders=map(repr, shared), fix=fix))
    text, start = text_columns([key for key, *_ in rows])
    numbers = np.array([row[1:] for row in rows], dtype=np.int64).reshape(-1, 3)
    return {
        "object_text": text,
        "object_start": start,
        "object_file": numbers[:, 0],
        "object_byte": numbers[:, 1],
        "object_length": numbers[:, 2],
    }


def _joined(columns: Sequence[Column]) -> Column:
    return np.concatenate([*columns, _int64([])])


def _int64(values: Sequence[int]) -> Column:
    return np.array(values, dtype=np.int64)
