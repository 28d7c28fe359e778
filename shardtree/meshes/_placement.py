"""Tensors of a tree with their keys and specs, and the shards of all ranks of a mesh as columns."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..core.geometry import Column, Mask, box_column, refuse, widen
from ..core.layouts import ShardColumns, TensorKind
from ..core.lazy import LazyTensor
from ..core.mapping import SHAPE_FIX, ShardedObject, ShardedTensor, ShardedTensorFactory, lacks_memory, without_shape
from ..core.trees import call_at, diff, flatten_with_paths, path_key, refuse_hidden
from ..errors import IntegrityError, MetadataError, TreeError, TreePath, error_text, render_path
from ._mesh import Mesh
from ._shards import mesh_shards
from ._specs import PartitionSpec, Specs, check_patterns, check_spec
from ._tree_specs import specs_by_path

KeyFunction = Callable[[TreePath], str]
"""Function from a leaf's path to the key of its tensor."""


@dataclass(frozen=True, slots=True)
class Placement:
    """A tensor and its spec.

    Attributes:
        key: Key of the tensor.
        kind: Dtype and shape of the tensor.
        spec: Spec of the tensor.
        copy: Index among tied tensors, which have the same key; only index 0 has main replicas.
    """

    key: str
    kind: TensorKind
    spec: PartitionSpec
    copy: int = 0


def keyed_tensors(
    doing: str, pairs: Sequence[tuple[TreePath, Any]], key: KeyFunction | None
) -> dict[TreePath, ShardedTensor]:
    """Return a tree's plain tensors as whole shards, by path; leaves that are shards are left out.

    Raises:
        MetadataError: `key` isn't a function, or returned something that isn't a key.
        TreeError: A tensor isn't dense.

    Examples:
        >>> keyed_tensors("shard", [(("a", "w"), torch.zeros(2))], None)["a", "w"].key
        'a.w'
    """
    if key is not None and not callable(key):
        fix = "Pass a function that takes a leaf's path, a tuple, and returns the leaf's key."
        raise MetadataError(error_text(f"{doing}: key is not a function", found=type(key).__name__, fix=fix))
    problems = [f"{render_path(path)}: {reason}" for path, leaf in pairs if (reason := _why_not_dense(leaf))]
    if problems:
        dense = "Convert them to dense tensors first, with .to_dense() or .dequantize()."
        fix = SHAPE_FIX if any(without_shape(leaf) for _, leaf in pairs) else dense
        raise TreeError(error_text(f"{doing}: tensors that are not dense", offenders=problems, fix=fix))
    tensors = [(path, leaf) for path, leaf in pairs if isinstance(leaf, (torch.Tensor, LazyTensor))]
    return {path: _whole_shard(call_at(path, key or path_key, path), leaf) for path, leaf in tensors}


def _why_not_dense(leaf: Any) -> str:
    if not isinstance(leaf, torch.Tensor) or (shapeless := without_shape(leaf)):
        return shapeless if isinstance(leaf, torch.Tensor) else ""
    if lacks_memory(leaf):
        return "its storage is freed"
    return str(leaf.layout) if leaf.layout != torch.strided or leaf.is_quantized else ""


def _whole_shard(key: str, leaf: Any) -> ShardedTensor:
    # Detached, since views of a parameter would require gradients.
    data, shape = leaf.detach() if isinstance(leaf, torch.Tensor) else leaf, tuple(leaf.shape)
    return ShardedTensor(key, data, leaf.dtype, shape, shape, (0,) * len(shape), (1,) * len(shape))


def copies_by_path(
    doing: str,
    tensors: Iterable[tuple[TreePath, ShardedTensor]],
    leaves: Mapping[TreePath, Any],
    key: KeyFunction | None,
) -> dict[TreePath, int]:
    """Return each tensor's index among the tensors with the same key, by path.

    Several tensors may have one key only if the user chose it: with `key`, or as the key of shards in the tree.

    Args:
        doing: Name of the caller in errors.
        tensors: Tensors with their keys, in the tree's order.
        leaves: Leaves of the tree; shards among them bring their own keys.
        key: Function that the user passed, or None.

    Raises:
        TreeError: Two paths have the same key, but the user didn't choose it.
        IntegrityError: Tensors with the same key aren't equal.

    Examples:
        >>> tied = torch.zeros(2)
        >>> pairs = [(("in",), tied), (("out",), tied)]
        >>> copies_by_path("shard", keyed_tensors("shard", pairs, lambda path: "w").items(), dict(pairs), path_key)
        {('in',): 0, ('out',): 1}
    """
    first: dict[str, tuple[TreePath, ShardedTensor]] = {}
    count: dict[str, int] = {}
    copies = {}
    for path, shard in tensors:
        other_path, other = first.setdefault(shard.key, (path, shard))
        copies[path] = count[shard.key] = count.get(shard.key, -1) + 1
        if not copies[path]:
            continue
        offenders = [render_path(other_path), render_path(path)]
        if key is None and not all(isinstance(leaves[each], ShardedTensor) for each in (other_path, path)):
            fix = "Pass key= to choose the keys, or rename one of the paths."
            raise TreeError(error_text(f"{doing}: two paths have the key {shard.key!r}", offenders=offenders, fix=fix))
        if not _same_tensor(other, shard):
            fix = "Give each tensor a key of its own. Only equal tensors may share a key; lazy tensors, which are not"
            fix += " compared, may share it only if they are one object."
            heading = f"{doing}: different tensors have the key {shard.key!r}"
            raise IntegrityError(error_text(heading, offenders=offenders, fix=fix))
    return copies


