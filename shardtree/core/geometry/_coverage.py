"""Coverage of elements by boxes: tiling, overlaps, and the parts of a region that are missing or covered twice."""

from __future__ import annotations

from hashlib import blake2b
from itertools import product
from math import prod

import numpy as np
from numpy.typing import NDArray

from ._boxes import Column, begins, distinct, volumes
from ._pairs import overlapping_pairs, rows_with_elements

# Tiling is tested in one pass over the boxes by a randomised sum.

_Weights = NDArray[np.uint64]

_FACTORS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
"""Shifts and odd factors of SplitMix64's mixing; the factors have as many ones as zeros."""

_MOST_AXES = 4
"""Upper bound of axes: half of all weights are even, and a product of many even numbers is 0 modulo 2**64."""


def tiled_groups(group: Column, offset: Column, shape: Column, groups: int) -> NDArray[np.bool_]:
    """Return whether each group's boxes tile their bounding box, without gaps or overlaps.

    Each index of each axis has a pseudorandom weight. The weight of an element is the product of its indices' weights
    modulo 2**64. The weight of a box is the sum over its elements, computed from the box's corners. Boxes that tile
    their bounding box have together the weight of the bounding box. Other boxes have this weight with a probability of
    about 2**-60 if their offsets or shapes vary along one axis or two, and 2**-52 if they vary along four, since the
    difference is a nonzero polynomial of the indices' weights. True is therefore reliable. False means a gap, an
    overlap, or that the boxes of all groups vary along more than four axes, which isn't tested. The weights follow from
    all boxes by a cryptographic hash, so that boxes can't be chosen to fit them.

    Args:
        group: Index of each box's group, int64 (boxes,).
        offset: Offset of each box, int64 (boxes, axes).
        shape: Shape of each box, int64 (boxes, axes); every box has elements.
        groups: Number of groups; those without boxes count as tiled.

    Examples:
        >>> offset, shape = np.array([[0], [2], [0], [1]]), np.array([[2], [1], [1], [3]])
        >>> tiled_groups(np.array([0, 0, 1, 1]), offset, shape, 2).tolist()
        [True, True]
        >>> tiled_groups(np.array([0, 0, 0]), np.array([[0], [0], [2]]), np.ones((3, 1), int), 1).tolist()
        [False]

    References:
        G. L. Steele, D. Lea, C. H. Flood, Fast splittable pseudorandom number generators, 2014.
        J. T. Schwartz, Fast probabilistic algorithms for verification of polynomial identities, 1980.
        A. Fiat, A. Shamir, How to prove yourself, 1986.
    """
    empty, axes = np.bincount(group, minlength=groups) == 0, _differing_axes(offset, shape)
    if len(axes) > _MOST_AXES:
        return np.asarray(empty)
    boxes = blake2b(np.concatenate([group[:, None], offset, shape], axis=1, dtype=np.int64).data, digest_size=32)
    sums, around = np.ones(len(group), dtype=np.uint64), np.ones(groups, dtype=np.uint64)
    for axis in axes:
        begin, end = offset[:, axis], offset[:, axis] + shape[:, axis]
        low, high = np.full(groups, np.iinfo(np.int64).max), np.full(groups, np.iinfo(np.int64).min)
        np.minimum.at(low, group, begin)
        np.maximum.at(high, group, end)
        seed = _seed(boxes.digest(), axis)
        sums *= _weight(end, seed) - _weight(begin, seed)
        around *= _weight(high, seed) - _weight(low, seed)
    total = np.zeros(groups, dtype=np.uint64)
    np.add.at(total, group, sums)
    return np.asarray((total == around) | empty)


def _differing_axes(offset: Column, shape: Column) -> list[int]:
    """Return the axes along which the boxes' offsets or shapes differ, or all axes if there are at most four."""
    axes = range(offset.shape[1])
    if len(axes) <= _MOST_AXES:
        return list(axes)
    return [axis for axis in axes if any((column[:, axis] != column[:1, axis]).any() for column in (offset, shape))]


def _seed(boxes: bytes, axis: int) -> np.uint64:
    return np.uint64(int.from_bytes(blake2b(boxes + axis.to_bytes(8, "little"), digest_size=8).digest(), "little"))


