"""Evaluating moves: elements of sources, whole or in boxes, are copied to where they go."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ..lazy import dense
from ..trees import as_integers
from ._boxes import Reads, covering_box, tight
from ._moves import Move, read_of
from ._steps import Computed, Constant, Operand

Shapes = Mapping[str, tuple[int, ...]]


class Elements(Protocol):
    """Where sources' elements are taken from."""

    def parts(self, move: Move) -> Iterator[Move]:
        """Yield a move from a source in parts that can each be taken."""

    def take(self, part: Move) -> torch.Tensor:
        """Return a part's elements as a tensor of its loops' counts."""


@dataclass(frozen=True, slots=True, eq=False)
class Whole:
    """Sources that are in memory whole.

    Attributes:
        tensors: dense, by name.
    """

    tensors: Mapping[str, torch.Tensor]

    def parts(self, move: Move) -> Iterator[Move]:
        yield move

    def take(self, part: Move) -> torch.Tensor:
        return strided(self.tensors[part.root], part.size, [step for _, _, step in part.loops], part.at)


@dataclass(frozen=True, slots=True, eq=False)
class InBoxes:
    """Sources of which some boxes are in memory.

    Attributes:
        shapes: of the sources.
        reads: the boxes.
        tensors: their elements, dense, in the order of the boxes.
    """

    shapes: Shapes
    reads: Reads
    tensors: Mapping[str, Sequence[torch.Tensor]]

    def parts(self, move: Move) -> Iterator[Move]:
        return (part for _, part in tight(move, self.shapes[move.root]))

    def take(self, part: Move) -> torch.Tensor:
        box, inner = covering_box(part, self.shapes[part.root])
        number = self.reads.numbers[part.root][box]
        outer = self.reads.boxes[part.root][number]
        strides = dense(outer.shape).stride
        place = [low - base for low, base in zip(box.offset, outer.offset, strict=True)]
        # Steps lead along the same axes in a part's own box and in the one that was read, which has other strides.
        own = dense(box.shape).stride
        steps = [sum(_digits(step, own, strides)) for step in inner.stride]
        first = sum(_digits(inner.offset, own, strides)) + sum(map(int.__mul__, place, strides))
        return strided(self.tensors[part.root][number], part.size, steps, first)


def _digits(flat: int, own: Sequence[int], strides: Sequence[int]) -> Iterator[int]:
    for weight, stride in zip(own, strides, strict=True):
        digit, flat = divmod(flat, weight)
        yield digit * stride


def strided(tensor: torch.Tensor, size: Sequence[int], steps: Sequence[int], place: int) -> torch.Tensor:
    """Return a view of a dense tensor's elements by their flat places."""
    return tensor.as_strided(size, steps, tensor.storage_offset() + place)


def filled(
    into: torch.Tensor, moves: Sequence[Move], elements: Elements, unwritten: Callable[[int], float | None]
) -> torch.Tensor:
    """Return a new dense tensor once the moves' elements are in it.

    Args:
        into: the tensor.
        moves: of its flat places.
        elements: of sources.
        unwritten: is told how many places no move writes, if any, and returns what fills them, or raises.
    """
    if missing := into.numel() - sum([move.numel for move in moves]):
        fill = unwritten(missing)
        _ = as_integers(into).zero_() if not fill else into.fill_(fill)
    for move in moves:
        for part in elements.parts(move) if isinstance(move.root, str) else (move,):
            place = strided(into, part.size, [step for _, step, _ in part.loops], part.to)
            place.copy_(_value(part, elements, unwritten))
    return into


def _value(move: Move, elements: Elements, unwritten: Callable[[int], float | None]) -> torch.Tensor:
    steps = [step for _, _, step in move.loops]
    if isinstance(move.root, Constant):
        value = strided(move.root.value, move.size, steps, move.at)
    elif isinstance(move.root, Computed):
        value = move.root([_part(each, move, elements, unwritten) for each in move.root.tensors])
        value = value.reshape(move.size) if value.numel() == move.numel else value.expand(move.size)
    else:
        value = elements.take(move)
    for step in move.via:
        value = step(value)
    return value


def _part(operand: Operand, move: Move, elements: Elements, unwritten: Callable[[int], float | None]) -> torch.Tensor:
    size = () if operand.alone else move.size or (1,)
    part = torch.empty(size, dtype=operand.dtype, device="cpu")
    return filled(part, operand_moves(operand, move), elements, unwritten)


def operand_moves(operand: Operand, move: Move) -> list[Move]:
    """Return what a move of computed elements takes of an operand, as moves to a dense tensor of its loops' counts."""
    if operand.alone:
        return list(operand.moves)
    size, steps = move.size, [step for _, _, step in move.loops]
    found: list[Move] = operand.moves.find([read_of(move.at, size, dense(size).stride, steps)])[0]
    return found


def leaves(moves: Sequence[Move]) -> Iterator[Move]:
    """Yield moves from sources alone: those of what is computed are its operands'."""
    for move in moves:
        if isinstance(move.root, str):
            yield move
        elif isinstance(move.root, Computed):
            for operand in move.root.tensors:
                yield from leaves(operand_moves(operand, move))


def dense_cpu(tensor: Any) -> torch.Tensor:
    """Return a tensor's elements as a dense row-major one on the same device, the tensor itself where it is one."""
    held: torch.Tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return held
