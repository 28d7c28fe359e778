"""Integrity checks: of all ranks' shards together, and of the ranks' common states against each other."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ...errors import IntegrityError, MetadataError, TreePath, error_text, rank_text
from ..geometry import box_column, refuse
from ..offences import offences_text
from ..trees import diff, value_at, without_holes
from ._columns import ShardColumns, check_columns, check_ranks_columns, join_agreed, select_rows
from ._objects import ONE_KIND, ObjectColumns, join_objects, kind_problems, object_problems, without_keys
from ._problems import (
    Faults,
    Problem,
    doubled_faults,
    fault_problems,
    join_faults,
    sharding_faults,
)

_MOST_ROWS = 2**18
"""Number of shards that are checked at once: the check takes several times the memory of its columns."""

# The rule for shards: every element of a global tensor has exactly one main replica.


def join_columns(parts: Sequence[ShardColumns]) -> ShardColumns:
    """Return several ranks' columns as one, rows in the same order.

    If ranks can't compute each other's shards, they gather columns once, and pass them to save and load as `layout`:
    ``join_columns(world.all_gather(shard_columns(own_shards, world.rank)))``.

    Raises:
        IntegrityError: Ranks differ about a key's global shape, dtype or prepended axes.

    Examples:
        >>> import torch, shardtree as st
        >>> shards = [st.ShardedTensor.from_rank_offsets("w", torch.zeros(2), (0, rank, 2)) for rank in range(2)]
        >>> join_columns([st.layouts.shard_columns([shard], rank) for rank, shard in enumerate(shards)]).offset.tolist()
        [[0], [2]]
    """
    check_ranks_columns("join_columns", parts)
    problems = kind_problems(parts)
    if problems:
        heading = "the ranks disagree about their tensors"
        raise IntegrityError(error_text(heading, offenders=map(str, problems), fix=ONE_KIND))
    return join_agreed(parts)


def sharding_problems(parts: Sequence[ShardColumns], objects: Sequence[ObjectColumns] = ()) -> tuple[Problem, ...]:
    """Return all problems between ranks: disagreements, and elements without exactly one main replica.

    Tensors and objects that ranks disagree about aren't checked further.

    Args:
        parts: Shards of each rank.
        objects: Objects of each rank.

    Examples:
        >>> import torch, shardtree as st
        >>> shards = [st.ShardedTensor.from_rank_offsets("w", torch.zeros(2), (0, 0, rank + 2)) for rank in range(3)]
        >>> own = [st.layouts.shard_columns([shard], rank) for rank, shard in enumerate(shards)]
        >>> for problem in sharding_problems(own):
        ...     print(problem)
        'w' (ranks 0-2): (4,) float32 on rank 0, (6,) float32 on rank 1, (8,) float32 on rank 2
    """
    check_ranks_columns("sharding_problems", parts)
    return _join_and_check(parts, objects)[1]


def join_checked(parts: Sequence[ShardColumns], objects: Sequence[ObjectColumns] = ()) -> ShardColumns:
    """Return all ranks' shards in one `ShardColumns`, rank by rank, after checking that they fit together.

    Args:
        parts: Shards of each rank.
        objects: Objects of each rank.

    Raises:
        IntegrityError: The shards have `sharding_problems`; the error names all of them.

    Examples:
        >>> import torch, shardtree as st
        >>> shards = [st.ShardedTensor.from_rank_offsets("w", torch.zeros(2), (0, rank, 2)) for rank in range(2)]
        >>> join_checked([st.layouts.shard_columns([shard], rank) for rank, shard in enumerate(shards)]).rank.tolist()
        [0, 1]
    """
    columns, problems = _join_and_check(parts, objects)
    raise_problems(problems)
    return columns


def _join_and_check(
    parts: Sequence[ShardColumns], objects: Sequence[ObjectColumns]
) -> tuple[ShardColumns, tuple[Problem, ...]]:
    """Return the joined shards, without tensors that the ranks disagree about, and all problems."""
    problems = kind_problems(parts, objects)
    keys = {problem.key for problem in problems}
    # Without a common global shape there is nothing to tile: further problems of these keys would only repeat the
    # first one.
    columns = join_agreed([without_keys(part, keys) for part in parts] if keys else parts)
    arrays = object_problems(join_objects(objects)) if any(map(len, objects)) else ()
    others = (problem for problem in arrays if problem.key not in keys)
    return columns, (*problems, *access_problems(columns), *others)


def access_problems(columns: ShardColumns) -> tuple[Problem, ...]:
    """Return a problem for each part of a global tensor that has no main replica, or several.

    Shards that reach beyond their global tensor are a problem too. If a tensor has more than 20 such parts, one more
    problem counts the others.

    Args:
        columns: Shards of all ranks.

    Examples:
        >>> import torch, shardtree as st
        >>> half = st.ShardedTensor.from_rank_offsets("w", torch.zeros(2, 3), (0, 0, 2))
        >>> [str(problem) for problem in access_problems(st.layouts.shard_columns([half]))]
        ["'w' (rank 0): [2:4, 0:3] has no main replica (6 of 12 elements); beside it: rank 0 [0:2, 0:3]"]
    """
    check_columns("access_problems", columns)
    # Boxes are compared with each other. Counting the cells of regular grids, as Megatron-Core does, would leave uneven
    # grids unchecked.
    beyond: list[Problem] = []
    faults: list[Faults] = []
    for first, main in _main_by_keys(columns):
        beyond += _overhanging(main)
        part_faults = sharding_faults(main)
        if len(part_faults):
            faults.append(replace(part_faults, key=part_faults.key + first))
    return (*beyond, *fault_problems(columns, join_faults(faults), "element")) if faults else tuple(beyond)


def _main_by_keys(columns: ShardColumns) -> Iterator[tuple[int, ShardColumns]]:
    """Yield batches of main replicas: the index of a batch's first tensor, and the shards of consecutive tensors."""
    if len(columns) <= _MOST_ROWS:
        yield 0, select_rows(columns, np.flatnonzero(columns.main))
        return
    rows = np.flatnonzero(columns.main)
    rows = rows[np.argsort(columns.key[rows], kind="stable")]
    begins = np.searchsorted(columns.key[rows], np.arange(len(columns.keys) + 1))
    first = 0
    while first < len(columns.keys):
        last = max(first + 1, int(np.searchsorted(begins, begins[first] + _MOST_ROWS, side="right")) - 1)
        part = select_rows(columns, rows[begins[first] : begins[last]])
        yield first, replace(part, keys=columns.keys[first:last], kinds=columns.kinds[first:last], key=part.key - first)
        first = last


