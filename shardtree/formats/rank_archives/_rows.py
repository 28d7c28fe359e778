"""Strategies of formats whose checkpoints are files of torch.save: loads, metadata, verification.

Stored tensors are read. Weights that are not stored are rounded from their float32 master weights; where both are
stored, they are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from ...errors import CheckpointingException, CorruptCheckpoint, UnsupportedValue, error_text
from ...kit import (
    Checkpoint,
    Damage,
    Finding,
    IndexMetadata,
    LoadPlan,
    ReadCost,
    ReadReport,
    Resolution,
    ShardedObject,
    ShardedTensor,
    Strategy,
    TensorKind,
    check_objects_known,
    chunks_of,
    file_regions,
    in_threads,
    opened,
    plan_load,
    plan_shards,
    planned_cost,
    read_planned,
    shard_columns,
    span_findings,
    threads_of,
)
from ..archives import Record, read_crc32
from ..torch import HEADERS
from ._contents import Contents
from ._copies import Seen, differing_among, resolution
from ._files import ArchiveFile, filled
from ._masters import Comparison, first_difference, memory_of, pieces_of
from ._scattered import in_order, read_scattered, scattered_cost


def load_sharded(checkpoint: Checkpoint, contents: Contents, shards: Sequence[ShardedTensor]) -> ReadReport:
    """Fill each shard's data, a contiguous CPU tensor, in place, and return a report of the reads.

    Raises:
        KeyMismatch: The checkpoint lacks a key.
        ShapeError: A tensor is stored with another global shape or dtype.
        UnsupportedValue: A tensor can't be read.
        CorruptCheckpoint: Stored bytes aren't what was saved, or belong to another parameter.
    """
    _check_loadable(checkpoint, contents, shards)
    computed = [shard for shard in shards if shard.key in contents.derived or shard.key in contents.numbers]
    if computed:  # The plan isn't used: making it checks shapes and dtypes.
        plan_shards(contents.shown, computed, shard_columns(computed))
    stored = [shard for shard in shards if shard.key not in contents.derived and shard.key not in contents.numbers]
    report = ReadReport(uncompared=_uncompared(checkpoint, contents, {shard.key for shard in stored}))
    if checkpoint.options.verify is not None:
        _check_files(checkpoint, contents)
        for shard in stored:
            report += _compare(checkpoint, contents, shard)
    if stored:
        report += _read(checkpoint, contents, stored)
    for shard in computed:
        report += _compute(checkpoint, contents, shard)
    return report


def _check_files(checkpoint: Checkpoint, contents: Contents) -> None:
    memo = checkpoint.once(Seen)
    if contents.check is not None and not memo.files:
        contents.check(checkpoint)
        memo.files = True


def _uncompared(checkpoint: Checkpoint, contents: Contents, keys: Set[str]) -> tuple[str, ...]:
    return tuple(sorted(keys & contents.compared.keys())) if checkpoint.options.verify is None else ()


def _check_loadable(checkpoint: Checkpoint, contents: Contents, shards: Sequence[ShardedTensor]) -> None:
    refused = _refused_among(checkpoint, contents, {shard.key for shard in shards}, reads=True)
    wrong = [f"{key!r}: {reason}" for key, reason in sorted(refused.items())]
    if wrong:
        fix = "Leave them out of the target, or, if only copies differ, load the first with LoadOptions(verify=None)."
        raise UnsupportedValue(
            error_text("load: tensors that cannot be read from the ranks' files", offenders=wrong, fix=fix)
        )


def _refused_among(checkpoint: Checkpoint, contents: Contents, keys: Iterable[str], *, reads: bool) -> dict[str, str]:
    """Return the reasons that tensors cannot be loaded, by key; loadable tensors are left out.

    Args:
        checkpoint: The open checkpoint; with ``verify=None``, copies of a tensor in several files are not compared.
        contents: Contents of the checkpoint.
        keys: Keys of the tensors.
        reads: True to read and compare the copies whose checksums do not tell whether they are equal.
    """
    unique_keys = dict.fromkeys(keys)
    refused = {key: contents.refused[key] for key in unique_keys if key in contents.refused}
    if checkpoint.options.verify is None:
        return refused
    if reads:
        return differing_among(checkpoint, contents.copies, unique_keys) | refused
    copies = ((key, copy) for key in unique_keys for copy in contents.copies.get(key, ()))
    unlike = [(key, copy.reason) for key, copy in copies if copy.same is False]
    return dict(reversed(unlike)) | refused  # In reverse order, so that a tensor's first differing copy is named.


def _read(checkpoint: Checkpoint, contents: Contents, shards: Sequence[ShardedTensor]) -> ReadReport:
    plan = plan_shards(contents.stored, shards, shard_columns(shards, checkpoint.world.rank))
    plan = in_order(plan, [file.length for file in contents.files]) if contents.scattered else plan
    report = read_planned(checkpoint, contents.checked.__getitem__, plan, [shard.data for shard in shards])
    return report + read_scattered(checkpoint, contents.scattered, shards) if contents.scattered else report


def _compute(checkpoint: Checkpoint, contents: Contents, shard: ShardedTensor) -> ReadReport:
    """Fill a shard whose tensor is stored as a Python number, or is a weight that is rounded from its master weight."""
    if shard.key in contents.numbers:
        shard.data.copy_(contents.numbers[shard.key])
        return ReadReport()
    report = ReadReport()
    for piece in pieces_of(shard):
        master = replace(piece, key=contents.derived[shard.key], data=memory_of(piece), dtype=torch.float32)
        report += _read(checkpoint, contents, [master])
        piece.data.copy_(master.data)
    return report


# Comparing masters with weights, which shows that a file belongs to its rank.


def _compare(checkpoint: Checkpoint, contents: Contents, shard: ShardedTensor) -> ReadReport:
    """Raise if a parameter's rounded master weight differs from its weight in the box of an optimizer state's shard.

    Each box is compared once. Master weights are stored with the states, and weights in other files. A difference
    therefore shows that a file was copied or exchanged.
    """
    pair = contents.compared.get(shard.key)
    box = (pair, shard.global_offset, shard.local_shape, str(shard.flattened_range))
    boxes = checkpoint.once(Seen).boxes
    if pair is None or box in boxes:
        return ReadReport()
    read, dtype = partial(_read, checkpoint, contents), _stored_kind(contents, pair.weight).dtype
    place, report = first_difference(read, pair, shard, dtype)
    if place is not None:
        raise _not_its_own(checkpoint, contents, pair, shard.global_shape, place)
    boxes.add(box)
    return report


def _stored_kind(contents: Contents, key: str) -> TensorKind:
    (number,) = contents.stored.find_keys([key])
    return contents.stored.kind(number)


def _not_its_own(
    checkpoint: Checkpoint, contents: Contents, pair: Comparison, shape: tuple[int, ...], place: tuple[int, ...]
) -> CorruptCheckpoint:
    index = contents.stored
    (number,) = index.find_keys([pair.master])
    flat = int(np.ravel_multi_index(place, shape)) if place else 0
    rows = np.flatnonzero((index.chunk_key == number) & (index.chunk_start <= flat) & (flat < index.chunk_stop))
    rows = rows if rows.size else np.flatnonzero(index.chunk_key == number)
    name = index.file(int(index.chunk_file[rows[0]])).name
    return CorruptCheckpoint(
        error_text(
            f"load: {checkpoint.storage.where(name)!r} is not the file that was saved with these weights",
            found=f"a master weight of {pair.weight!r} that rounds to another value than the weight, at element {flat}",
            expected="fp32 master weights that round to the weights",
            fix="A rank's file was copied, exchanged or taken from another step, or the weights were edited; "
            "load another checkpoint. LoadOptions(verify=None) skips this check.",
        )
    )


def _compare_all(checkpoint: Checkpoint, contents: Contents) -> Iterator[CorruptCheckpoint]:
    """Yield an error if a file belongs to another rank, then one for each weight that differs from its master weight.

    Master weights are rounded to the weights' dtype for the comparison.
    """
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
    """Return a description, without data, of every whole tensor by key and of every object by unique key."""
    return IndexMetadata(
        contents.shown,
        refused=lambda shards: _refused_among(checkpoint, contents, [shard.key for shard in shards], reads=False),
        uncompared=partial(_uncompared, checkpoint, contents),
        cost=partial(_cost, checkpoint, contents),
    )


def _cost(checkpoint: Checkpoint, contents: Contents, shards: Sequence[ShardedTensor], shown: LoadPlan) -> ReadCost:
    """Return the cost of loading shards, without the comparison of master weights with weights.

    Args:
        checkpoint: The open checkpoint.
        contents: Contents of the checkpoint.
        shards: Shards to load.
        shown: Plan that was made from the index of all tensors; unused.
    """
    # In the shown index, rows of derived tensors have the masters' bytes under another dtype, so a new plan is made.
    sources = [_as_read(contents, shard) for shard in shards if shard.key not in contents.numbers]
    columns = shard_columns(sources)
    numbers = contents.stored.find_keys(columns.keys)
    plan = plan_load(columns, chunks_of(contents.stored, np.array(numbers, dtype=np.int64)))
    plan = in_order(plan, [file.length for file in contents.files])
    cost = planned_cost(checkpoint, contents.checked.__getitem__, plan)
    return cost + scattered_cost(contents.scattered, sources)


def _as_read(contents: Contents, shard: ShardedTensor) -> ShardedTensor:
    """Return the shard, without data, of the stored tensor from which a shard is filled.

    A weight that is not stored itself is filled from its master weight. Other tensors are filled from their own bytes.
    """
    key = contents.derived.get(shard.key, shard.key)
    return replace(shard, key=key, dtype=_stored_kind(contents, key).dtype, data=None)


ReadContents = Callable[[Checkpoint], Contents]
"""Function that returns a checkpoint's contents, or raises CorruptCheckpoint if they can't be read."""


def rows_from_contents(read_contents: ReadContents) -> tuple[Strategy, ...]:
    """Return a format's strategies, which all work on the contents of a checkpoint.

    They are load_common, load_sharded, load_objects, load_metadata, verify and resolve, in this order.

    Args:
        read_contents: Function that lists the contents of a checkpoint; called once for an open checkpoint.
    """

    def contents(checkpoint: Checkpoint) -> Contents:
        return checkpoint.once(read_contents)

    def load_common(checkpoint: Checkpoint) -> Any:
        """Return the stored common tree."""
        return filled(checkpoint, contents(checkpoint).common)

    def load(checkpoint: Checkpoint, shards: Sequence[ShardedTensor]) -> ReadReport:
        """Fill each shard's data, a contiguous tensor, in place, and return a report of the reads."""
        return load_sharded(checkpoint, contents(checkpoint), shards)

    def load_objects(checkpoint: Checkpoint, objects: Sequence[ShardedObject]) -> list[Any]:
        """Return the data of each sharded object, in order."""
        stored_objects, unique_keys = contents(checkpoint).objects, [item.unique_key for item in objects]
        check_objects_known(unique_keys, [key in stored_objects for key in unique_keys])
        return [filled(checkpoint, stored_objects[key]) for key in unique_keys]

    def metadata(checkpoint: Checkpoint) -> Mapping[str, ShardedTensor | ShardedObject]:
        """Return a description, without data, of every whole tensor by key and of every object by unique key."""
        return load_metadata(checkpoint, contents(checkpoint))

    def verify(checkpoint: Checkpoint) -> tuple[Finding, ...]:
        """Return damaged records, checksum coverage, master weights unlike the weights, and unreadable tensors."""
        try:
            content = contents(checkpoint)
        except CheckpointingException as error:
            return (Damage("", str(error)),)
        return tuple(_verified(checkpoint, content))

    def resolve(checkpoint: Checkpoint, keys: Set[str], listed: bool) -> Resolution | None:
        """Return a task that compares copies of tensors, with a share for each rank; None if none is needed.

        The task is needed if one of `keys`, which are loaded, has copies. `listed` is ignored: the task is the same if
        the load also lists all keys.
        """
        return resolution(checkpoint, contents(checkpoint).copies, keys)

    return load_common, load, load_objects, metadata, verify, resolve


