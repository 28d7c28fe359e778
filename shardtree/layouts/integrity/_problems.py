"""Problems of layouts as values, and their text: where, how much of the tensor, and which ranks hold what there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from math import prod

import numpy as np

from ...errors import TreePath, plural, rank_text, render_path
from ...geometry import Column, box_slices, overlapping_pairs
from .._columns import ShardColumns, select_rows, shard_boxes
from ._faults import Faults, select_faults

# The value, and how boxes, flat ranges and ranks are written in its text.

_SHOWN_OF_ONE_KIND = 3


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong with how ranks share a state.

    Attributes:
        key: the key of the tensor or object; of a common value, its path.
        ranks: those concerned, ascending.
        what: what is wrong, as text.
        box: where in the global tensor or array of objects, as slices; None where it isn't about a place.
        flat: which elements of the flattened box, where shards are flat ranges; None for all of it.
        fix: what to do about it, as text; empty where that isn't known.
    """

    key: str | TreePath
    ranks: tuple[int, ...]
    what: str
    box: tuple[slice, ...] | None = None
    flat: slice | None = None
    fix: str = ""

    def __str__(self) -> str:
        name = render_path(self.key) if isinstance(self.key, tuple) else repr(self.key)
        holders = f" ({rank_text(self.ranks)})" if self.ranks else ""
        return f"{name}{holders}: {self.what}"


def problem_lines(problems: Iterable[Problem]) -> list[str]:
    """Return problems as lines, at most a few for each key, so that one key doesn't hide the others.

    Examples:
        >>> problem_lines([Problem(key, (0,), str(n)) for key in "ab" for n in range(5)])[2:5]
        ["'a' (rank 0): 2", "'a': and 2 more", "'b' (rank 0): 0"]
    """
    lines = []
    for _, of_one in groupby(problems, key=lambda problem: problem.key):
        same = list(of_one)
        lines += list(map(str, same[:_SHOWN_OF_ONE_KIND]))
        more = len(same) - _SHOWN_OF_ONE_KIND
        lines += [str(Problem(same[0].key, (), f"and {more} more"))] if more > 0 else []
    return lines


def place_text(box: tuple[slice, ...], flat: slice | None = None) -> str:
    """Return a box, or a flat range of it, as text.

    Examples:
        >>> place_text((slice(0, 2), slice(3, 6))), place_text((slice(0, 4),), slice(1, 3))
        ('[0:2, 3:6]', 'elements [1:3] of [0:4]')
    """
    spans = "[" + ", ".join(f"{span.start}:{span.stop}" for span in box) + "]"
    return spans if flat is None else f"elements [{flat.start}:{flat.stop}] of {spans}"


def holder_text(holders: Iterable[tuple[int, tuple[slice, ...], slice | None]], more: int = 0) -> str:
    """Return which rank holds which box.

    Args:
        holders: rank, box and flat range of each shard.
        more: how many there are that aren't named.

    Examples:
        >>> holder_text([(0, (slice(0, 2),), None), (3, (slice(1, 4),), slice(0, 2))], more=5)
        'rank 0 [0:2], rank 3 elements [0:2] of [1:4], and 5 more'
    """
    texts = [f"rank {rank} {place_text(box, flat)}" for rank, box, flat in holders]
    return ", ".join([*texts, *([f"and {more} more"] if more else [])])


# Faults as problems.

_SHOWN_OF_ONE = 20
_SHOWN_HOLDERS = 4

_NO_RANK = "; no rank holds any of it"
_NEXT_TO = "; beside it: "
_OTHERS = "; only other replicas: "
_HELD = ": "

_FILL = (
    "Where a place has no main replica, compare the shards' offsets, shapes and flat ranges, and look whether all "
    "ranks take part, with all of their shards."
)
_FIXES = {
    _NO_RANK: _FILL,
    _NEXT_TO: _FILL,
    _OTHERS: (
        "Where only other replicas hold a place, give one of them replica_id 0, or a tuple of zeros: replica ids tell "
        "apart the ranks that hold the same box."
    ),
    _HELD: (
        "Where several hold the same elements, give all but one of them a replica_id that isn't 0; where these are "
        "other elements, give them other offsets or flat ranges, or keys of their own."
    ),
}


