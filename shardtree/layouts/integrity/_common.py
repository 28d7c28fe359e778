"""Whether all ranks have the same common state, which only one of them stores."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from ...errors import MetadataError, TreePath, rank_text
from ...geometry import refuse
from ...trees import diff, value_at, without_holes
from ._problems import Problem


def common_problems(commons: Sequence[Any] | Mapping[int, Any]) -> tuple[Problem, ...]:
    """Return the paths at which ranks' common trees differ, with each value and its ranks; holes in dicts don't count.

    Args:
        commons: each rank's common tree, by rank: a mapping, or a sequence that begins with rank 0.

    Examples:
        >>> for problem in common_problems([{"step": 7}, {"step": 8}, {"step": 8}, {"step": 7, "lr": 0.1}]):
        ...     print(problem)
        tree['step']: ranks 0, 3 have 7, ranks 1, 2 have 8
        tree['lr']: ranks 0-2 have nothing, rank 3 has 0.1
    """
    if not isinstance(commons, Mapping | Sequence):
        fix = "Give each rank's common tree: a list, or a dict by rank."
        refuse("common_problems", "commons", type(commons).__name__, "a sequence", fix, error=MetadataError)
    by_rank = commons if isinstance(commons, Mapping) else dict(enumerate(commons))
    # Holes mark shards, and ranks may hold different ones.
    trees = {rank: without_holes(common) for rank, common in by_rank.items()}
    first = next(iter(trees.values()), None)
    differing: dict[TreePath, list[int]] = defaultdict(list)
    for rank, tree in trees.items():
        found = diff(first, tree)
        for path in (*found.only_left, *found.only_right, *found.mismatch):
            differing[path].append(rank)
    return tuple(Problem(path, (), _values(trees, path, ranks)) for path, ranks in differing.items())


def _values(trees: Mapping[int, Any], path: TreePath, ranks: Sequence[int]) -> str:
    """Return each value at a path with the ranks that have it; `ranks` are those that differ from the first one."""
    like_first = [rank for rank in trees if rank not in ranks]
    first = value_at(trees[like_first[0]], path)
    groups: dict[str, list[int]] = defaultdict(list)
    for rank in ranks:
        value = value_at(trees[rank], path)
        # Two values may differ and print alike, as tensors that are long do.
        groups[f"another {value}" if value == first else value].append(rank)
    values = {first: like_first} | groups
    return ", ".join(f"{rank_text(own)} {'has' if len(own) == 1 else 'have'} {value}" for value, own in values.items())
