"""Which places of a tensor moves have, and which several have: counted exactly, without looking at each place."""

from __future__ import annotations

from collections.abc import Iterable

from ._moves import Move, Moves, Written, in_place, nested


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
