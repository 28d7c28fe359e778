"""Loading tensors and objects from archives of torch.save."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

import numpy as np
import torch

from ...errors import UnsupportedValue, error_text
from ...kit import (
    ByteRanges,
    Checkpoint,
    Column,
    Copies,
    Damage,
    DeferredMetadata,
    Index,
    IndexMetadata,
    LoadPlan,
    ReadCost,
    ReadReport,
    Resolution,
    ShardedObject,
    ShardedTensor,
    StoredFile,
    Verify,
    byte_buffer,
    check_objects_known,
    check_taken,
    fetch_cost,
    fetch_from_memory,
    plan_shards,
    read_planned,
    row_major_bits,
    runs_plan,
    shard_columns,
)
from ..archives import StoredTensor, box_of, filled_tensor
from ..rank_archives import check_record
from ..unique_keys import is_object
from ._buckets import is_bucket, is_groups
from ._listing import ArchiveListing, index_on_files, read_listing
from ._model_states import FIX, Comparisons, differing, refuse, refused_among, states_among
from ._optimizer import STEP, States, optimizer_index, state_copies
from ._payloads import (
    SCATTERED,
    Payloads,
    archive_name,
    check_reach,
    check_tensor,
    decoded,
    decoded_at,
    open_data_file,
    payloads_of,
)


def read_archives(
    checkpoint: Checkpoint, listing: ArchiveListing, plan: LoadPlan, memories: Sequence[torch.Tensor]
) -> ReadReport:
    """Execute a plan for a listing's index, and return a report that counts archives as blocks.

    Args:
        checkpoint: The open checkpoint.
        listing: Listing whose index the plan is for.
        plan: Plan to execute.
        memories: Memory of each requested shard, a contiguous tensor, written in place.

    Raises:
        CorruptCheckpoint: An archive isn't what was saved.
    """
    run, piece = listing.archives.at(plan.runs.byte), listing.archives.at(plan.strided.byte)
    numbers = np.union1d(run, piece)
    payloads = payloads_of(checkpoint, listing, numbers)
    in_order, run_in_order, piece_in_order = (payloads.begin[rows] != SCATTERED for rows in (numbers, run, piece))
    # Row-major payloads are read straight from the data files, as in any other format; others are decoded whole.
    direct = plan.select(run_in_order, piece_in_order)
    file_plan = _file_plan(listing, payloads, direct, run[run_in_order], piece[piece_in_order])
    files = _files(listing, payloads, numbers[in_order])
    report = read_planned(checkpoint, files.__getitem__, file_plan, memories)
    for number in numbers[~in_order].tolist():
        rows = plan.select(run == number, piece == number)
        report += _read_scattered(checkpoint, listing, payloads.places.get(number), number, rows, memories)
    return report


def archives_cost(
    checkpoint: Checkpoint, listing: ArchiveListing, shards: Sequence[ShardedTensor], plan: LoadPlan
) -> ReadCost:
    """Return the cost of a plan for a listing's index, assuming row-major tensors that have checksums.

    Archives aren't opened, so that tensors in another order go unnoticed. A load also reads each archive's own
    directory for the offset of its tensor, which takes a few hundred bytes more.

    Args:
        checkpoint: Checkpoint with the options of the reads.
        listing: Listing whose index the plan is for.
        shards: Shards that the plan would fill.
        plan: Plan whose cost is estimated.

    Raises:
        CorruptCheckpoint: A data file is missing, or is shorter than the listing says.
    """
    archives = listing.archives
    run, piece = archives.at(plan.runs.byte), archives.at(plan.strided.byte)
    numbers = np.union1d(run, piece)
    for file in np.unique(archives.file[numbers]).tolist():
        check_reach(checkpoint, listing, file, numbers[archives.file[numbers] == file].tolist())
    # An archive that is shorter than its tensor holds an expanded tensor (stride 0), and is decoded whole.
    repeats = archives.payload > archives.length
    direct, begin = plan.select(~repeats[run], ~repeats[piece]), archives.start[numbers]
    ranges = ByteRanges(begin, begin + archives.payload[numbers], np.ones_like(begin))
    virtual = replace(archives.virtual, ranges=ranges)
    cost = fetch_cost({0: virtual}, direct, verify=checkpoint.options.verify)
    decoded_bytes = int(archives.length[numbers[repeats[numbers]]].sum())
    files = np.unique(archives.file[numbers]).size
    return replace(cost, bytes_wanted=plan.bytes_read, bytes_read=cost.bytes_read + decoded_bytes, files=files)


def _file_plan(listing: ArchiveListing, payloads: Payloads, plan: LoadPlan, run: Column, piece: Column) -> LoadPlan:
    """Return a plan for the data files, translated from a plan for the virtual file that joins all archives' payloads.

    Args:
        listing: Listing of the checkpoint.
        payloads: Offsets of the payloads in the data files.
        plan: Plan for the virtual file, with row-major payloads only.
        run: Number of the archive that each contiguous read is from, int64 (runs,).
        piece: Number of the archive that each strided read is from, int64 (pieces,).
    """
    archives = listing.archives
    run_shift, piece_shift = (payloads.begin[rows] - archives.start[rows] for rows in (run, piece))
    # The rows are sorted again, since two tensors may share an archive and then change their order.
    runs = runs_plan(replace(plan.runs, file=archives.file[run], byte=plan.runs.byte + run_shift)).runs
    strided = replace(plan.strided, file=archives.file[piece], byte=plan.strided.byte + piece_shift)
    return replace(plan, runs=runs, strided=strided)


def _files(listing: ArchiveListing, payloads: Payloads, numbers: Column) -> dict[int, StoredFile]:
    """Return the data files of archives, by file number, each with the byte ranges and checksums of its payloads."""
    archives, files = listing.archives, dict[int, StoredFile]()
    for file in np.unique(archives.file[numbers]).tolist():
        inside = numbers[archives.file[numbers] == file]
        begin = payloads.begin[inside]
        # The checksum is the CRC32 of the zip record, which torch writes and never checks.
        ranges = ByteRanges(begin, begin + archives.payload[inside], payloads.crc32[inside])
        files[file] = StoredFile(archives.files[file], payloads.lengths[file], ranges=ranges)
    return files


def _read_scattered(
    checkpoint: Checkpoint,
    listing: ArchiveListing,
    place: StoredTensor | None,
    number: int,
    plan: LoadPlan,
    memories: Sequence[torch.Tensor],
) -> ReadReport:
    """Execute the part of a plan that reads one archive whose tensor is not in row-major order; return a report.

    Args:
        checkpoint: The open checkpoint.
        listing: Listing whose index the plan is for.
        place: Stored tensor of the archive; None if the archive must be decoded whole.
        number: Number of the archive.
        plan: Plan with only the reads from this archive.
        memories: Memory of each requested shard, as for `read_archives`.
    """
    archives = listing.archives
    start, what = archives.start[number], archive_name(checkpoint, listing, number)
    with open_data_file(checkpoint, listing, int(archives.file[number]), [number]) as reader:
        if place is None:
            tensor = check_tensor(listing, number, decoded_at(checkpoint, listing, reader, number), what)
            is_checked = True
        else:
            first, rows = _rows_of(plan, int(start), place)
            # The whole record is checked even for a part, as for archives that are decoded whole.
            verify: Verify = None if checkpoint.options.verify is None else "all"
            is_checked = check_record(reader, rows, verify, checkpoint.storage.where(place.file))
            tensor, start = filled_tensor(reader.read, rows, what), start + first
    # The tensor's row-major bytes stand for a file, to which the plan's rows apply.
    runs = replace(plan.runs, file=np.zeros_like(plan.runs.file), byte=plan.runs.byte - start)
    strided = replace(plan.strided, file=np.zeros_like(plan.strided.file), byte=plan.strided.byte - start)
    inner, contents = replace(plan, runs=runs, strided=strided), {0: byte_buffer(row_major_bits(tensor))}
    report = fetch_from_memory(contents, inner, memories, progress=checkpoint.options.progress)
    return replace(report, blocks_checked=int(is_checked), blocks_unchecked=int(not is_checked))


def _rows_of(plan: LoadPlan, start: int, tensor: StoredTensor) -> tuple[int, StoredTensor]:
    """Return the range of a tensor's rows, along its first axis, that covers all reads of a plan.

    The result is the offset of the first row in the tensor's row-major bytes, and the rows as a `StoredTensor`.

    Args:
        plan: Plan with only the reads from this tensor.
        start: Offset of the tensor in the plan's file.
        tensor: Stored tensor.
    """
    row = prod(tensor.shape[1:]) * tensor.dtype.itemsize
    if not tensor.shape or not row:
        return 0, tensor
    runs, strided = plan.runs, plan.strided
    spans = ((strided.shape - 1) * strided.stride).sum(axis=1) + 1
    begin = np.concatenate([runs.byte, strided.byte])
    end = np.concatenate([runs.byte + runs.length, strided.byte + spans * strided.item_size])
    first, last = int(begin.min() - start) // row, -(-int(end.max() - start) // row)
    offset = (first, *(0,) * (len(tensor.shape) - 1))
    return first * row, box_of(tensor, (offset, (last - first, *tensor.shape[1:])))


def load_metadata(checkpoint: Checkpoint) -> Mapping[str, ShardedTensor | ShardedObject]:
    """Return a description, without data, of every whole tensor by key and of every object by unique key.

    The buckets of a distributed optimizer are listed as states of the model's parameters.
    """
    listing = read_listing(checkpoint)

    def metadata_of(index: Index) -> IndexMetadata:
        return IndexMetadata(
            index,
            partial(index_on_files, listing, index),
            listing.unknown,
            lambda shards: refused_among(listing, {shard.key for shard in shards}),
            partial(states_among, checkpoint, listing) if checkpoint.options.verify is None else lambda _: (),
            partial(archives_cost, checkpoint, listing),
        )

    metadata = metadata_of(listing.index)
    if not any(map(is_bucket, listing.contents.tensors)):
        return metadata
    return DeferredMetadata(metadata, lambda: metadata_of(_states(checkpoint, listing)))


def load_sharded(checkpoint: Checkpoint, shards: Sequence[ShardedTensor]) -> ReadReport:
    """Fill each shard's data, a contiguous CPU tensor, in place, and return a report of the reads.

    Raises:
        KeyMismatch: The checkpoint lacks a key.
        ShapeError: A tensor is stored with another global shape or dtype.
        UnsupportedValue: A tensor is stored in a way that can't be read.
        CorruptCheckpoint: Stored bytes aren't what was saved.
    """
    listing = read_listing(checkpoint)
    keys = {shard.key for shard in shards}
    check_taken(refused_among(listing, keys), keys)
    states = _compare(checkpoint, listing, keys)
    # The index has tensors as `.metadata` lists them, or with buckets as states of the model's parameters.
    index = _states(checkpoint, listing) if _has_states(listing, keys) else listing.index
    return replace(_load(checkpoint, listing, index, shards), uncompared=states)


def _load(checkpoint: Checkpoint, listing: ArchiveListing, index: Index, shards: Sequence[ShardedTensor]) -> ReadReport:
    steps = [shard for shard in shards if shard.key.startswith(STEP) and index is not listing.index]
    if not steps:
        return _fill(checkpoint, listing, index, shards)
    plan_shards(index, steps, shard_columns(steps))  # The plan isn't used: making it checks shapes and dtypes.
    step = _step(checkpoint, listing)
    for shard in steps:
        shard.data.fill_(step)
    return _fill(checkpoint, listing, index, [shard for shard in shards if not shard.key.startswith(STEP)])


def _step(checkpoint: Checkpoint, listing: ArchiveListing) -> float:
    """Return the step of a distributed optimizer, which must be the same in all model-parallel ranks' param groups."""
    steps = {step for _, step in _steps(checkpoint, listing)}
    if len(steps) != 1:
        fix = "Leave the steps out of the target, and set the optimizer's step by hand."
        heading = f"load: the optimizer's param groups have {'different steps' if steps else 'no step'}"
        raise UnsupportedValue(error_text(heading, found=sorted(steps) or None, fix=fix))
    return steps.pop()


