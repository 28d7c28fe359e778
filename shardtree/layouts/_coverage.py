"""How tensors lie: how often main replicas of several ranks hold each element; how a stored one is cut into files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from .._deferred import notebook_html
from ..errors import TreeError, error_text, plural, shorten, table_lines
from ..geometry import Column, group_sums, volumes
from ..mapping import ShardedTensor
from ..trees import apply_factories, leaves_with_paths, refuse_hidden
from ._columns import ShardColumns, TensorKind, select_rows, shard_columns
from ._integrity import access_problems, join_columns
from ._problems import Faults, Problem, problem_lines, sharding_faults

# Trees of several ranks as columns.

RankTrees: TypeAlias = Sequence[Any] | Mapping[int, Any]
"""A tree for each rank: a sequence that begins with rank 0's, or a mapping."""


def tree_columns(trees: RankTrees) -> ShardColumns:
    """Return the tensor shards of several ranks' trees, factories applied, as columns.

    Args:
        trees: each rank's tree, by rank: a mapping, or a sequence that begins with rank 0. A rank's rows are in the
            order of its tree's leaves.

    Raises:
        TreeError: there is none, or it is one tree rather than a tree for each rank; or a leaf is a DTensor.
        IntegrityError: shards of one key differ in global shape, dtype or prepended axes.

    Examples:
        >>> import torch
        >>> trees = [{"w": ShardedTensor.from_rank_offsets("w", torch.zeros(2), (0, rank, 2))} for rank in range(2)]
        >>> columns = tree_columns(trees)
        >>> columns.rank.tolist(), columns.offset.tolist()
        ([0, 1], [[0], [2]])
    """
    return join_columns([shard_columns(tensor_shards(tree), rank) for rank, tree in trees_by_rank(trees).items()])


def trees_by_rank(trees: RankTrees, doing: str = "trees by rank") -> dict[int, Any]:
    """Return ranks' trees by rank, ascending.

    Args:
        trees: a tree for each rank.
        doing: for the message.

    Raises:
        TreeError: there is none, or it is one tree rather than a tree for each rank.

    Examples:
        >>> trees_by_rank([{"step": 3}, {"step": 4}])
        {0: {'step': 3}, 1: {'step': 4}}
    """
    what = f"{doing}: not a tree for each rank"
    fix = "Pass a list that begins with rank 0's, or a mapping by rank; of one tree alone, [tree]."
    if not isinstance(trees, (list, tuple, Mapping)) or not trees:
        found = "none" if isinstance(trees, (list, tuple, Mapping)) else type(trees).__name__
        raise TreeError(error_text(what, found=found, fix=fix))
    by_rank = trees if isinstance(trees, Mapping) else dict(enumerate(trees))
    wrong = [repr(rank)[:100] for rank in by_rank if not _is_rank(rank)]
    if wrong:
        raise TreeError(error_text(f"{what}; these aren't ranks", offenders=wrong, fix=fix))
    return {int(rank): by_rank[rank] for rank in sorted(by_rank)}


def _is_rank(rank: Any) -> bool:
    return isinstance(rank, (int, np.integer)) and not isinstance(rank, bool) and int(rank) >= 0


def tensor_shards(tree: Any) -> list[ShardedTensor]:
    """Return a tree's tensor shards, factories applied, in the order of its leaves.

    Raises:
        TreeError: a leaf is a DTensor: it is a part of a tensor, and would count as a plain value.

    Examples:
        >>> import torch
        >>> tensor_shards({"w": ShardedTensor.from_rank_offsets("w", torch.zeros(2)), "step": 3})[0].key
        'w'
    """
    pairs = leaves_with_paths(apply_factories(tree))
    refuse_hidden("layout", pairs)
    return [leaf for _, leaf in pairs if isinstance(leaf, ShardedTensor)]


_HEAD = ("tensor", "shape", "once", "twice", "not", "copies")


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Coverage:
    """How often each element of global tensors is held; prints as a table.

    Attributes:
        keys: the tensors.
        kinds: what each is.
        once: elements with one main replica, int64 (keys,).
        twice: elements with more than one, int64 (keys,).
        missing: elements with none, int64 (keys,).
        copies: how many shards hold an element, replicas included, on average, float64 (keys,).
        problems: the places that are held twice or not at all, with the ranks that hold them; the first 20 of each
            tensor.
    """

    keys: tuple[str, ...]
    kinds: tuple[TensorKind, ...]
    once: Column
    twice: Column
    missing: Column
    copies: NDArray[np.float64]
    problems: tuple[Problem, ...]

    @property
    def is_complete(self) -> bool:
        """Whether each element has exactly one main replica."""
        return not self.problems

    def __repr__(self) -> str:
        wrong = int(((self.twice > 0) | (self.missing > 0)).sum())
        return f"Coverage({plural(len(self.keys), 'tensor')}, {f'{wrong} with problems' if wrong else 'no problems'})"

    def _repr_html_(self) -> str:
        return notebook_html(self)

    def __str__(self) -> str:
        wrong = (self.twice > 0) | (self.missing > 0)
        rows = [_HEAD, *map(self._row, [*np.flatnonzero(wrong).tolist(), *np.flatnonzero(~wrong).tolist()])]
        heading, *lines = table_lines(rows, words=2)
        # Tensors with problems come first and are never shortened away.
        problems = ["", *problem_lines(list(self.problems))] if self.problems else []
        return "\n".join([heading, *shorten(lines, shown=max(10, int(wrong.sum()))), *problems])

    def _row(self, number: int) -> tuple[str, ...]:
        counts = (self.once[number], self.twice[number], self.missing[number])
        return (
            self.keys[number],
            str(self.kinds[number]),
            *(f"{int(count):,}" for count in counts),
            f"{self.copies[number]:.3g}",
        )


