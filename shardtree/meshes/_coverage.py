"""Coverage: the number of main replicas of each element of global tensors, over all ranks."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.typing import NDArray

from ..core.deferred import notebook_html
from ..core.geometry import Column, group_sums, volumes
from ..core.layouts import (
    Faults,
    Problem,
    RankTrees,
    ShardColumns,
    TensorKind,
    access_problems,
    select_rows,
    sharding_faults,
    tree_columns,
)
from ..core.offences import offence_lines
from ..errors import plural, shorten, table_lines

_HEAD = ("tensor", "shape", "once", "twice", "not", "copies")


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Coverage:
    """Counts of the elements of global tensors with one, several or no main replicas; prints as a table.

    Attributes:
        keys: Keys of the tensors.
        kinds: Dtype and shape of each tensor.
        once: Number of elements with one main replica, int64 (keys,).
        twice: Number of elements with several main replicas, int64 (keys,).
        missing: Number of elements without a main replica, int64 (keys,).
        copies: Mean number of shards that contain an element, replicas included, float64 (keys,).
        problems: Boxes with several or no main replicas, with the ranks that hold them; the first 20 of each tensor.
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
        problems = ["", *offence_lines(self.problems)] if self.problems else []
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
    """Return the counts of elements with one, several or no main replicas in the trees of all ranks.

    Args:
        trees: Tree of each rank, as a mapping by rank or a sequence that begins with rank 0; or all ranks' shards as
            columns, such as `layout_of` returns.

    Raises:
        TreeError: The argument doesn't hold a tree for each rank.
        IntegrityError: Shards of one key differ in global shape, dtype or prepended axes.

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
    """Return the number of elements for each key in the faults for which the mask `which` is true.

    A fault is a box, or a flat range of one, that has no main replica or several.
    """
    sizes = np.where(faults.start < 0, volumes(faults.shape), faults.stop - faults.start)
    return group_sums(faults.key[which], sizes[which], keys)
