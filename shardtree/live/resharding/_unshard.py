"""unshard: sharded trees of all ranks into the global tree."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np
import torch

from ...core.geometry import Column, rows_of
from ...core.layouts import (
    BoxColumns,
    ObjectRule,
    Problem,
    RankTrees,
    ShardColumns,
    common_problems,
    doubled_faults,
    fault_problems,
    held_arrays,
    join_columns,
    reshard_objects,
    select_rows,
    shard_boxes,
    shard_columns,
    sharding_faults,
    trees_by_rank,
)
from ...core.lazy import LazyTensor, as_integers
from ...core.mapping import ShardedBase, ShardedObject, ShardedTensor, ShardedTensorFactory, has_elements
from ...core.offences import offences_text
from ...core.trees import (
    HOLE,
    apply_factories,
    common_with_holes,
    comparable,
    empty_data,
    flatten_with_paths,
    leaves_with_paths,
    map_shards,
    merge,
    prune,
    refuse_hidden,
)
from ...errors import IntegrityError, ShapeError, TreeError, TreePath, error_text, render_path

# Global tensors assembled from shards.


def assembled(columns: ShardColumns, shards: Sequence[ShardedTensor]) -> dict[str, Any]:
    """Return the global tensors, by key.

    If one shard holds a whole tensor, the result is the shard's own data. Otherwise it is a new tensor. Its elements
    come from main replicas, or from the copy on the lowest rank where there is none.

    Args:
        columns: Shards of all ranks, as columns.
        shards: The same shards, row by row.

    Raises:
        IntegrityError: No rank holds some element, or it has two main replicas.
        ShapeError: A shard that is needed has no data.
    """
    check_covered(columns)
    order = np.argsort(columns.key, kind="stable")
    of_each = np.split(order, np.searchsorted(columns.key[order], np.arange(1, len(columns.keys))))
    rows = [_rows_to_copy(columns, number, of_each[number]) for number in range(len(columns.keys))]
    absent = [
        f"{shards[row].key!r} on rank {columns.rank[row]}"
        for tensor_rows in rows
        for row in tensor_rows
        if not _has_elements(shards[row].data)
    ]
    if absent:
        fix = "Pass shards with data that is not on the meta device, such as the result of a load."
        raise ShapeError(error_text("unshard: shards have no tensor with elements", offenders=absent, fix=fix))
    return {key: _whole(columns, shards, number, rows[number]) for number, key in enumerate(columns.keys)}


def check_covered(columns: ShardColumns) -> None:
    """Raise IntegrityError if some element is held by no rank, or by several main replicas."""
    mains = select_rows(columns, np.flatnonzero(columns.main))
    overlaps = fault_problems(columns, doubled_faults(mains), "element")
    # If main replicas are missing a copy is enough, so gaps are looked for among all shards.
    all_main = replace(columns, main=np.ones(len(columns), dtype=np.bool_))
    faults = sharding_faults(all_main)
    missing = fault_problems(all_main, rows_of(faults, np.flatnonzero(~faults.doubled)), "element")
    problems: Sequence[Problem] = (*missing, *overlaps)
    if problems:
        heading = "unshard: each element needs a shard that holds it, and at most one main replica"
        raise IntegrityError(offences_text(heading, problems))


def _rows_to_copy(columns: ShardColumns, number: int, rows: Column) -> list[int]:
    """Return the rows of the shards to copy into a tensor, in the order of copying.

    They are the main replicas if these cover the tensor, otherwise all shards with elements, main replicas last. Later
    shards overwrite earlier ones where they overlap.

    Args:
        columns: Shards of all ranks.
        number: Index of the tensor's key.
        rows: Rows in `columns` of all shards of the tensor.
    """
    rows = rows[columns.elements[rows] > 0]
    mains = rows[columns.main[rows]]
    # Main replicas don't overlap here, so if they have as many elements as the tensor they cover it.
    are_all = columns.elements[mains].sum() == prod(columns.kinds[number].global_shape)
    copies: list[int] = (mains if are_all else rows[np.lexsort((-columns.rank[rows], columns.main[rows]))]).tolist()
    return copies


def _has_elements(data: Any) -> bool:
    return isinstance(data, LazyTensor) or (isinstance(data, torch.Tensor) and has_elements(data))


def _whole(columns: ShardColumns, shards: Sequence[ShardedTensor], number: int, rows: Sequence[int]) -> Any:
    kind = columns.kinds[number]
    if len(rows) == 1:
        data = shards[rows[0]].data
        return data if tuple(data.shape) == kind.global_shape else _dense(data).reshape(kind.global_shape)
    pieces = [_dense(shards[row].data) for row in rows]
    whole = empty_data(kind.global_shape, kind.dtype, pieces[0].device if pieces else "cpu")
    mine = select_rows(columns, np.array(rows, dtype=np.int64))
    boxes = shard_boxes(mine.offset, mine.shape, mine.start, mine.stop)
    # Tensors are copied as integers: torch can't copy some packed dtypes.
    _fill(as_integers(whole), list(map(as_integers, pieces)), boxes, (mine.start >= 0).tolist())
    return whole


def _dense(data: Any) -> torch.Tensor:
    tensor: torch.Tensor = data.read() if isinstance(data, LazyTensor) else data
    return tensor


def _fill(whole: torch.Tensor, pieces: Sequence[torch.Tensor], boxes: BoxColumns, is_flat: Sequence[bool]) -> None:
    """Copy boxes from shards into a global tensor, in order.

    Args:
        whole: Tensor to fill.
        pieces: Data of each shard.
        boxes: Boxes of the shards.
        is_flat: Whether each shard is a flat range.
    """
    axes = whole.dim()
    rows = zip(boxes.shard.tolist(), boxes.offset.tolist(), boxes.shape.tolist(), boxes.position.tolist(), strict=True)
    for shard, offset, shape, position in rows:
        # Columns are widened on the left, so a tensor's own axes are the last ones; a scalar has none.
        box = zip(offset[len(offset) - axes :], shape[len(shape) - axes :], strict=True)
        place = whole[tuple(slice(first, first + size) for first, size in box)]
        piece = pieces[shard]
        if is_flat[shard]:
            piece = piece[position : position + place.numel()]
        place.copy_(piece.reshape(place.shape))


@dataclass(frozen=True, slots=True)
class _Slot:
    """A placeholder for the global tensor or object of a key in a tree."""

    key: str
    is_tensor: bool


@dataclass(frozen=True, slots=True, eq=False)
class _RankTree:
    """A rank's tree, taken apart: its shards, its sharded objects, and the tree with a `_Slot` in place of each."""

    tensors: tuple[ShardedTensor, ...]
    objects: tuple[ShardedObject, ...]
    slots: Any


