"""What is said of traces: their printed form, what they do to elements other than once, and how two of them differ."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import torch

from ..errors import plural
from ..lazy import dense
from ._boxes import leaves, operand_moves, strided
from ._moves import Loop, Move, Moves, Written, in_place, nested, rolled, turned
from ._steps import Computed, Constant, Operand, bits

if TYPE_CHECKING:
    from ._trace import Trace

_SHOWN = 16
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


def trace_text(trace: Trace) -> str:
    """Return a trace's printed form, of at most some moves for each output."""
    lines = [f"trace: {plural(len(trace.sources), 'source')} -> {plural(len(trace.outputs), 'output')}"]
    for name, kind in trace.outputs.items():
        if name in trace.tied:
            lines.append(f"  {name}: {kind} is {trace.tied[name]}")
            continue
        lines.append(f"  {name}: {kind} =")
        moves = rolled(trace.moves[name])
        lines += [f"    {move_text(move, kind.shape, root_shape(trace, move))}" for move in moves[:_SHOWN]]
        lines += [f"    and {len(moves) - _SHOWN} more moves"] if len(moves) > _SHOWN else []
        lines += ["    nothing"] if not moves and kind.numel else []
    return "\n".join(lines)


def root_shape(trace: Trace, move: Move) -> tuple[int, ...]:
    """Return the shape of what a move is from; of what is constant or computed, a flat one."""
    return trace.sources[move.root].shape if isinstance(move.root, str) else (move.last + 1,)


def move_text(move: Move, shape: tuple[int, ...], root: tuple[int, ...]) -> str:
    """Return a move as text.

    Args:
        move: from a root to an output.
        shape: of the output.
        root: of the root.

    Examples:
        >>> move_text(Move("w", 0, 0, ((2, 4, 1), (4, 1, 2))), (2, 4), (4, 2))
        '[a, b] = w[b, a]  (a=2 b=4)'
    """
    loops = factored(move, shape, root)
    names = [_LETTERS[number % 26] for number in range(len(loops))]
    into = _side(move.to, [(count, to, name) for (count, to, _), name in zip(loops, names, strict=True)], shape)
    read = _side(move.at, [(count, at, name) for (count, _, at), name in zip(loops, names, strict=True)], root)
    is_one = isinstance(move.root, Constant) and move.root.value.numel() == 1
    source = f"{move.root}[{read}]" if isinstance(move.root, str) else str(move.root)
    source += "" if is_one or isinstance(move.root, str) or move.last + 1 == move.numel else f"[{read}]"
    sizes = " ".join(f"{name}={count}" for (count, _, _), name in zip(loops, names, strict=True))
    return f"[{into}] = {source}{''.join(f'.{step}' for step in move.via)}" + (f"  ({sizes})" if sizes else "")


