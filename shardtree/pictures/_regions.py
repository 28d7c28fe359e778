"""Regions: rectangles that tile a plane, where all elements of a rectangle are in the same boxes.

A plane is a matrix, or a two-dimensional slice of a tensor. Boxes are its parts that ranks or files hold. The edges of
boxes divide the plane into horizontal and vertical bands. If there are too many bands, neighbouring bands are merged,
so that a region may contain several small boxes.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from ..core.geometry import Column, distinct

MOST_BANDS = 48
"""Largest number of rows or columns that can be told apart; more are merged."""
_MERGED_BANDS, _MERGED_SQUARE = 32, 10
"""Upper bounds of the number of merged bands: along one axis, and along each of both, whose cells are smaller."""


@dataclass(frozen=True, slots=True, eq=False)
class PlaneRegion:
    """A rectangle of a plane, given by the bands that it spans.

    Attributes:
        rows: Range (first, stop) of horizontal bands.
        columns: Range (first, stop) of vertical bands.
        boxes: Indices of all boxes that have elements in the region, ascending, int64 (boxes,).
    """

    rows: tuple[int, int]
    columns: tuple[int, int]
    boxes: Column


@dataclass(frozen=True, slots=True, eq=False)
class PlaneRegions:
    """A plane that is cut into horizontal and vertical bands, and the regions that they make up.

    Attributes:
        row_edges: Edges of the horizontal bands, in elements, int64 (bands + 1,).
        column_edges: Edges of the vertical bands, in elements, int64 (bands + 1,).
        regions: Regions in row-major order.
        is_merged: Whether neighbouring bands were merged, so that a region may contain several small boxes (parts that
            ranks or files hold).
    """

    row_edges: Column
    column_edges: Column
    regions: tuple[PlaneRegion, ...]
    is_merged: bool

    def place(self, region: PlaneRegion) -> tuple[slice, slice]:
        """Return a region's rectangle in elements, as a slice of rows and a slice of columns."""
        (top, bottom), (left, right) = region.rows, region.columns
        row, column = self.row_edges.tolist(), self.column_edges.tolist()
        return slice(row[top], row[bottom]), slice(column[left], column[right])


def regions_of(begin: Column, end: Column, extent: tuple[int, int], edges: Column, most: int) -> PlaneRegions:
    """Return a plane cut into regions along the edges of boxes, or more coarsely if there would be too many regions.

    Args:
        begin: First index of each box, int64 (boxes, 2).
        end: Stop index of each box, int64 (boxes, 2).
        extent: Size of the plane, in elements; at least 1 along both axes.
        edges: Pairs (row, column), int64 (pairs, 2). If bands are merged, the plane is still cut at these rows and
            columns, but only at those of the first 48 pairs.
        most: Approximate upper bound on the number of regions.

    Examples:
        >>> halves = np.array([[0, 0], [2, 0]]), np.array([[2, 3], [4, 3]])
        >>> found = regions_of(*halves, (4, 3), np.zeros((0, 2), int), 100)
        >>> [(found.place(each), each.boxes.tolist()) for each in found.regions]
        [((slice(0, 2, None), slice(0, 3, None)), [0]), ((slice(2, 4, None), slice(0, 3, None)), [1])]
    """
    exact = [
        distinct(np.clip(np.concatenate([begin[:, axis], end[:, axis], [0, extent[axis]]]), 0, extent[axis]))
        for axis in (0, 1)
    ]
    bands = _bands(exact[0].size - 1, exact[1].size - 1, most)
    rows, columns = (
        places if count == places.size - 1 else _coarser(places, count, edges[:, axis])
        for axis, (places, count) in enumerate(zip(exact, bands, strict=True))
    )
    spans = np.stack(
        [
            np.searchsorted(rows, begin[:, 0], side="right") - 1,
            np.searchsorted(rows, end[:, 0], side="left"),
            np.searchsorted(columns, begin[:, 1], side="right") - 1,
            np.searchsorted(columns, end[:, 1], side="left"),
        ]
    )
    regions = []
    for top, bottom, left, right in _rectangles(_names_of_sets(spans, rows.size - 1, columns.size - 1)):
        is_here = (spans[0] < bottom) & (spans[1] > top) & (spans[2] < right) & (spans[3] > left)
        regions.append(PlaneRegion((top, bottom), (left, right), np.flatnonzero(is_here)))
    return PlaneRegions(rows, columns, tuple(regions), bands != (exact[0].size - 1, exact[1].size - 1))


