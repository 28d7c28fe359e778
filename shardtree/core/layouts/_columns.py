"""Shards of many ranks as columns, the form in which plans and checks use them, and ranks send them to each other."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, cast

import numpy as np
import torch

from ...errors import IntegrityError, MetadataError, error_text, plural
from ..deferred import notebook_html
from ..geometry import Column, Mask, as_int64, box_column, check_type, flat_boxes, narrowed, refuse, volumes, widen
from ..mapping import ShardedTensor, is_main_replica

_Fields: TypeAlias = tuple[torch.dtype, tuple[int, ...], int]


@dataclass(frozen=True, slots=True)
class TensorKind:
    """Dtype, global shape and number of prepended axes of a global tensor, on which all its shards must agree."""

    dtype: torch.dtype
    global_shape: tuple[int, ...]
    prepend_axis_num: int

    def __str__(self) -> str:
        suffix = f" with {self.prepend_axis_num} prepended" if self.prepend_axis_num else ""
        return f"{self.global_shape} {str(self.dtype).removeprefix('torch.')}{suffix}"


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class ShardColumns:
    """Shards, one a row: a box of the tensor ``keys[key[row]]``, or a flat range of it.

    Attributes:
        keys: Keys of the tensors, sorted, each once.
        kinds: Dtype and shape of each key's tensor.
        key: Index of each shard's key in `keys`, int64 (shards,).
        offset: Offset of each box, int64 (shards, axes), right-aligned, prepended axes included.
        shape: Shape of each box, int64 (shards, axes), 1 on prepended axes.
        start: First element of the flat range, -1 for a whole box, int64 (shards,).
        stop: One past its last element, -1 for a whole box, int64 (shards,).
        rank: Rank that holds the shard, int64 (shards,).
        main: Whether the shard is the main replica, bool (shards,).
    """

    keys: tuple[str, ...]
    kinds: tuple[TensorKind, ...]
    key: Column
    offset: Column
    shape: Column
    start: Column
    stop: Column
    rank: Column
    main: Mask

    def __len__(self) -> int:
        return len(self.key)

    def __repr__(self) -> str:
        tensors, ranks = plural(len(self.keys), "tensor"), plural(np.unique(self.rank).size, "rank")
        return f"ShardColumns({plural(len(self), 'shard')} of {tensors} on {ranks})"

    def _repr_html_(self) -> str:
        return notebook_html(self)

    def __reduce__(self) -> tuple[Any, ...]:
        """Return a compact form for pickling, since ranks send columns to each other."""
        # Kinds are packed as columns too: pickled one by one, they would be most of the message.
        others = tuple(narrowed(getattr(self, name)) for name in ROWS)
        return _from_packed, (self.keys, packed_kinds(self.kinds), others)

    @property
    def elements(self) -> Column:
        """The number of elements of each shard, int64 (shards,)."""
        return np.where(self.start < 0, volumes(self.shape), self.stop - self.start)

    @property
    def item_size(self) -> Column:
        """The item size of each key's tensor in bytes, int64 (keys,)."""
        return np.array([kind.dtype.itemsize for kind in self.kinds], dtype=np.int64)

    @property
    def nbytes(self) -> Column:
        """The size of each shard in bytes, int64 (shards,)."""
        return self.elements * self.item_size[self.key]


ROWS = ("key", "offset", "shape", "start", "stop", "rank", "main")
"""The columns of `ShardColumns` that have a row for each shard, in order."""

_PackedKinds: TypeAlias = tuple[Column, tuple[torch.dtype, ...], Column, Column, Column]


def packed_kinds(kinds: Sequence[TensorKind]) -> _PackedKinds:
    """Return kinds as columns without repetitions: an index for each kind, and the fields of the distinct kinds.

    The index is that of the kind among the distinct ones. The fields follow in this order: dtypes, numbers of axes,
    numbers of prepended axes, and global shapes.

    Examples:
        >>> kind = TensorKind(torch.float32, (4, 6), 0)
        >>> packed_kinds([kind, kind])[0].tolist(), packed_kinds([kind, kind])[1]
        ([0, 0], (torch.float32,))
    """
    few = {id(kind): kind for kind in kinds}  # equal kinds are mostly the same object, and ids hash faster than kinds
    number = {kind: position for position, kind in enumerate(dict.fromkeys(few.values()))}
    number_of = {identity: number[kind] for identity, kind in few.items()}
    return (
        _int64([number_of[id(kind)] for kind in kinds]),
        tuple(kind.dtype for kind in number),
        _int64([len(kind.global_shape) for kind in number]),
        _int64([kind.prepend_axis_num for kind in number]),
        box_column([kind.global_shape for kind in number], fill=1),
    )


