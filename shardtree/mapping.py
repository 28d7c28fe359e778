"""The leaves of a sharded state dict: what a rank holds of a global tensor or object, as immutable values.

Names and meaning are Megatron-Core's; every change is a new value. A shard is the box
[global_offset, global_offset + shape) of the global tensor named by its key, or one flat range of such a box.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from typing import Any, TypeAlias

import torch

from .errors import MetadataError, ShapeError
from .geometry._grid import (
    cell_index,
    cell_shape,
    check_box,
    check_cell,
    check_flat_range,
    check_lengths,
    check_ranks,
    grid_cell,
    narrow_axis,
    narrow_place,
)
from .geometry._narrow import narrow_flat_range
from .geometry._numbers import flat_range, integer, integers, refuse

StateDict: TypeAlias = dict[str, Any]
CommonStateDict: TypeAlias = dict[str, Any]
ShardedStateDict: TypeAlias = dict[str, Any]
ReplicaId: TypeAlias = int | tuple[int, ...]
FactoryBuildFn: TypeAlias = Callable[[str, Any, ReplicaId, slice | None], Any]
FactoryMergeFn: TypeAlias = Callable[[Any], Any]
RankOffset: TypeAlias = tuple[int, int, int]

_RECAST = "Change a dtype with `cast`, and a shape together with its metadata with `map_shards`."
_OBJECT_KEY = re.compile(r"(?P<key>.+)/shard_(?P<offset>[0-9.]*)_(?P<shape>[-0-9.]*)", re.DOTALL)


class ShardedBase(ABC):
    """What sharded leaves have in common: a key, data, a replica id, and how they are compared and shown.

    Equal means the same kind, equal metadata and the same data object; elements are never compared or printed.
    """

    __slots__ = ()

    key: str
    data: Any
    replica_id: ReplicaId

    @abstractmethod
    def validate_metadata_integrity(self) -> None:
        """Raise MetadataError or ShapeError where a field contradicts another."""

    @abstractmethod
    def without_data(self) -> ShardedBase:
        """Return the same leaf with None as its data."""

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return self.data is other.data and _metadata(self) == _metadata(other)

    def __hash__(self) -> int:
        # The rest stays out: slices and some callables have no hash.
        return hash((type(self), self.key, self.replica_id, getattr(self, "global_offset", None), id(self.data)))

    def __repr__(self) -> str:
        shown = [f"{name}={value!r}" for name, (value, default) in _metadata(self).items() if value != default]
        shown.insert(1, f"data={_describe(self.data)}")
        return f"{type(self).__name__}({', '.join(shown)})"


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class ShardedTensor(ShardedBase):
    """One rank's piece of a global tensor.

    The piece is a box of `local_shape`, behind `prepend_axis_num` axes of size 1, at `global_offset`. `data` may be
    None or whatever stands for a tensor; where it is a tensor, its dtype and shape must fit.

    Args:
        key: the global tensor's name.
        data: the local tensor; with `flattened_range` it has one axis.
        dtype: the tensor's dtype.
        local_shape: the box's shape in elements, without the prepended axes.
        global_shape: the global tensor's shape in elements, prepended axes first.
        global_offset: the box's first index along each axis of the global tensor.
        axis_fragmentations: into how many equal pieces each global axis is cut; None for an irregular grid.
        replica_id: 0, or all zeros, on the one rank whose copy counts as the main one.
        prepend_axis_num: how many leading global axes `data` lacks.
        allow_shape_mismatch: the stored global shape may differ from this one, as it does for padded tensors.
        flattened_range: the slice of the row-major flattened box that `data` is.

    Raises:
        MetadataError: a field contradicts another.
        ShapeError: the data's dtype or shape isn't what the metadata says.

    Examples:
        >>> ShardedTensor("w", torch.zeros(2, 3), torch.float32, (2, 3), (4, 3), (2, 0), (2, 1)).global_slice()
        (slice(2, 4, None), slice(0, 3, None))
    """

    key: str
    data: Any
    dtype: torch.dtype
    local_shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    axis_fragmentations: tuple[int, ...] | None
    replica_id: ReplicaId = 0
    prepend_axis_num: int = 0
    allow_shape_mismatch: bool = False
    flattened_range: slice | None = None

    def __post_init__(self) -> None:
        _check_key(self)
        _normalise(self, integers, "local_shape", "global_shape", "global_offset")
        if self.axis_fragmentations is not None:
            _normalise(self, integers, "axis_fragmentations")
        _normalise(self, integer, "prepend_axis_num")
        _normalise(self, _replica, "replica_id")
        _normalise(self, lambda subject, _, value: flat_range(subject, value), "flattened_range")
        self.validate_metadata_integrity()

    def validate_metadata_integrity(self) -> None:
        """Raise MetadataError or ShapeError where a field contradicts another, or the data."""
        _check_kinds(self)
        subject, box = _name(self), (1,) * self.prepend_axis_num + self.local_shape
        check_ranks(subject, self.local_shape, self.global_shape, self.prepend_axis_num)
        check_lengths(subject, self.global_shape, self.global_offset, self.axis_fragmentations)
        check_box(subject, box, self.global_offset, self.global_shape, may_leave=self.allow_shape_mismatch)
        if self.axis_fragmentations is not None:
            check_cell(subject, box, self.global_offset, self.axis_fragmentations)
        if self.flattened_range is not None:
            check_flat_range(subject, self.flattened_range, self.local_shape)
        _check_data(self)

    @classmethod
    def from_rank_offsets(
        cls,
        key: str,
        data: Any,
        *rank_offsets: RankOffset,
        replica_id: ReplicaId = 0,
        prepend_axis_num: int = 0,
        flattened_range: None = None,
        allow_shape_mismatch: bool = False,
    ) -> ShardedTensor:
        """Return the shard that is one cell of a regular grid.

        The arguments that aren't listed are ShardedTensor's.

        Args:
            data: the local tensor.
            rank_offsets: (axis, index, count) for each axis that is cut: `data` is piece `index` of `count` equal
                pieces along the global `axis`; prepended axes count.
            flattened_range: always None; flat shards come from `from_rank_offsets_flat`.

        Raises:
            MetadataError: an axis is repeated or out of range, an index isn't below its count, `data` isn't a tensor.

        Examples:
            >>> ShardedTensor.from_rank_offsets("w", torch.zeros(4), (0, 3, 8))
            ShardedTensor(key='w', data=<float32 (4,) cpu>, dtype=torch.float32, local_shape=(4,), \
global_shape=(32,), global_offset=(12,), axis_fragmentations=(8,))
        """
        subject = f"{cls.__name__} {key!r}"
        if flattened_range is not None:
            fix = "Use `from_rank_offsets_flat` for flat shards."
            refuse(subject, "flattened_range", flattened_range, "None", fix, error=MetadataError)
        dtype, local_shape = _kind(subject, data)
        box = (1,) * integer(subject, "prepend_axis_num", prepend_axis_num) + local_shape
        cell = grid_cell(subject, box, rank_offsets)
        return cls(key, data, dtype, local_shape, *cell, replica_id, prepend_axis_num, allow_shape_mismatch)

    @classmethod
    def from_rank_offsets_flat(
        cls,
        key: str,
        data: Any,
        non_flat_local_shape: Iterable[int],
        *rank_offsets: RankOffset,
        flattened_range: slice,
        replica_id: ReplicaId = 0,
        prepend_axis_num: int = 0,
        allow_shape_mismatch: bool = False,
    ) -> ShardedTensor:
        """Return the shard whose data is one flat range of a cell of a regular grid.

        The other arguments are those of `from_rank_offsets`.

        Args:
            data: the local elements, shape (flattened_range.stop - flattened_range.start,).
            non_flat_local_shape: the cell's shape, without the prepended axes.
            flattened_range: the slice of the row-major flattened cell that `data` is.

        Raises:
            MetadataError: as `from_rank_offsets`, or the range doesn't lie in the cell.
            ShapeError: `data` isn't 1-D, or isn't as long as the range.

        Examples:
            >>> shard = ShardedTensor.from_rank_offsets_flat(
            ...     "w", torch.zeros(5), (4, 2), (0, 3, 8), flattened_range=slice(3, 8))
            >>> shard.local_shape, shard.global_shape, shard.flattened_range
            ((4, 2), (32, 2), slice(3, 8, None))
        """
        subject = f"{cls.__name__} {key!r}"
        flat = flat_range(subject, flattened_range)
        if flat is None:
            fix = "Use `from_rank_offsets` for shards that aren't flat."
            refuse(subject, "flattened_range", "None", "a slice", fix, error=MetadataError)
        dtype, _ = _kind(subject, data)
        local_shape = integers(subject, "non_flat_local_shape", non_flat_local_shape)
        box = (1,) * integer(subject, "prepend_axis_num", prepend_axis_num) + local_shape
        cell = grid_cell(subject, box, rank_offsets)
        return cls(key, data, dtype, local_shape, *cell, replica_id, prepend_axis_num, allow_shape_mismatch, flat)

    @property
    def has_regular_grid(self) -> bool:
        """Whether the global tensor is cut into equal pieces along each axis."""
        return self.axis_fragmentations is not None

    @property
    def data_shape(self) -> tuple[int, ...]:
        """The shape that `data` has: the box's, or (length of the flat range,)."""
        flat = self.flattened_range
        return self.local_shape if flat is None else (flat.stop - flat.start,)

    def global_slice(self) -> tuple[int | slice, ...]:
        """Return the index of the box in the global tensor: an int for each prepended axis, then slices.

        Examples:
            >>> ShardedTensor.from_rank_offsets("w", torch.zeros(2), (0, 1, 3), prepend_axis_num=1).global_slice()
            (1, slice(0, 2, None))
        """
        prepended, offset = self.global_offset[: self.prepend_axis_num], self.global_offset[self.prepend_axis_num :]
        box = zip(offset, self.local_shape, strict=True)
        return (*prepended, *(slice(first, first + size) for first, size in box))

    def local_chunk_offset_in_global(self) -> tuple[int, ...]:
        """Return the box's place in the grid of equal boxes that tiles the global tensor.

        Raises:
            ShapeError: an offset isn't a multiple of the box's size, or can't tell the place since that size is 0.

        Examples:
            >>> ShardedTensor.from_rank_offsets("w", torch.zeros(4, 2), (0, 3, 8)).local_chunk_offset_in_global()
            (3, 0)
        """
        box = (1,) * self.prepend_axis_num + self.local_shape
        return cell_index(_name(self), box, self.global_offset, self.axis_fragmentations)

    def max_allowed_chunks(self) -> tuple[int, ...]:
        """Return the size of the grid's pieces along each global axis.

        Raises:
            ShapeError: the grid is irregular, or a global axis isn't a multiple of its number of pieces.

        Examples:
            >>> ShardedTensor.from_rank_offsets("w", torch.zeros(4, 2), (0, 3, 8)).max_allowed_chunks()
            (4, 2)
        """
        counts = self.axis_fragmentations
        if counts is None:
            fix = "Only shards of a regular grid have pieces of one size."
            refuse(_name(self), "axis_fragmentations", "None", "one count for each axis", fix, error=ShapeError)
        return cell_shape(_name(self), self.global_shape, counts, padded=self.allow_shape_mismatch)

    def narrow(self, dim: int, start: int, length: int) -> list[ShardedTensor]:
        """Return the shards left when every rank narrows its box to [start, start + length) along `dim`.

        The global tensor shrinks with the boxes, so they must form a regular grid along `dim`. Data are views.

        Args:
            dim: an axis of `local_shape`; negative ones count from its end.
            start: the first index to keep; negative ones count from the end.
            length: how many indices to keep.

        Returns:
            One shard for a box; for a flat shard one for each contiguous run that is left, possibly none.

        Raises:
            ShapeError: `dim` or the indices are out of range, or the grid is irregular along `dim`.

        Examples:
            >>> [half] = ShardedTensor.from_rank_offsets("w", torch.zeros(4, 2), (0, 3, 8)).narrow(0, 2, 2)
            >>> half.local_shape, half.global_shape, half.global_offset
            ((2, 2), (16, 2), (6, 0))
        """
        subject = f"narrow {_name(self)}"
        dim, start, length = narrow_place(subject, self.local_shape, dim, start, length)
        axis, size, flat = dim + self.prepend_axis_num, self.local_shape[dim], self.flattened_range
        box = replace(
            self,
            data=None,
            local_shape=(*self.local_shape[:dim], length, *self.local_shape[dim + 1 :]),
            global_shape=narrow_axis(subject, "global_shape", self.global_shape, axis, size, length),
            global_offset=narrow_axis(subject, "global_offset", self.global_offset, axis, size, length),
            flattened_range=None,
        )
        if flat is None:
            return [replace(box, data=_narrow_data(subject, self.data, dim, start, length))]
        runs = narrow_flat_range(self.local_shape, flat.start, flat.stop, dim, start, length)
        parts = [_narrow_data(subject, self.data, 0, part.start, part.stop - part.start) for part, _ in runs]
        return [replace(box, data=part, flattened_range=run) for part, (_, run) in zip(parts, runs, strict=True)]

    def init_data(
        self, device: str | torch.device, init_fn: Callable[..., torch.Tensor] = torch.empty
    ) -> ShardedTensor:
        """Return the shard with a new tensor where it had no data, else the shard itself.

        Args:
            device: where the tensor lives.
            init_fn: makes the tensor: `init_fn(shape, dtype=..., device=...)`.

        Examples:
            >>> ShardedTensor("w", None, torch.int8, (2,), (2,), (0,), None).init_data("cpu", torch.zeros).data
            tensor([0, 0], dtype=torch.int8)
        """
        if self.data is not None:
            return self
        return replace(self, data=init_fn(self.data_shape, dtype=self.dtype, device=device))

    def without_data(self) -> ShardedTensor:
        """Return the shard's metadata: the same shard with None as its data."""
        return replace(self, data=None)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class ShardedObject(ShardedBase):
    """One cell of a global array of Python objects; how the array is cut can't change.

    Args:
        key: the global object's name.
        data: the local object.
        global_shape: the array's shape in objects; -1 as its last size says that it isn't known.
        global_offset: the cell's index in the array.
        replica_id: see ShardedTensor.

    Raises:
        MetadataError: the index doesn't lie in the shape.

    Examples:
        >>> ShardedObject("rng", {"seed": 1}, (2, 4), (1, 3)).unique_key
        'rng/shard_1.3_2.4'
    """

    key: str
    data: Any
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    replica_id: ReplicaId = 0

    def __post_init__(self) -> None:
        _check_key(self)
        _normalise(self, integers, "global_shape", "global_offset")
        _normalise(self, _replica, "replica_id")
        self.validate_metadata_integrity()

    def validate_metadata_integrity(self) -> None:
        """Raise MetadataError where the cell doesn't lie in the array."""
        shape, offset = self.global_shape, self.global_offset
        if len(shape) != len(offset):
            expected, fix = f"{len(shape)} indices, for global_shape {shape}", "Pass one for each axis."
            refuse(_name(self), "global_offset", offset, expected, fix, error=MetadataError)
        last = len(shape) - 1
        inside = (
            0 <= index < size or (size == -1 and axis == last and index >= 0)
            for axis, (index, size) in enumerate(zip(offset, shape, strict=True))
        )
        if not all(inside):
            expected, fix = f"an index into global_shape {shape}", "Count cells from 0."
            refuse(_name(self), "global_offset", offset, expected, fix, error=MetadataError)

    def without_data(self) -> ShardedObject:
        """Return the same object with None as its data."""
        return replace(self, data=None)

    @property
    def unique_key(self) -> str:
        """The key with the cell's index and the array's shape: `<key>/shard_<offset>_<shape>`."""
        return f"{self.key}/shard_{'.'.join(map(str, self.global_offset))}_{'.'.join(map(str, self.global_shape))}"

    @classmethod
    def empty_from_unique_key(cls, unique_key: str, replica_id: ReplicaId = 0) -> ShardedObject:
        """Return the object, without data, that a unique key names.

        Old checkpoints left out the shape's last size; it becomes -1.

        Raises:
            MetadataError: the key hasn't the form `<key>/shard_<offset>_<shape>`.

        Examples:
            >>> ShardedObject.empty_from_unique_key("a/b_c/shard_1.3_2.4")
            ShardedObject(key='a/b_c', data=None, global_shape=(2, 4), global_offset=(1, 3))
            >>> ShardedObject.empty_from_unique_key("rng/shard_1.3_2").global_shape
            (2, -1)
        """
        parts = _OBJECT_KEY.fullmatch(unique_key)
        try:
            key, *numbers = parts.groups() if parts else ()
            offset, shape = (tuple(map(int, text.split("."))) if text else () for text in numbers)
        except ValueError:
            expected, fix = "'<key>/shard_<offset>_<shape>', as in 'rng/shard_1.3_2.4'", "Pass what `unique_key` gave."
            refuse(cls.__name__, "unique key", repr(unique_key), expected, fix, error=MetadataError)
        return cls(key, None, (*shape, -1) if len(shape) + 1 == len(offset) else shape, offset, replica_id)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class ShardedTensorFactory(ShardedBase):
    """A tensor that is stored in another form: `build_fn` gives the tree of shards, `merge_fn` undoes it.

    Args:
        key: the tensor's name.
        data: the tensor as the model holds it.
        build_fn: (key, data, replica_id, flattened_range) -> tree of shards.
        merge_fn: the same tree with loaded tensors -> the tensor.
        replica_id: see ShardedTensor.
        flattened_range: where `data` is flat, the slice of the flattened tensor that it is.

    Raises:
        MetadataError: a field isn't of its kind.

    Examples:
        >>> def build(key, data, replica_id, flattened_range):
        ...     return {"t": ShardedTensor.from_rank_offsets(key, data.T, replica_id=replica_id)}
        >>> factory = ShardedTensorFactory("w", torch.zeros(2, 3), build, lambda tree: tree["t"].T)
        >>> factory.build()["t"].global_shape
        (3, 2)
    """

    key: str
    data: Any
    build_fn: FactoryBuildFn
    merge_fn: FactoryMergeFn
    replica_id: ReplicaId = 0
    flattened_range: slice | None = None

    def __post_init__(self) -> None:
        _check_key(self)
        _normalise(self, _replica, "replica_id")
        _normalise(self, lambda subject, _, value: flat_range(subject, value), "flattened_range")
        self.validate_metadata_integrity()

    def validate_metadata_integrity(self) -> None:
        """Raise MetadataError where a function can't be called."""
        for field in ("build_fn", "merge_fn"):
            function = getattr(self, field)
            if not callable(function):
                fix = "Pass build_fn, then merge_fn."
                refuse(_name(self), field, type(function).__name__, "a function", fix, error=MetadataError)

    def build(self) -> Any:
        """Return the tree of shards that stands for the tensor."""
        return self.build_fn(self.key, self.data, self.replica_id, self.flattened_range)

    def without_data(self) -> ShardedTensorFactory:
        """Return the same factory with None as its data."""
        return replace(self, data=None)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class LocalNonpersistentObject:
    """A local value that a checkpoint doesn't store: saving leaves it out, loading puts it back where it stands.

    Examples:
        >>> LocalNonpersistentObject({"step": 3}).unwrap()
        {'step': 3}
    """

    obj: Any

    def __eq__(self, other: object) -> bool:
        return self.obj is other.obj if isinstance(other, LocalNonpersistentObject) else NotImplemented

    def __hash__(self) -> int:
        return hash((LocalNonpersistentObject, id(self.obj)))

    def __repr__(self) -> str:
        return f"LocalNonpersistentObject({_describe(self.obj)})"

    def unwrap(self) -> Any:
        """Return the value."""
        return self.obj


