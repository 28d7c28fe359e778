"""A rank's part of a tensor on a mesh: the intervals along each axis, the boxes that they form, and the tree's leaf."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from math import prod
from typing import Any

import torch

from ..core.geometry import Spans, cut_spans, integers, slices
from ..core.mapping import ReplicaId, ShardedTensor, ShardedTensorFactory
from ..core.trees import join_data
from ..errors import ShapeError, error_text
from ._mesh import Mesh
from ._specs import AxisSplit, PartitionSpec, SpecEntry, check_fits, splits

# Intervals and boxes.


@dataclass(frozen=True, slots=True)
class RankBox:
    """One of the boxes that make up a rank's part of a tensor.

    Attributes:
        offset: Offset in the global tensor.
        shape: Shape of the box.
        local_offset: Offset in the rank's own tensor.
    """

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    local_offset: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RankShard:
    """One rank's part of a tensor.

    Attributes:
        rank: Rank that holds the part.
        spans: Intervals along each axis, in the order of the local tensor.
        global_shape: Shape of the global tensor.
        replica_id: 0 for the main replica; other replicas are numbered row-major over the mesh axes that the spec
            leaves out.
        grid: Number of equal pieces along each axis; None if pieces differ in size or parts consist of several boxes.
    """

    rank: int
    spans: tuple[Spans, ...]
    global_shape: tuple[int, ...]
    replica_id: int
    grid: tuple[int, ...] | None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the rank's own tensor."""
        return tuple(sum(stop - start for start, stop in spans) for spans in self.spans)

    @property
    def boxes(self) -> tuple[RankBox, ...]:
        """Boxes of the part, in row-major order of the local tensor. A part without elements has one empty box."""
        if 0 in self.shape:
            starts = zip(self.spans, self.global_shape, strict=True)
            # The box begins at each axis's first interval. It stays within the tensor, since intervals are disjoint.
            offset = tuple(spans[0][0] if spans else size for spans, size in starts)
            return (RankBox(offset, self.shape, (0,) * len(offset)),)
        per_axis = [list(_local_spans(spans)) for spans in self.spans]
        return tuple(
            RankBox(*map(tuple, zip(*box, strict=True))) if box else RankBox((), (), ()) for box in product(*per_axis)
        )


def _local_spans(spans: Spans) -> Iterator[tuple[int, int, int]]:
    """Yield start, length and local start of each interval."""
    position = 0
    for start, stop in spans:
        yield start, stop - start, position
        position += stop - start


def mesh_shards(global_shape: tuple[int, ...], mesh: Mesh, spec: PartitionSpec) -> tuple[RankShard, ...]:
    """Return the part of each rank of a mesh, in the mesh's order; ranks that don't hold the tensor are left out.

    Args:
        global_shape: Shape of the global tensor.
        mesh: Mesh of the ranks.
        spec: Spec of the tensor.

    Raises:
        MetadataError: The spec doesn't fit the shape or the mesh.

    Examples:
        >>> [(part.spans, part.replica_id) for part in mesh_shards((5,), Mesh(dp=2, tp=2), PartitionSpec("tp"))]
        [((((0, 3),),), 0), ((((3, 5),),), 0), ((((0, 3),),), 1), ((((3, 5),),), 1)]
    """
    shape = _checked_shape(global_shape, mesh, spec)
    indices = product(*(range(size) for _, size in mesh.axes))
    places = (dict(zip(mesh.shape, each, strict=True)) for each in indices)
    return tuple(_parts(shape, mesh, spec, zip(mesh.ranks, places, strict=True)))


def mesh_shard(global_shape: tuple[int, ...], mesh: Mesh, spec: PartitionSpec, rank: int) -> RankShard | None:
    """Return the part of one rank of a mesh, or None if the rank doesn't hold the tensor.

    Args:
        global_shape: Shape of the global tensor.
        mesh: Mesh of the ranks.
        spec: Spec of the tensor.
        rank: Rank on the mesh.

    Raises:
        MetadataError: The spec doesn't fit, or the rank isn't on the mesh.

    Examples:
        >>> mesh_shard((5,), Mesh(dp=2, tp=2), PartitionSpec("tp"), 3).shape
        (2,)
    """
    shape = _checked_shape(global_shape, mesh, spec)
    return next(_parts(shape, mesh, spec, [(rank, mesh.coordinates(rank))]), None)


