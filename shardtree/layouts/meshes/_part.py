"""What each rank of a mesh holds of a tensor: stretches of each axis, and the boxes that they make."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import product
from math import prod

from ...geometry import Spans, cut_spans, integers
from ._mesh import Mesh
from ._spec import PartitionSpec, SpecEntry, Split, check_fits, splits


@dataclass(frozen=True, slots=True)
class PartBox:
    """One of the boxes that a rank's part of a tensor consists of.

    Attributes:
        offset: in the global tensor.
        shape: of the box.
        local_offset: in the rank's own tensor.
    """

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    local_offset: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """What one rank holds of a tensor.

    Attributes:
        rank: who holds it.
        spans: the stretches of each axis, in the order in which the local tensor has them.
        global_shape: the tensor's.
        replica_id: 0 for the main replica; the copies are numbered row-major over the axes that the spec leaves out.
        grid: into how many equal pieces each axis is cut; None where they aren't equal, or parts are several boxes.
    """

    rank: int
    spans: tuple[Spans, ...]
    global_shape: tuple[int, ...]
    replica_id: int
    grid: tuple[int, ...] | None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the rank's own tensor."""
        return tuple(sum(stop - start for start, stop in spans) for spans in self.spans)

    @property
    def boxes(self) -> tuple[PartBox, ...]:
        """The boxes, in row-major order of the local tensor: one, for most; a part without elements is one too."""
        if 0 in self.shape:
            starts = zip(self.spans, self.global_shape, strict=True)
            # What is held of the other axes fits behind its first stretch's start, since the stretches lie apart.
            offset = tuple(spans[0][0] if spans else size for spans, size in starts)
            return (PartBox(offset, self.shape, (0,) * len(offset)),)
        placed = [list(_placed(spans)) for spans in self.spans]
        return tuple(
            PartBox(*map(tuple, zip(*box, strict=True))) if box else PartBox((), (), ()) for box in product(*placed)
        )


def _placed(spans: Spans) -> Iterator[tuple[int, int, int]]:
    """Yield start, length and local start of each stretch."""
    position = 0
    for start, stop in spans:
        yield start, stop - start, position
        position += stop - start


def mesh_parts(global_shape: tuple[int, ...], mesh: Mesh, spec: PartitionSpec) -> tuple[Part, ...]:
    """Return what each rank of a mesh holds of a tensor, in the mesh's order; ranks that don't hold it aren't there.

    Args:
        global_shape: the tensor's.
        mesh: the ranks.
        spec: one that fits both.

    Raises:
        MetadataError: it doesn't.

    Examples:
        >>> [(part.spans, part.replica_id) for part in mesh_parts((5,), Mesh(dp=2, tp=2), PartitionSpec("tp"))]
        [((((0, 3),),), 0), ((((3, 5),),), 0), ((((0, 3),),), 1), ((((3, 5),),), 1)]
    """
    shape = _checked(global_shape, mesh, spec)
    return tuple(_parts(shape, mesh, spec, zip(mesh.ranks, _places(mesh), strict=True)))


def mesh_part(global_shape: tuple[int, ...], mesh: Mesh, spec: PartitionSpec, rank: int) -> Part | None:
    """Return what one rank of a mesh holds of a tensor; None where it doesn't hold it.

    Args:
        global_shape: the tensor's.
        mesh: the ranks.
        spec: one that fits both.
        rank: one that is on the mesh.

    Raises:
        MetadataError: the spec doesn't fit, or the rank isn't on the mesh.

    Examples:
        >>> mesh_part((5,), Mesh(dp=2, tp=2), PartitionSpec("tp"), 3).shape
        (2,)
    """
    shape = _checked(global_shape, mesh, spec)
    return next(_parts(shape, mesh, spec, [(rank, mesh.coordinates(rank))]), None)


def _checked(global_shape: tuple[int, ...], mesh: Mesh, spec: PartitionSpec) -> tuple[int, ...]:
    """Return a shape as ints, once it is known that the spec fits it and the mesh."""
    shape = integers("mesh_parts", "global_shape", global_shape)
    check_fits("a tensor", shape, mesh, spec)
    return shape


def _parts(
    global_shape: tuple[int, ...], mesh: Mesh, spec: PartitionSpec, places: Iterable[tuple[int, Mapping[str, int]]]
) -> Iterator[Part]:
    entries = (*spec.entries, *(None,) * (len(global_shape) - len(spec.entries)))
    left_out = [axis for axis in mesh.shape if axis not in spec.axes and axis not in dict(spec.at)]
    grid = _grid(global_shape, mesh, entries)
    cuts: dict[tuple[object, ...], Spans] = {}
    for rank, place in places:
        if any(place[axis] != index for axis, index in spec.at):
            continue
        spans = []
        for size, entry in zip(global_shape, entries, strict=True):
            name = (size, entry, *(place[split.axis] for split in splits(entry)))
            cuts[name] = cuts[name] if name in cuts else _spans(size, mesh, entry, place)
            spans.append(cuts[name])
        yield Part(rank, tuple(spans), global_shape, _index(mesh, left_out, place), grid)


def _places(mesh: Mesh) -> Iterator[dict[str, int]]:
    for place in product(*(range(size) for _, size in mesh.axes)):
        yield dict(zip(mesh.shape, place, strict=True))


def _index(mesh: Mesh, axes: list[str], place: Mapping[str, int]) -> int:
    """Return a place's number, row-major over some axes."""
    number = 0
    for axis in axes:
        number = number * mesh.shape[axis] + place[axis]
    return number


def _spans(size: int, mesh: Mesh, entry: SpecEntry, place: Mapping[str, int]) -> Spans:
    whole: Spans = ((0, size),) if size else ()
    if isinstance(entry, tuple) and not isinstance(entry[0], Split):
        axes = [split.axis for split in splits(entry)]
        return cut_spans(whole, prod(mesh.shape[axis] for axis in axes), _index(mesh, axes, place))
    for split in splits(entry):
        whole = cut_spans(whole, mesh.shape[split.axis], place[split.axis], split.split_factor)
    return whole


def _grid(global_shape: tuple[int, ...], mesh: Mesh, entries: tuple[SpecEntry, ...]) -> tuple[int, ...] | None:
    """Return into how many equal pieces each axis is cut, if all are equal and none is in several stretches."""
    counts = tuple(prod(mesh.shape[split.axis] for split in splits(entry)) for entry in entries)
    even = all(map(partial(_is_even, mesh), global_shape, entries, counts))
    return counts if even else None


def _is_even(mesh: Mesh, size: int, entry: SpecEntry, count: int) -> bool:
    if not size or size % count:
        return count == 1
    if all(split.split_factor == 1 for split in splits(entry)):
        return True
    axes = [split.axis for split in splits(entry)]
    places = product(*(range(mesh.shape[axis]) for axis in axes))
    pieces = (_spans(size, mesh, entry, dict(zip(axes, place, strict=True))) for place in places)
    return all(len(piece) == 1 and piece[0][1] - piece[0][0] == size // count for piece in pieces)