def is_main_replica(replica_id: ReplicaId) -> bool:
    """Return whether a replica is the main one: 0, or nothing but zeros.

    Raises:
        MetadataError: `replica_id` is neither an int nor a sequence of ints.

    Examples:
        >>> is_main_replica(0), is_main_replica((0, 0)), is_main_replica((0, 1))
        (True, True, False)
    """
    replica = _replica("is_main_replica", "replica_id", replica_id)
    return replica == 0 if isinstance(replica, int) else not any(replica)


def _name(leaf: ShardedBase) -> str:
    return f"{type(leaf).__name__} {leaf.key!r}"


def _metadata(leaf: Any) -> dict[str, tuple[Any, Any]]:
    """Return the value and the default of each field but the data."""
    return {field.name: (getattr(leaf, field.name), field.default) for field in fields(leaf) if field.name != "data"}


def _describe(value: object) -> str:
    """Return what a value is, without its elements."""
    if value is None:
        return "None"
    dtype, shape = getattr(value, "dtype", None), getattr(value, "shape", None)
    if dtype is None or shape is None:
        return f"<{type(value).__name__}>"
    kind = f"{str(dtype).removeprefix('torch.')} {tuple(shape)}"
    return f"<{kind} {value.device}>" if isinstance(value, torch.Tensor) else f"<{type(value).__name__} {kind}>"


