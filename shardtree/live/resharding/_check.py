"""A check that transfers fill the target: each element of each target shard is written once, with the right element.

It uses none of the planner's functions, only the two layouts, so that a planner's mistake isn't repeated here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator

import numpy as np

from ...core.geometry import (
    Column,
    Mask,
    box_slices,
    group_sums,
    intersect,
    overlapping_pairs,
    shared_groups,
    volumes,
)
from ...core.layouts import (
    Problem,
    ShardColumns,
    TensorKind,
    place_text,
    select_rows,
    write_problems,
)
from ...core.offences import by_key, offences_text
from ...core.plans import convertible
from ...core.trees import near_names, refuse_scaled, scaled_values, those_of, with_guesses
from ...errors import IntegrityError, KeyMismatch, ShapeError, error_text, plural
from ._pieces import NOWHERE, Pieces
from ._transfers import Transfers, sending_shards, shard_memory

_SHOWN_PROBLEMS = 20


def transfer_problems(source: ShardColumns, target: ShardColumns, transfers: Transfers) -> tuple[Problem, ...]:
    """Return all problems of transfers between two layouts; none if each element is written once.

    Args:
        source: Shards of all ranks before the resharding, with as many axes as the target.
        target: Shards of all ranks after the resharding.
        transfers: Transfers to check.
    """
    rows = np.where(transfers.hop > 0, len(target), len(source))
    # Rows are checked first: every other check indexes columns with them.
    strays = (transfers.hop < 0) | (transfers.source < 0) | (transfers.source >= rows)
    strays |= (transfers.target < 0) | (transfers.target >= len(target))
    if strays.any():
        count = plural(int(strays.sum()), "transfer")
        return (Problem("transfers", (), f"{count} of shards that do not exist"),)
    problems = [*_wrong_kinds(source, target), *_wrong_transfers(source, target, transfers)]
    return (*problems, *_wrong_counts(target, transfers), *_too_early(target, transfers))


def _wrong_kinds(source: ShardColumns, target: ShardColumns) -> Iterator[Problem]:
    kinds = dict(zip(source.keys, source.kinds, strict=True))
    for key, kind in zip(target.keys, target.kinds, strict=True):
        before = kinds.get(key, kind)
        if before.global_shape != kind.global_shape or not convertible(before.dtype, kind.dtype):
            yield Problem(key, (), f"is {before} in the source and {kind} in the target")


def _wrong_transfers(source: ShardColumns, target: ShardColumns, transfers: Transfers) -> Iterator[Problem]:
    """Yield the problems of single transfers: a wrong tensor, rank, number of bytes, box or position in memory."""
    before = sending_shards(source, target, transfers.hop, transfers.source)
    after = select_rows(target, transfers.target)
    wrong = {
        "has no elements": (transfers.shape <= 0).any(axis=1),
        "comes from a shard of another tensor": before.key != after.key,
        "is stated to be of another tensor": transfers.key != after.key,
        "comes from another rank than stated": before.rank != transfers.from_rank,
        "goes to another rank than stated": after.rank != transfers.to_rank,
        "has another number of bytes than stated": (
            volumes(transfers.shape) * target.item_size[after.key] != transfers.nbytes
        ),
    }
    at_source = (transfers.source_element, transfers.source_stride)
    wrong |= _wrong_places(before, transfers, at_source, "that it comes from")
    at_target = (transfers.target_element, transfers.target_stride)
    wrong |= _wrong_places(after, transfers, at_target, "that it goes to")
    for problem, is_wrong in wrong.items():
        yield from _first_problems(target, transfers, np.flatnonzero(is_wrong), problem)


def _wrong_places(
    shard: ShardColumns, transfers: Transfers, memory: tuple[Column, Column], which: str
) -> dict[str, Mask]:
    """Return masks of the transfers whose box isn't in its shard, or has another position in memory than stated.

    Only the senders or only the receivers are checked.

    Args:
        shard: Sending shard of each transfer, or receiving shard of each transfer.
        transfers: Transfers to check.
        memory: Position of each box in its shard's data, as the transfers state it: the columns
            ``(source_element, source_stride)`` for senders, ``(target_element, target_stride)`` for receivers.
        which: Words after "the shard" in problem texts: "that it comes from" or "that it goes to".

    Returns:
        Mask of the transfers that have each problem, by problem text.
    """
    last = transfers.offset + transfers.shape
    outside = ((transfers.offset < shard.offset) | (last > shard.offset + shard.shape)).any(axis=1)
    first_element, stride = shard_memory(shard, transfers.offset)
    last_element, _ = shard_memory(shard, last - 1)
    # In row-major order a box's first corner comes first and its last one last, so these two decide for a flat range.
    outside |= (shard.start >= 0) & ((first_element < 0) | (last_element >= shard.stop - shard.start))
    element, strides = memory
    elsewhere = (element != first_element) | ((strides != stride) & (transfers.shape > 1)).any(axis=1)
    return {f"is not in the shard {which}": outside, f"is misplaced in the shard {which}": elsewhere & ~outside}


def _first_problems(target: ShardColumns, transfers: Transfers, rows: Column, what: str) -> Iterator[Problem]:
    """Yield a problem for each of the first wrong transfers, and one that counts the others.

    Args:
        target: Shards of all ranks after the resharding.
        transfers: All transfers.
        rows: Rows of the wrong transfers.
        what: Text of the problem that they share.
    """
    for row in rows[:_SHOWN_PROBLEMS].tolist():
        key = int(target.key[transfers.target[row]])
        box = box_slices(transfers.offset[row], transfers.shape[row], len(target.kinds[key].global_shape))
        ranks = tuple(sorted({int(transfers.from_rank[row]), int(transfers.to_rank[row])}))
        yield Problem(target.keys[key], ranks, f"transfer {row}, {place_text(box)}, {what}", box)
    if rows.size > _SHOWN_PROBLEMS:
        yield Problem("transfers", (), f"and {rows.size - _SHOWN_PROBLEMS} more, each of which {what}")


def _wrong_counts(target: ShardColumns, transfers: Transfers) -> Iterator[Problem]:
    """Yield the problems of target shards with missing elements or elements written twice."""
    counts = group_sums(transfers.target, volumes(np.maximum(transfers.shape, 0)), len(target))
    # The number of elements alone isn't enough: an element written twice would hide a missing one.
    is_repeated = np.zeros(len(target), dtype=np.bool_)
    is_repeated[shared_groups(transfers.target, transfers.offset, transfers.shape)] = True
    wrong = np.flatnonzero(is_repeated | (counts != target.elements))
    for row in wrong[:_SHOWN_PROBLEMS].tolist():
        key = int(target.key[row])
        box = box_slices(target.offset[row], target.shape[row], len(target.kinds[key].global_shape))
        flat = slice(int(target.start[row]), int(target.stop[row])) if target.start[row] >= 0 else None
        count = f"{counts[row]} elements are written, of {target.elements[row]}"
        description = f"shard {row}, {place_text(box, flat)}: {count}" + (
            ", some of them twice" if is_repeated[row] else ""
        )
        yield Problem(target.keys[key], (int(target.rank[row]),), description, box, flat)
    if wrong.size > _SHOWN_PROBLEMS:
        yield Problem("transfers", (), f"and {wrong.size - _SHOWN_PROBLEMS} more shards are not written once")


def _too_early(target: ShardColumns, transfers: Transfers) -> Iterator[Problem]:
    """Yield the problems of transfers that pass on elements too early.

    At hop 1 and later, a target shard is the sender. It must have received the elements at earlier hops.
    """
    later = np.flatnonzero(transfers.hop > 0)
    offset, shape = transfers.offset, transfers.shape
    left, right = overlapping_pairs(
        transfers.source[later], offset[later], shape[later], transfers.target, offset, shape
    )
    earlier = transfers.hop[right] < transfers.hop[later[left]]
    left, right = left[earlier], right[earlier]
    _, common = intersect(offset[later[left]], shape[later[left]], offset[right], shape[right])
    lacks = group_sums(left, volumes(common), later.size) < volumes(shape[later])
    yield from _first_problems(target, transfers, later[lacks], "comes from a shard that does not have it yet")


# Layouts between which no plan is possible.

_ALL = "Give the plan the shards of all ranks."
_MOST = 2.0**62
"""Upper bound of a size in bytes: a sum of a few such numbers fits an int64."""


def check_kinds(
    source: ShardColumns, target: ShardColumns, *, cast: bool, is_plain: Callable[[str], bool] = lambda _: False
) -> None:
    """Raise an error unless every wanted tensor is in the source, with the same global shape and a compatible dtype.

    Args:
        source: Shards before the resharding.
        target: Shards after the resharding.
        cast: True if dtypes may differ where `load` could convert them, False if they must be equal.
        is_plain: Predicate of keys whose values may be converted without their stored scales.

    Raises:
        KeyMismatch: A tensor isn't in the source.
        ShapeError: A tensor has another global shape or an incompatible dtype, or would be cast without its scales.
    """
    source_kinds = dict(zip(source.keys, source.kinds, strict=True))
    kinds = dict(zip(target.keys, target.kinds, strict=True))
    absent = [key for key in target.keys if key not in source_kinds]
    if absent:
        near = near_names(absent, [key for key in source.keys if key not in kinds])
        fix = "Ask for tensors that the source has, or rename keys of the source or the target."
        heading = "plan_reshard: the source lacks tensors that the target asks for"
        raise KeyMismatch(error_text(heading, offenders=with_guesses(absent, near), fix=fix))
    pairs = {key: (source_kinds[key], kind) for key, kind in kinds.items()}
    wrong = {key: pair for key, pair in pairs.items() if not _fits(*pair, cast=cast)}
    if wrong:
        lines = (f"{key!r}: source has {before}, target asks for {after}" for key, (before, after) in wrong.items())
        fix = "\n  ".join(_fixes(wrong.values()))
        raise ShapeError(error_text("plan_reshard: global shapes or dtypes differ", offenders=lines, fix=fix))
    # Scales are looked for in the whole source, whoever asks for them, so that all ranks find the same.
    dtypes = {key: kind.dtype for key, kind in source_kinds.items()}
    changed = {key: dtypes[key] for key, kind in kinds.items() if kind.dtype != dtypes[key] and not is_plain(key)}
    refuse_scaled("plan_reshard", changed, scaled_values(changed, those_of(dtypes)))


def _fits(before: TensorKind, after: TensorKind, *, cast: bool) -> bool:
    same_dtype = before.dtype == after.dtype or (cast and convertible(before.dtype, after.dtype))
    return same_dtype and before.global_shape == after.global_shape


def _fixes(pairs: Collection[tuple[TensorKind, TensorKind]]) -> Iterator[str]:
    """Yield the advice for tensors whose dtype or shape differs: one text for each kind of difference."""
    dtypes = {(before.dtype, after.dtype) for before, after in pairs if before.dtype != after.dtype}
    if any(convertible(*pair) for pair in dtypes):
        yield "Pass cast=True to convert the source's dtype."
    if not all(convertible(*pair) for pair in dtypes):
        yield "Ask for the source's dtype, where values cannot be converted without a loss."
    if any(before.global_shape != after.global_shape for before, after in pairs):
        yield "Resharding keeps global shapes; save and load to change padding."


def check_sizes(source: ShardColumns, target: ShardColumns) -> None:
    """Raise an error if the shards of the source, or those of the target, have 2**62 bytes or more in total.

    Sums of larger sizes might overflow an int64.

    Raises:
        ShapeError: A side is too large; the error names its largest tensors.
    """
    for side, columns in (("source", source), ("target", target)):
        # The product is computed in floats, which don't overflow: an int64 product would wrap around and pass the
        # check.
        item, box = columns.item_size[columns.key], columns.shape.astype(np.float64).prod(axis=1)
        nbytes = np.where(columns.start < 0, box, columns.stop - columns.start) * item
        if max((box * item).max(initial=0), nbytes.sum()) < _MOST:
            continue
        total = np.bincount(columns.key, weights=nbytes, minlength=len(columns.keys))
        largest = np.argsort(-total, kind="stable").tolist()
        lines = (f"{columns.keys[key]!r} {columns.kinds[key]}: {total[key]:.3g} bytes" for key in largest)
        heading = f"plan_reshard: the {side}'s shards together are too large"
        raise ShapeError(
            error_text(heading, offenders=lines, fix="Make several plans, each for less than 2**62 bytes.")
        )


def check_mains(source: ShardColumns, target: ShardColumns) -> None:
    """Raise an error if main replicas of a wanted tensor overlap each other, or exceed the tensor.

    Where two of them overlap, it is undecided whose elements count.

    Raises:
        IntegrityError: Main replicas overlap or exceed their tensor; the error names keys, ranks and boxes.
    """
    keys = set(target.keys)
    # Faults of tensors that no target asks for don't matter: they aren't moved.
    is_wanted = np.array([key in keys for key in source.keys], dtype=np.bool_)[source.key]
    problems = write_problems(select_rows(source, np.flatnonzero(source.main & is_wanted)))
    _raise("plan_reshard: main replicas of the source do not tile their tensors", problems)


def check_gaps(target: ShardColumns, pieces: Pieces) -> None:
    """Raise an error if a rank wants elements that no rank holds.

    Raises:
        IntegrityError: Some elements have no holder; the error names keys, ranks and boxes.
    """
    rows = np.flatnonzero(pieces.place == NOWHERE)
    _raise("plan_reshard: the source does not hold all that the target asks for", _gaps(target, pieces, rows.tolist()))


def _gaps(target: ShardColumns, pieces: Pieces, rows: Iterable[int]) -> Iterator[Problem]:
    for row in rows:
        shard = int(pieces.target[row])
        key = int(target.key[shard])
        box = box_slices(pieces.offset[row], pieces.shape[row], len(target.kinds[key].global_shape))
        count = plural(int(volumes(pieces.shape[row][None])[0]), "element")
        what = f"{place_text(box)} is held by no rank of the source ({count})"
        yield Problem(
            target.keys[key], (int(target.rank[shard]),), what, box, fix="Give the plan the shards of all ranks."
        )


def _raise(what: str, problems: Iterable[Problem]) -> None:
    problems = sorted(problems, key=by_key)
    if problems:
        raise IntegrityError(offences_text(what, problems))