def _checked_shape(global_shape: tuple[int, ...], mesh: Mesh, spec: PartitionSpec) -> tuple[int, ...]:
    """Return a shape as ints, after checking that the spec fits it and the mesh."""
    shape = integers("mesh_shards", "global_shape", global_shape)
    check_fits("a tensor", shape, mesh, spec)
    return shape


def _parts(
    global_shape: tuple[int, ...], mesh: Mesh, spec: PartitionSpec, places: Iterable[tuple[int, Mapping[str, int]]]
) -> Iterator[RankShard]:
    entries = (*spec.entries, *(None,) * (len(global_shape) - len(spec.entries)))
    left_out = [axis for axis in mesh.shape if axis not in spec.axes and axis not in dict(spec.at)]
    # The number of pieces along each axis, if all are equal and none consists of several intervals.
    counts = tuple(prod(mesh.shape[split.axis] for split in splits(entry)) for entry in entries)
    grid = counts if all(map(partial(_is_even, mesh), global_shape, entries, counts)) else None
    # Many ranks share their intervals along an axis: each is computed once.
    cuts: dict[tuple[object, ...], Spans] = {}
    for rank, place in places:
        if any(place[axis] != index for axis, index in spec.at):
            continue
        spans = []
        for size, entry in zip(global_shape, entries, strict=True):
            name = (size, entry, *(place[split.axis] for split in splits(entry)))
            cuts[name] = cuts[name] if name in cuts else _spans(size, mesh, entry, place)
            spans.append(cuts[name])
        yield RankShard(rank, tuple(spans), global_shape, _flat_index(mesh, left_out, place), grid)


def _flat_index(mesh: Mesh, axes: list[str], place: Mapping[str, int]) -> int:
    """Return the row-major index, over the given mesh axes, of a position on the mesh (`place`: index by axis)."""
    number = 0
    for axis in axes:
        number = number * mesh.shape[axis] + place[axis]
    return number


def _spans(size: int, mesh: Mesh, entry: SpecEntry, place: Mapping[str, int]) -> Spans:
    whole: Spans = ((0, size),) if size else ()
    # As in JAX, names in a tuple count as one mesh axis, whose size is their product: the tensor is cut once. Cutting
    # along one name after the other gives different parts if the length isn't a multiple of that size.
    if isinstance(entry, tuple) and not isinstance(entry[0], AxisSplit):
        axes = [split.axis for split in splits(entry)]
        return cut_spans(whole, prod(mesh.shape[axis] for axis in axes), _flat_index(mesh, axes, place))
    for split in splits(entry):
        whole = cut_spans(whole, mesh.shape[split.axis], place[split.axis], split.split_factor)
    return whole


