"""Differences between two traces.

A trace has moves for each output; a `Move` copies elements to the output from its root, such as a source. For each move
of one trace, the other trace's moves to the same elements are found, and the origins of these elements are compared.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ..core.offences import offence_text
from ..errors import plural
from ._evaluate import gone_through, operand_moves, strided
from ._fields import Fields
from ._moves import Move, Moves, in_place, turned
from ._steps import Computed, Constant, Operand, bits, exactly
from ._text import move_text


@dataclass(frozen=True, slots=True)
class Difference:
    """Elements of one output that differ between two traces.

    Attributes:
        name: Name of the output.
        elements: Number of elements that differ.
        here: Description of the elements in the first trace.
        there: Description of the elements in the second trace.
    """

    where: ClassVar[str] = ""
    fix: ClassVar[str] = ""

    name: str
    elements: int
    here: str
    there: str

    __str__ = offence_text

    @property
    def key(self) -> str:
        """The output's name."""
        return self.name

    @property
    def what(self) -> str:
        """The number of elements that differ, and the descriptions `here` and `there`, as text."""
        return (
            f"{plural(self.elements, 'element')} {'is' if self.elements == 1 else 'are'} {self.here}, not {self.there}"
        )


def differences(one: Fields, other: Fields) -> dict[str, tuple[Difference, ...]]:
    """Return the differences between two traces, by the output's name; equal outputs are left out."""
    by_output: dict[str, tuple[Difference, ...]] = {}
    for name in dict.fromkeys([*one.outputs, *other.outputs]):
        kinds = one.outputs.get(name), other.outputs.get(name)
        if kinds[0] != kinds[1] or kinds[0] is None:
            here, there = ("not there" if kind is None else str(kind) for kind in kinds)
            by_output[name] = (Difference(name, max(kind.numel for kind in kinds if kind), here, there),)
        elif (bad := tuple(_differing(one, other, name))) != ():
            by_output[name] = bad
    return by_output


def _differing(one: Fields, other: Fields, name: str) -> Iterator[Difference]:
    mine, theirs, shape = one.moves[name], other.moves[name], one.outputs[name].shape
    for move, count in _not_in(theirs, mine):
        texts = [move_text(part, shape, other.root_shape(part)) for part in theirs.find([in_place(move)])[0]]
        there = "; ".join(texts[:3]) + (f" and {len(texts) - 3} more" if len(texts) > 3 else "")
        yield Difference(name, count, move_text(move, shape, one.root_shape(move)), there or "unwritten")
    # Places that only the other trace writes: if both write equally many, the loop above has found all.
    for move in theirs if mine.numel != theirs.numel else ():
        if left := mine.find([in_place(move)])[1]:
            there = move_text(move, shape, other.root_shape(move))
            yield Difference(name, sum([part.numel for part in left]), "unwritten", there)


def _not_in(theirs: Moves, mine: Moves) -> Iterator[tuple[Move, int]]:
    """Yield each move of `mine` that disagrees with `theirs`, and the number of its elements that differ."""
    for move in mine if mine != theirs else ():  # most are equal, which is quick to compare
        pieces, left = theirs.find([turned(move)])
        count = sum([piece.numel for piece in pieces if not _same(piece, move)]) + sum([part.numel for part in left])
        if count:
            yield move, count


def same(one: Moves, other: Moves) -> bool:
    """Return whether two lists of moves give a tensor exactly the same elements, however these are split into moves."""
    return one.numel == other.numel and next(_not_in(other, one), None) is None


def _same(piece: Move, move: Move) -> bool:
    """Return whether two traces give some positions of an output equal elements.

    Args:
        piece: Origins of the elements in both traces, encoded as a move from the origins in the other trace's root to
            those in the root of `move`.
        move: Move of this trace that writes the elements.
    """
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
        and (mine.func, mine.dtype, move.via) == (theirs.func, theirs.dtype, piece.via)
        and exactly(mine.options) == exactly(theirs.options)
        and len(mine.operands) == len(theirs.operands)
        and all(_same_operand(*pair, piece) for pair in zip(mine.operands, theirs.operands, strict=True))
    )


def _elements(root: Constant, place: int, piece: Move, side: int, via: tuple[Any, ...]) -> torch.Tensor:
    return gone_through(strided(root.value, piece.size, [loop[side] for loop in piece.loops], place), via)


def _same_operand(mine: Any, theirs: Any, piece: Move) -> bool:
    if not (isinstance(mine, Operand) and isinstance(theirs, Operand)):
        return bool(exactly(mine) == exactly(theirs))
    if (mine.dtype, mine.alone) != (theirs.dtype, theirs.alone):
        return False
    here, there = operand_moves(mine, turned(piece)), operand_moves(theirs, piece)
    return same(Moves(here), Moves(there))