def unpacked_kinds(columns: _PackedKinds) -> tuple[TensorKind, ...]:
    """Return the kinds from the columns of `packed_kinds`; equal kinds are the same object.

    Examples:
        >>> unpacked_kinds(packed_kinds([TensorKind(torch.float32, (4, 6), 0)]))
        (TensorKind(dtype=torch.float32, global_shape=(4, 6), prepend_axis_num=0),)
    """
    number, dtypes, axes, fronts, boxes = columns
    # Shapes are right-aligned, so that the leading fill isn't part of them.
    fills = (boxes.shape[1] - axes).tolist()
    shapes = [box[skip:] for box, skip in zip(zip(*boxes.T.tolist(), strict=True), fills, strict=True)]
    kinds = list(map(TensorKind, dtypes, shapes, fronts.tolist()))
    return tuple([kinds[position] for position in number.tolist()])


def _from_packed(keys: tuple[str, ...], kinds: _PackedKinds, others: tuple[Any, ...]) -> ShardColumns:
    return ShardColumns(keys, unpacked_kinds(kinds), *map(as_int64, others))


def shard_columns(shards: Sequence[ShardedTensor], rank: int = 0) -> ShardColumns:
    """Return one rank's shards as columns, one row a shard, in the same order.

    Args:
        shards: Sharded tensors, with or without data.
        rank: Rank that holds them.

    Raises:
        IntegrityError: Two shards of one key differ in global shape, dtype or prepended axes.
        MetadataError: The shards aren't tensor shards.

    Examples:
        >>> shard = ShardedTensor.from_rank_offsets("w", torch.zeros(2, 3), (0, 1, 4))
        >>> columns = shard_columns([shard], rank=1)
        >>> columns.keys, columns.offset.tolist(), columns.shape.tolist()
        (('w',), [[2, 0]], [[2, 3]])
    """
    try:
        kinds = _kinds(shards, rank)
    except (AttributeError, TypeError):
        # Types are checked only after a failure: checking them beforehand would take as long as making the columns.
        one_by_one = shards if isinstance(shards, Sequence) else [shards]
        other = next((type(shard).__name__ for shard in one_by_one if not isinstance(shard, ShardedTensor)), "others")
        fix = "Pass a list of shards; `tree_columns` takes trees."
        refuse("shard_columns", "shards", other, "a list of ShardedTensor", fix, error=MetadataError)
    keys = tuple(sorted(kinds))
    number = dict(zip(keys, range(len(keys)), strict=True))
    parts = [shard.flattened_range for shard in shards]
    start, stop = np.full(len(shards), -1, dtype=np.int64), np.full(len(shards), -1, dtype=np.int64)
    if any(parts):  # most trees have no flat ranges
        start = _int64([-1 if part is None else part.start for part in parts])
        stop = _int64([-1 if part is None else part.stop for part in parts])
    return ShardColumns(
        keys=keys,
        kinds=tuple(kinds[key] for key in keys),
        key=_int64([number[shard.key] for shard in shards]),
        offset=box_column([shard.global_offset for shard in shards], fill=0),
        shape=box_column([(1,) * shard.prepend_axis_num + shard.local_shape for shard in shards], fill=1),
        start=start,
        stop=stop,
        rank=np.full(len(shards), rank, dtype=np.int64),
        main=np.array([is_main_replica(shard.replica_id) for shard in shards], dtype=np.bool_),
    )


def _kinds(shards: Sequence[ShardedTensor], rank: int) -> dict[str, TensorKind]:
    """Return the kind of each key, or raise an error that names all keys with shards of several kinds."""
    same: dict[_Fields, TensorKind] = {}  # a model repeats few kinds, and a shared object compares by identity
    kinds_of: dict[str, TensorKind] = {}
    agree = True
    for shard in shards:
        fields = (shard.dtype, shard.global_shape, shard.prepend_axis_num)
        kind = same.get(fields)
        if kind is None:
            kind = same[fields] = TensorKind(*fields)
        agree = kinds_of.setdefault(shard.key, kind) is kind and agree
    if not agree:
        raise _disagreement(shards, rank)
    return kinds_of


def _disagreement(shards: Sequence[ShardedTensor], rank: int) -> IntegrityError:
    kinds_of: dict[str, dict[TensorKind, None]] = defaultdict(dict)
    for shard in shards:
        kinds_of[shard.key][TensorKind(shard.dtype, shard.global_shape, shard.prepend_axis_num)] = None
    wrong = [f"{key!r}: {', '.join(map(str, kinds))}" for key, kinds in sorted(kinds_of.items()) if len(kinds) > 1]
    fix = "Give all shards of a key one global shape, dtype and number of prepended axes."
    return IntegrityError(error_text(f"shards of one key differ on rank {rank}", offenders=wrong, fix=fix))


def check_columns(doing: str, columns: object) -> None:
    """Raise MetadataError unless an argument is a `ShardColumns`; callers may have passed a tree instead.

    Examples:
        >>> check_columns("access_problems", shard_columns([]))
    """
    fix = "Make them from all ranks' trees with `tree_columns`, or from a rank's shards with `shard_columns`."
    check_type(doing, "columns", columns, ShardColumns, fix)