def _same_tensor(left: ShardedTensor, right: ShardedTensor) -> bool:
    """Return whether two shards hold equal tensors; if one has no data, whether their dtypes and shapes agree."""
    if (left.dtype, left.global_shape) != (right.dtype, right.global_shape):
        return False
    one, other = left.data, right.data
    if one is None or other is None:
        return True
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return one is other  # lazy tensors aren't read to compare
    # Tied weights usually share memory: comparing addresses first spares comparing elements.
    is_one_view = (one.device, one.data_ptr(), one.stride()) == (other.device, other.data_ptr(), other.stride())
    return is_one_view or not diff(one, other)


# A tree's leaves with their placements.


@dataclass(frozen=True, slots=True)
class Placed:
    """A leaf of the tree to shard, and its placement.

    Attributes:
        leaf: Whole shard of a tensor, or another leaf unchanged.
        placement: Key and spec of the tensor; None for other leaves.
    """

    leaf: Any
    placement: Placement | None


def placed_leaves(
    tree: Any, mesh: Mesh, specs: Specs, key: KeyFunction | None
) -> tuple[list[Placed], Callable[[Sequence[Any]], Any]]:
    """Return a tree's leaves with their placements, and the function that rebuilds the tree from new leaves.

    Raises:
        TreeError: A leaf is a factory or part of a tensor, or two paths have the same key.
        MetadataError: A tensor has no spec, a spec doesn't fit its tensor or the mesh, or `key` isn't a function.
        KeyMismatch: A pattern of `specs_by_pattern` matches no tensor.
        IntegrityError: Tensors with the same key aren't equal.
    """
    # A mapping that isn't a dict would be a leaf.
    tree = dict(tree) if isinstance(tree, Mapping) and not isinstance(tree, dict) else tree
    pairs, rebuild = flatten_with_paths(tree)
    _check_leaves(pairs)
    tensors = keyed_tensors("shard", pairs, key)
    whole = [(path, tensors.get(path, leaf)) for path, leaf in pairs]
    shards = [(path, leaf) for path, leaf in whole if isinstance(leaf, ShardedTensor)]
    copies = copies_by_path("shard", shards, dict(pairs), key)
    spec_of = specs_by_path(specs, tree, dict(shards))
    leaves = []
    for path, leaf in whole:
        if not isinstance(leaf, ShardedTensor):
            leaves.append(Placed(leaf, None))
            continue
        kind = TensorKind(leaf.dtype, leaf.global_shape, 0)
        placement = Placement(leaf.key, kind, spec_of[path], copies[path])
        check_spec(leaf.key, kind, mesh, placement.spec)
        leaves.append(Placed(leaf, placement))
    check_patterns("shard", specs, [shard.key for _, shard in shards], whole=True)
    return leaves, rebuild


def _check_leaves(pairs: Sequence[tuple[TreePath, Any]]) -> None:
    factories = [render_path(path) for path, leaf in pairs if isinstance(leaf, ShardedTensorFactory)]
    if factories:
        fix = "Call `apply_factories` on the tree first: specs are for the tensors that are stored."
        raise TreeError(error_text("shard: factories cannot be sharded", offenders=factories, fix=fix))
    parts = [f"{render_path(path)}: {leaf.key!r}" for path, leaf in pairs if _is_partial(leaf)]
    if parts:
        fix = "Pass whole tensors; join shards with `unshard` first."
        raise TreeError(error_text("shard: tensors or objects that are not whole", offenders=parts, fix=fix))
    refuse_hidden("shard", pairs)


def _is_partial(leaf: Any) -> bool:
    if isinstance(leaf, ShardedObject):
        return any(size != 1 for size in leaf.global_shape)
    is_flat = isinstance(leaf, ShardedTensor) and leaf.flattened_range is not None
    return is_flat or (isinstance(leaf, ShardedTensor) and leaf.local_shape != leaf.global_shape)


# The shards of all ranks, computed once for each shape and spec without building a shard.


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """Shards of one tensor on all ranks, one per row."""

    offset: Column
    shape: Column
    rank: Column
    main: Mask