def _is_even(mesh: Mesh, size: int, entry: SpecEntry, count: int) -> bool:
    # Only equal pieces make a regular grid, and a wrong grid would be worse than None.
    if not size or size % count:
        return count == 1
    if all(split.split_factor == 1 for split in splits(entry)):
        return True
    axes = [split.axis for split in splits(entry)]
    places = product(*(range(mesh.shape[axis]) for axis in axes))
    pieces = (_spans(size, mesh, entry, dict(zip(axes, place, strict=True))) for place in places)
    return all(len(piece) == 1 and piece[0][1] - piece[0][0] == size // count for piece in pieces)


# The tree's leaf: a shard, or a factory if the rank holds several boxes.


def rank_leaf(
    key: str, data: Any, dtype: torch.dtype, part: RankShard, *, allow_shape_mismatch: bool = False
) -> ShardedTensor | ShardedTensorFactory:
    """Return the leaf of a rank's part of a tensor.

    A part of one box is a shard. A part of several boxes is a factory: it builds one shard for each of `part.boxes`,
    whose data are views of the rank's tensor, and merges tensors of the boxes into a new one.

    Args:
        key: Key of the global tensor.
        data: The rank's own tensor, of shape `part.shape`, or None.
        dtype: Dtype of the tensor.
        part: The rank's part of the tensor.
        allow_shape_mismatch: Value of `ShardedTensor.allow_shape_mismatch`.

    Raises:
        ShapeError: The data's dtype or shape contradicts `dtype` or the part.

    Examples:
        >>> from shardtree.layouts import Mesh, PartitionSpec, AxisSplit, mesh_shards
        >>> spec = PartitionSpec((AxisSplit("dp", split_factor=2), AxisSplit("tp")))
        >>> part = mesh_shards((8,), Mesh(dp=2, tp=1), spec)[1]
        >>> factory = rank_leaf("w", torch.tensor([2, 3, 6, 7]), torch.int64, part)
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


def rank_data(whole: Any, part: RankShard) -> Any:
    """Return the data of a rank's part: a view of the global tensor for one box, else the boxes joined in a copy.

    Args:
        whole: Global tensor; a lazy one isn't read, and None stays None.
        part: The rank's part of the tensor.

    Raises:
        ShapeError: The tensor has another shape than the part's global shape.

    Examples:
        >>> from shardtree.layouts import Mesh, PartitionSpec, mesh_shards
        >>> rank_data(torch.arange(5), mesh_shards((5,), Mesh(tp=2), PartitionSpec("tp"))[1])
        tensor([3, 4])
    """
    if whole is None:
        return None
    if tuple(whole.shape) != part.global_shape:
        found, fix = tuple(whole.shape), "Pass the whole tensor that the part was computed for."
        raise ShapeError(
            error_text(
                "rank_data: the tensor does not have the part's global shape",
                found=found,
                expected=part.global_shape,
                fix=fix,
            )
        )
    boxes = [whole[slices(box.offset, box.shape)] for box in part.boxes]
    return boxes[0] if len(boxes) == 1 else _concatenate(boxes, part)


@dataclass(frozen=True, slots=True)
class BuildBoxes:
    """Build function of the factory for a rank's part that consists of several boxes.

    It is a dataclass, so that equal parts make equal factories.

    Attributes:
        part: The rank's part of the tensor.
        dtype: Dtype of shards without data.
        allow_shape_mismatch: Value of `ShardedTensor.allow_shape_mismatch`.
    """

    part: RankShard
    dtype: torch.dtype
    allow_shape_mismatch: bool = False

    def __call__(
        self, key: str, data: Any, replica_id: ReplicaId, flattened_range: slice | None
    ) -> list[ShardedTensor]:
        """Return a shard for each box of the rank's part. Its data is a view of `data`, or None if `data` is None.

        Raises:
            ShapeError: `data` has another shape than the rank's part, or a flat range was passed.
        """
        if flattened_range is not None:
            heading = f"{key!r}: the rank holds several blocks of the tensor, so its factory takes no flattened_range"
            fix = "Call `apply_factories` first, then set flattened_range in the shard of each block."
            raise ShapeError(error_text(heading, found=flattened_range, expected="None", fix=fix))
        self.check(key, data)
        return [self._shard(key, data, replica_id, box) for box in self.part.boxes]

    def check(self, key: str, data: Any) -> None:
        """Raise ShapeError if the data has another shape than the rank's part."""
        if data is not None and tuple(data.shape) != self.part.shape:
            heading, fix = f"{key!r}: the data is not the rank's part of the tensor", "Pass the rank's own tensor."
            raise ShapeError(error_text(heading, found=tuple(data.shape), expected=self.part.shape, fix=fix))

    def _shard(self, key: str, data: Any, replica_id: ReplicaId, box: RankBox) -> ShardedTensor:
        view = None if data is None else data[slices(box.local_offset, box.shape)]
        dtype = self.dtype if data is None else data.dtype
        place = (box.shape, self.part.global_shape, box.offset, None)
        return ShardedTensor(key, view, dtype, *place, replica_id, allow_shape_mismatch=self.allow_shape_mismatch)


@dataclass(frozen=True, slots=True)
class MergeBoxes:
    """Merge function of the factory for a rank's part that consists of several boxes; the inverse of `BuildBoxes`.

    Attributes:
        part: The rank's part of the tensor.
    """

    part: RankShard

    def __call__(self, boxes: Sequence[Any]) -> Any:
        """Return the rank's tensor: a copy that joins the tensors of its boxes."""
        return _concatenate(list(boxes), self.part)


def _concatenate(boxes: list[Any], part: RankShard) -> Any:
    """Return the concatenation of boxes in row-major order; the last axis is joined first."""
    for axis in reversed(range(len(part.spans))):
        count = len(part.spans[axis])
        rows = [boxes[first : first + count] for first in range(0, len(boxes), count)]
        boxes = [row[0] if count == 1 else join_data(torch.cat, row, axis) for row in rows]
    return boxes[0]