def _steps(checkpoint: Checkpoint, listing: ArchiveListing) -> Iterator[tuple[str, float]]:
    """Yield ``(name of the object, step)`` for each optimizer step in the stored objects with param groups."""
    names = [name for name in listing.values if is_groups(name)]
    objects = load_objects(checkpoint, [ShardedObject.empty_from_unique_key(name) for name in names])
    for name, data in zip(names, objects, strict=True):
        yield from ((name, float(group["step"])) for group in data["param_groups"] if "step" in group)


def _copies(checkpoint: Checkpoint, listing: ArchiveListing) -> Iterator[Copies]:
    yield from state_copies(checkpoint, listing, partial(_fill, checkpoint, listing, listing.index))
    tensor = partial(torch.tensor, dtype=torch.float64, device="cpu")
    steps = [(name, partial(tensor, step)) for name, step in _steps(checkpoint, listing)]
    yield from [Copies(STEP.rstrip("."), (), steps)] if steps else ()


def _fill(checkpoint: Checkpoint, listing: ArchiveListing, index: Index, shards: Sequence[ShardedTensor]) -> ReadReport:
    plan = plan_shards(index, shards, shard_columns(shards, checkpoint.world.rank))
    return read_archives(checkpoint, listing, plan, [shard.data for shard in shards])


