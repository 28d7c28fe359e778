"""Moves: copies of elements as strided loops from one flat tensor, the root, to another, the destination.

Views, cat, stack, permutations, reshapes, gathers by known indices and ``copy_`` are all lists of moves. This one,
``out[1:3, 0:2] = w.T[0:2, 1:3]``, has the root ``w`` (3, 4) and the destination ``out`` (4, 3), shown by flat indices::

    w (3, 4)            at = 4                 out (4, 3)          to = 3
     0  1  2  3                                 0  1  2
    [4][5] 6  7     4 -> 3    8 -> 4           [3][4] 5
    [8][9] 10 11    5 -> 6    9 -> 7           [6][7] 8
                                                9 10 11

    Move("w", to=3, at=4, loops=((2, 3, 1), (2, 1, 4)))

    outer loop (2, 3, 1): count 2; a step adds 3 to the index in out, and 1 to the index in w
    inner loop (2, 1, 4): count 2; a step adds 1 to the index in out, and 4 to the index in w

Moves compose exactly (`Moves.find`). They are immutable; only a `Written`, a list of moves, can be changed.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from math import gcd, prod
from operator import attrgetter
from typing import Any, NamedTuple

from ._steps import joined

Loop = tuple[int, int, int]
"""Count of a loop, its step in the destination, and its step in the root, both in elements."""


class Move(NamedTuple):
    """Elements ``at + sum(i * from_step)`` of a root go to ``to + sum(i * to_step)``, for each index i of the loops.

    Attributes:
        root: A `Constant`, a `Computed`, or a source's name; None in the reads that `Moves.find` takes.
        to: Flat index of the first element in the destination.
        at: Flat index of the first element in the root.
        loops: Triples (count, to_step, from_step); steps in the destination are positive, those in the root may be 0.
        via: Casts and functions that the elements pass through, in order.
    """

    root: Any
    to: int
    at: int
    loops: tuple[Loop, ...]
    via: tuple[Any, ...] = ()

    @property
    def numel(self) -> int:
        """The number of elements that are moved."""
        return prod([count for count, _, _ in self.loops])

    @property
    def size(self) -> tuple[int, ...]:
        """The counts of the loops."""
        return tuple([count for count, _, _ in self.loops])

    @property
    def end(self) -> int:
        """The largest flat index that is written in the destination: the last one, not one past it."""
        return self.to + sum([(count - 1) * step for count, step, _ in self.loops])

    @property
    def last(self) -> int:
        """The largest flat index that is read in the root: the last one, not one past it."""
        return self.at + sum([(count - 1) * step for count, _, step in self.loops])


def read_of(place: int, shape: Sequence[int], into: Sequence[int], strides: Sequence[int], to: int = 0) -> Move:
    """Return the move from a view (offset `place`, strides `strides`) to another (offset `to`, strides `into`)."""
    return normal(Move(None, to, place, tuple(zip(shape, into, strides, strict=True))))


def whole(root: Any, numel: int) -> tuple[Move, ...]:
    """Return one move, in a tuple, that copies all elements of a root to the same flat indices; () for no elements."""
    return (Move(root, 0, 0, ((numel, 1, 1),) if numel > 1 else ()),) if numel else ()


def normal(move: Move) -> Move:
    """Return an equal move: loops sorted by destination step, largest first, and merged if contiguous on both sides.

    Examples:
        >>> normal(Move("w", 0, 4, ((3, 1, 1), (2, 3, 3)))).loops
        ((6, 1, 1),)
    """
    loops = move.loops
    if len(loops) == 1 and loops[0][0] != 1:
        return move
    new: list[Loop] = []
    for count, to, at in sorted([loop for loop in loops if loop[0] != 1], key=lambda loop: -loop[1]):
        if new and new[-1][1] == to * count and new[-1][2] == at * count:
            count *= new.pop()[0]
        new.append((count, to, at))
    return Move(move.root, move.to, move.at, tuple(new), move.via)


def turned(move: Move, root: Any = None, via: tuple[Any, ...] = ()) -> Move:
    """Return a move with its two sides swapped: the new root is `root`, and the new casts and functions are `via`."""
    return Move(root, move.at, move.to, tuple([(count, at, to) for count, to, at in move.loops]), via)


def in_place(move: Move) -> Move:
    """Return the identity move on the flat indices that a move writes: it reads each of them and writes it back."""
    return Move(None, move.to, move.to, tuple([(count, to, to) for count, to, _ in move.loops]))


def through(moves: Sequence[Move], via: tuple[Any, ...]) -> Sequence[Move]:
    """Return moves whose elements pass through further steps (casts and functions) at the end."""
    return [move._replace(via=joined(move.via, via)) for move in moves] if via else moves


def is_nested(move: Move) -> bool:
    """Return whether each loop's `to_step` is at least the extent of the loops inside it, so that no writes overlap."""
    below = 1
    for count, step, _ in reversed(move.loops):
        if step < below:
            return False
        below = step * count
    return True


