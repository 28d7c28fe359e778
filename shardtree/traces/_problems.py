"""Problems of a trace: elements that are dropped, repeated, overwritten or never written."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from ..errors import plural
from ._evaluate import leaves, operand_moves
from ._fields import Fields
from ._moves import Move, Moves, Written, in_place, nested, turned
from ._steps import Computed, Constant
from ._text import axis_of, factored, places_text

_WHAT = {
    "unused": ("reaches no output", "reach no output"),
    "repeated": ("is used more than once", "are used more than once"),
    "unwritten": ("is never written", "are never written"),
    "overwritten": ("was written and later overwritten", "were written and later overwritten"),
    "bends": ("", "are rows that became columns, as by a reshape where a transpose was meant"),
    "constant": ("", "come from no source: perhaps read from a file that the code opens itself"),
}
"""Description of one element, and of several, by kind of problem."""
_CONSTANT = 64
"""Number of different elements above which a constant is reported; smaller ones are usual as padding or masks."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Elements of one tensor that aren't used or written exactly once, or that hint at a mistake.

    Attributes:
        kind: "unused" or "repeated" for a source; "unwritten" or "overwritten" for an output; for an output also the
            hints "bends" (rows became columns) and "constant" (elements come from no source).
        name: Name of the source or output, after the rank's number if several ranks were checked.
        elements: Number of elements.
        where: Position of the elements, as slices of the tensor.
    """

    fix: ClassVar[str] = ""

    kind: str
    name: str
    elements: int
    where: str

    def __str__(self) -> str:
        return f"{self.name!r}: {self.what}: {self.where}"

    @property
    def key(self) -> str:
        """The tensor's name."""
        return self.name

    @property
    def what(self) -> str:
        """The number of elements and their problem, as text, such as "2 elements are never written"."""
        return f"{plural(self.elements, 'element')} {_WHAT[self.kind][self.elements != 1]}"


def problems_of(ranks: Sequence[Fields]) -> tuple[Problem, ...]:
    """Return the problems of all ranks' traces. Elements that several ranks use are replicas, which is no problem."""
    uses: dict[str, dict[Move, None]] = defaultdict(dict)  # keys alone, since many ranks have equal moves
    problems: list[Problem] = []
    for number, trace in enumerate(ranks):
        label = f"rank {number}: " if len(ranks) > 1 else ""
        moved: dict[str, list[Move]] = defaultdict(list)
        for name, moves in trace.moves.items():
            for move in moves if name not in trace.tied else ():
                if isinstance(move.root, str):
                    moved[move.root].append(turned(move))
                for leaf in leaves([move]):
                    uses[leaf.root][turned(leaf)] = None
        # Operands of functions, such as scales of blocks, may be used for many elements.
        for name, reads in moved.items():
            kind = trace.sources[name]
            problems += _problem("repeated", label + name, kind.shape, coverage(reads, kind.numel)[1])
        for name in trace.outputs:
            problems += _output_problems(trace, name, label) if name not in trace.tied else ()
    unused = (
        _problem("unused", name, kind.shape, coverage(uses[name], kind.numel)[0])
        for name, kind in ranks[0].sources.items()
    )
    return (*(problem for problems_of_source in unused for problem in problems_of_source), *problems)


def _problem(kind: str, name: str, shape: tuple[int, ...], moves: Sequence[Move]) -> Iterator[Problem]:
    if moves:
        yield Problem(kind, name, sum([move.numel for move in moves]), places_text(moves, shape))


def _output_problems(trace: Fields, name: str, label: str) -> Iterator[Problem]:
    moves, kind = trace.moves[name], trace.outputs[name]
    missing = coverage(moves, kind.numel)[0] if moves.numel < kind.numel else []
    unwritten = [*missing, *(move for move in moves if not _is_known(move))]
    yield from _problem("unwritten", label + name, kind.shape, unwritten)
    yield from _problem("overwritten", label + name, kind.shape, trace.overwritten.get(name, ()))
    bent = [move for move in moves if isinstance(move.root, str) and _bends(move, kind.shape, trace.root_shape(move))]
    yield from _problem("bends", label + name, kind.shape, bent)
    large = [move for move in moves if isinstance(move.root, Constant) and move.root.value.numel() > _CONSTANT]
    yield from _problem("constant", label + name, kind.shape, large)


