"""Loading from torch.save's files: pieces that are stored, masters that are rounded, and states that are compared."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from ...errors import CorruptCheckpoint, UnsupportedValue, error_text
from ...layouts import TensorKind, shard_columns
from ...mapping import ShardedTensor
from ...plans import LoadPlan, ReadCost, find_unexpected, plan_load
from ...storage import ReadReport, fetch, fetch_cost
from .._checks import check_fit
from .._masters import Comparison, first_difference, memory_of, pieces_of
from .._metadata import check_lengths
from .._values import Checkpoint
from ..index import IndexMetadata, chunks_of, file_at, find_texts, kind_at, plan_shards, texts
from ._contents import Contents
from ._copies import Seen, refused_among


def load_sharded(checkpoint: Checkpoint, contents: Contents, shards: Sequence[ShardedTensor]) -> ReadReport:
    """Fill each shard's data, a contiguous CPU tensor, in place, and return what was read.

    Raises:
        KeyMismatch: the checkpoint lacks a key.
        ShapeError: a tensor is stored with another global shape or dtype.
        UnsupportedValue: a tensor can't be read.
        CorruptCheckpoint: stored bytes aren't what was saved, or aren't those of their parameter.
    """
    check_fit(
        find_unexpected({shard.key for shard in shards}, texts(contents.shown.key_text, contents.shown.key_start))
    )
    _check_loadable(checkpoint, contents, shards)
    computed = [shard for shard in shards if shard.key in contents.derived or shard.key in contents.numbers]
    if computed:  # the plan is only made for what it checks: shapes and dtypes
        plan_shards(contents.shown, computed, shard_columns(computed))
    own = [shard for shard in shards if shard.key not in contents.derived and shard.key not in contents.numbers]
    report = ReadReport(uncompared=_uncompared(checkpoint, contents, {shard.key for shard in own}))
    if checkpoint.options.verify is not None:
        _check_files(checkpoint, contents)
        for shard in own:
            report += _compare(checkpoint, contents, shard)
    if own:
        report += _read(checkpoint, contents, own)
    for shard in computed:
        report += _compute(checkpoint, contents, shard)
    return report


def _check_files(checkpoint: Checkpoint, contents: Contents) -> None:
    seen = checkpoint.once(Seen)
    if contents.check is not None and not seen.files:
        contents.check(checkpoint)
        seen.files = True


def _uncompared(checkpoint: Checkpoint, contents: Contents, keys: Set[str]) -> tuple[str, ...]:
    return tuple(sorted(keys & contents.compared.keys())) if checkpoint.options.verify is None else ()


def _check_loadable(checkpoint: Checkpoint, contents: Contents, shards: Sequence[ShardedTensor]) -> None:
    refused = refused_among(checkpoint, contents, {shard.key for shard in shards}, reads=True)
    wrong = [f"{key!r}: {reason}" for key, reason in sorted(refused.items())]
    if wrong:
        fix = "Leave them out of the target; LoadOptions(verify=None) reads the first rank's where copies differ."
        raise UnsupportedValue(error_text("load: tensors that can't be told", offenders=wrong, fix=fix))


def _read(checkpoint: Checkpoint, contents: Contents, shards: Sequence[ShardedTensor]) -> ReadReport:
    plan = plan_shards(contents.stored, shards, shard_columns(shards, checkpoint.world.rank))
    files = {number: contents.checked[number] for number in np.union1d(plan.runs.file, plan.strided.file).tolist()}
    check_lengths(checkpoint, files.values())
    options = checkpoint.options
    memories = [shard.data for shard in shards]
    return fetch(checkpoint.storage, files, plan, memories, verify=options.verify, progress=options.progress)


def _compute(checkpoint: Checkpoint, contents: Contents, shard: ShardedTensor) -> ReadReport:
    """Fill a shard that isn't stored as it is: a number, or its master rounded."""
    if shard.key in contents.numbers:
        shard.data.copy_(contents.numbers[shard.key])
        return ReadReport()
    report = ReadReport()
    for piece in pieces_of(shard):
        master = replace(piece, key=contents.derived[shard.key], data=memory_of(piece), dtype=torch.float32)
        report += _read(checkpoint, contents, [master])
        piece.data.copy_(master.data)
    return report


# Comparing masters with weights: what shows that a rank's file is the rank's