def _normalise(leaf: ShardedBase, function: Callable[[str, str, Any], object], *names: str) -> None:
    # The one place that writes to a frozen leaf, and only while it is being built.
    for name in names:
        object.__setattr__(leaf, name, function(_name(leaf), name, getattr(leaf, name)))


def _replica(subject: str, field: str, value: Any) -> ReplicaId:
    # A bool is let through as a number: replica ids are often the outcome of comparing ranks.
    many = isinstance(value, Iterable) and not hasattr(value, "__index__")  # a tensor of one number has both
    ids = [int(item) if isinstance(item, bool) else item for item in (value if many else (value,))]
    return integers(subject, field, ids) if many else integer(subject, field, ids[0])


def _kind(subject: str, data: Any) -> tuple[torch.dtype, tuple[int, ...]]:
    if not isinstance(getattr(data, "dtype", None), torch.dtype) or not hasattr(data, "shape"):
        fix = "Describe a shard without data with `ShardedTensor(...)` itself."
        refuse(subject, "data", type(data).__name__, "a tensor", fix, error=MetadataError)
    return data.dtype, tuple(data.shape)


def _narrow_data(subject: str, data: Any, dim: int, start: int, length: int) -> Any:
    if data is not None and not hasattr(data, "narrow"):
        fix = "Narrow `shard.without_data()` if only metadata matters."
        refuse(subject, "data", type(data).__name__, "a tensor or None", fix, error=ShapeError)
    return None if data is None else data.narrow(dim, start, length)


