"""Bytes dealt out to ranks: of what several of them could read or send, each takes a part, so that all are level."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..geometry import Column, joined_rows

_SWEEPS = 8
_MANY_SETS = 2000


@dataclass(frozen=True, slots=True, eq=False)
class Line:
    """Pieces that one set of ranks holds, laid end to end as a line, and where the line may be cut.

    Attributes:
        item: the numbers of the pieces, int64 (items,).
        size: bytes, int64 (items,).
        row: the bytes that a piece is cut in multiples of; 0 where it isn't cut, int64 (items,).
        holders: ranks, ascending, int64 (holders,).
    """

    item: Column
    size: Column
    row: Column
    holders: Column


@dataclass(frozen=True, slots=True, eq=False)
class Parts:
    """Parts of a line's pieces, each with its sender: item, first byte, end, rank, int64 (parts,) each."""

    item: Column
    begin: Column
    end: Column
    sender: Column


def dealt_out(alone: Parts, lines: list[Line], load: Column, shortest_cut: int) -> Parts:
    """Return who sends, or reads, what: of each line its holders take parts, so that ranks are level.

    Args:
        alone: what only one rank can take.
        lines: what several can.
        load: the bytes of each rank besides, int64 (ranks,).
        shortest_cut: bytes; no part of a piece that is cut is shorter.

    Examples:
        >>> none, one = np.zeros(0, dtype=np.int64), np.array([100])
        >>> parts = dealt_out(Parts(*[none] * 4), [Line(one * 0, one, one // 50, np.arange(2))], np.array([20, 0]), 1)
        >>> parts.sender.tolist(), parts.begin.tolist(), parts.end.tolist()
        ([0, 1], [0, 40], [40, 100])
    """
    load = _add_load(load, alone, 1)
    assigned: list[Parts] = []
    for line in lines:
        assigned.append(_assign_line(line, load[line.holders], shortest_cut))
        load = _add_load(load, assigned[-1], 1)
    # The first pass sees only the loads of lines before. Sweeps assign each line anew under all others' loads, until
    # nothing changes; with very many sets that would take long.
    for _ in range(_SWEEPS if 1 < len(lines) <= _MANY_SETS else 0):
        before = load
        for number, line in enumerate(lines):
            load = _add_load(load, assigned[number], -1)
            assigned[number] = _assign_line(line, load[line.holders], shortest_cut)
            load = _add_load(load, assigned[number], 1)
        if np.array_equal(before, load):
            break
    return joined_rows([alone, *assigned])


def _add_load(load: Column, parts: Parts, sign: int) -> Column:
    changed = load.copy()
    np.add.at(changed, parts.sender, sign * (parts.end - parts.begin))
    return changed


def _assign_line(line: Line, load: Column, shortest_cut: int) -> Parts:
    """Return a line's pieces with their senders: each holder gets a interval whose length levels its load."""
    end = np.cumsum(line.size)
    begin = end - line.size
    bounds = np.cumsum(_shares(load, int(end[-1])))[:-1]
    inside = np.searchsorted(begin, bounds, side="right") - 1
    cuts = snapped(bounds, begin[inside], line.size[inside], line.row[inside], shortest_cut)
    edges = np.sort(np.concatenate([begin, cuts[cuts < end[-1]]]))
    edges = edges[np.append(True, edges[1:] > edges[:-1])]
    item = np.searchsorted(begin, edges, side="right") - 1
    sender = line.holders[np.searchsorted(cuts, edges, side="right")]
    stops = np.append(edges[1:], end[-1])
    return Parts(line.item[item], edges - begin[item], stops - begin[item], sender)


def snapped(bounds: Column, begin: Column, size: Column, row: Column, shortest_cut: int) -> Column:
    """Return where a line is cut: at the row nearest to a bound inside its piece, or at the piece's nearer end."""
    at = bounds - begin
    whole = np.where(2 * at > size, size, 0)
    rows = np.maximum(row, 1)
    cut = (at + rows // 2) // rows * rows
    cut = np.where(cut < shortest_cut, 0, np.where(size - cut < shortest_cut, size, cut))
    return begin + np.where(row > 0, cut, whole)


def _shares(load: Column, total: int) -> Column:
    """Return how a number of bytes is added to loads, so that the highest becomes as low as possible."""
    order = np.argsort(load, kind="stable")
    above = load[order] - load.min()
    needed = above * np.arange(load.size) - (np.cumsum(above) - above)
    count = int(np.searchsorted(needed, total, side="right"))
    level, more = divmod(total + int(above[:count].sum()), count)
    share = np.zeros_like(load)
    share[order[:count]] = level - above[:count] + (np.arange(count) < more)
    return share