def check_ranks_columns(doing: str, parts: object) -> None:
    """Raise MetadataError unless an argument is a sequence of `ShardColumns`, one for each rank.

    Examples:
        >>> check_ranks_columns("join_columns", [shard_columns([])])
    """
    check_type(doing, "parts", parts, Sequence, "Pass a list of `shard_columns(shards, rank)`, one for each rank.")
    for columns in cast("Sequence[object]", parts):
        check_columns(doing, columns)


def select_rows(columns: ShardColumns, rows: Column) -> ShardColumns:
    """Return columns with only the given rows, in this order; `keys` and `kinds` stay unchanged.

    Examples:
        >>> shards = [ShardedTensor.from_rank_offsets("w", torch.zeros(2), (0, part, 2)) for part in range(2)]
        >>> select_rows(shard_columns(shards), np.array([1])).offset.tolist()
        [[2]]
    """
    return replace(columns, **{name: getattr(columns, name).take(rows, axis=0) for name in ROWS})


def join_agreed(parts: Sequence[ShardColumns]) -> ShardColumns:
    """Return several ranks' columns as one; the caller guarantees that the ranks agree about the tensors' kinds."""
    if len(parts) < 2:
        return parts[0] if parts else shard_columns([])
    keys, kinds, numbers = _joined_tables({part.keys: part.kinds for part in parts})
    axes = max(part.offset.shape[1] for part in parts)
    alike = [
        replace(
            part,
            key=numbers[part.keys][part.key],
            offset=widen(part.offset, axes, 0),
            shape=widen(part.shape, axes, 1),
        )
        for part in parts
    ]
    return ShardColumns(keys, kinds, *(np.concatenate([getattr(part, name) for part in alike]) for name in ROWS))


def _joined_tables(
    tables: dict[tuple[str, ...], tuple[TensorKind, ...]],
) -> tuple[tuple[str, ...], tuple[TensorKind, ...], dict[tuple[str, ...], Column]]:
    """Return the union of several ranks' keys and kinds.

    Args:
        tables: Dict from the keys of a rank's tensors to their kinds; ranks with the same keys share an item.

    Returns:
        All keys, sorted; their kinds; and for each item of `tables` the indices of its keys in the sorted ones.
    """
    if len(tables) == 1:  # the usual case: all ranks hold shards of the same tensors
        ((keys, kinds),) = tables.items()
        return keys, kinds, {keys: np.arange(len(keys))}
    kind_of = {key: kind for table in tables.items() for key, kind in zip(*table, strict=True)}
    keys = tuple(sorted(kind_of))
    number = {key: position for position, key in enumerate(keys)}
    numbers = {table: np.array([number[key] for key in table], dtype=np.int64) for table in tables}
    return keys, tuple([kind_of[key] for key in keys]), numbers


@dataclass(frozen=True, slots=True, eq=False)
class BoxColumns:
    """Shards divided into boxes, each contiguous within its shard.

    Attributes:
        shard: Row of the box's shard, int64 (boxes,).
        offset: Offset of the box in the global tensor, int64 (boxes, axes).
        shape: Shape of the box, int64 (boxes, axes).
        position: Index of the box's first element in the shard's data, int64 (boxes,).
    """

    shard: Column
    offset: Column
    shape: Column
    position: Column


def shard_boxes(offset: Column, shape: Column, start: Column, stop: Column) -> BoxColumns:
    """Return the boxes that make up shards: one for a shard that is a box, a few for a flat range.

    Args:
        offset: Offset of each shard, int64 (shards, axes).
        shape: Shape of each shard, int64 (shards, axes).
        start: First element of each flat range, -1 for a whole box, int64 (shards,).
        stop: One past its last element, int64 (shards,).

    Examples:
        >>> boxes = shard_boxes(*map(np.array, ([[2, 0]], [[2, 3]], [1], [5])))
        >>> boxes.offset.tolist(), boxes.shape.tolist(), boxes.position.tolist()
        ([[2, 1], [3, 0]], [[1, 2], [1, 2]], [0, 2])
    """
    flat = np.flatnonzero(start >= 0)
    whole = np.flatnonzero(start < 0)
    if not flat.size:
        return BoxColumns(whole, offset, shape, np.zeros(whole.size, dtype=np.int64))
    row, inside, part, position = flat_boxes(shape[flat], start[flat], stop[flat])
    shard = np.concatenate([whole, flat[row]])
    # Boxes return to the order of the shards, so that plans and messages don't depend on which shards are flat.
    order = np.argsort(shard, kind="stable")
    return BoxColumns(
        shard[order],
        np.concatenate([offset[whole], offset[flat][row] + inside])[order],
        np.concatenate([shape[whole], part])[order],
        np.concatenate([np.zeros(whole.size, dtype=np.int64), position])[order],
    )


def _int64(values: Sequence[int]) -> Column:
    return np.array(values, dtype=np.int64)