def fault_problems(columns: ShardColumns, faults: Faults, noun: str) -> tuple[Problem, ...]:
    """Return faults as problems: the first 20 of each key, and one that counts the others.

    Args:
        columns: all shards, replicas too.
        faults: of their main replicas.
        noun: what the shards have: "element" or "object".

    Examples:
        >>> import torch, shardtree as st
        >>> columns = st.layouts.shard_columns([st.ShardedTensor.from_rank_offsets("w", torch.zeros(2), replica_id=1)])
        >>> faults = st.layouts.sharding_faults(select_rows(columns, np.flatnonzero(columns.main)))
        >>> [str(problem) for problem in fault_problems(columns, faults, "element")]
        ["'w' (rank 0): [0:2] has no main replica (2 of 2 elements); only other replicas: rank 0 [0:2]"]
    """
    if not len(faults):
        return ()
    place = np.arange(len(faults)) - np.searchsorted(faults.key, faults.key)
    left = np.searchsorted(faults.key, faults.key, side="right") - np.arange(len(faults)) - 1
    shown = np.flatnonzero(place < _SHOWN_OF_ONE)
    # Only shards of tensors with faults: pairs are searched among few rows of many.
    concerned = np.zeros(len(columns.keys), dtype=np.bool_)
    concerned[faults.key] = True
    shards = select_rows(columns, np.flatnonzero(concerned[columns.key]))
    holders = _holders(shards, select_faults(faults, shown))
    problems = []
    for row, held in zip(shown.tolist(), holders, strict=True):
        problems.append(_problem(shards, faults, row, held, noun))
        if place[row] == _SHOWN_OF_ONE - 1 and left[row]:
            more = f"and {plural(int(left[row]), 'more place')}"
            problems.append(Problem(columns.keys[int(faults.key[row])], (), more))
    return tuple(problems)


def _problem(shards: ShardColumns, faults: Faults, row: int, held: tuple[str, Column], noun: str) -> Problem:
    number = int(faults.key[row])
    whole = shards.kinds[number].global_shape
    box, flat = _place(faults, row, len(whole))
    part = prod(span.stop - span.start for span in box) if flat is None else flat.stop - flat.start
    verb, has = ("are", "have") if flat else ("is", "has")
    state = f"{verb} held by more than one main replica" if faults.doubled[row] else f"{has} no main replica"
    relation, holders = held
    shown = [(int(shards.rank[row]), *_place(shards, row, len(whole))) for row in holders[:_SHOWN_HOLDERS].tolist()]
    who = holder_text(shown, len(holders) - len(shown))
    what = f"{place_text(box, flat)} {state} ({part} of {plural(prod(whole), noun)}){relation}{who}"
    ranks = tuple(np.unique(shards.rank[holders]).tolist())
    return Problem(shards.keys[number], ranks, what, box, flat, _FIXES[relation])


def _holders(shards: ShardColumns, faults: Faults) -> list[tuple[str, Column]]:
    """Return, for each fault, how shards relate to it, and which: those in it, or else those next to it."""
    mains, others = np.flatnonzero(shards.main), np.flatnonzero(~shards.main)
    doubled, gaps = np.flatnonzero(faults.doubled), np.flatnonzero(~faults.doubled)
    found = [(_NO_RANK, np.zeros(0, dtype=np.int64))] * len(faults)
    for relation, rows, candidates, reach in (
        # Later rows replace earlier ones: a copy that could become the main replica says more than a neighbour.
        (_NEXT_TO, gaps, mains, 1),
        (_OTHERS, gaps, others, 0),
        (_HELD, doubled, mains, 0),
    ):
        for row, held in _within_reach(select_rows(shards, candidates), select_faults(faults, rows), reach=reach):
            found[int(rows[row])] = relation, candidates[held]
    return found


def _within_reach(shards: ShardColumns, faults: Faults, *, reach: int) -> Iterator[tuple[int, Column]]:
    """Return faults with the shards that have an element in them, or no further than `reach` from them."""
    places = shard_boxes(faults.offset, faults.shape, faults.start, faults.stop)
    boxes = shard_boxes(shards.offset, shards.shape, shards.start, shards.stop)
    fault, box = overlapping_pairs(
        faults.key[places.shard],
        places.offset - reach,
        places.shape + 2 * reach,
        shards.key[boxes.shard],
        boxes.offset,
        boxes.shape,
    )
    pairs = np.unique(np.column_stack([places.shard[fault], boxes.shard[box]]), axis=0)
    rows, first = np.unique(pairs[:, 0], return_index=True)
    return zip(rows.tolist(), np.split(pairs[:, 1], first[1:]), strict=False)


def _place(places: ShardColumns | Faults, row: int, axes: int) -> tuple[tuple[slice, ...], slice | None]:
    """Return a row's box, without the axes that it was widened by, and its flat range."""
    start, stop = int(places.start[row]), int(places.stop[row])
    return box_slices(places.offset[row], places.shape[row], axes), None if start < 0 else slice(start, stop)
