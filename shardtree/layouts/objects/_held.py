"""The arrays that objects make up: what is there of each, by shape and cell."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ...errors import IntegrityError, error_text
from ...mapping import ShardedObject, is_main_replica
from ._array import ObjectArray, Shape, cells_of


@dataclass(frozen=True, slots=True, eq=False)
class HeldArrays:
    """What is there of the arrays of one key: one, for most.

    Attributes:
        shapes: by a shape as objects have it, which may end in -1, the shape that it stands for.
        mains: by a shape with all sizes known, the main replicas by cell.
    """

    shapes: dict[Shape, Shape] = field(default_factory=dict)
    mains: dict[Shape, dict[Shape, ShardedObject]] = field(default_factory=dict)

    @property
    def all_shapes(self) -> tuple[Shape, ...]:
        """The shapes that there are, all sizes known."""
        return tuple(dict.fromkeys(self.shapes.values()))

    def shape_as(self, shape: Shape) -> Shape | None:
        """Return the shape, all sizes known, that a given one stands for; None where nothing of that shape is there."""
        return self.shapes.get(shape, shape if shape in self.all_shapes else None)

    def whole(self, key: str, shape: Shape) -> ObjectArray:
        """Return all values of an array.

        Raises:
            IntegrityError: cells are missing.
        """
        cells, mains = cells_of(shape), self.mains.get(shape, {})
        missing = [str(cell) for cell in cells if cell not in mains]
        if missing:
            what = f"the objects {key!r} of shape {shape} aren't all there: no main replica of these cells"
            raise IntegrityError(error_text(what, offenders=missing, fix="Pass the objects of all ranks."))
        return ObjectArray(key, shape, tuple(mains[cell].data for cell in cells))


def held_arrays(objects: Iterable[ShardedObject]) -> Mapping[str, HeldArrays]:
    """Return what is there, by key; a last size that isn't known ends with the last object that is there.

    Raises:
        IntegrityError: a cell has two main replicas.

    Examples:
        >>> objects = [ShardedObject("rng", rank, (2, -1), (1, rank)) for rank in range(3)]
        >>> held_arrays(objects)["rng"].shapes
        {(2, -1): (2, 3)}
    """
    listed = list(objects)
    found: dict[str, HeldArrays] = defaultdict(HeldArrays)
    for item in listed:
        shape = item.global_shape
        if shape and shape[-1] < 0:
            end = found[item.key].shapes.get(shape, (0,))[-1]
            found[item.key].shapes[shape] = (*shape[:-1], max(end, item.global_offset[-1] + 1))
        else:
            found[item.key].shapes[shape] = shape
    _enter_mains(found, [item for item in listed if is_main_replica(item.replica_id)])
    return dict(found)


def _enter_mains(found: Mapping[str, HeldArrays], mains: Iterable[ShardedObject]) -> None:
    twice = []
    for item in mains:
        arrays = found[item.key]
        cells = arrays.mains.setdefault(arrays.shapes[item.global_shape], {})
        if item.global_offset in cells:
            twice.append(f"{item.key!r} at {item.global_offset} of {item.global_shape}")
        cells[item.global_offset] = item
    if twice:
        fix = "Give replicas different replica_ids."
        raise IntegrityError(error_text("objects with two main replicas", offenders=dict.fromkeys(twice), fix=fix))