def coverage(trees: RankTrees | ShardColumns) -> Coverage:
    """Return what the main replicas of ranks' trees hold of their tensors: once, twice, or not at all.

    Args:
        trees: each rank's tree, by rank: a mapping, or a sequence that begins with rank 0; or all ranks' shards as
            columns, as `layout_of` gives them.

    Raises:
        TreeError: it isn't a tree for each rank.
        IntegrityError: shards of one key differ in global shape, dtype or prepended axes.

    Examples:
        >>> import torch, shardtree as st
        >>> rows = [st.ShardedTensor.from_rank_offsets("w", torch.zeros(1, 3), (0, rank, 4)) for rank in range(3)]
        >>> print(coverage([{"w": row} for row in rows]))
        tensor  shape           once  twice  not  copies
        w       (4, 3) float32     9      0    3    0.75
        <BLANKLINE>
        'w' (rank 2): [3:4, 0:3] has no main replica (3 of 12 elements); beside it: rank 2 [2:3, 0:3]
    """
    columns = trees if isinstance(trees, ShardColumns) else tree_columns(trees)
    faults = sharding_faults(select_rows(columns, np.flatnonzero(columns.main)))
    size = np.array([prod(kind.global_shape) for kind in columns.kinds], dtype=np.int64)
    twice, missing = (_elements(faults, which, size.size) for which in (faults.doubled, ~faults.doubled))
    held = group_sums(columns.key, columns.elements, size.size)
    shards = np.bincount(columns.key, minlength=size.size)
    # A tensor without elements has no average; its shards are counted.
    copies = np.where(size > 0, held / np.maximum(size, 1), shards)
    problems = access_problems(columns)
    return Coverage(columns.keys, columns.kinds, size - twice - missing, twice, missing, copies, problems)


def _elements(faults: Faults, which: NDArray[np.bool_], keys: int) -> Column:
    """Return how many elements the chosen faults have, for each key."""
    sizes = np.where(faults.start < 0, volumes(faults.shape), faults.stop - faults.start)
    return group_sums(faults.key[which], sizes[which], keys)


# How a stored tensor is cut, as its chunks show, and which file holds which part.


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class StoredLayout:
    """Which file holds which part of a stored tensor, as a checkpoint's index says.

    Attributes:
        columns: of one tensor, a row a chunk; `rank` is the number of the file.
        files: their names in the checkpoint.
    """

    columns: ShardColumns
    files: tuple[str, ...]

    def __repr__(self) -> str:
        pieces, tensors = plural(len(self.columns), "piece"), plural(len(self.columns.keys), "tensor")
        return f"StoredLayout({pieces} of {tensors} in {plural(np.unique(self.columns.rank).size, 'file')})"

    def _repr_html_(self) -> str:
        return notebook_html(self)


# Grids, found from chunks.

GridKind = Literal["empty", "whole", "regular", "uneven", "irregular", "flat"]
"""No chunk; one that holds the whole tensor; a grid of equal cells; a grid of unequal cells; boxes that make no grid;
flat ranges of boxes."""


@dataclass(frozen=True, slots=True)
class Grid:
    """How one tensor is cut.

    Attributes:
        kind: "empty", "whole", "regular", "uneven", "irregular" or "flat".
        counts: pieces along each axis; () where the chunks are no grid.
        chunks: how many chunks there are.
    """

    kind: GridKind
    counts: tuple[int, ...]
    chunks: int


def chunk_grids(key: Column, offset: Column, shape: Column, start: Column, axes: Column) -> list[Grid]:
    """Return how each tensor is cut, for all tensors at once.

    Chunks that don't overlap make a grid if there are as many of them as ways to pick one of the intervals that occur
    along each axis.

    Args:
        key: the tensor that each chunk belongs to, ascending, int64 (chunks,).
        offset: right-aligned, int64 (chunks, axes).
        shape: right-aligned, int64 (chunks, axes).
        start: first element of a flat range, -1 for a whole box, int64 (chunks,).
        axes: how many axes each tensor has, int64 (keys,).

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
    # In floats, since products can exceed an int64. They are exact up to 2**53, far more than there can be chunks.
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
    """Return how many different intervals of one axis the chunks of each tensor occupy."""
    order = np.lexsort((length, begin, key))
    ordered = np.stack([key[order], begin[order], length[order]])
    is_new = np.ones(key.size, dtype=np.bool_)
    is_new[1:] = (np.diff(ordered) != 0).any(axis=0)
    return np.bincount(ordered[0][is_new], minlength=keys)