def _weight(place: Column, seed: np.uint64) -> _Weights:
    """Return, for each coordinate in `place`, the sum of the weights of all indices below it along an axis.

    These sums define the weights. A sum is a pseudorandom number, computed from the coordinate and the axis's seed as
    in SplitMix64, and an index's weight is the difference of two successive sums.
    """
    weight = place.astype(np.uint64)
    weight += seed
    for shift, factor in _FACTORS:
        weight ^= weight >> np.uint64(shift)
        weight *= np.uint64(factor)
    weight ^= weight >> np.uint64(31)
    return weight


# Groups in which two boxes share an element. Input may be adversarial, so no input may cause a test of all pairs.

_FEW_TOGETHER = 64
"""Upper bound of the boxes in a group whose pairs are all compared at once. The pairs of a larger group, or a part of
it, are compared if they are at most this many times its boxes."""
_MOST_PAIRS = 1 << 18
"""Number of pairs that are tried at once, which bounds memory."""


def shared_groups(group: Column, offset: Column, shape: Column) -> Column:
    """Return the groups in which two boxes share an element, ascending.

    A group of many boxes is divided until the answer for each part is known: if the boxes' volumes add up to more than
    that of their bounding box, two of them overlap; if few pairs of boxes remain, all are compared. A million equal
    boxes thus take no longer than a million boxes that tile.

    Args:
        group: Index of each box's group, int64 (boxes,).
        offset: Offset of each box, int64 (boxes, axes).
        shape: Shape of each box, int64 (boxes, axes).

    Examples:
        >>> offset, shape = np.array([[0], [2], [0], [1]]), np.array([[2], [2], [2], [2]])
        >>> shared_groups(np.array([0, 0, 1, 1]), offset, shape).tolist()
        [1]
    """
    rows = rows_with_elements(shape)
    groups = int(group.max(initial=-1)) + 1
    tiled = tiled_groups(group[rows], offset.take(rows, axis=0), shape.take(rows, axis=0), groups)
    rows = rows[~tiled[group[rows]]]
    rows = rows[np.argsort(group[rows], kind="stable")]
    group, offset, shape = group[rows], offset.take(rows, axis=0), shape.take(rows, axis=0)
    first = np.flatnonzero(begins(group))
    names, count = group[first], np.diff(first, append=group.size)
    small = np.repeat(count <= _FEW_TOGETHER, count)
    left, right = overlapping_pairs(
        group[small], offset[small], shape[small], group[small], offset[small], shape[small]
    )
    ends = offset + shape
    large = [
        number
        for number, begin, size in zip(names.tolist(), first.tolist(), count.tolist(), strict=True)
        if size > _FEW_TOGETHER and _shared(offset[begin : begin + size], ends[begin : begin + size])
    ]
    return distinct(np.concatenate([group[small][left[left != right]], np.array(large, dtype=np.int64)]))


def _shared(begin: Column, end: Column) -> bool:
    """Return whether any two of the boxes, which must not be empty, share an element."""
    if len(begin) < 2 or _overfull(begin, end):
        return len(begin) > 1
    crossings = [_crossings(begin[:, axis], end[:, axis]) for axis in range(begin.shape[1])]
    axis = int(np.argmin(crossings))
    # In grids, few boxes are side by side along some axis: trying their pairs is cheaper than further cuts.
    if crossings[axis] <= _FEW_TOGETHER * len(begin):
        return _any_pair_meets(begin, end, axis)
    cut = _cut(begin, end)
    if cut is None:
        return _any_pair_meets(begin, end, axis)
    axis, at = cut
    low, high = begin[:, axis] < at, end[:, axis] > at
    before, after = end[low].copy(), begin[high].copy()
    before[:, axis], after[:, axis] = np.minimum(before[:, axis], at), np.maximum(after[:, axis], at)
    return _shared(begin[low], before) or _shared(after, end[high])


def _overfull(begin: Column, end: Column) -> bool:
    """Return whether the boxes' volumes add up to more than their bounding box's, by more than rounding errors."""
    around = (end.max(axis=0) - begin.min(axis=0)).astype(np.float64).prod()
    # The margin allows for rounding, since these are sums of floats. Within it, comparing pairs decides.
    return bool((end - begin).astype(np.float64).prod(axis=1).sum() > around * 1.001)


