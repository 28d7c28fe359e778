"""coverage: how often the main replicas of several ranks hold each element of their global tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from .._deferred import notebook_html
from ..errors import TreeError, error_text, plural, shorten
from ..geometry import Column, group_sums, volumes
from ..mapping import ShardedTensor
from ..trees import apply_factories, leaves_with_paths, refuse_hidden
from ._columns import ShardColumns, TensorKind, select_rows, shard_columns
from .integrity import Faults, Problem, access_problems, join_columns, problem_lines, sharding_faults

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
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(_cells(row, widths)).rstrip() for row in rows]
        # Tensors with problems come first and are never shortened away.
        problems = ["", *problem_lines(list(self.problems))] if self.problems else []
        return "\n".join([lines[0], *shorten(lines[1:], shown=max(10, int(wrong.sum()))), *problems])

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


def _cells(row: tuple[str, ...], widths: Sequence[int]) -> Iterator[str]:
    """Yield a row's cells as wide as their columns; words on the left, numbers on the right."""
    for place, (text, width) in enumerate(zip(row, widths, strict=True)):
        yield text.ljust(width) if place < 2 else text.rjust(width)