def mesh_columns(kinds: Mapping[str, TensorKind], mesh: Mesh, specs: Mapping[str, PartitionSpec]) -> ShardColumns:
    """Return the shards of all ranks of a mesh as columns, equal to those of the trees that `shard` makes.

    Rows are sorted by key, then in the mesh's order, then in the order of `RankShard.boxes`.

    Args:
        kinds: Dtype and shape of each tensor, by key.
        mesh: Mesh of the ranks.
        specs: Spec of each tensor, by the same keys.

    Raises:
        MetadataError: A tensor has no spec, a spec doesn't fit its tensor or the mesh, or a kind isn't a TensorKind.

    Examples:
        >>> import torch
        >>> kinds = {"w": TensorKind(torch.float32, (4, 6), 0)}
        >>> columns = mesh_columns(kinds, Mesh(dp=2, tp=2), {"w": PartitionSpec("tp")})
        >>> columns.rank.tolist(), columns.offset.tolist(), columns.main.tolist()
        ([0, 1, 2, 3], [[0, 0], [2, 0], [0, 0], [2, 0]], [True, True, False, False])
    """
    for name, value in (("kinds", kinds), ("specs", specs)):
        if not isinstance(value, Mapping):
            fix = "Pass a dict; `layout_of` also takes a tree, and one spec for all tensors."
            refuse("mesh_columns", name, type(value).__name__, "a dict by the tensors' keys", fix, error=MetadataError)
    missing = [repr(key) for key in kinds if key not in specs]
    if missing:
        fix = "Give a PartitionSpec for each tensor."
        raise MetadataError(error_text("mesh_columns: tensors without a spec", offenders=missing, fix=fix))
    return placed_columns([Placement(key, kind, specs[key]) for key, kind in kinds.items()], mesh)


def placed_columns(placements: Iterable[Placement], mesh: Mesh) -> ShardColumns:
    """Return the shards of all ranks of a mesh as columns; placements of tied tensors may have the same key."""
    placements = sorted(placements, key=lambda placement: (placement.key, placement.copy))
    _check_kinds(placements)
    for placement in placements:
        check_spec(placement.key, placement.kind, mesh, placement.spec)
    # One width for all tensors, so that their rows can be concatenated without padding each again.
    width = max((len(placement.kind.global_shape) for placement in placements), default=1)
    names = [(placement.kind.global_shape, placement.spec) for placement in placements]
    # A model has few shapes and specs, repeated in its layers, and a mesh may have thousands of ranks.
    of_each = {name: _tensor_rows(*name, mesh, width) for name in dict.fromkeys(names)}
    rows = [of_each[name] for name in names]
    kinds = {placement.key: placement.kind for placement in placements}
    number = {key: position for position, key in enumerate(kinds)}
    counts = np.array([len(table.rank) for table in rows], dtype=np.int64)
    # Only the first of tied tensors has main replicas.
    is_first = np.array([placement.copy == 0 for placement in placements], dtype=np.bool_)
    no_range = np.full(counts.sum(), -1, dtype=np.int64)
    return ShardColumns(
        keys=tuple(kinds),
        kinds=tuple(kinds.values()),
        key=np.repeat(np.array([number[placement.key] for placement in placements], dtype=np.int64), counts),
        offset=np.concatenate([table.offset for table in rows] or [np.zeros((0, max(width, 1)), dtype=np.int64)]),
        shape=np.concatenate([table.shape for table in rows] or [np.zeros((0, max(width, 1)), dtype=np.int64)]),
        start=no_range,
        stop=no_range,
        rank=np.concatenate([*(table.rank for table in rows), np.zeros(0, dtype=np.int64)]),
        main=np.concatenate([*(t.main for t in rows), np.zeros(0, dtype=np.bool_)]) & np.repeat(is_first, counts),
    )


def _check_kinds(placements: Iterable[Placement]) -> None:
    """Raise IntegrityError if tensors of one key differ in dtype or shape."""
    kinds: dict[str, dict[TensorKind, None]] = defaultdict(dict)
    for each in placements:
        kinds[each.key][each.kind] = None
    wrong = [f"{key!r}: {', '.join(map(str, several))}" for key, several in kinds.items() if len(several) > 1]
    if wrong:
        fix = "Give each tensor a key of its own."
        raise IntegrityError(error_text("different tensors have one key", offenders=wrong, fix=fix))


def _tensor_rows(global_shape: tuple[int, ...], spec: PartitionSpec, mesh: Mesh, axes: int) -> _Rows:
    pairs = [(part, part.boxes) for part in mesh_shards(global_shape, mesh, spec)]
    counts = [len(boxes) for _, boxes in pairs]
    return _Rows(
        offset=widen(box_column([box.offset for _, boxes in pairs for box in boxes], fill=0), axes, 0),
        shape=widen(box_column([box.shape for _, boxes in pairs for box in boxes], fill=1), axes, 1),
        rank=np.repeat(np.array([part.rank for part, _ in pairs], dtype=np.int64), counts),
        main=np.repeat(np.array([part.replica_id == 0 for part, _ in pairs], dtype=np.bool_), counts),
    )
