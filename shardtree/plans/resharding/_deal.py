"""Who of those that want the same gets which part of it from the sources."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...geometry import Column, volumes
from ._alike import numbered_rows
from ._senders import snapped


@dataclass(frozen=True, slots=True, eq=False)
class Parts:
    """Parts of boxes, cut across their longest axes, that tile them.

    Attributes:
        box: which one, int64 (parts,).
        axis: that it is cut across, int64 (parts,).
        begin: the first index of the part along that axis, counted within the box, int64 (parts,).
        size: how many indices, int64 (parts,).
        member: which of those that want the box gets the part, int64 (parts,).
    """

    box: Column
    axis: Column
    begin: Column
    size: Column
    member: Column


def dealt_parts(shape: Column, item: Column, ranks: Column, senders: Column, shortest_cut: int) -> Parts:
    """Return boxes that several ranks want, in parts, each for one of these ranks.

    Boxes that the same ranks want and would get from the same senders are laid one behind the other, and that line is
    divided into one equal stretch for each of these ranks. So few boxes are cut, and a sender that would send a box to
    n of k ranks sends n / k of it. Where stretches can't be quite equal, those that have least get the longest.

    Args:
        shape: int64 (boxes, axes), without zeros.
        item: bytes of an element, int64 (boxes,).
        ranks: who wants each box, int64 (boxes, members).
        senders: from whom each of them would get it, int64 (boxes, members).
        shortest_cut: bytes; no box is cut into parts that are shorter.

    Examples:
        >>> ones = np.ones((1, 2), dtype=np.int64)
        >>> parts = dealt_parts(np.array([[8, 3]]), np.array([4]), ones * [1, 2], ones * 0, 1)
        >>> parts.begin.tolist(), parts.size.tolist(), parts.member.tolist()
        ([0, 4], [4, 4], [0, 1])
    """
    members = ranks.shape[1]
    group, first = numbered_rows(np.concatenate([ranks, senders], axis=1))
    line = np.argsort(group, kind="stable")
    group, axis = group[line], shape[line].argmax(axis=1)
    size = (volumes(shape) * item)[line]
    row = size // shape[line, axis]
    end = np.cumsum(size)
    begin = end - size
    cuts = _cuts(group, begin, end, np.where(size >= 2 * shortest_cut, row, 0), members, shortest_cut)
    edges = np.sort(np.concatenate([begin, cuts]), kind="stable")  # union1d is much slower
    edges = edges[(np.diff(edges, prepend=-1) > 0) & (edges < end[-1])]
    place = np.searchsorted(begin, edges, side="right") - 1
    length = np.append(edges[1:], end[-1]) - edges
    stretch = np.searchsorted(cuts, edges, side="right") - group[place] * (members - 1)
    stretches = np.zeros((len(first), members), dtype=np.int64)
    np.add.at(stretches, (group[place], stretch), length)
    member = _assigned(stretches, ranks[first])[group[place], stretch]
    return Parts(line[place], axis[place], (edges - begin[place]) // row[place], length // row[place], member)


def _cuts(group: Column, begin: Column, end: Column, row: Column, members: int, shortest_cut: int) -> Column:
    """Return where the lines of groups, one behind the other, are cut into stretches, ascending."""
    first = np.flatnonzero(np.diff(group, prepend=-1))
    last = np.append(first[1:], group.size) - 1
    total = end[last] - begin[first]
    bounds = (begin[first][:, None] + total[:, None] * np.arange(1, members) // members).ravel()
    inside = np.searchsorted(begin, bounds, side="right") - 1
    return snapped(bounds, begin[inside], (end - begin)[inside], row[inside], shortest_cut)


def _assigned(stretches: Column, ranks: Column) -> Column:
    """Return which member gets each stretch: of all groups of the same ranks, each about as much.

    Longest to least is what keeps it level: it never takes ranks further apart than the stretches of one group are.

    Args:
        stretches: bytes, int64 (groups, members).
        ranks: int64 (groups, members).
    """
    number, first = numbered_rows(ranks)
    got, member = np.zeros_like(ranks[first]), np.empty_like(stretches)
    for group, (lengths, together) in enumerate(zip(stretches, number.tolist(), strict=True)):
        longest, least = np.argsort(-lengths, kind="stable"), np.argsort(got[together], kind="stable")
        member[group, longest] = least
        got[together, least] += lengths[longest]
    return member