def unshard(trees: RankTrees, *, rules: Mapping[str, ObjectRule] | None = None) -> Any:
    """Return the global tree of ranks' sharded trees; undoes `shard`.

    A shard is replaced by its global tensor, as a checkpoint would hold it; a factory by the tree that it builds, or by
    one tensor if all its shards have one key. A tensor that a shard holds whole isn't copied. If copies differ, the
    main replica counts, or the copy on the lowest rank if there is none.

    Args:
        trees: Tree of each rank: a mapping by rank, or a sequence that begins with rank 0. Dicts are joined by key,
            lists and tuples of equal length by position.
        rules: Rules for arrays of several objects, such as one on each rank, by key pattern; see `reshard_objects`. A
            single object needs no rule. Objects that a rule drops are left out of the tree.

    Returns:
        The global tree. Plain values, which must be the same on all ranks, are unchanged; objects are copies of their
        data.

    Raises:
        IntegrityError: No rank holds some element, or it has two main replicas; plain values differ between ranks;
            ranks disagree about a tensor; there are several objects and no rule.
        ShapeError: A shard that is needed has no data.
        TreeError: An argument isn't a tree for each rank, or the trees don't fit together.

    Examples:
        >>> import torch
        >>> from shardtree.layouts import Mesh, PartitionSpec, shard
        >>> trees = shard({"w": torch.arange(5), "step": 3}, Mesh(dp=2, tp=2), PartitionSpec("tp"))
        >>> unshard(trees)
        {'w': tensor([0, 1, 2, 3, 4]), 'step': 3}
    """
    by_rank = trees_by_rank(trees, "unshard")
    # Plain values are compared before any tensor is assembled, which may take long and much memory.
    for rank, tree in by_rank.items():
        refuse_hidden(f"unshard: rank {rank}", leaves_with_paths(tree))
    problems = common_problems({rank: comparable(common_with_holes(tree)) for rank, tree in by_rank.items()})
    if problems:
        heading, fix = "unshard: plain values differ between ranks", "Make them equal, or remove them."
        raise IntegrityError(error_text(heading, offenders=map(str, problems), fix=fix))
    flat = {rank: _flatten(tree) for rank, tree in by_rank.items()}
    columns = join_columns([shard_columns(rank_tree.tensors, rank) for rank, rank_tree in flat.items()])
    tensors = assembled(columns, [shard for rank_tree in flat.values() for shard in rank_tree.tensors])
    objects = _objects([item for rank_tree in flat.values() for item in rank_tree.objects], rules)

    def value(leaf: Any) -> Any:
        if not isinstance(leaf, _Slot):
            return leaf
        return tensors[leaf.key] if leaf.is_tensor else objects[leaf.key]

    return prune(map_shards(value, _join_slots([rank_tree.slots for rank_tree in flat.values()])))