def _crossings(begin: Column, end: Column) -> int:
    """Return the number of pairs of intervals that overlap."""
    return int(np.searchsorted(np.sort(begin), end, side="left").sum()) - len(begin) * (len(begin) + 1) // 2


def _cut(begin: Column, end: Column) -> tuple[int, int] | None:
    """Return the axis and coordinate at which to divide the boxes, so that the larger part has as few as possible.

    Cuts are tried at the median edge of each axis. None is returned if every cut leaves all boxes in one part.
    """
    best, most = None, len(begin)
    for axis in range(begin.shape[1]):
        at = int(np.median(np.concatenate([begin[:, axis], end[:, axis]])))
        parts = max(int((begin[:, axis] < at).sum()), int((end[:, axis] > at).sum()))
        if parts < most:
            best, most = (axis, at), parts
    return best


def _any_pair_meets(begin: Column, end: Column, axis: int) -> bool:
    """Return whether any two boxes share an element, by comparing the pairs that overlap along `axis`."""
    order = np.argsort(begin[:, axis], kind="stable")
    begin, end = begin[order], end[order]
    count = np.searchsorted(begin[:, axis], end[:, axis], side="left") - np.arange(len(begin)) - 1
    before = np.concatenate([[0], np.cumsum(count)])
    # Few pairs are compared at first, then more at a time: if boxes overlap, mostly one of the first pairs does.
    row, most = 0, _FEW_TOGETHER * _FEW_TOGETHER
    while row < len(begin):
        stop = max(row + 1, int(np.searchsorted(before, before[row] + most, side="right")) - 1)
        left = np.repeat(np.arange(row, stop), count[row:stop])
        right = np.arange(left.size) + before[row] - before[left] + left + 1
        if _any_meets(begin, end, left, right):
            return True
        row, most = stop, min(most * 4, _MOST_PAIRS)
    return False


def _any_meets(begin: Column, end: Column, one: Column, other: Column) -> bool:
    for axis in range(begin.shape[1]):
        low, high = begin[:, axis], end[:, axis]
        meets = np.flatnonzero((low[one] < high[other]) & (low[other] < high[one]))
        one, other = one.take(meets), other.take(meets)
    return one.size > 0


# Parts of a region that boxes don't cover, or cover more than once.

Boxes = tuple[Column, Column]
"""Offsets and shapes, int64 (boxes, axes) each."""

_MOST_CELLS = 1 << 18


def coverage_faults(offset: Column, shape: Column, whole: tuple[int, ...]) -> tuple[Boxes, Boxes]:
    """Return the parts of a region that no box covers, and the parts that several boxes cover, as boxes.

    The boxes of each result are disjoint, and merged with their neighbours along the last axis first. Parts of the
    given boxes that lie outside of the region are ignored.

    Args:
        offset: Offset of each box, int64 (boxes, axes).
        shape: Shape of each box, int64 (boxes, axes).
        whole: Shape of the region, which begins at 0.

    Examples:
        >>> missing, doubled = coverage_faults(np.array([[0, 0], [1, 0]]), np.array([[2, 3], [1, 3]]), (4, 3))
        >>> [column.tolist() for column in missing], [column.tolist() for column in doubled]
        ([[[2, 0]], [[2, 3]]], [[[1, 0]], [[1, 3]]])
    """
    low, high = np.zeros(len(whole), dtype=np.int64), np.array(whole, dtype=np.int64)
    gaps, overlaps = _faults_between(offset, offset + shape, low, high)
    return _as_boxes(*_merge_neighbours(*gaps)), _as_boxes(*_merge_neighbours(*overlaps))


def _as_boxes(begin: Column, end: Column) -> Boxes:
    return begin, end - begin