def nested(move: Move) -> Iterator[Move]:
    """Yield nested moves (see `is_nested`) that together do the same as a move; for a nested move, only itself."""
    move = normal(move)
    if is_nested(move):
        yield move
        return
    # The shortest loop is unrolled, which gives the fewest parts.
    which = min(range(len(move.loops)), key=lambda number: move.loops[number][0])
    count, to, at = move.loops[which]
    others = (*move.loops[:which], *move.loops[which + 1 :])
    for number in range(count):
        yield from nested(move._replace(to=move.to + number * to, at=move.at + number * at, loops=others))


class Moves(Sequence[Move]):
    """Nested moves (see `is_nested`) into one flat destination, without overlaps, in the order of their starts."""

    __slots__ = ("_lows", "_moves", "_tops")

    def __init__(self, moves: Iterable[Move] = ()):
        parts = [part for move in moves for part in ((move,) if is_nested(move) else nested(move))]
        self._moves = sorted(parts, key=attrgetter("to"))
        self._lows = [move.to for move in self._moves]
        self._tops = list(accumulate([move.end for move in self._moves], max))  # the maximum of `end` up to each move

    def __len__(self) -> int:
        return len(self._moves)

    def __getitem__(self, index: Any) -> Any:
        return self._moves[index]

    def __iter__(self) -> Iterator[Move]:
        return iter(self._moves)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Moves) and self._moves == other._moves

    __hash__ = None  # type: ignore[assignment]  # different moves may copy the same elements

    @property
    def numel(self) -> int:
        """The number of elements that are written."""
        return sum([move.numel for move in self._moves])

    def near(self, low: int, high: int) -> slice:
        """Return the slice of the moves that may write to flat indices from `low` to `high`, both included."""
        # Without this, a model of 46,183 tensors, or a permutation of rows, would take quadratic time.
        return slice(bisect_left(self._tops, low), bisect_right(self._lows, high))

    def find(self, reads: Iterable[Move]) -> tuple[list[Move], list[Move]]:
        """Return reads of the destination composed with the moves that write it, and the reads of unwritten elements.

        A composed read takes its elements directly from the move's root. Reads are cut into parts if needed.

        Examples:
            >>> rows = Moves([Move("a", 0, 0, ((4, 1, 1),)), Move("b", 4, 0, ((4, 1, 1),))])
            >>> rows.find([Move(None, 0, 2, ((4, 1, 1),))])[0]
            [Move(root='a', to=0, at=2, loops=((2, 1, 1),), ...), Move(root='b', to=2, at=0, loops=((2, 1, 1),), ...)]
        """
        hits: list[Move] = []
        missing: list[Move] = []
        for read in reads:
            if not read.numel:
                continue
            remaining = [read]
            for write in self._moves[self.near(read.at, read.last)]:
                low, high = write.to, write.end
                todo, remaining = remaining, []
                while todo:
                    part = todo.pop()
                    if part.at > high or part.last < low:
                        remaining.append(part)
                    else:
                        todo += _meet(part, write, hits, remaining)
                if not remaining:
                    break
            missing += remaining
        return hits, missing


