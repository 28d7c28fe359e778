"""The shards of all ranks of a mesh as columns, computed once for each shape and spec without building a shard."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from ...errors import IntegrityError, MetadataError, error_text
from ...geometry import Column, Mask, box_column, refuse, widen
from .._columns import ShardColumns, TensorKind
from ._mesh import Mesh
from ._shards import mesh_shards
from ._specs import PartitionSpec, check_spec


@dataclass(frozen=True, slots=True)
class Placement:
    """A tensor and how it is cut.

    Attributes:
        key: the tensor's name.
        kind: what it is.
        spec: how it is cut.
        copy: 0 for the main one; tensors that occur more than once under one key are numbered.
    """

    key: str
    kind: TensorKind
    spec: PartitionSpec
    copy: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """One tensor's shards on all ranks, one a row."""

    offset: Column
    shape: Column
    rank: Column
    main: Mask


def mesh_columns(kinds: Mapping[str, TensorKind], mesh: Mesh, specs: Mapping[str, PartitionSpec]) -> ShardColumns:
    """Return the shards that all ranks of a mesh hold, as columns; equal to those of the trees that `shard` makes.

    Rows are ordered by key, then in the mesh's order, then as `RankShard.boxes` are.

    Args:
        kinds: the tensors, by key.
        mesh: the ranks.
        specs: how each is cut, by the same keys.

    Raises:
        MetadataError: a tensor has no spec, or one that doesn't fit it or the mesh; or its kind isn't a TensorKind.

    Examples:
        >>> import torch
        >>> kinds = {"w": TensorKind(torch.float32, (4, 6), 0)}
        >>> columns = mesh_columns(kinds, Mesh(dp=2, tp=2), {"w": PartitionSpec("tp")})
        >>> columns.rank.tolist(), columns.offset.tolist(), columns.main.tolist()
        ([0, 1, 2, 3], [[0, 0], [2, 0], [0, 0], [2, 0]], [True, True, False, False])
    """
    for name, given in (("kinds", kinds), ("specs", specs)):
        if not isinstance(given, Mapping):
            fix = "Pass a dict; `layout_of` takes a tree, and one spec for all."
            refuse("mesh_columns", name, type(given).__name__, "a dict by the tensors' keys", fix, error=MetadataError)
    missing = [repr(key) for key in kinds if key not in specs]
    if missing:
        fix = "Give a PartitionSpec for each tensor."
        raise MetadataError(error_text("mesh_columns: tensors without a spec", offenders=missing, fix=fix))
    return placed_columns([Placement(key, kind, specs[key]) for key, kind in kinds.items()], mesh)


def placed_columns(placements: Iterable[Placement], mesh: Mesh) -> ShardColumns:
    """As `mesh_columns`, for placements, of which several may have one key."""
    placed = sorted(placements, key=lambda each: (each.key, each.copy))
    _check_kinds(placed)
    for each in placed:
        check_spec(each.key, each.kind, mesh, each.spec)
    # One width for all tensors, so that their rows can be concatenated without padding each again.
    width = max((len(each.kind.global_shape) for each in placed), default=1)
    names = [(each.kind.global_shape, each.spec) for each in placed]
    # A model has few shapes and specs, repeated in its layers, and a mesh may have thousands of ranks.
    of_each = {name: _tensor_rows(*name, mesh, width) for name in dict.fromkeys(names)}
    rows = [of_each[name] for name in names]
    kinds = {each.key: each.kind for each in placed}
    number = {key: position for position, key in enumerate(kinds)}
    counts = np.array([len(each.rank) for each in rows], dtype=np.int64)
    # Of tied tensors only the first has main replicas.
    is_first = np.array([each.copy == 0 for each in placed], dtype=np.bool_)
    no_range = np.full(counts.sum(), -1, dtype=np.int64)
    return ShardColumns(
        keys=tuple(kinds),
        kinds=tuple(kinds.values()),
        key=np.repeat(np.array([number[each.key] for each in placed], dtype=np.int64), counts),
        offset=np.concatenate([each.offset for each in rows] or [np.zeros((0, max(width, 1)), dtype=np.int64)]),
        shape=np.concatenate([each.shape for each in rows] or [np.zeros((0, max(width, 1)), dtype=np.int64)]),
        start=no_range,
        stop=no_range,
        rank=np.concatenate([*(each.rank for each in rows), np.zeros(0, dtype=np.int64)]),
        main=np.concatenate([*(each.main for each in rows), np.zeros(0, dtype=np.bool_)]) & np.repeat(is_first, counts),
    )


def _check_kinds(placed: Iterable[Placement]) -> None:
    """Raise IntegrityError where tensors of one key are of different kinds."""
    kinds: dict[str, dict[TensorKind, None]] = defaultdict(dict)
    for each in placed:
        kinds[each.key][each.kind] = None
    wrong = [f"{key!r}: {', '.join(map(str, found))}" for key, found in kinds.items() if len(found) > 1]
    if wrong:
        fix = "Give each tensor a key of its own."
        raise IntegrityError(error_text("different tensors have one key", offenders=wrong, fix=fix))


def _tensor_rows(global_shape: tuple[int, ...], spec: PartitionSpec, mesh: Mesh, axes: int) -> _Rows:
    held = [(part, part.boxes) for part in mesh_shards(global_shape, mesh, spec)]
    counts = [len(boxes) for _, boxes in held]
    return _Rows(
        offset=widen(box_column([box.offset for _, boxes in held for box in boxes], fill=0), axes, 0),
        shape=widen(box_column([box.shape for _, boxes in held for box in boxes], fill=1), axes, 1),
        rank=np.repeat(np.array([part.rank for part, _ in held], dtype=np.int64), counts),
        main=np.repeat(np.array([part.replica_id == 0 for part, _ in held], dtype=np.bool_), counts),
    )
