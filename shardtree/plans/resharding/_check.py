"""Whether transfers do what a plan is for: each element of each target shard is written once, with what it should be.

Nothing is taken from how plans are made: all follows from the two layouts.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ...errors import plural
from ...geometry import Column, box_slices, held_elements, intersect, overlapping_pairs, shared_groups, volumes
from ...layouts import Problem, ShardColumns, place_text, select_rows
from .._convertible import convertible
from .._save import Rows
from ._transfers import Transfers, sending_shards, shard_memory

_SHOWN = 20


def transfer_problems(source: ShardColumns, target: ShardColumns, transfers: Transfers) -> tuple[Problem, ...]:
    """Return all that is wrong with transfers between two layouts; nothing where each element is written once.

    Args:
        source: the shards of all ranks before, of as many axes as the target.
        target: the shards of all ranks after.
        transfers: what goes where.
    """
    rows = np.where(transfers.hop > 0, len(target), len(source))
    strays = (transfers.hop < 0) | (transfers.source < 0) | (transfers.source >= rows)
    strays |= (transfers.target < 0) | (transfers.target >= len(target))
    if strays.any():
        count = plural(int(strays.sum()), "transfer")
        return (Problem("transfers", (), f"{count} of shards that there aren't"),)
    found = [*_wrong_kinds(source, target), *_wrong_transfers(source, target, transfers)]
    return (*found, *_wrong_counts(target, transfers), *_too_early(target, transfers))


def _wrong_kinds(source: ShardColumns, target: ShardColumns) -> Iterator[Problem]:
    had = dict(zip(source.keys, source.kinds, strict=True))
    for key, kind in zip(target.keys, target.kinds, strict=True):
        if key in had and not (had[key].global_shape == kind.global_shape and convertible(had[key].dtype, kind.dtype)):
            yield Problem(key, (), f"is {had[key]} in the source and {kind} in the target")


def _wrong_transfers(source: ShardColumns, target: ShardColumns, transfers: Transfers) -> Iterator[Problem]:
    """Yield what is wrong with single transfers: tensors, ranks, bytes, boxes."""
    before = sending_shards(source, target, transfers.hop, transfers.source)
    after = select_rows(target, transfers.target)
    wrong = {
        "has no elements": (transfers.shape <= 0).any(axis=1),
        "comes from a shard of another tensor": before.key != after.key,
        "is said to be of another tensor": transfers.key != after.key,
        "comes from another rank than is said": before.rank != transfers.from_rank,
        "goes to another rank than is said": after.rank != transfers.to_rank,
        "has another number of bytes than is said": (
            volumes(transfers.shape) * target.item_size[after.key] != transfers.nbytes
        ),
    }
    at_source = (transfers.source_element, transfers.source_stride)
    wrong |= _wrong_places(before, transfers, at_source, "that it comes from")
    at_target = (transfers.target_element, transfers.target_stride)
    wrong |= _wrong_places(after, transfers, at_target, "that it goes to")
    for what, found in wrong.items():
        yield from _told(target, transfers, np.flatnonzero(found), what)


def _wrong_places(
    shard: ShardColumns, transfers: Transfers, memory: tuple[Column, Column], which: str
) -> dict[str, Rows]:
    """Return which boxes aren't in the shards given for them, and which aren't where in their memory is said."""
    last = transfers.offset + transfers.shape
    outside = ((transfers.offset < shard.offset) | (last > shard.offset + shard.shape)).any(axis=1)
    first_element, stride = shard_memory(shard, transfers.offset)
    last_element, _ = shard_memory(shard, last - 1)
    # Along a row-major box, a box's first corner comes first and its last corner last.
    outside |= (shard.start >= 0) & ((first_element < 0) | (last_element >= shard.stop - shard.start))
    element, strides = memory
    elsewhere = (element != first_element) | ((strides != stride) & (transfers.shape > 1)).any(axis=1)
    return {f"isn't in the shard {which}": outside, f"lies elsewhere in the shard {which}": elsewhere & ~outside}


def _told(target: ShardColumns, transfers: Transfers, rows: Column, what: str) -> Iterator[Problem]:
    """Yield a problem for each of the first transfers, and one that tells how many more there are."""
    for row in rows[:_SHOWN].tolist():
        key = int(target.key[transfers.target[row]])
        box = box_slices(transfers.offset[row], transfers.shape[row], len(target.kinds[key].global_shape))
        ranks = tuple(sorted({int(transfers.from_rank[row]), int(transfers.to_rank[row])}))
        yield Problem(target.keys[key], ranks, f"transfer {row}, {place_text(box)}, {what}", box)
    if rows.size > _SHOWN:
        yield Problem("transfers", (), f"and {rows.size - _SHOWN} more {what}")


def _wrong_counts(target: ShardColumns, transfers: Transfers) -> Iterator[Problem]:
    """Yield the shards that aren't written once: as many elements as they have, and none of them twice."""
    written = held_elements(transfers.target, np.maximum(transfers.shape, 0), len(target))
    doubled = np.zeros(len(target), dtype=np.bool_)
    doubled[shared_groups(transfers.target, transfers.offset, transfers.shape)] = True
    wrong = np.flatnonzero(doubled | (written != target.elements))
    for row in wrong[:_SHOWN].tolist():
        key = int(target.key[row])
        box = box_slices(target.offset[row], target.shape[row], len(target.kinds[key].global_shape))
        flat = slice(int(target.start[row]), int(target.stop[row])) if target.start[row] >= 0 else None
        count = f"{written[row]} elements are written, of {target.elements[row]}"
        what = f"shard {row}, {place_text(box, flat)}: {count}" + (", some of them twice" if doubled[row] else "")
        yield Problem(target.keys[key], (int(target.rank[row]),), what, box, flat)
    if wrong.size > _SHOWN:
        yield Problem("transfers", (), f"and {wrong.size - _SHOWN} more shards aren't written once")


def _too_early(target: ShardColumns, transfers: Transfers) -> Iterator[Problem]:
    """Yield what comes from a target shard that doesn't have all of it from earlier hops."""
    later = np.flatnonzero(transfers.hop > 0)
    offset, shape = transfers.offset, transfers.shape
    left, right = overlapping_pairs(
        transfers.source[later], offset[later], shape[later], transfers.target, offset, shape
    )
    earlier = transfers.hop[right] < transfers.hop[later[left]]
    left, right = left[earlier], right[earlier]
    _, common = intersect(offset[later[left]], shape[later[left]], offset[right], shape[right])
    lacks = held_elements(left, common, later.size) < volumes(shape[later])
    yield from _told(target, transfers, later[lacks], "comes from a shard that doesn't have it by then")