def _is_known(move: Move) -> bool:
    """Return whether all operands' elements that a move from a `Computed` needs were written; True for other moves."""
    if not isinstance(move.root, Computed):
        return True
    pairs = [(operand, operand_moves(operand, move)) for operand in move.root.tensors]
    counts = [(1 if operand.alone else move.numel) == sum([part.numel for part in parts]) for operand, parts in pairs]
    return all(counts) and all(_is_known(part) for _, parts in pairs for part in parts)


def _bends(move: Move, shape: tuple[int, ...], root: tuple[int, ...]) -> bool:
    """Return whether a move looks like a reshape where a transpose was meant.

    In such a move, one axis of the output gets elements from several axes of the root. One of these axes of the root
    also has elements for several axes of the output. No split, merge or permutation of axes does both.

    Args:
        move: Move from a root to an output.
        shape: Shape of the output.
        root: Shape of the root.
    """
    loops = factored(move, shape, root)
    pairs = {(axis_of(to, shape), axis_of(at, root)) for count, to, at in loops if count > 1 and at}
    # A split or merged axis has several partners, each of which has no other partner. A reshape where a transpose was
    # meant has axes with several partners on both sides.
    into, out_of = defaultdict[int, set[int]](set), defaultdict[int, set[int]](set)
    for to_axis, from_axis in pairs:
        into[to_axis].add(from_axis)
        out_of[from_axis].add(to_axis)
    return any(len(into[to_axis]) > 1 and len(out_of[from_axis]) > 1 for to_axis, from_axis in pairs)


# Coverage of a flat tensor by moves, computed exactly without a visit to each element.


def coverage(moves: Iterable[Move], numel: int) -> tuple[list[Move], list[Move]]:
    """Return the elements of a flat tensor that are never written, and those that are written several times.

    Both are lists of moves; only their destinations matter.

    Args:
        moves: Moves into the tensor. A loop's step in the tensor may be 0: it writes the same elements again.
        numel: Number of elements of the tensor.

    Examples:
        >>> missing, twice = coverage([Move(None, 0, 0, ((4, 1, 1),)), Move(None, 3, 0, ((2, 2, 1),))], 8)
        >>> [(move.to, move.loops) for move in missing], [move.to for move in twice]
        ([(4, ()), (6, ((2, 1, 1),))], [3])
    """
    missing: list[Move] = []
    twice: list[Move] = []
    parts: list[Move] = []
    for move in moves:
        if move.numel:
            moving = move._replace(loops=tuple([loop for loop in move.loops if loop[1]]))
            twice += [moving] if moving.numel < move.numel else []
            parts += nested(moving)
    parts.sort(key=lambda part: (part.to, part.end))
    end = first = 0
    while first < len(parts):
        # A group of moves whose intervals meet; usually that is one move without holes, and nothing has to be cut.
        low, high, last = parts[first].to, parts[first].end, first + 1
        while last < len(parts) and parts[last].to <= high:
            high, last = max(high, parts[last].end), last + 1
        missing += _interval(end, low)
        if last > first + 1 or parts[first].numel != high + 1 - low:
            free = Written(_interval(low, high + 1))
            for part in parts[first:last]:
                taken = free.take(part)
                if sum([piece.numel for piece in taken]) < part.numel:  # other moves have some of its places
                    twice += Moves(map(in_place, taken)).find([in_place(part)])[1]
            missing += free
        end, first = high + 1, last
    return missing + _interval(end, numel), twice


def _interval(low: int, high: int) -> list[Move]:
    return [] if high <= low else [Move(None, low, low, ((high - low, 1, 1),) if high > low + 1 else ())]