def _flatten(tree: Any) -> _RankTree:
    pairs, rebuild = flatten_with_paths(tree)
    parts = [apply_factories(leaf) for _, leaf in pairs]
    leaves = [leaf for part in parts for _, leaf in leaves_with_paths(part)]
    slots = [
        _factory_slot(part) if isinstance(leaf, ShardedTensorFactory) else _slot(leaf)
        for (_, leaf), part in zip(pairs, parts, strict=True)
    ]
    tensors = tuple(leaf for leaf in leaves if isinstance(leaf, ShardedTensor))
    return _RankTree(tensors, tuple(leaf for leaf in leaves if isinstance(leaf, ShardedObject)), rebuild(slots))


def _objects(objects: Sequence[ShardedObject], rules: Mapping[str, ObjectRule] | None) -> dict[str, Any]:
    """Return the global value of each array of objects, by key: its only object, or the result of its rule."""
    targets = []
    for key, array in held_arrays(objects).items():
        shape = array.all_shapes[0]
        single = shape if len(array.all_shapes) == 1 and prod(shape) == 1 else (1,) * len(shape)
        targets.append(ShardedObject(key, HOLE, single, (0,) * len(single)))  # where a rule drops one, the hole stays
    return {item.key: item.data for item in reshard_objects(objects, targets, rules)}


def _factory_slot(part: Any) -> Any:
    """Return the tree that a factory built, with a `_Slot` in place of each shard and object.

    If the leaves are shards of a single key, one `_Slot` is returned instead of the tree.
    """
    slots = map_shards(_slot, part)
    leaves = [leaf for _, leaf in leaves_with_paths(slots)]
    kinds = {leaf for leaf in leaves if isinstance(leaf, _Slot)}
    return kinds.pop() if len(kinds) == 1 and all(isinstance(leaf, _Slot) for leaf in leaves) else slots


def _slot(leaf: Any) -> Any:
    """Return the `_Slot` for the global value of a shard or sharded object; other leaves unchanged."""
    return _Slot(leaf.key, isinstance(leaf, ShardedTensor)) if isinstance(leaf, ShardedBase) else leaf


def _join_slots(trees: Iterable[Any]) -> Any:
    """Return the trees of all ranks merged into one, in which a `_Slot` stands for each shard or object."""
    whole: Any = HOLE
    leaves: dict[TreePath, Any] = {}
    for tree in trees:
        pairs, rebuild = flatten_with_paths(tree)
        _check_same(leaves, pairs)
        # Leaves that an earlier tree has become holes: merging refuses a path that two trees fill, and replicas are on
        # many ranks.
        new = [leaf if path not in leaves else HOLE for path, leaf in pairs]
        leaves |= {path: leaf for path, leaf in pairs if leaf is not HOLE and path not in leaves}
        whole = merge(whole, rebuild(new))
    unknown = [render_path(path) for path, leaf in leaves_with_paths(whole) if leaf is HOLE]
    if unknown:
        fix = "Pass the trees of all ranks."
        raise IntegrityError(error_text("unshard: paths where no rank has a value", offenders=unknown, fix=fix))
    return whole


def _check_same(leaves: Mapping[TreePath, Any], pairs: Iterable[tuple[TreePath, Any]]) -> None:
    wrong = [
        f"{render_path(path)}: {_name(leaves[path])} and {_name(leaf)}"
        for path, leaf in pairs
        if path in leaves and leaf is not HOLE and {type(leaf), type(leaves[path])} >= {_Slot} and leaf != leaves[path]
    ]
    if wrong:
        fix = "Instead of each rank's tree, pass a dict of all of the rank's shards: {shard.key: shard, ...}."
        raise TreeError(error_text("unshard: ranks have different tensors at the same path", offenders=wrong, fix=fix))


def _name(leaf: Any) -> str:
    return repr(leaf.key) if isinstance(leaf, _Slot) else type(leaf).__name__