def _meet(read: Move, write: Move, hits: list[Move], left: list[Move]) -> tuple[Move, ...]:
    """Add a read to `hits`, composed with one write; if they share no element, add it to `left` as it is.

    If neither is possible for the whole read, it is cut into parts, which are returned to be added in the same way.
    """
    loops = read.loops
    at, steps = read.at - write.to, [loop[2] for loop in loops]
    total, froms = write.at, [0] * len(loops)
    edge: tuple[list[int], int] | None = None  # where to cut, unless a later digit shows that nothing meets
    # A nested write is a mixed radix: each loop's step is the weight of a digit. Where a read's steps never carry from
    # one digit into the next, it is a read of the write's root, with the digits weighted by the loops' steps there.
    for count, weight, step_there in write.loops or ((1, 1, 0),):
        digit, at = divmod(at, weight)
        digits = [step // weight for step in steps]
        steps = [step % weight for step in steps]
        if at + _span(loops, steps) >= weight:
            return _cut_at_carry(read, steps, weight, at)
        last = digit + _span(loops, digits)
        if digit >= count or last < 0:
            left.append(read)
            return ()
        if edge is None and (digit < 0 or last >= count):
            edge = digits, (0 if digit < 0 else count) - digit
        total += digit * step_there
        froms = [old + number * step_there for old, number in zip(froms, digits, strict=True)]
    if at:
        left.append(read)
        return ()
    if any(step for step, loop in zip(steps, loops, strict=True) if loop[0] > 1):
        edge = edge or (steps, 1)
    if edge is None:
        new = tuple([(count, to, step) for (count, to, _), step in zip(loops, froms, strict=True)])
        hits.append(normal(Move(write.root, read.to, total, new, joined(write.via, read.via))))
        return ()
    digits, room = edge
    which = next(number for number, step in enumerate(digits) if step and loops[number][0] > 1)
    return _cut(read, which, min(max(1, -(-room // digits[which])), loops[which][0] - 1))


def _span(loops: Sequence[Loop], steps: Sequence[int]) -> int:
    return sum([(loop[0] - 1) * step for loop, step in zip(loops, steps, strict=True)])


def _cut_at_carry(read: Move, steps: list[int], weight: int, at: int) -> tuple[Move, ...]:
    """Split a read in two, or one of its loops into two nested ones, to reduce carries (see `_meet`).

    `at` and `steps` are the read's first index and steps modulo `weight`, the step of one of the write's loops. A carry
    is a sum of these remainders that reaches `weight`.
    """
    loops = read.loops
    moving = [number for number, step in enumerate(steps) if step and loops[number][0] > 1]
    which = max(moving, key=lambda number: (loops[number][0] - 1) * steps[number])
    count, to, step = loops[which]
    period = weight // gcd(steps[which], weight)  # of the remainder of the step below larger digits
    if period < count:
        whole_periods = count // period * period
        if whole_periods < count:
            return _cut(read, which, whole_periods)
        # After a period the steps are whole digits, so the loop becomes two, and the outer one never carries.
        pair = (count // period, to * period, step * period), (period, to, step)
        return (read._replace(loops=(*loops[:which], *pair, *loops[which + 1 :])),)
    before = -(-(weight - at) // steps[which])
    return _cut(read, which, before if before < count else count // 2)


def _cut(read: Move, which: int, before: int) -> tuple[Move, Move]:
    count, to, at = read.loops[which]

    def part(first: int, length: int) -> Move:
        loops = (*read.loops[:which], (length, to, at), *read.loops[which + 1 :])
        return read._replace(to=read.to + first * to, at=read.at + first * at, loops=loops)

    return part(0, before), part(before, count - before)


class Written(Moves):
    """A mutable list of moves into a tensor that running code still writes to."""

    __slots__ = ()

    def add(self, move: Move) -> None:
        """Add a move for which `is_nested` is true. No other move may write the same elements of the destination."""
        place = bisect_right(self._lows, move.to)
        self._lows.insert(place, move.to)
        self._moves.insert(place, move)
        self._tops.insert(place, -1)
        self._renew_tops(place, place + 1)

    def _renew_tops(self, first: int, least: int) -> None:
        """Recompute maxima in `_tops` from index `first` on; stop at an unchanged one with index `least` or more."""
        top = self._tops[first - 1] if first else -1
        for number in range(first, len(self._moves)):
            top = max(top, self._moves[number].end)
            if number >= least and self._tops[number] == top:
                return
            self._tops[number] = top

    def take(self, out: Move) -> list[Move]:
        """Remove and return the parts of moves that write the same elements as `out`; `is_nested(out)` must be true."""
        moves: list[Move] = []
        hole, changes = Moves([out]), list[tuple[int, list[Move]]]()
        which = self.near(out.to, out.end)
        for number in range(which.start, which.stop):
            old = self._moves[number]
            if old.end < out.to:
                continue
            hit, missed = hole.find([in_place(old)])
            if hit:
                # Both parts are read from the old move alone, so that they keep its root.
                alone = Moves([old])
                moves += alone.find(map(in_place, hit))[0]
                changes.append((number, alone.find(missed)[0]))
        for number, _ in reversed(changes):  # from the back, so that earlier indices stay valid
            del self._moves[number], self._lows[number], self._tops[number]
        if changes:
            self._renew_tops(changes[0][0], changes[-1][0])
        for _, kept in changes:
            for move in kept:
                self.add(move)
        return moves

    def clear(self) -> list[Move]:
        """Remove all moves, and return them."""
        moves, empty = self._moves, type(self)()
        self._moves, self._lows, self._tops = empty._moves, empty._lows, empty._tops
        return moves


def rolled(moves: Iterable[Move]) -> list[Move]:
    """Return equivalent moves, sorted by `to`, with moves that repeat at equal distances joined into one move.

    So a gather by a regular index becomes a single move, like a strided view. If that doesn't halve the number of
    moves, as for a random permutation, only contiguous moves are joined.

    Examples:
        >>> rolled([Move("w", 4 * row, 8 * row, ((4, 1, 1),)) for row in range(3)])
        [Move(root='w', to=0, at=0, loops=((3, 4, 8), (4, 1, 1)), via=())]
    """
    runs = _join_runs(sorted(moves, key=attrgetter("to")))
    last, new = runs, _rolled_once(runs)
    while len(new) < len(last):
        last, new = new, _rolled_once(new)
    return new if 2 * len(new) <= len(runs) else runs


def _join_runs(moves: list[Move]) -> list[Move]:
    """Return moves in which two neighbours are joined if the second continues the loops of the first."""
    new: list[Move] = []
    for move in moves:
        if new and (longer := _longer(new[-1], move)) is not None:
            new[-1] = new[-1]._replace(loops=longer)
        else:
            new.append(move)
    return new


def _longer(one: Move, other: Move) -> tuple[Loop, ...] | None:
    """Return the loops of one move that does the work of two; None if the second doesn't continue the first."""
    if one.root != other.root or one.via != other.via:
        return None
    # A move of one row has no loop over rows, so the other move's steps are used.
    for left, right in ((one.loops[1:], other.loops[1:]), (one.loops, other.loops[1:]), (one.loops[1:], other.loops)):
        if left == right and (len(left) < len(one.loops) or len(right) < len(other.loops)):
            count, *steps = one.loops[0] if len(left) < len(one.loops) else (1, *other.loops[0][1:])
            more, *others = other.loops[0] if len(right) < len(other.loops) else (1, *steps)
            goes_on = (other.to - one.to, other.at - one.at) == (count * steps[0], count * steps[1])
            if goes_on and steps == others:
                return ((count + more, steps[0], steps[1]), *left)
    return None


def _rolled_once(moves: list[Move]) -> list[Move]:
    new: list[Move] = []
    first = 0
    while first < len(moves):
        move, last = moves[first], first
        if first + 1 < len(moves):
            step = (moves[first + 1].to - move.to, moves[first + 1].at - move.at)
            while step[1] >= 0 and last + 1 < len(moves) and _repeats(moves[last], moves[last + 1], step):
                last += 1
        if last > first:
            # A rolled move may interleave with itself, as overlapping loops do; then its parts stay apart.
            both = normal(move._replace(loops=((last - first + 1, *step), *move.loops)))
            new += [both] if is_nested(both) else moves[first : last + 1]
        else:
            new.append(move)
        first = last + 1
    return sorted(new, key=attrgetter("to"))


def _repeats(one: Move, other: Move, step: tuple[int, int]) -> bool:
    at_distance = (other.to - one.to, other.at - one.at) == step
    return at_distance and one.loops == other.loops and one.root == other.root and one.via == other.via