def _check_key(leaf: ShardedBase) -> None:
    key: Any = leaf.key
    if not isinstance(key, str) or not key:
        found, fix = repr(key) if isinstance(key, str) else type(key).__name__, "Name the global tensor or object."
        refuse(type(leaf).__name__, "key", found, "a string that isn't empty", fix, error=MetadataError)
    try:
        key.encode()
    except UnicodeEncodeError:
        fix = "Leave lone surrogates out."
        refuse(_name(leaf), "key", ascii(key), "text that UTF-8 can encode", fix, error=MetadataError)


def _check_kinds(shard: ShardedTensor) -> None:
    for field, kind, fix in (
        ("dtype", torch.dtype, "Pass `data.dtype`."),
        ("allow_shape_mismatch", bool, "Pass a bool."),
    ):
        value = getattr(shard, field)
        if not isinstance(value, kind):
            refuse(_name(shard), field, type(value).__name__, f"a {kind.__name__}", fix, error=MetadataError)


def _check_data(shard: ShardedTensor) -> None:
    # Only tensors are looked at: tree maps put None, shapes and lazy tensors in their place.
    if not isinstance(shard.data, torch.Tensor):
        return
    found, source = tuple(shard.data.shape), "local_shape" if shard.flattened_range is None else "flattened_range"
    if shard.data.dtype != shard.dtype:
        refuse(_name(shard), "data's dtype", shard.data.dtype, str(shard.dtype), _RECAST, error=ShapeError)
    if found != shard.data_shape:
        refuse(_name(shard), "data's shape", found, f"{shard.data_shape} by {source}", _RECAST, error=ShapeError)