def _faults_between(begin: Column, end: Column, low: Column, high: Column) -> tuple[Boxes, Boxes]:
    """Return the parts of a region that no box covers, and the parts that several boxes cover.

    The region extends from `low` to `high`, int64 (axes,). All boxes, also those returned, are columns of begins and
    ends, int64 (boxes, axes).
    """
    begin, end = np.maximum(begin, low), np.minimum(end, high)
    rows = np.flatnonzero((begin < end).all(axis=1))
    begin, end = begin[rows], end[rows]
    none = np.zeros((0, low.size), dtype=np.int64), np.zeros((0, low.size), dtype=np.int64)
    if (low >= high).any() or _tiles(begin, end, low, high):
        return none, none
    ends = (np.concatenate([begin[:, axis], end[:, axis], [low[axis], high[axis]]]) for axis in range(low.size))
    edges = [distinct(places) for places in ends]
    # The number of cells is the product of the numbers of intervals along the axes. Beyond a bound the region is halved
    # instead; tiled halves need no cells.
    if prod(len(places) - 1 for places in edges) <= _MOST_CELLS:
        count = _cell_counts(begin, end, edges)
        return _cells_where(count == 0, edges), _cells_where(count > 1, edges)
    axis = int(np.argmax([len(places) for places in edges]))
    middle = edges[axis][len(edges[axis]) // 2]
    halves = (_faults_between(begin, end, *corners) for corners in _halves(low, high, axis, middle))
    (one, other), (more, others) = halves
    return _concatenate(one, more), _concatenate(other, others)


def _tiles(begin: Column, end: Column, low: Column, high: Column) -> bool:
    group, size = np.zeros(len(begin), dtype=np.int64), volumes((high - low)[None])
    return bool(volumes(end - begin).sum() == size) and not shared_groups(group, begin, end - begin).size


def _halves(low: Column, high: Column, axis: int, middle: int) -> tuple[tuple[Column, Column], tuple[Column, Column]]:
    inner_high, inner_low = high.copy(), low.copy()
    inner_high[axis] = inner_low[axis] = middle
    return (low, inner_high), (inner_low, high)


def _concatenate(one: Boxes, other: Boxes) -> Boxes:
    return np.concatenate([one[0], other[0]]), np.concatenate([one[1], other[1]])


def _cell_counts(begin: Column, end: Column, edges: list[Column]) -> Column:
    """Return the number of boxes that cover each cell of a grid, as an array with the axes of the grid.

    Boxes are given by their begins and ends. `edges` has the coordinates of the grid lines along each axis.
    """
    count = np.zeros([len(places) for places in edges], dtype=np.int64)
    sides = [
        (np.searchsorted(places, begin[:, axis]), np.searchsorted(places, end[:, axis]))
        for axis, places in enumerate(edges)
    ]
    # Along an axis that isn't cut, all boxes reach from the first edge to the last: half of the corners suffice.
    choices = [(0,) if len(places) == 2 else (0, 1) for places in edges]
    for corner in product(*choices):
        place = tuple(side[which] for side, which in zip(sides, corner, strict=True))
        np.add.at(count, place, -1 if sum(corner) % 2 else 1)
    for axis in range(count.ndim):
        np.cumsum(count, axis=axis, out=count)
    return count[(slice(-1),) * count.ndim]


def _cells_where(mask: np.ndarray, edges: list[Column]) -> Boxes:
    cells = np.nonzero(mask)
    begin = [places[cell] for places, cell in zip(edges, cells, strict=True)]
    end = [places[cell + 1] for places, cell in zip(edges, cells, strict=True)]
    return _merge_neighbours(np.stack(begin, axis=1), np.stack(end, axis=1))


def _merge_neighbours(begin: Column, end: Column) -> Boxes:
    """Merge neighbours that together are a box, along the last axis first, and return all boxes in row-major order."""
    for axis in reversed(range(begin.shape[1])):
        others = np.delete(np.concatenate([begin, end], axis=1), [axis, begin.shape[1] + axis], axis=1)
        order = np.lexsort((begin[:, axis], *others.T))
        begin, end, others = begin[order], end[order], others[order]
        is_first = np.ones(len(begin), dtype=np.bool_)
        # Neighbours along an axis are merged if they agree on all other axes, and one begins where the other ends.
        is_first[1:] = (others[1:] != others[:-1]).any(axis=1) | (begin[1:, axis] != end[:-1, axis])
        first = np.flatnonzero(is_first)
        last = end[first]
        last[:, axis] = end[np.append(first[1:], len(begin))[: len(first)] - 1, axis]
        begin, end = begin[first], last
    order = np.lexsort(begin.T[::-1])
    return begin[order], end[order]
