"""Whether all ranks' shards tile their global tensors: every element has exactly one main replica."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np

from ..errors import IntegrityError, error_text
from ..geometry import Column, box_column, intersect, overlapping_pairs, volumes
from ._columns import BoxColumns, ShardColumns, select_rows, shard_boxes


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong with a layout.

    Attributes:
        key: the tensor's key.
        ranks: who is concerned.
        what: what is wrong, in words.
    """

    key: str
    ranks: tuple[int, ...]
    what: str

    def __str__(self) -> str:
        holders = f" (ranks {', '.join(map(str, self.ranks))})" if self.ranks else ""
        return f"{self.key!r}{holders}: {self.what}"


def access_problems(columns: ShardColumns) -> tuple[Problem, ...]:
    """Return what keeps the main replicas from tiling their global tensors; nothing where all is well.

    Args:
        columns: the shards of all ranks.

    Examples:
        >>> import torch, shardtree as st
        >>> half = st.ShardedTensor.from_rank_offsets("w", torch.zeros(2, 3), (0, 0, 2))
        >>> [str(problem) for problem in access_problems(st.shard_columns([half]))]
        ["'w' (ranks 0): 6 of 12 elements have no main replica; the first one missing is at (2, 0)"]
    """
    main = select_rows(columns, np.flatnonzero(columns.main))
    boxes = shard_boxes(main.offset, main.shape, main.start, main.stop)
    wrong = (*_beyond(main, boxes), *_doubled(main, boxes))
    return (*wrong, *_missing(main, boxes, {problem.key for problem in wrong}))


def write_problems(columns: ShardColumns) -> tuple[Problem, ...]:
    """Return why the given shards can't all be stored in one checkpoint; gaps between them are no reason.

    Args:
        columns: the shards that are written, by whichever replica.

    Examples:
        >>> import torch, shardtree as st
        >>> twice = [st.ShardedTensor.from_rank_offsets("w", torch.zeros(2), (0, 0, 2)) for _ in range(2)]
        >>> [str(problem) for problem in write_problems(st.shard_columns(twice))]
        ["'w' (ranks 0): [0:2] is held by more than one main replica"]
    """
    boxes = shard_boxes(columns.offset, columns.shape, columns.start, columns.stop)
    return (*_beyond(columns, boxes), *_doubled(columns, boxes))


def check_access(columns: ShardColumns) -> None:
    """Raise unless every global element has exactly one main replica.

    Raises:
        IntegrityError: names every key, the ranks and the box that is covered twice or not at all.

    Examples:
        >>> import torch, shardtree as st
        >>> check_access(st.shard_columns([st.ShardedTensor.from_rank_offsets("w", torch.zeros(2, 3))]))
    """
    problems = access_problems(columns)
    if problems:
        raise IntegrityError(
            error_text(
                "sharding integrity: each element of a global tensor needs exactly one main replica (replica_id 0)",
                offenders=map(str, problems),
                fix="Give replicas different replica_ids; pass validate_access_integrity=False to skip the check.",
            )
        )


def _beyond(main: ShardColumns, boxes: BoxColumns) -> tuple[Problem, ...]:
    """Return the tensors that a shard leaves, as `allow_shape_mismatch` lets it: its volume would hide a gap."""
    whole = box_column([kind.global_shape for kind in main.kinds], fill=1, axes=boxes.offset.shape[1])
    group = main.key[boxes.shard]
    leaves = (boxes.offset + boxes.shape > whole[group]).any(axis=1) & (volumes(boxes.shape) > 0)
    ranks = main.rank[boxes.shard]
    return tuple(
        Problem(
            main.keys[number],
            tuple(np.unique(ranks[leaves & (group == number)]).tolist()),
            f"a shard reaches beyond the global shape {main.kinds[number].global_shape}",
        )
        for number in np.unique(group[leaves]).tolist()
    )


def _doubled(main: ShardColumns, boxes: BoxColumns) -> tuple[Problem, ...]:
    group = main.key[boxes.shard]
    left, right = overlapping_pairs(group, boxes.offset, boxes.shape, group, boxes.offset, boxes.shape)
    twice = left < right
    left, right = left[twice], right[twice]
    offset, shape = intersect(boxes.offset[left], boxes.shape[left], boxes.offset[right], boxes.shape[right])
    problems: dict[str, Problem] = {}
    for pair, (one, other) in enumerate(zip(left.tolist(), right.tolist(), strict=True)):
        key = main.keys[int(group[one])]
        ranks = tuple(sorted({int(main.rank[boxes.shard[one]]), int(main.rank[boxes.shard[other]])}))
        axes = len(main.kinds[int(group[one])].global_shape)
        what = f"{_box(offset[pair], shape[pair], axes)} is held by more than one main replica"
        problems.setdefault(key, Problem(key, ranks, what))
    return tuple(problems.values())


def _missing(main: ShardColumns, boxes: BoxColumns, wrong: set[str]) -> tuple[Problem, ...]:
    held = np.bincount(main.key[boxes.shard], weights=volumes(boxes.shape), minlength=len(main.keys)).astype(np.int64)
    needed = [prod(kind.global_shape) for kind in main.kinds]
    short = (number for number, size in enumerate(needed) if held[number] != size)
    return tuple(
        _gap(main, boxes, number, needed[number] - int(held[number]))
        for number in short
        if main.keys[number] not in wrong
    )


def _gap(main: ShardColumns, boxes: BoxColumns, number: int, missing: int) -> Problem:
    shape = main.kinds[number].global_shape
    rows = np.flatnonzero(main.key[boxes.shard] == number)
    first = first_gap(boxes.offset[rows], boxes.shape[rows], shape)
    ranks = tuple(sorted({int(rank) for rank in main.rank[boxes.shard[rows]]}))
    elements = prod(shape)
    what = f"{missing} of {elements} elements have no main replica; the first one missing is at {first}"
    return Problem(main.keys[number], ranks, what)


def first_gap(offset: Column, shape: Column, global_shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the first element, in row-major order, that no box covers; the global shape itself if there is none.

    Boxes may not overlap. Along each axis in turn the search keeps to the first slab between box edges that isn't full.

    Args:
        offset: int64 (boxes, axes).
        shape: int64 (boxes, axes).
        global_shape: the tensor that the boxes should tile.

    Examples:
        >>> first_gap(np.array([[0, 0], [2, 0]]), np.array([[2, 4], [2, 3]]), (4, 4))
        (2, 3)
    """
    axes = offset.shape[1]
    begin, end = offset, offset + shape
    size = (1,) * (axes - len(global_shape)) + global_shape
    found: list[int] = []
    for axis in range(axes):
        rest = int(np.prod(size[axis + 1 :], dtype=np.int64))
        edges = np.unique(np.concatenate([begin[:, axis], end[:, axis], [0, size[axis]]]))
        for edge in edges[:-1].tolist():
            inside = (begin[:, axis] <= edge) & (end[:, axis] > edge)
            if int(volumes(shape[inside][:, axis + 1 :]).sum()) < rest:
                found.append(edge)
                begin, end, shape = begin[inside], end[inside], shape[inside]
                break
        else:
            return global_shape
    return tuple(found[axes - len(global_shape) :])


def _box(offset: Column, shape: Column, axes: int) -> str:
    spans = zip(offset[len(offset) - axes :].tolist(), shape[len(shape) - axes :].tolist(), strict=True)
    return "[" + ", ".join(f"{begin}:{begin + length}" for begin, length in spans) + "]"