def _bands(rows: int, columns: int, most: int) -> tuple[int, int]:
    """Return the numbers of horizontal and vertical bands after merging.

    Args:
        rows: Number of horizontal bands before merging.
        columns: Number of vertical bands before merging.
        most: Approximate upper bound on the number of regions.
    """
    if rows <= MOST_BANDS and columns <= MOST_BANDS and rows * columns <= most:
        return rows, columns
    # A long axis gets more bands if the other axis is short.
    limit = max(min(int(most**0.5), _MERGED_SQUARE), most // max(min(rows, columns), 1))
    return group_count(rows, min(limit, _MERGED_BANDS)), group_count(columns, min(limit, _MERGED_BANDS))


def group_count(count: int, most: int) -> int:
    """Return the number of groups, at most `most`, into which items are divided; of equal size if possible."""
    if count <= most:
        return count
    return next((groups for groups in range(most, most // 2, -1) if count % groups == 0), most)


def _coarser(places: Column, count: int, edges: Column) -> Column:
    """Return the edges of fewer bands, which are made by merging neighbouring bands.

    Args:
        places: Edges of the bands before merging.
        count: Number of bands into which they are merged, before these are cut at `edges`.
        edges: Further edges, at which the merged bands are cut; only the first 48 are used.
    """
    some = places[np.linspace(0, places.size - 1, count + 1).round().astype(np.int64)]
    return distinct(np.concatenate([some, np.clip(edges[:MOST_BANDS], 0, places[-1])]))


def _names_of_sets(spans: Column, rows: int, columns: int) -> np.ndarray:
    """Return a hash of the set of boxes in each cell, uint64 (rows, columns); a cell is the crossing of two bands.

    Args:
        spans: Bands that each box meets, int64 (4, boxes): first and stop index of horizontal, then of vertical bands.
        rows: Number of horizontal bands.
        columns: Number of vertical bands.
    """
    # Sums of random numbers, taken at the corners: lists of boxes for each cell would be far larger.
    weight = np.random.Generator(np.random.PCG64(0)).integers(1, 2**63, size=spans.shape[1], dtype=np.uint64)
    total = np.zeros((rows + 1, columns + 1), dtype=np.uint64)
    for row, column, sign in ((0, 2, 1), (1, 2, -1), (0, 3, -1), (1, 3, 1)):
        np.add.at(total, (spans[row], spans[column]), weight if sign > 0 else np.uint64(0) - weight)
    return total.cumsum(axis=0, dtype=np.uint64).cumsum(axis=1, dtype=np.uint64)[:-1, :-1]


def _rectangles(names: np.ndarray) -> list[tuple[int, int, int, int]]:
    """Return rectangles of cells with equal hashes, as (top, bottom, left, right).

    Equal cells of a row are joined first. Then equal spans of successive rows are joined.

    Args:
        names: Hash of each cell, uint64 (rows, columns).
    """
    open_runs: dict[tuple[int, int], list[int]] = {}
    rectangles: list[tuple[int, int, int, int]] = []
    for row, line in enumerate(names.tolist()):
        starts = [0, *(place for place in range(1, len(line)) if line[place] != line[place - 1]), len(line)]
        runs = {(left, right): line[left] for left, right in itertools.pairwise(starts)}
        for span in [span for span, (_, name) in open_runs.items() if runs.get(span) != name]:
            rectangles.append((open_runs.pop(span)[0], row, *span))
        for span, name in runs.items():
            open_runs.setdefault(span, [row, name])
    rectangles += [(top, len(names), *span) for span, (top, _) in open_runs.items()]
    return sorted(rectangles, key=lambda each: (each[0], each[2]))


def places(edges: Column, least: float) -> tuple[float, ...]:
    """Return the positions of bands' edges in a drawing, from 0 to 1: to scale, but thin bands are drawn thicker.

    Args:
        edges: Edges of the bands, ascending, int64 (bands + 1,).
        least: Approximate smallest thickness of a band, as a fraction of the whole.

    Examples:
        >>> places(np.array([0, 50, 100]), 0.1), [round(each, 3) for each in places(np.array([0, 1, 1000]), 0.1)]
        ((0.0, 0.5, 1.0), [0.0, 0.091, 1.0])
    """
    lengths = np.diff(edges).astype(np.float64)
    if not lengths.size or not lengths.sum():
        return (0.0, 1.0)
    shares = np.maximum(lengths / lengths.sum(), min(least, 0.5 / lengths.size))
    return (0.0, *(np.cumsum(shares)[:-1] / shares.sum()).tolist(), 1.0)