def write_problems(columns: ShardColumns) -> tuple[Problem, ...]:
    """Return the problems that prevent these shards from being stored in one checkpoint; gaps are allowed.

    Args:
        columns: Shards to write; each counts as a main replica, so that two replicas of an element are a problem.

    Examples:
        >>> import torch, shardtree as st
        >>> twice = [st.ShardedTensor.from_rank_offsets("w", torch.zeros(2), (0, 0, 2)) for _ in range(2)]
        >>> [str(problem) for problem in write_problems(st.layouts.shard_columns(twice))]
        ["'w' (rank 0): [0:2] is held by more than one main replica (2 of 4 elements): rank 0 [0:2], rank 0 [0:2]"]
    """
    all_main = replace(columns, main=np.ones(len(columns), dtype=np.bool_))
    return (*_overhanging(all_main), *fault_problems(all_main, doubled_faults(all_main), "element"))


def check_stored_shards(columns: ShardColumns) -> None:
    """Raise unless these shards can be stored in one checkpoint; gaps between them are allowed.

    Raises:
        IntegrityError: Two shards hold the same element, or one exceeds its tensor's global shape.

    Examples:
        >>> import torch, shardtree as st
        >>> part = st.ShardedTensor.from_rank_offsets("w", torch.zeros(2), (0, 1, 3))
        >>> check_stored_shards(st.layouts.shard_columns([part]))
    """
    problems = write_problems(columns)
    if problems:
        fix = "Give replicas different replica_ids. Correct the offset of a shard that exceeds its global shape."
        heading = "save: these shards cannot be stored in one checkpoint"
        raise IntegrityError(error_text(heading, offenders=map(str, problems), fix=fix))


