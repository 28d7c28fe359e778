"""ShardedTensor: a rank's part of a global tensor, which is a box or one flat range of a box."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from ...errors import MetadataError, ShapeError
from .. import geometry
from ..lazy import LazyTensor
from ._leaves import RankOffset, ReplicaId, ShardedBase, check_key, leaf_name, normalise, replica

# Checks of a shard's data against its metadata.

SHAPE_FIX = "Give each part of a nested tensor its own shard; run a module with lazy parameters once beforehand."
_RECAST = "Change a dtype with `cast`, and a shape together with its metadata with `map_shards`."


def data_kind(subject: str, data: Any) -> tuple[torch.dtype, tuple[int, ...]]:
    """Return the dtype and shape of a tensor, or of any object that has both.

    Other values raise MetadataError, with `subject` as the name of the value.
    """
    check_has_shape(subject, data)
    if not isinstance(getattr(data, "dtype", None), torch.dtype) or not hasattr(data, "shape"):
        fix = "For a shard without data, call `ShardedTensor(...)` itself."
        geometry.refuse(subject, "data", type(data).__name__, "a tensor", fix, error=MetadataError)
    return data.dtype, tuple(data.shape)


def check_data(subject: str, data: object, dtype: torch.dtype, shape: tuple[int, ...], source: str) -> None:
    """Raise ShapeError if a shard's tensor has another dtype or shape than its metadata states.

    Only tensors are checked, lazy tensors included: tree maps also use None and shapes as data.

    Args:
        subject: Name of the shard, for the error.
        data: The shard's data.
        dtype: Expected dtype.
        shape: Expected shape.
        source: Name of the field that determines the shape, for the error.
    """
    if not isinstance(data, (torch.Tensor, LazyTensor)):
        return
    check_has_shape(subject, data)
    if data.dtype != dtype:
        geometry.refuse(subject, "data.dtype", data.dtype, str(dtype), _RECAST, error=ShapeError)
    if tuple(data.shape) != shape:
        geometry.refuse(subject, "data.shape", tuple(data.shape), f"{shape} (from {source})", _RECAST, error=ShapeError)


def without_shape(data: object) -> str:
    """Return a name for a tensor without a single shape (nested or uninitialised); an empty string for other data.

    Examples:
        >>> without_shape(torch.zeros(2)), without_shape(torch.nn.UninitializedParameter())
        ('', 'an uninitialised parameter')
    """
    if not isinstance(data, torch.Tensor):
        return ""
    if is_lazy(data):
        return "an uninitialised parameter"
    return "a nested tensor" if data.is_nested else ""


def check_has_shape(subject: str, data: object) -> None:
    """Raise MetadataError for a nested or uninitialised tensor, since it has no single shape."""
    if found := without_shape(data):
        geometry.refuse(subject, "data", found, "a tensor of one shape", SHAPE_FIX, error=MetadataError)


def _narrow_data(subject: str, data: Any, dim: int, start: int, length: int) -> Any:
    # Lazy tensors have `narrow` too, and stay unread.
    if data is not None and not hasattr(data, "narrow"):
        fix = "Narrow `shard.without_data()` if only metadata matters."
        geometry.refuse(subject, "data", type(data).__name__, "a tensor or None", fix, error=ShapeError)
    return None if data is None else data.narrow(dim, start, length)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class ShardedTensor(ShardedBase):
    """A rank's part of a global tensor.

    The part is a box of `local_shape`, preceded by `prepend_axis_num` axes of size 1, at `global_offset`. `data` may be
    None or any other value; the dtype and shape of a tensor must fit.

    Args:
        key: The global tensor's name.
        data: The local tensor; with `flattened_range` it has one axis.
        dtype: The tensor's dtype.
        local_shape: The box's shape in elements, without the prepended axes.
        global_shape: The global tensor's shape in elements, prepended axes first.
        global_offset: The box's first index along each axis of the global tensor.
        axis_fragmentations: Number of equal pieces along each global axis; None for an irregular grid.
        replica_id: Number of the replica; 0, or all zeros, on the one rank whose copy is the main one.
        prepend_axis_num: Number of leading global axes that `data` lacks.
        allow_shape_mismatch: Whether the stored global shape may differ from `global_shape`, as for padded tensors.
        flattened_range: Slice of the row-major flattened box that `data` holds; None for the whole box.

    Raises:
        MetadataError: A field contradicts another.
        ShapeError: The data's dtype or shape contradicts the metadata.

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
        check_key(self)
        normalise(self, geometry.integers, "local_shape", "global_shape", "global_offset")
        if self.axis_fragmentations is not None:
            normalise(self, geometry.integers, "axis_fragmentations")
        normalise(self, geometry.integer, "prepend_axis_num")
        normalise(self, replica, "replica_id")
        normalise(self, lambda subject, _, value: geometry.flat_range(subject, value), "flattened_range")
        self.validate_metadata_integrity()

    def validate_metadata_integrity(self) -> None:
        """Raise MetadataError or ShapeError if a field contradicts another, or the data."""
        subject, box = leaf_name(self), (1,) * self.prepend_axis_num + self.local_shape
        # The order matters: later checks iterate over shapes and offsets together, which must have equal lengths.
        geometry.check_type(subject, "dtype", self.dtype, torch.dtype, "Pass `data.dtype`.")
        geometry.check_type(subject, "allow_shape_mismatch", self.allow_shape_mismatch, bool, "Pass a bool.")
        geometry.check_ranks(subject, self.local_shape, self.global_shape, self.prepend_axis_num)
        geometry.check_lengths(subject, self.global_shape, self.global_offset, self.axis_fragmentations)
        geometry.check_box(subject, box, self.global_offset, self.global_shape, may_leave=self.allow_shape_mismatch)
        if self.axis_fragmentations is not None:
            geometry.check_cell(subject, box, self.global_offset, self.axis_fragmentations)
        if self.flattened_range is not None:
            geometry.check_flat_range(subject, self.flattened_range, self.local_shape)
        source = "local_shape" if self.flattened_range is None else "flattened_range"
        check_data(subject, self.data, self.dtype, self.data_shape, source)

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

        Arguments that aren't listed are those of ShardedTensor.

        Args:
            data: The local tensor.
            rank_offsets: (axis, index, count) for each axis that is cut: `data` is piece `index` of `count` equal
                pieces along the global `axis`; prepended axes count.
            flattened_range: Always None; flat shards come from `from_rank_offsets_flat`.

        Raises:
            MetadataError: An axis is repeated or out of range, an index isn't below its count, or `data` isn't a
                tensor.

        Examples:
            >>> shard = ShardedTensor.from_rank_offsets("w", torch.zeros(4), (0, 3, 8))
            >>> shard.global_shape, shard.global_offset, shard.axis_fragmentations
            ((32,), (12,), (8,))
        """
        subject = f"{cls.__name__} {key!r}"
        # Megatron-Core's signature has this parameter, which must be None there too.
        if flattened_range is not None:
            fix = "Use `from_rank_offsets_flat` for flat shards."
            geometry.refuse(subject, "flattened_range", flattened_range, "None", fix, error=MetadataError)
        dtype, local_shape = data_kind(subject, data)
        box = (1,) * geometry.integer(subject, "prepend_axis_num", prepend_axis_num) + local_shape
        cell = geometry.grid_cell(subject, box, rank_offsets)
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
            data: The local elements, shape (flattened_range.stop - flattened_range.start,).
            non_flat_local_shape: The cell's shape, without the prepended axes.
            flattened_range: Slice of the row-major flattened cell that `data` holds.

        Raises:
            MetadataError: An error of `from_rank_offsets`, or the range exceeds the cell.
            ShapeError: `data` isn't 1-D, or has another length than the range.

        Examples:
            >>> shard = ShardedTensor.from_rank_offsets_flat(
            ...     "w", torch.zeros(5), (4, 2), (0, 3, 8), flattened_range=slice(3, 8))
            >>> shard.local_shape, shard.global_shape, shard.flattened_range
            ((4, 2), (32, 2), slice(3, 8, None))
        """
        subject = f"{cls.__name__} {key!r}"
        flat = geometry.flat_range(subject, flattened_range)
        if flat is None:
            fix = "Use `from_rank_offsets` for shards that are not flat."
            geometry.refuse(subject, "flattened_range", "None", "a slice", fix, error=MetadataError)
        dtype, _ = data_kind(subject, data)
        local_shape = geometry.integers(subject, "non_flat_local_shape", non_flat_local_shape)
        box = (1,) * geometry.integer(subject, "prepend_axis_num", prepend_axis_num) + local_shape
        cell = geometry.grid_cell(subject, box, rank_offsets)
        return cls(key, data, dtype, local_shape, *cell, replica_id, prepend_axis_num, allow_shape_mismatch, flat)

    @property
    def has_regular_grid(self) -> bool:
        """Whether the global tensor is cut into equal pieces along each axis."""
        return self.axis_fragmentations is not None

    @property
    def data_shape(self) -> tuple[int, ...]:
        """The expected shape of `data`: `local_shape`, or ``(length,)`` for a flat range of this length."""
        flat = self.flattened_range
        return self.local_shape if flat is None else (flat.stop - flat.start,)

    def global_slice(self) -> tuple[int | slice, ...]:
        """Return the index of the box in the global tensor: an int for each prepended axis, then slices.

        Examples:
            >>> ShardedTensor.from_rank_offsets("w", torch.zeros(2), (0, 1, 3), prepend_axis_num=1).global_slice()
            (1, slice(0, 2, None))
        """
        front, offset = self.global_offset[: self.prepend_axis_num], self.global_offset[self.prepend_axis_num :]
        box = zip(offset, self.local_shape, strict=True)
        return (*front, *(slice(first, first + size) for first, size in box))

    def local_chunk_offset_in_global(self) -> tuple[int, ...]:
        """Return the index of the box in the grid of equal boxes that tiles the global tensor.

        Raises:
            ShapeError: An offset isn't a multiple of the box's size, or that size is 0 and doesn't determine the index.

        Examples:
            >>> ShardedTensor.from_rank_offsets("w", torch.zeros(4, 2), (0, 3, 8)).local_chunk_offset_in_global()
            (3, 0)
        """
        box = (1,) * self.prepend_axis_num + self.local_shape
        return geometry.cell_index(leaf_name(self), box, self.global_offset, self.axis_fragmentations)

    def max_allowed_chunks(self) -> tuple[int, ...]:
        """Return the size of one cell of the regular grid along each global axis.

        Raises:
            ShapeError: The grid is irregular, or a global axis isn't a multiple of its number of pieces.

        Examples:
            >>> ShardedTensor.from_rank_offsets("w", torch.zeros(4, 2), (0, 3, 8)).max_allowed_chunks()
            (4, 2)
        """
        counts = self.axis_fragmentations
        if counts is None:
            fix = "Call this for shards of a regular grid only."
            geometry.refuse(
                leaf_name(self), "axis_fragmentations", "None", "one count for each axis", fix, error=ShapeError
            )
        return geometry.cell_shape(leaf_name(self), self.global_shape, counts, padded=self.allow_shape_mismatch)

    def narrow(self, dim: int, start: int, length: int) -> list[ShardedTensor]:
        """Return this shard narrowed to the indices [start, start + length) of its own box along `dim`.

        Every rank must narrow its own box in the same way: the global tensor shrinks along with the boxes, which must
        therefore form a regular grid along `dim`. The data of the results are views.

        Args:
            dim: Axis of `local_shape`; negative numbers count from its end.
            start: First index to keep; negative indices count from the end.
            length: Number of indices to keep.

        Returns:
            One shard if this is a box. A flat shard gives one shard for each contiguous run of elements that remains,
            possibly none.

        Raises:
            ShapeError: `dim` or the indices are out of range, or the grid is irregular along `dim`.

        Examples:
            >>> [half] = ShardedTensor.from_rank_offsets("w", torch.zeros(4, 2), (0, 3, 8)).narrow(0, 2, 2)
            >>> half.local_shape, half.global_shape, half.global_offset
            ((2, 2), (16, 2), (6, 0))
        """
        subject = f"narrow {leaf_name(self)}"
        dim, start, length = geometry.narrow_place(subject, self.local_shape, dim, start, length)
        # Prepended axes come first in global shapes, and aren't in local ones.
        axis, size = dim + self.prepend_axis_num, self.local_shape[dim]
        box = partial(
            replace,
            self,
            local_shape=(*self.local_shape[:dim], length, *self.local_shape[dim + 1 :]),
            global_shape=geometry.narrow_axis(subject, "global_shape", self.global_shape, axis, size, length),
            global_offset=geometry.narrow_axis(subject, "global_offset", self.global_offset, axis, size, length),
        )
        flat = self.flattened_range
        if flat is None:
            return [box(data=_narrow_data(subject, self.data, dim, start, length))]
        runs = geometry.narrow_flat_range(self.local_shape, flat.start, flat.stop, dim, start, length)
        return [
            box(data=_narrow_data(subject, self.data, 0, part.start, part.stop - part.start), flattened_range=run)
            for part, run in runs
        ]

    def init_data(
        self, device: str | torch.device, init_fn: Callable[..., torch.Tensor] = torch.empty
    ) -> ShardedTensor:
        """Return the shard with a new tensor instead of None or a meta tensor; with other data, the shard itself.

        Args:
            device: Device of the new tensor.
            init_fn: Function that makes the tensor: `init_fn(shape, dtype=..., device=...)`.

        Examples:
            >>> ShardedTensor("w", None, torch.int8, (2,), (2,), (0,), None).init_data("cpu", torch.zeros).data
            tensor([0, 0], dtype=torch.int8)
        """
        is_meta = isinstance(self.data, torch.Tensor) and self.data.is_meta
        if self.data is not None and not is_meta:
            return self
        return replace(self, data=init_fn(self.data_shape, dtype=self.dtype, device=device))

    def without_data(self) -> ShardedTensor:
        """Return the shard's metadata: the same shard with None as its data."""
        return replace(self, data=None)