def _has_states(listing: ArchiveListing, keys: Set[str] | None) -> bool:
    """Return whether one of the keys may name an optimizer state that is stored in a bucket; None means all keys.

    A bucket is a 1-D tensor with a state of several parameters, whose names aren't stored.
    """
    are_tensors = keys is not None and keys <= listing.contents.tensors.keys()
    return not are_tensors and any(map(is_bucket, listing.contents.tensors))


def _states(checkpoint: Checkpoint, listing: ArchiveListing) -> Index:
    return optimizer_index(checkpoint, listing, partial(_fill, checkpoint, listing, listing.index))


def _compare(checkpoint: Checkpoint, listing: ArchiveListing, keys: Set[str]) -> tuple[str, ...]:
    """Compare all master weights with the weights if one of the keys is an optimizer state; raise if they differ.

    They are compared once for an open checkpoint. The result is the keys of uncompared states: with ``verify=None`` it
    is all requested states, and otherwise it is empty.
    """
    states = states_among(checkpoint, listing, keys)
    if checkpoint.options.verify is None:
        return tuple(states)
    comparisons = checkpoint.once(Comparisons)
    if states and not comparisons.all_alike:
        refuse(checkpoint, _differing(checkpoint, listing, 0, 1))
        comparisons.all_alike = True
    return ()