def factored(move: Move, shape: tuple[int, ...], root: tuple[int, ...]) -> list[Loop]:
    """Return a move's loops, cut so that each stays within one axis on both sides, where that can be."""
    loops = list(move.loops)
    # By the output's axes first, then by the root's: a loop that crosses both is cut twice.
    for side, steps in ((1, dense(shape).stride), (2, dense(root).stride)):
        new: list[Loop] = []
        for count, to, at in loops:
            own = (to, at)[side - 1]
            for step in steps:
                inner = step // own if own else 0
                if 1 < inner < count and step % own == 0 and count % inner == 0:
                    new.append((count // inner, to * inner, at * inner))
                    count = inner
            new.append((count, to, at))
        loops = new
    return loops


def _side(place: int, loops: Sequence[tuple[int, int, str]], shape: tuple[int, ...]) -> str:
    """Return one side of a move: for each axis a number, a name, factors, or an interval of them."""
    texts = []
    for axis, step in enumerate(dense(shape).stride):
        low, place = divmod(place, step) if step else (0, place)
        own = [(count, each // step, name) for count, each, name in loops if axis_of(each, shape) == axis]
        # From the innermost: factors that run on, as (a b) do, need no steps beside them.
        expected, runs_on = 1, True
        for count, each, _ in reversed(own):
            runs_on, expected = runs_on and each == expected, each * count
        names = " ".join(name if runs_on else f"{name}*{each}" for _, each, name in own)
        names = f"({names})" if len(own) > 1 else names
        is_whole = runs_on and not low and prod([count for count, _, _ in own]) == shape[axis]
        texts.append(str(low) if not own else names if is_whole else f"{low}:+{names}")
    return ", ".join(texts)


def axis_of(step: int, shape: tuple[int, ...]) -> int:
    """Return the axis along which a flat step leads, the number of axes if it leads nowhere."""
    strides = dense(shape).stride
    return next((axis for axis, stride in enumerate(strides) if 0 < stride <= step and shape[axis] > 1), len(shape))


def places_text(moves: Sequence[Move], shape: tuple[int, ...], shown: int = 3) -> str:
    """Return where moves' `to` sides lie in a tensor: as slices, or from the first element to the last.

    Examples:
        >>> places_text([Move(None, 4, 0, ((2, 4, 1), (2, 1, 1)))], (4, 4))
        '[1:3, 0:2]'
    """
    listed = rolled(moves)
    texts = [_place_text(move, shape) for move in listed[:shown]]
    return ", ".join(texts) + (f" and {len(listed) - shown} more" if len(listed) > shown else "")


def _place_text(move: Move, shape: tuple[int, ...]) -> str:
    axes, rest, place = [], factored(move, shape, shape), move.to
    for axis, step in enumerate(dense(shape).stride):
        low, place = divmod(place, step) if step else (0, place)
        own = [(count, each // step) for count, each, _ in rest if axis_of(each, shape) == axis]
        length = 1 + sum((count - 1) * each for count, each in own)
        by = own[0][1] if len(own) == 1 else 1
        # Two factors that leave gaps are no slice.
        if len(own) > 1 and length != prod([count for count, _ in own]):
            return f"{plural(move.numel, 'element')} from {move.to} to {move.end} of the flat tensor"
        axes.append(f"{low}:{low + length}{f':{by}' if by > 1 else ''}" if length > 1 else str(low))
    return f"[{', '.join(axes)}]"


# Problems: drops, repeats, overwrites.


_WHAT = {
    "unused": "reach no output",
    "repeated": "are used more than once",
    "unwritten": "are never written",
    "overwritten": "were written, then something else over them",
    "bends": "are rows that became columns, as by a reshape where a transpose was meant",
    "constant": "are no source's: read from a file, perhaps, that the code opens itself",
}
_CONSTANT = 64
"""Of more different elements than this, a constant is said: as padding or a mask, it is usual."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Elements of one tensor that aren't used or made exactly once, or a hint.

    Attributes:
        kind: "unused" or "repeated", of a source; "unwritten" or "overwritten", of an output; the hints "bends" and
            "constant", of an output.
        name: of the source or the output, with the rank's number in front where several were looked at.
        elements: how many.
        where: as slices of the tensor.
    """

    kind: str
    name: str
    elements: int
    where: str

    def __str__(self) -> str:
        return f"{self.name!r}: {self.elements} elements {_WHAT[self.kind]}: {self.where}"


@dataclass(frozen=True, slots=True)
class Difference:
    """What two traces make of one part of an output.

    Attributes:
        name: of the output.
        elements: how many differ.
        here: what the first makes of it.
        there: what the second does.
    """

    name: str
    elements: int
    here: str
    there: str

    def __str__(self) -> str:
        return f"{self.name!r}: {self.elements} elements are {self.here}, not {self.there}"


def problems_of(ranks: Sequence[Trace]) -> tuple[Problem, ...]:
    """Return the problems of all ranks' traces; what several ranks have of a source counts as copies."""
    used: dict[str, dict[Move, None]] = defaultdict(dict)  # each once, though many ranks have equal moves
    found: list[Problem] = []
    for number, trace in enumerate(ranks):
        label = f"rank {number}: " if len(ranks) > 1 else ""
        moved: dict[str, list[Move]] = defaultdict(list)
        for name, moves in trace.moves.items():
            for move in moves if name not in trace.tied else ():
                if isinstance(move.root, str):
                    moved[move.root].append(turned(move))
                for leaf in leaves([move]):
                    used[leaf.root][turned(leaf)] = None
        # What functions take, as scales of blocks, they may take for many elements.
        for name, reads in moved.items():
            kind = trace.sources[name]
            found += _problem("repeated", label + name, kind.shape, coverage(reads, kind.numel)[1])
        for name in trace.outputs:
            found += _output_problems(trace, name, label) if name not in trace.tied else ()
    unused = (
        _problem("unused", name, kind.shape, coverage(used[name], kind.numel)[0])
        for name, kind in ranks[0].sources.items()
    )
    return (*(each for some in unused for each in some), *found)


def _problem(kind: str, name: str, shape: tuple[int, ...], moves: Sequence[Move]) -> Iterator[Problem]:
    if moves:
        yield Problem(kind, name, sum([move.numel for move in moves]), places_text(moves, shape))


def _output_problems(trace: Trace, name: str, label: str) -> Iterator[Problem]:
    moves, kind = trace.moves[name], trace.outputs[name]
    missing = coverage(moves, kind.numel)[0] if moves.numel < kind.numel else []
    unwritten = [*missing, *(move for move in moves if not _is_known(move))]
    yield from _problem("unwritten", label + name, kind.shape, unwritten)
    yield from _problem("overwritten", label + name, kind.shape, trace.overwritten.get(name, ()))
    bent = [each for each in moves if isinstance(each.root, str) and _bends(each, kind.shape, root_shape(trace, each))]
    yield from _problem("bends", label + name, kind.shape, bent)
    large = [each for each in moves if isinstance(each.root, Constant) and each.root.value.numel() > _CONSTANT]
    yield from _problem("constant", label + name, kind.shape, large)


def _is_known(move: Move) -> bool:
    """Return whether no element that a computed one is made of was never written."""
    if not isinstance(move.root, Computed):
        return True
    parts = [(each, operand_moves(each, move)) for each in move.root.tensors]
    counts = [(1 if each.alone else move.numel) == sum([part.numel for part in some]) for each, some in parts]
    return all(counts) and all(_is_known(part) for _, some in parts for part in some)


def _bends(move: Move, shape: tuple[int, ...], root: tuple[int, ...]) -> bool:
    """Return whether a move neither splits axes nor merges them: two of one side are mixed in two of the other."""
    loops = factored(move, shape, root)
    pairs = {(axis_of(to, shape), axis_of(at, root)) for count, to, at in loops if count > 1 and at}
    # An axis that is split or merged has several partners, each of which has it alone; a reshape where a transpose
    # was meant has several on both sides.
    into, out_of = defaultdict[int, set[int]](set), defaultdict[int, set[int]](set)
    for one, other in pairs:
        into[one].add(other)
        out_of[other].add(one)
    return any(len(into[one]) > 1 and len(out_of[other]) > 1 for one, other in pairs)


# How two traces differ: each move of one is read through the other, which says of each element where it is from there.


def differences(one: Trace, other: Trace) -> dict[str, tuple[Difference, ...]]:
    """Return by output what differs."""
    found: dict[str, tuple[Difference, ...]] = {}
    for name in dict.fromkeys([*one.outputs, *other.outputs]):
        kinds = one.outputs.get(name), other.outputs.get(name)
        if kinds[0] != kinds[1] or kinds[0] is None:
            here, there = ("not there" if kind is None else str(kind) for kind in kinds)
            found[name] = (Difference(name, max(kind.numel for kind in kinds if kind), here, there),)
        elif (bad := tuple(_differing(one, other, name))) != ():
            found[name] = bad
    return found


def _differing(one: Trace, other: Trace, name: str) -> Iterator[Difference]:
    mine, theirs, shape = one.moves[name], other.moves[name], one.outputs[name].shape
    for move, count in _not_in(theirs, mine):
        found = [move_text(each, shape, root_shape(other, each)) for each in theirs.find([in_place(move)])[0]]
        there = "; ".join(found[:3]) + (f" and {len(found) - 3} more" if len(found) > 3 else "")
        yield Difference(name, count, move_text(move, shape, root_shape(one, move)), there or "unwritten")
    # Places that only the other one writes: where both write as many, the loop above has said all.
    for move in theirs if mine.numel != theirs.numel else ():
        if left := mine.find([in_place(move)])[1]:
            there = move_text(move, shape, root_shape(other, move))
            yield Difference(name, sum([part.numel for part in left]), "unwritten", there)


def _not_in(theirs: Moves, mine: Moves) -> Iterator[tuple[Move, int]]:
    """Yield which of my moves make other elements than theirs do at the same places, and how many."""
    for move in mine if mine != theirs else ():  # most are written alike, which is quickly seen
        pieces, left = theirs.find([turned(move)])
        count = sum([piece.numel for piece in pieces if not _same(piece, move)]) + sum([part.numel for part in left])
        if count:
            yield move, count


def same(one: Moves, other: Moves) -> bool:
    """Return whether two lists of moves make the same elements of one tensor: exact, whatever their form."""
    return one.numel == other.numel and next(_not_in(other, one), None) is None


def _same(piece: Move, move: Move) -> bool:
    """Return whether a piece, which leads from another trace's root to a move's root, is of the same elements."""
    mine, theirs = move.root, piece.root
    if isinstance(mine, str) or isinstance(theirs, str):
        # Read through the other trace, an element of a source must come out at its own place.
        stays = piece.to == piece.at and all(to == at for _, to, at in piece.loops)
        return stays and mine == theirs and move.via == piece.via
    if isinstance(mine, Constant) and isinstance(theirs, Constant):
        # By their bits: NaN equals itself, and 0.0 isn't -0.0.
        values = (_elements(mine, piece.to, piece, 1, move.via), _elements(theirs, piece.at, piece, 2, piece.via))
        return values[0].dtype == values[1].dtype and torch.equal(bits(values[0]), bits(values[1]))
    return (
        isinstance(mine, Computed)
        and isinstance(theirs, Computed)
        and (mine.func, mine.options, mine.dtype, move.via) == (theirs.func, theirs.options, theirs.dtype, piece.via)
        and len(mine.operands) == len(theirs.operands)
        and all(_same_operand(*pair, piece) for pair in zip(mine.operands, theirs.operands, strict=True))
    )


def _elements(root: Constant, place: int, piece: Move, side: int, via: tuple[Any, ...]) -> torch.Tensor:
    value = strided(root.value, piece.size, [loop[side] for loop in piece.loops], place)
    for step in via:
        value = step(value)
    return value


def _same_operand(mine: Any, theirs: Any, piece: Move) -> bool:
    if not (isinstance(mine, Operand) and isinstance(theirs, Operand)):
        return type(mine) is type(theirs) and bool(mine == theirs)
    if (mine.dtype, mine.alone) != (theirs.dtype, theirs.alone):
        return False
    here, there = operand_moves(mine, turned(piece)), operand_moves(theirs, piece)
    return same(Moves(here), Moves(there))


# Places that moves have: counted exactly, without looking at each.


def coverage(moves: Iterable[Move], numel: int) -> tuple[list[Move], list[Move]]:
    """Return which places of a flat tensor no move's `to` side has, and those that several have: exact.

    Args:
        moves: any, nested or not, with loops that stay where they are.
        numel: of the tensor.

    Examples:
        >>> left, twice = coverage([Move(None, 0, 0, ((4, 1, 1),)), Move(None, 3, 0, ((2, 2, 1),))], 8)
        >>> [(move.to, move.loops) for move in left], [move.to for move in twice]
        ([(4, ()), (6, ((2, 1, 1),))], [3])
    """
    left: list[Move] = []
    twice: list[Move] = []
    parts: list[Move] = []
    for move in moves:
        if move.numel:
            moving = move._replace(loops=tuple([loop for loop in move.loops if loop[1]]))
            twice += [moving] if moving.numel < move.numel else []
            parts += nested(moving)
    parts.sort(key=lambda part: (part.to, part.end))
    done = first = 0
    while first < len(parts):
        # A group of moves whose intervals meet; mostly that is one move without holes, and nothing has to be cut.
        low, high, last = parts[first].to, parts[first].end, first + 1
        while last < len(parts) and parts[last].to <= high:
            high, last = max(high, parts[last].end), last + 1
        left += _interval(done, low)
        if last > first + 1 or parts[first].numel != high + 1 - low:
            rest = Written(_interval(low, high + 1))
            for part in parts[first:last]:
                gone = rest.take(part)
                if sum([each.numel for each in gone]) < part.numel:  # the rest of it was taken before
                    twice += Moves(map(in_place, gone)).find([in_place(part)])[1]
            left += rest
        done, first = high + 1, last
    return left + _interval(done, numel), twice


def _interval(low: int, high: int) -> list[Move]:
    return [] if high <= low else [Move(None, low, low, ((high - low, 1, 1),) if high > low + 1 else ())]