def _compare(checkpoint: Checkpoint, contents: Contents, shard: ShardedTensor) -> ReadReport:
    """Raise unless the master of a state, over the same box, is the weight once it is rounded; once for a box.

    A rank's masters and moments lie in one file. So a file that was copied or exchanged shows in its masters, since the
    weights lie in another one.
    """
    pair = contents.compared.get(shard.key)
    box = (pair, shard.global_offset, shard.local_shape, str(shard.flattened_range))
    seen = checkpoint.once(Seen).boxes
    if pair is None or box in seen:
        return ReadReport()
    read, dtype = partial(_read, checkpoint, contents), _stored_kind(contents, pair.weight).dtype
    place, report = first_difference(read, pair, shard, dtype)
    if place is not None:
        raise _not_its_own(checkpoint, contents, pair, shard.global_shape, place)
    seen.add(box)
    return report


def _stored_kind(contents: Contents, key: str) -> TensorKind:
    (number,) = find_texts(contents.stored.key_text, contents.stored.key_start, [key])
    return kind_at(contents.stored, number)


def _not_its_own(
    checkpoint: Checkpoint, contents: Contents, pair: Comparison, shape: tuple[int, ...], place: tuple[int, ...]
) -> CorruptCheckpoint:
    index = contents.stored
    (number,) = find_texts(index.key_text, index.key_start, [pair.master])
    flat = int(np.ravel_multi_index(place, shape)) if place else 0
    rows = np.flatnonzero((index.chunk_key == number) & (index.chunk_start <= flat) & (flat < index.chunk_stop))
    rows = rows if rows.size else np.flatnonzero(index.chunk_key == number)
    name = file_at(index, int(index.chunk_file[rows[0]])).name
    return CorruptCheckpoint(
        error_text(
            f"load: {checkpoint.storage.where(name)!r} isn't the file that was saved with these weights",
            found=f"element {flat} of the master of {pair.weight!r}, rounded, isn't the weight",
            expected="masters that are the weights, once they are rounded",
            fix="A rank's file was copied, exchanged or taken from another step, or the weights were edited; "
            "load another checkpoint. LoadOptions(verify=None) skips the comparison.",
        )
    )


def compare_all(checkpoint: Checkpoint, contents: Contents) -> Iterator[CorruptCheckpoint]:
    """Yield an error for each parameter whose master isn't its weight, and for a file that isn't its rank's own."""
    try:
        _check_files(checkpoint, contents)
    except CorruptCheckpoint as error:
        yield error
    for pair in dict.fromkeys(contents.compared.values()):
        shape = _stored_kind(contents, pair.master).global_shape
        whole = ShardedTensor(pair.master, None, torch.float32, shape, shape, (0,) * len(shape), None)
        try:
            _compare(checkpoint, contents, whole)
        except CorruptCheckpoint as error:
            yield error


def load_metadata(checkpoint: Checkpoint, contents: Contents) -> IndexMetadata:
    """Return every stored tensor by key, and object by unique key, whole and without data."""
    return IndexMetadata(
        contents.shown,
        refused=partial(refused_among, checkpoint, contents, reads=False),
        uncompared=partial(_uncompared, checkpoint, contents),
        cost=partial(_cost, checkpoint, contents),
    )


def _cost(checkpoint: Checkpoint, contents: Contents, shards: Sequence[ShardedTensor], shown: LoadPlan) -> ReadCost:
    """Return what loading shards would read; what a comparison of masters with weights reads isn't counted."""
    # What is shown has the masters' places in derived tensors' rows, so that it is planned anew.
    asked = [_as_read(contents, shard) for shard in shards if shard.key not in contents.numbers]
    columns = shard_columns(asked)
    numbers = find_texts(contents.stored.key_text, contents.stored.key_start, columns.keys)
    plan = plan_load(columns, chunks_of(contents.stored, np.array(numbers, dtype=np.int64)))
    files = {number: contents.checked[number] for number in np.union1d(plan.runs.file, plan.strided.file).tolist()}
    check_lengths(checkpoint, files.values())
    return fetch_cost(files, plan, verify=checkpoint.options.verify)


def _as_read(contents: Contents, shard: ShardedTensor) -> ShardedTensor:
    """Return a shard without data, in the key and dtype that its bytes have."""
    key = contents.derived.get(shard.key, shard.key)
    return replace(shard, key=key, dtype=_stored_kind(contents, key).dtype, data=None)
