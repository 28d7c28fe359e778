"""Layouts of stored tensors: the files that hold their chunks, and the grids that the chunks form."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from ...errors import plural
from ..deferred import notebook_html
from ..geometry import Column
from ._columns import ShardColumns


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class StoredLayout:
    """Chunks of stored tensors and the files that hold them, as recorded in a checkpoint's index.

    Attributes:
        columns: Chunks, one a row; `rank` is the index of a chunk's file in `files`.
        files: Names of the files in the checkpoint.
    """

    columns: ShardColumns
    files: tuple[str, ...]

    def __repr__(self) -> str:
        pieces, tensors = plural(len(self.columns), "piece"), plural(len(self.columns.keys), "tensor")
        return f"StoredLayout({pieces} of {tensors} in {plural(np.unique(self.columns.rank).size, 'file')})"

    def _repr_html_(self) -> str:
        return notebook_html(self)


# Grids, derived from chunks.

GridKind = Literal["empty", "whole", "regular", "uneven", "irregular", "flat"]
"""In this order: no chunk; a single chunk of the whole tensor; a grid of equal cells; a grid of unequal cells; boxes
that form no grid; flat ranges of boxes."""


@dataclass(frozen=True, slots=True)
class Grid:
    """The division of one tensor into chunks.

    Attributes:
        kind: "empty" without chunks, "whole" for a single one, "regular" or "uneven" for a grid of equal or unequal
            cells, "irregular" for boxes that form no grid, "flat" for flat ranges of boxes.
        counts: Number of chunks along each axis; () if they form no grid.
        chunks: Number of chunks.
    """

    kind: GridKind
    counts: tuple[int, ...]
    chunks: int


def chunk_grids(key: Column, offset: Column, shape: Column, start: Column, axes: Column) -> list[Grid]:
    """Return the division of each tensor into chunks, for all tensors at once.

    Chunks that don't overlap form a grid if their number is the product, over all axes, of the numbers of distinct
    intervals.

    Args:
        key: Index of each chunk's tensor, ascending, int64 (chunks,).
        offset: Offset of each chunk, right-aligned, int64 (chunks, axes).
        shape: Shape of each chunk, right-aligned, int64 (chunks, axes).
        start: First element of a flat range, -1 for a whole box, int64 (chunks,).
        axes: Number of axes of each tensor, int64 (keys,).

    Examples:
        >>> offset = np.array([[0, 0], [0, 3], [2, 0], [2, 3], [0, 0], [0, 5]])
        >>> shape = np.array([[2, 3], [2, 3], [2, 3], [2, 3], [1, 5], [1, 1]])
        >>> key, start = np.array([0, 0, 0, 0, 1, 1]), np.full(6, -1)
        >>> for grid in chunk_grids(key, offset, shape, start, np.array([2, 1])):
        ...     print(grid)
        Grid(kind='regular', counts=(2, 2), chunks=4)
        Grid(kind='uneven', counts=(2,), chunks=2)
    """
    keys, width = axes.size, offset.shape[1]
    chunks = np.bincount(key, minlength=keys)
    counts = np.stack([_interval_counts(key, offset[:, axis], shape[:, axis], keys) for axis in range(width)], axis=1)
    # Products are floats, since they can exceed an int64. They are exact up to 2**53, far above the number of chunks.
    is_grid = np.prod(counts.astype(np.float64), axis=1) == chunks
    first = np.searchsorted(key, np.arange(keys))
    differs = (shape != shape[first[key]]).any(axis=1) if key.size else np.zeros(0, dtype=np.bool_)
    is_uneven = np.bincount(key[differs], minlength=keys) > 0
    is_flat = np.bincount(key[start >= 0], minlength=keys) > 0
    kinds = np.select([chunks == 0, is_flat, chunks == 1, ~is_grid, is_uneven], [0, 1, 2, 3, 4], default=5)
    names: tuple[GridKind, ...] = ("empty", "flat", "whole", "irregular", "uneven", "regular")
    rows = zip(kinds.tolist(), counts.tolist(), chunks.tolist(), axes.tolist(), strict=True)
    return [
        Grid(names[kind], tuple(row[width - rank :]) if kind in (2, 4, 5) else (), count)
        for kind, row, count, rank in rows
    ]


def _interval_counts(key: Column, begin: Column, length: Column, keys: int) -> Column:
    """Return the number of distinct intervals of one axis that the chunks of each tensor occupy."""
    order = np.lexsort((length, begin, key))
    ordered = np.stack([key[order], begin[order], length[order]])
    is_new = np.ones(key.size, dtype=np.bool_)
    is_new[1:] = (np.diff(ordered) != 0).any(axis=0)
    return np.bincount(ordered[0][is_new], minlength=keys)