def _verified(checkpoint: Checkpoint, contents: Contents) -> Iterator[Finding]:
    records = [(file, record) for file in contents.files for record in file.records if record.crc32]

    def wrong(pair: tuple[ArchiveFile, Record]) -> str:
        file, record = pair
        try:
            with opened(checkpoint.storage, file.name, record.begin + record.nbytes) as reader:
                crc32 = read_crc32(reader, record.begin, record.begin + record.nbytes)
        except CheckpointingException as error:
            return str(error)
        checkpoint.options.progress(record.nbytes)
        return "" if crc32 == record.crc32 else f"the CRC32 of record {record.name[:100]!r} of an archive differs"

    problems = in_threads(wrong, records, threads_of(checkpoint.storage, checkpoint.options.threads))
    numbers = {file.name: number for number, file in enumerate(contents.files)}
    for (file, record), what in zip(records, problems, strict=True):
        if what:
            yield _damage(contents, numbers[file.name], record, what)
    for file in contents.files:
        covered = ((record.begin, record.begin + record.nbytes) for record in file.records if record.crc32)
        yield from span_findings(file.name, HEADERS, file.length, covered)
    if not any(problems):  # Otherwise damaged masters would differ from their weights, and be reported twice.
        yield from (Damage("", str(error)) for error in _compare_all(checkpoint, contents))
    refused = differing_among(checkpoint, contents.copies, contents.copies) | dict(contents.refused)
    yield from (Damage("", reason, keys=(key,)) for key, reason in refused.items())


def _damage(contents: Contents, number: int, record: Record, what: str) -> Damage:
    begin, end = record.begin, record.begin + record.nbytes
    regions = file_regions(contents.stored, number)(begin, end)
    behind = {key for key, boxes in contents.scattered.items() if any(box.tensor.record is record for box in boxes)}
    keys = tuple(sorted({region.key for region in regions} | behind))
    return Damage(contents.files[number].name, what, begin, end, keys, regions)
