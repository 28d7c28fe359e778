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
    "overwritten": ("was written, then something else over it", "were written, then something else over them"),
    "bends": ("", "are rows that became columns, as by a reshape where a transpose was meant"),
    "constant": ("", "are no source's: read from a file, perhaps, that the code opens itself"),
}
"""What is said of one element, and of several."""
_CONSTANT = 64
"""Of more different elements than this, a constant is said: as padding or a mask, it is usual."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Elements of one tensor that aren't used or made exactly once, or a hint.

    Attributes:
        kind: "unused" or "repeated", of a source; "unwritten" or "overwritten", of an output; the hints "bends" and
            "constant", of an output.
        name: Name of the source or the output; with the rank's number in front if several ranks were checked.
        elements: Number of elements.
        where: Place of the elements, as slices of the tensor.
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
        """The name."""
        return self.name

    @property
    def what(self) -> str:
        """The number of elements, and what the trace does to them."""
        return f"{plural(self.elements, 'element')} {_WHAT[self.kind][self.elements != 1]}"


def problems_of(ranks: Sequence[Fields]) -> tuple[Problem, ...]:
    """Return the problems of all ranks' traces; what several ranks have of a source counts as copies."""
    uses: dict[str, dict[Move, None]] = defaultdict(dict)  # each once, though many ranks have equal moves
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
        # What functions take, as scales of blocks, they may take for many elements.
        for name, reads in moved.items():
            kind = trace.sources[name]
            problems += _problem("repeated", label + name, kind.shape, coverage(reads, kind.numel)[1])
        for name in trace.outputs:
            problems += _output_problems(trace, name, label) if name not in trace.tied else ()
    unused = (
        _problem("unused", name, kind.shape, coverage(uses[name], kind.numel)[0])
        for name, kind in ranks[0].sources.items()
    )
    return (*(each for some in unused for each in some), *problems)


def _problem(kind: str, name: str, shape: tuple[int, ...], moves: Sequence[Move]) -> Iterator[Problem]:
    if moves:
        yield Problem(kind, name, sum([move.numel for move in moves]), places_text(moves, shape))


def _output_problems(trace: Fields, name: str, label: str) -> Iterator[Problem]:
    moves, kind = trace.moves[name], trace.outputs[name]
    missing = coverage(moves, kind.numel)[0] if moves.numel < kind.numel else []
    unwritten = [*missing, *(move for move in moves if not _is_known(move))]
    yield from _problem("unwritten", label + name, kind.shape, unwritten)
    yield from _problem("overwritten", label + name, kind.shape, trace.overwritten.get(name, ()))
    bent = [each for each in moves if isinstance(each.root, str) and _bends(each, kind.shape, trace.root_shape(each))]
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


# Places that moves have: counted exactly, without looking at each.


def coverage(moves: Iterable[Move], numel: int) -> tuple[list[Move], list[Move]]:
    """Return which places of a flat tensor no move's `to` side has, and those that several have: exact.

    Args:
        moves: any, nested or not, with loops that stay where they are.
        numel: Number of elements of the tensor.

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
    end = first = 0
    while first < len(parts):
        # A group of moves whose intervals meet; mostly that is one move without holes, and nothing has to be cut.
        low, high, last = parts[first].to, parts[first].end, first + 1
        while last < len(parts) and parts[last].to <= high:
            high, last = max(high, parts[last].end), last + 1
        left += _interval(end, low)
        if last > first + 1 or parts[first].numel != high + 1 - low:
            rest = Written(_interval(low, high + 1))
            for part in parts[first:last]:
                gone = rest.take(part)
                if sum([each.numel for each in gone]) < part.numel:  # the rest of it was taken before
                    twice += Moves(map(in_place, gone)).find([in_place(part)])[1]
            left += rest
        end, first = high + 1, last
    return left + _interval(end, numel), twice


def _interval(low: int, high: int) -> list[Move]:
    return [] if high <= low else [Move(None, low, low, ((high - low, 1, 1),) if high > low + 1 else ())]