def check_access(columns: ShardColumns) -> None:
    """Raise unless every global element has exactly one main replica.

    Raises:
        IntegrityError: Some elements have none or several; the error names their keys, ranks and boxes.

    Examples:
        >>> import torch, shardtree as st
        >>> check_access(st.layouts.shard_columns([st.ShardedTensor.from_rank_offsets("w", torch.zeros(2, 3))]))
    """
    raise_problems(access_problems(columns))


def raise_problems(problems: Sequence[Problem]) -> None:
    """Raise IntegrityError with the problems, if there are any.

    Examples:
        >>> raise_problems([])
    """
    if problems:
        heading = (
            "sharding integrity: each element of a global tensor, and each object of a global array, "
            "needs exactly one main replica (replica_id 0)"
        )
        skip = "Or skip this check: validate_access_integrity=False; a save then leaves out what has no main replica."
        raise IntegrityError(offences_text(heading, problems, skip))


def _overhanging(main: ShardColumns) -> tuple[Problem, ...]:
    """Return a problem for each tensor with a shard that exceeds the global shape."""
    # Such a shard may be loaded, with `allow_shape_mismatch`; saved, it would lie outside of its tensor.
    whole = box_column([kind.global_shape for kind in main.kinds], fill=1, axes=main.offset.shape[1])
    leaves = np.zeros(len(main), dtype=np.bool_)
    for axis in range(whole.shape[1]):
        leaves |= main.offset[:, axis] + main.shape[:, axis] > whole[:, axis].take(main.key)
    leaves &= main.elements > 0
    return tuple(
        Problem(
            main.keys[number],
            tuple(np.unique(main.rank[leaves & (main.key == number)]).tolist()),
            f"a shard reaches beyond the global shape {main.kinds[number].global_shape}",
            fix="Keep shards within the global shape: that of a padded tensor includes its padding.",
        )
        for number in np.unique(main.key[leaves]).tolist()
    )


# The rule for common states: they are the same on all ranks, since only one rank stores its own.


def common_problems(commons: Sequence[Any] | Mapping[int, Any]) -> tuple[Problem, ...]:
    """Return a problem for each path at which ranks' common trees differ, with each value and the ranks that have it.

    Holes in dicts, which stand for shards, are ignored.

    Args:
        commons: Common tree of each rank: a mapping by rank, or a sequence that begins with rank 0.

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
    # Every tree is compared with the first: equality is transitive, and all pairs would be too many.
    first = next(iter(trees.values()), None)
    differing: dict[TreePath, list[int]] = defaultdict(list)
    for rank, tree in trees.items():
        difference = diff(first, tree)
        for path in (*difference.only_left, *difference.only_right, *difference.mismatch):
            differing[path].append(rank)
    return tuple(Problem(path, (), _values(trees, path, ranks)) for path, ranks in differing.items())


def _values(trees: Mapping[int, Any], path: TreePath, ranks: Sequence[int]) -> str:
    """Return each value at a path and the ranks that have it, as text.

    Args:
        trees: Tree of each rank.
        path: Path at which the trees differ.
        ranks: Ranks whose value differs from the first rank's.
    """
    like_first = [rank for rank in trees if rank not in ranks]
    first = value_at(trees[like_first[0]], path)
    groups: dict[str, list[int]] = defaultdict(list)
    for rank in ranks:
        value = value_at(trees[rank], path)
        # Two different values may print alike, such as long tensors.
        groups[f"another {value}" if value == first else value].append(rank)
    values = {first: like_first} | groups
    return ", ".join(f"{rank_text(who)} {'has' if len(who) == 1 else 'have'} {value}" for value, who in values.items())
