"""What a rank holds of a tensor, as a leaf of its tree: a shard, or a factory where it holds several boxes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...errors import ShapeError, error_text
from ...mapping import ReplicaId, ShardedTensor, ShardedTensorFactory
from ...trees import join_data
from ._part import Part, PartBox


def part_shard(
    key: str, data: Any, dtype: torch.dtype, part: Part, *, allow_shape_mismatch: bool = False
) -> ShardedTensor | ShardedTensorFactory:
    """Return the leaf that stands for what a rank holds of a tensor.

    One box is a shard. Several are a factory: it builds a list of one shard a box, in the order of `part.boxes`, whose
    data are views of the rank's tensor, and merges tensors of the boxes to one that is new. A part without elements is
    one shard.

    Args:
        key: the global tensor's name.
        data: the rank's own tensor, of shape `part.shape`; or None.
        dtype: the tensor's.
        part: what the rank holds.
        allow_shape_mismatch: see ShardedTensor.

    Raises:
        ShapeError: the data's dtype or shape isn't what the part and `dtype` say.

    Examples:
        >>> from shardtree.layouts import Mesh, PartitionSpec, Split, mesh_parts
        >>> spec = PartitionSpec((Split("dp", split_factor=2), Split("tp")))
        >>> part = mesh_parts((8,), Mesh(dp=2, tp=1), spec)[1]
        >>> factory = part_shard("w", torch.tensor([2, 3, 6, 7]), torch.int64, part)
        >>> [(shard.global_offset, shard.data.tolist()) for shard in factory.build()]
        [((2,), [2, 3]), ((6,), [6, 7])]
    """
    boxes = part.boxes
    if len(boxes) == 1:
        place = (boxes[0].shape, part.global_shape, boxes[0].offset, part.grid)
        return ShardedTensor(key, data, dtype, *place, part.replica_id, allow_shape_mismatch=allow_shape_mismatch)
    build = BuildBoxes(part, dtype, allow_shape_mismatch)
    build.check(key, data)
    return ShardedTensorFactory(key, data, build, MergeBoxes(part), part.replica_id)


def part_data(whole: Any, part: Part) -> Any:
    """Return a rank's part of a global tensor: a view where it is one box, else the boxes copied to one tensor.

    Args:
        whole: the global tensor, or a lazy one, which isn't read; None stays None.
        part: what the rank holds.

    Raises:
        ShapeError: the tensor isn't of the part's global shape.

    Examples:
        >>> from shardtree.layouts import Mesh, PartitionSpec, mesh_parts
        >>> part_data(torch.arange(5), mesh_parts((5,), Mesh(tp=2), PartitionSpec("tp"))[1])
        tensor([3, 4])
    """
    if whole is None:
        return None
    if tuple(whole.shape) != part.global_shape:
        found, fix = tuple(whole.shape), "Pass the whole tensor that the part was computed for."
        raise ShapeError(error_text("part_data: not the tensor", found=found, expected=part.global_shape, fix=fix))
    boxes = [whole[_index(box.offset, box.shape)] for box in part.boxes]
    return boxes[0] if len(boxes) == 1 else _joined(boxes, part)


@dataclass(frozen=True, slots=True)
class BuildBoxes:
    """The build function of a rank's part that is several boxes. A value, so that equal parts make equal factories.

    Attributes:
        part: what the rank holds.
        dtype: the tensor's, where it isn't there to tell.
        allow_shape_mismatch: see ShardedTensor.
    """

    part: Part
    dtype: torch.dtype
    allow_shape_mismatch: bool = False

    def __call__(
        self, key: str, data: Any, replica_id: ReplicaId, flattened_range: slice | None
    ) -> list[ShardedTensor]:
        """Return one shard a box; views of the rank's tensor, without data where there is none.

        Raises:
            ShapeError: the tensor isn't the part's, or is flat.
        """
        if flattened_range is not None:
            found, fix = flattened_range, "Flatten each box: the shards that `apply_factories` gives."
            raise ShapeError(error_text(f"{key!r}: a part of several boxes is flat", found=found, fix=fix))
        self.check(key, data)
        return [self._shard(key, data, replica_id, box) for box in self.part.boxes]

    def check(self, key: str, data: Any) -> None:
        """Raise ShapeError unless there is no data, or its shape is the part's."""
        if data is not None and tuple(data.shape) != self.part.shape:
            what, fix = f"{key!r}: not the rank's own part of the tensor", "Pass the tensor that the rank holds."
            raise ShapeError(error_text(what, found=tuple(data.shape), expected=self.part.shape, fix=fix))

    def _shard(self, key: str, data: Any, replica_id: ReplicaId, box: PartBox) -> ShardedTensor:
        view = None if data is None else data[_index(box.local_offset, box.shape)]
        dtype = self.dtype if data is None else data.dtype
        place = (box.shape, self.part.global_shape, box.offset, None)
        return ShardedTensor(key, view, dtype, *place, replica_id, allow_shape_mismatch=self.allow_shape_mismatch)


@dataclass(frozen=True, slots=True)
class MergeBoxes:
    """The merge function of a rank's part that is several boxes; undoes `BuildBoxes`.

    Attributes:
        part: what the rank holds.
    """

    part: Part

    def __call__(self, boxes: Sequence[Any]) -> Any:
        """Return the rank's tensor: what the boxes hold, copied to one."""
        return _joined(list(boxes), self.part)


def _joined(boxes: list[Any], part: Part) -> Any:
    """Return boxes in row-major order as one tensor, joined along the last axis first."""
    for axis in reversed(range(len(part.spans))):
        count = len(part.spans[axis])
        rows = [boxes[first : first + count] for first in range(0, len(boxes), count)]
        boxes = [row[0] if count == 1 else join_data(torch.cat, row, axis) for row in rows]
    return boxes[0]


def _index(offset: tuple[int, ...], shape: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(first, first + size) for first, size in zip(offset, shape, strict=True))