def _differing(checkpoint: Checkpoint, listing: ArchiveListing, share: int, shares: int) -> dict[str, str]:
    return differing(checkpoint, listing, partial(_fill, checkpoint, listing, listing.index), share, shares)


def resolve(checkpoint: Checkpoint, keys: Set[str], listed: bool) -> Resolution | None:
    """Return a task that ranks carry out together before they read; None if there is none.

    The task is to find the parameters in a distributed optimizer's buckets, or to compare master weights with weights.

    Args:
        checkpoint: The open checkpoint.
        keys: Keys that are loaded.
        listed: Whether the load also lists all stored keys.
    """
    listing = read_listing(checkpoint)
    if _has_states(listing, None if listed else keys):

        def keep_states(indexes: Sequence[Index]) -> None:
            checkpoint.once(States).index = indexes[0]

        # One rank reads the buckets for all, since that takes the hashes of all weights.
        copies = partial(_copies, checkpoint, listing)
        return Resolution(lambda share, _: None if share else _states(checkpoint, listing), keep_states, copies)
    if checkpoint.options.verify is None or not states_among(checkpoint, listing, keys):
        return None

    def keep(reasons: Sequence[Mapping[str, str]]) -> None:
        refuse(checkpoint, {key: reason for by_key in reversed(reasons) for key, reason in by_key.items()})
        checkpoint.once(Comparisons).all_alike = True

    return Resolution(partial(_differing, checkpoint, listing), keep)


def master_damage(checkpoint: Checkpoint) -> list[Damage]:
    """Return a `Damage` for each master weight that differs from its weight after rounding."""
    listing = read_listing(checkpoint)
    wrong = _differing(checkpoint, listing, 0, 1) if states_among(checkpoint, listing, listing.contents.tensors) else {}
    return [Damage("", f"{reason}. {FIX}", keys=(key,)) for key, reason in sorted(wrong.items())]


def load_objects(checkpoint: Checkpoint, objects: Sequence[ShardedObject]) -> list[Any]:
    """Return the data of each sharded object, in order.

    Raises:
        KeyMismatch: The checkpoint lacks an object.
        UnsafeFile: Reading an object would run pickled code, and `allow_pickle` isn't given.
    """
    listing = read_listing(checkpoint)
    unique_keys = [item.unique_key for item in objects]
    check_objects_known(unique_keys, [name in listing.values and is_object(name) for name in unique_keys])
    numbers = [listing.values[name] for name in unique_keys]
    values = dict(decoded(checkpoint, listing, numbers))
    return [unboxed(values[number]) for number in numbers]


def unboxed(value: Any) -> Any:
    """Return an object's data, which Megatron-Core stores in a list of one item, except for its early releases."""
    return value[0] if type(value) is list and len(value) == 1 else value
