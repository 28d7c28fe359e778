"""The boxes of a tensor that moves read: what plans, files and other ranks can be asked for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from ..lazy import Box, Strided, covering, dense
from ._evaluate import leaves
from ._moves import Move
from ._steps import Kind

MOST = 4096
"""Into so many boxes a move is cut, so that nothing else is read; beyond that, what lies between is read too."""


def covering_box(move: Move, shape: tuple[int, ...]) -> tuple[Box, Strided]:
    """Return the smallest box of a move's root that has its elements, and where they lie in it."""
    return covering(Strided(move.at, move.size, tuple([step for _, _, step in move.loops])), shape)


def tight(move: Move, shape: tuple[int, ...], most: int = MOST) -> Iterator[tuple[Box, Move]]:
    """Yield a move in parts, each with its box, which holds nothing else.

    Args:
        move: from a dense tensor.
        shape: of that.
        most: how many parts there are about; what would be more parts has boxes that hold other elements too.
    """
    box, _ = covering_box(move, shape)
    if most <= 1 or prod(box.shape) == prod([count for count, _, step in move.loops if step]):
        yield box, move
        return
    for part, share in _divided(move, shape, most):
        yield from tight(part, shape, share)


def _divided(move: Move, shape: tuple[int, ...], most: int) -> Iterator[tuple[Move, int]]:
    """Yield a move's parts, by rows' ends or by its longest step, each with how many parts it may have again."""
    which = max(range(len(move.loops)), key=lambda number: move.loops[number][2])
    count, to, at = move.loops[which]
    rest = (*move.loops[:which], *move.loops[which + 1 :])
    if at == 1:
        # A run over the ends of rows: up to where one ends, then whole ones, then the beginning of another.
        row = max([step for step in dense(shape).stride if step < count], default=1)
        first = min(count - 1, -move.at % row or count // row * row)
        cuts = [(0, first), (first, count - first)]
        first = count // row * row
        cuts = [(0, first), (first, count - first)] if move.at % row == 0 and first < count else cuts
        for start, length in cuts:
            loops = ((length, to, at), *rest)
            yield move._replace(to=move.to + start * to, at=move.at + start, loops=loops), most // 2
        return
    if count > most:
        yield move, 1
        return
    for number in range(count):
        yield move._replace(to=move.to + number * to, at=move.at + number * at, loops=rest), most // count


@dataclass(frozen=True, slots=True, eq=False)
class Reads:
    """Which boxes of sources are read, and in which of them each part of a move is found.

    Attributes:
        boxes: of each source, without what is next to each other being apart.
        numbers: of each source, from a part's own box to the number of the one that it is in.
    """

    boxes: Mapping[str, tuple[Box, ...]]
    numbers: Mapping[str, Mapping[Box, int]]


def reads_of(sources: Mapping[str, Kind], moves: Iterable[Move], most: int = MOST) -> Reads:
    """Return the boxes of sources that moves read, each cut in at most some parts."""
    asked: dict[str, dict[Box, None]] = defaultdict(dict)
    for move in leaves(moves):
        for box, _ in tight(move, sources[move.root].shape, most):
            asked[move.root][box] = None
    boxes, numbers = {}, {}
    for name, found in asked.items():
        listed = list(found)
        boxes[name], places = merged(listed)
        numbers[name] = dict(zip(listed, places, strict=True))
    return Reads(boxes, numbers)


def merged(boxes: Sequence[Box]) -> tuple[tuple[Box, ...], list[int]]:
    """Return boxes with those that touch or overlap along one axis as one, and for each given one its number.

    Examples:
        >>> merged([Box((2, 0), (2, 4)), Box((0, 0), (2, 4)), Box((6, 0), (1, 4))])
        ((Box(offset=(0, 0), shape=(4, 4)), Box(offset=(6, 0), shape=(1, 4))), [0, 0, 1])
    """
    now, place, before = list(boxes), list(range(len(boxes))), -1
    while len(now) != before:
        before = len(now)
        for axis in range(len(now[0].shape) - 1, -1, -1) if len(now) > 1 else ():
            now, moved = _merged_along(now, axis)
            place = [moved[number] for number in place]
    order = sorted(range(len(now)), key=now.__getitem__)
    rank = {number: position for position, number in enumerate(order)}
    return tuple([now[number] for number in order]), [rank[number] for number in place]


def _merged_along(boxes: list[Box], axis: int) -> tuple[list[Box], dict[int, int]]:
    def others(number: int) -> tuple[tuple[int, ...], ...]:
        offset, shape = boxes[number]
        return offset[:axis] + offset[axis + 1 :], shape[:axis] + shape[axis + 1 :]

    rows = sorted((others(number), boxes[number].offset[axis], number) for number in range(len(boxes)))
    new, moved, last = list[Box](), dict[int, int](), None
    for row, low, number in rows:
        offset, shape = boxes[number]
        high = low + shape[axis]
        begin = new[-1].offset[axis] if new else 0
        if row == last and low <= begin + new[-1].shape[axis]:
            length = max(new[-1].shape[axis], high - begin)
            new[-1] = Box(new[-1].offset, (*shape[:axis], length, *shape[axis + 1 :]))
        else:
            new.append(Box(offset, shape))
        moved[number], last = len(new) - 1, row
    return new, moved
