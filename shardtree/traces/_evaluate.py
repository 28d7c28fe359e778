"""Evaluation of moves: sources' elements are copied to their destinations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import copysign

import torch

from ..core.lazy import as_integers, dense
from ._moves import Move, read_of
from ._steps import Computed, Constant, Operand


def strided(tensor: torch.Tensor, size: Sequence[int], steps: Sequence[int], place: int) -> torch.Tensor:
    """Return the view of a dense tensor that begins at a flat index and has the given sizes and strides."""
    return tensor.as_strided(size, steps, tensor.storage_offset() + place)


def filled(
    into: torch.Tensor,
    moves: Sequence[Move],
    sources: Mapping[str, torch.Tensor],
    unwritten: Callable[[int], float],
) -> torch.Tensor:
    """Fill a dense tensor with the elements that moves copy or compute, and return the tensor.

    Args:
        into: New tensor, all of whose elements are overwritten.
        moves: Moves into the flat tensor.
        sources: Dense sources by name.
        unwritten: Function that is called if some elements are written by no move. It takes their count, and returns
            the value to fill them with, or raises.
    """
    if missing := into.numel() - sum([move.numel for move in moves]):
        fill = unwritten(missing)
        is_zero = not fill and copysign(1.0, fill) > 0
        _ = as_integers(into).zero_() if is_zero else into.fill_(fill)  # torch can't fill some dtypes, even with zeros
    for move in moves:
        # Elements that are only copied are copied as integers: torch can't copy all dtypes that can be stored.
        whole = into if move.via or isinstance(move.root, Computed) else as_integers(into)
        place = strided(whole, move.size, [step for _, step, _ in move.loops], move.to)
        place.copy_(_value(move, sources, unwritten, into.device))
    return into


def _value(
    move: Move, sources: Mapping[str, torch.Tensor], unwritten: Callable[[int], float], device: torch.device
) -> torch.Tensor:
    steps = [step for _, _, step in move.loops]
    if isinstance(move.root, Computed):
        parts = []
        for operand in move.root.tensors:
            size = () if operand.alone else move.size or (1,)
            part = torch.empty(size, dtype=operand.dtype, device=device)
            parts.append(filled(part, operand_moves(operand, move), sources, unwritten))
        value = move.root(parts)
        value = value.reshape(move.size) if value.numel() == move.numel else value.expand(move.size)
    else:
        root = move.root.value.to(device) if isinstance(move.root, Constant) else sources[move.root]
        value = strided(root if move.via else as_integers(root), move.size, steps, move.at)
    return gone_through(value, move.via)


def gone_through(value: torch.Tensor, via: Sequence[Callable[[torch.Tensor], torch.Tensor]]) -> torch.Tensor:
    """Return a tensor after the steps in `via`: casts and functions. Repeats in an expanded view are computed once."""
    small = value
    for dim, (size, stride) in enumerate(zip(value.shape, value.stride(), strict=True)):
        small = small.narrow(dim, 0, 1) if via and size > 1 and not stride else small
    for step in via:
        small = step(small)
    return small.expand(value.shape)


def operand_moves(operand: Operand, move: Move) -> list[Move]:
    """Return moves that copy into a dense tensor those elements of an operand that `move` needs.

    The dense tensor has the shape ``move.size``, or no axes if the operand has none.

    Args:
        operand: Operand of a computed tensor.
        move: Move that reads a part of the computed tensor.
    """
    if operand.alone:
        return list(operand.moves)
    size, steps = move.size, [step for _, _, step in move.loops]
    moves: list[Move] = operand.moves.find([read_of(move.at, size, dense(size).stride, steps)])[0]
    return moves


def leaves(moves: Iterable[Move]) -> Iterator[Move]:
    """Yield all moves that read a source: given ones and, recursively, those that fill operands of computed tensors."""
    for move in moves:
        if isinstance(move.root, str):
            yield move
        elif isinstance(move.root, Computed):
            for operand in move.root.tensors:
                yield from leaves(operand_moves(operand, move))


def dense_tensor(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor as a dense row-major tensor on a device; it is copied only if necessary."""
    return as_integers(tensor).to(device).contiguous().view(tensor.dtype)
