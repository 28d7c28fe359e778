"""The boxes that moves read from sources: plans, files and other ranks are asked for these boxes.

A `Move` copies elements by strided loops, from a flat source, its root, to a flat destination.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

from ..core.lazy import Box, Strided, covering, dense
from ._evaluate import leaves
from ._moves import Move, normal, turned
from ._steps import Kind

MOST = 4096
"""Upper bound of the boxes of one move; a move that needs more also reads elements in between."""


def covering_box(move: Move, shape: tuple[int, ...]) -> tuple[Box, Strided]:
    """Return a small box that contains all elements that a move reads, and a strided view of them in that box.

    Args:
        move: Move from a dense tensor.
        shape: Shape of that tensor.
    """
    return covering(Strided(move.at, move.size, tuple([step for _, _, step in move.loops])), shape)


def tight(move: Move, shape: tuple[int, ...], most: int = MOST) -> Iterator[tuple[Box, Move]]:
    """Split a move into parts, and yield pairs (box, part): each part reads all elements of its box.

    If this takes more than about `most` parts, there are fewer parts, with larger boxes. A larger box also contains
    elements that its part doesn't read.

    Args:
        move: Move from a dense tensor.
        shape: Shape of that tensor.
        most: Approximate upper bound of the number of parts.
    """
    box, _ = covering_box(move, shape)
    if most <= 1 or prod(box.shape) == prod([count for count, _, step in move.loops if step]):
        yield box, move
        return
    for part, share in _divided(move, shape, most):
        yield from tight(part, shape, share)


def _divided(move: Move, shape: tuple[int, ...], most: int) -> Iterator[tuple[Move, int]]:
    """Split a move, and yield pairs: a part, and the upper bound of the number of boxes for this part.

    A `Move` is a nest of loops. A loop that crosses the end of an axis of the tensor is split there. Otherwise the
    parts are the iterations of one loop; if these are more than `most`, the whole move is the only part.

    Args:
        move: Move from a dense tensor.
        shape: Shape of that tensor.
        most: Upper bound of the number of boxes for the whole move.
    """
    for which, (count, to, at) in enumerate(move.loops):
        others = move.loops[:which], move.loops[which + 1 :]
        row = min([step for step in dense(shape).stride if step > at > 0], default=0)
        if row and row % at == 0 and move.at % row + (count - 1) * at >= row:
            # A run across ends of rows is cut into the end of a row, whole rows, and the beginning of another.
            length, first = row // at, -(-(row - move.at % row) // at)
            if first == length and count % length == 0:
                pair = (count // length, to * length, row), (length, to, at)
                yield move._replace(loops=(*others[0], *pair, *others[1])), most
                return
            first = first if first < length else count // length * length
            for start, length in ((0, first), (first, count - first)):
                loops = (*others[0], (length, to, at), *others[1])
                yield move._replace(to=move.to + start * to, at=move.at + start * at, loops=loops), most // 2
            return

    def without(which: int) -> Move:
        return move._replace(loops=(*move.loops[:which], *move.loops[which + 1 :]))

    def density(which: int) -> tuple[float, int]:
        part = without(which)
        return part.numel / prod(covering_box(part, shape)[0].shape), -move.loops[which][0]

    which = max([number for number, loop in enumerate(move.loops) if loop[2]], key=density)
    count, to, at = move.loops[which]
    if count > most:
        yield move, 1
        return
    part = without(which)
    for number in range(count):
        yield part._replace(to=move.to + number * to, at=move.at + number * at), most // count


class View(NamedTuple):
    """The part of a dense destination that gets the elements of a source's box, as a strided view.

    Attributes:
        at: Offset of the box's first element in the destination.
        steps: Stride along each of the box's axes; 0 for an axis of length 1.
    """

    at: int
    steps: tuple[int, ...]


def view_of(move: Move, box: Box, shape: tuple[int, ...]) -> View | None:
    """Return the strided view of a move's destination that receives a box; None if no strides reach all its elements.

    A move with casts or functions has no such view.

    Args:
        move: Move that reads the box and no other elements.
        box: Box of the move's source.
        shape: Shape of the source.
    """
    if move.via:
        return None
    there = normal(turned(into_box(move, shape, box, None)))
    loops, steps = {to: (count, at) for count, to, at in there.loops}, list[int]()
    for size, stride in zip(box.shape, dense(box.shape).stride, strict=True):
        # A loop over several contiguous axes has the strides of all of them.
        over = next(((to, count, at) for to, (count, at) in loops.items() if to <= stride < to * count), None)
        if size == 1:
            steps.append(0)
        elif over is None or over[0] * over[1] < stride * size:
            return None
        else:
            steps.append(over[2] * (stride // over[0]))
    return View(there.at, tuple(steps))


def into_box(move: Move, shape: tuple[int, ...], outer: Box, root: Any) -> Move:
    """Return a move from a source, rewritten as a move from a box of that source.

    Args:
        move: Move from the source.
        shape: Shape of the source.
        outer: Box of the source that contains all elements that the move reads.
        root: Name of the box, which becomes the new move's root.
    """
    box, inner = covering_box(move, shape)
    weights, strides = dense(box.shape).stride, dense(outer.shape).stride

    def there(flat: int) -> int:
        # A step leads along the same axes in both boxes, by other strides.
        total = 0
        for weight, stride in zip(weights, strides, strict=True):
            digit, flat = divmod(flat, weight)
            total += digit * stride
        return total

    first = sum((low - base) * stride for low, base, stride in zip(box.offset, outer.offset, strides, strict=True))
    loops = tuple((n, to, there(step)) for (n, to, _), step in zip(move.loops, inner.stride, strict=True))
    return Move(root, move.to, first + there(inner.offset), loops, move.via)


@dataclass(frozen=True, slots=True, eq=False)
class Reads:
    """The boxes that a trace reads from each source, with adjacent boxes joined.

    Attributes:
        boxes: Joined boxes of each source.
        numbers: For each source, a mapping from each original box to the index in `boxes` of the box that contains it.
        views: For each source, the destination's strided view of each joined box; None for a box that must be copied.
    """

    boxes: Mapping[str, tuple[Box, ...]]
    numbers: Mapping[str, Mapping[Box, int]]
    views: Mapping[str, tuple[View | None, ...]]


def reads_of(
    sources: Mapping[str, Kind], moves: Iterable[Move], most: int = MOST, *, keep_views: bool | None = None
) -> Reads:
    """Return the boxes of sources that moves read; adjacent boxes are joined.

    Args:
        sources: Shape and dtype of each source, by name.
        moves: Moves from the sources.
        most: Approximate upper bound of the number of boxes for one move.
        keep_views: Whether two boxes that both have a strided view in the destination (`View`) are joined only if the
            joined box has one, too; None if no views are needed.
    """
    views_of: dict[str, dict[Box, View | None]] = defaultdict(dict)
    for move in leaves(moves):
        shape = sources[move.root].shape
        for box, part in tight(move, shape, most):
            views_of[move.root][box] = None if keep_views is None else view_of(part, box, shape)
    boxes, numbers, views = {}, {}, {}
    for name, parts in views_of.items():
        boxes[name], places, views[name] = merged(list(parts.items()), keep_views=bool(keep_views))
        numbers[name] = dict(zip(parts, places, strict=True))
    return Reads(boxes, numbers, views)


Item = tuple[Box, View | None]


def merged(
    items: Sequence[Item], *, keep_views: bool = False
) -> tuple[tuple[Box, ...], list[int], tuple[View | None, ...]]:
    """Join boxes that touch or overlap along one axis.

    Args:
        items: Pairs of a box of a source and the `View` of the destination that gets its elements; None for a box
            without such a view.
        keep_views: Whether two boxes with views are joined only if the joined box has a view, too.

    Returns:
        The joined boxes, sorted; for each item, the index of the joined box that contains it; and the `View` of each
        joined box, or None.

    Examples:
        >>> merged([(Box((2, 0), (2, 4)), None), (Box((0, 0), (2, 4)), None), (Box((6, 0), (1, 4)), None)])[:2]
        ((Box(offset=(0, 0), shape=(4, 4)), Box(offset=(6, 0), shape=(1, 4))), [0, 0, 1])
    """
    now, place, before = list(items), list(range(len(items))), -1
    while len(now) != before:
        before = len(now)
        for axis in range(len(now[0][0].shape) - 1, -1, -1) if len(now) > 1 else ():
            now, moved = _merged_along(now, axis, keep_views)
            place = [moved[number] for number in place]
    order = sorted(range(len(now)), key=lambda number: now[number][0])
    rank = {number: position for position, number in enumerate(order)}
    boxes, views = zip(*[now[number] for number in order], strict=True)
    return boxes, [rank[number] for number in place], views


def _merged_along(items: list[Item], axis: int, keep_views: bool) -> tuple[list[Item], dict[int, int]]:
    def others(number: int) -> tuple[tuple[int, ...], ...]:
        offset, shape = items[number][0]
        return offset[:axis] + offset[axis + 1 :], shape[:axis] + shape[axis + 1 :]

    rows = sorted((others(number), items[number][0].offset[axis], number) for number in range(len(items)))
    new, moved, last = list[Item](), dict[int, int](), None
    for row, _, number in rows:
        if row == last and (both := _both(new[-1], items[number], axis, keep_views)) is not None:
            new[-1] = both
        else:
            new.append(items[number])
        moved[number], last = len(new) - 1, row
    return new, moved


def _both(one: Item, other: Item, axis: int, keep_views: bool) -> Item | None:
    """Join two boxes along an axis, and return the joined box with its view; None if they stay separate.

    Boxes stay separate if there is a gap between them. With `keep_views`, they also stay separate if both have a view
    and the joined box would have none.

    Args:
        one: First box, and its view.
        other: Second box, and its view. On the axis, it does not begin before the first box; on all other axes, both
            boxes are equal.
        axis: Axis along which the boxes are joined.
        keep_views: Argument of `merged`.
    """
    (box, view), ((offset, shape), more) = one, other
    long, gap = box.shape[axis], offset[axis] - box.offset[axis]
    if gap > long:
        return None
    both = Box(box.offset, (*shape[:axis], max(long, gap + shape[axis]), *shape[axis + 1 :]))
    if view is None or more is None:
        return both, None
    step = view.steps[axis] if long > 1 else more.at - view.at
    steps = (*view.steps[:axis], step, *view.steps[axis + 1 :])
    steps_of_second = steps if shape[axis] > 1 else (*steps[:axis], 0, *steps[axis + 1 :])
    is_one = step > 0 and more == (view.at + gap * step, steps_of_second)
    return (both, View(view.at, steps)) if is_one else None if keep_views else (both, None)
