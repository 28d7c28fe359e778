"""ObjectArray: all values of a global array of objects; what a rule is given."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from math import prod
from typing import Any, Protocol

import numpy as np
import torch

from ..errors import IntegrityError, ShapeError, UnsupportedValue, error_text
from ..mapping import ShardedObject, is_main_replica
from ..trees import leaves_with_paths

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class ObjectArray:
    """All values of a global array of objects, as it was stored or held.

    Attributes:
        key: the array's name.
        shape: in objects, all sizes known.
        values: of its cells, in row-major order.

    Examples:
        >>> array = ObjectArray("rng", (2, 2), ("a", "b", "c", "d"))
        >>> array.cells[1], array.told(1)
        ((0, 1), "'rng' at (0, 1)")
    """

    key: str
    shape: Shape
    values: tuple[Any, ...]

    @property
    def cells(self) -> tuple[Shape, ...]:
        """The index of each value."""
        return cells_of(self.shape)

    def told(self, position: int) -> str:
        """Return what messages call a value."""
        return f"{self.key!r} at {self.cells[position]}"


class ObjectRule(Protocol):
    """What becomes of an array of objects in another shape: a pure function."""

    def __call__(self, array: ObjectArray, shape: Shape, /) -> Sequence[Any]:
        """Return the values of the cells of an array of the given shape, in row-major order.

        Where one is `HOLE`, the target keeps what it holds.
        """


def ruled(array: ObjectArray, rule: ObjectRule, shape: Shape) -> Sequence[Any]:
    """Return what a rule makes of an array, once it is known to be a value for each cell.

    Args:
        array: all values of the source.
        rule: what becomes of them.
        shape: of the target, in objects.

    Raises:
        UnsupportedValue: it isn't a list or tuple of values: a text or a dict would be taken apart.
        ShapeError: there are more or fewer values than cells.

    Examples:
        >>> ruled(ObjectArray("seed", (2,), (3, 4)), lambda array, shape: [sum(array.values)], (1,))
        (7,)
    """
    try:
        values = rule(array, shape)
    except Exception as error:
        error.add_note(f"from the rule for the objects {array.key!r}, from shape {array.shape} to {shape}")
        raise
    if not isinstance(values, (list, tuple)):
        what, found = f"the rule for the objects {array.key!r} gave no values by cell", type(values).__name__
        expected, fix = f"a list of {cell_count(shape)}", "Return a list with a value for each cell, also for one."
        raise UnsupportedValue(error_text(what, found=found, expected=expected, fix=fix))
    if len(values) != cell_count(shape):
        what = f"the rule for the objects {array.key!r} gave a wrong number of values"
        expected, fix = f"{cell_count(shape)}, for shape {shape}", "Return a value for each cell, in row-major order."
        raise ShapeError(error_text(what, found=len(values), expected=expected, fix=fix))
    return tuple(values)


def cells_of(shape: Shape) -> tuple[Shape, ...]:
    """Return the indices of an array's cells, in row-major order.

    Examples:
        >>> cells_of((2, 1))
        ((0, 0), (1, 0))
    """
    return tuple(np.ndindex(*shape))


def cell_count(shape: Shape) -> int:
    """Return how many cells an array has."""
    return prod(shape)


# The arrays that objects make up: what is there of each, by shape and cell.


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


# Own copies of values, so that no two places share something that can change.


def own_copy(value: Any, what: str) -> Any:
    """Return a value that shares nothing that can change with the given one.

    Args:
        value: anything that can be copied; of a view of a tensor, only what it shows is.
        what: what messages call it.

    Raises:
        UnsupportedValue: it can't be copied.

    Examples:
        >>> value = {"seen": [1, 2]}
        >>> copy = own_copy(value, "'loader' at (0,)")
        >>> copy == value, copy["seen"] is value["seen"]
        (True, False)
    """
    try:
        leaves = [leaf for _, leaf in leaves_with_paths(value)]
        # Copied deeply, a view would bring all of its storage along, and a tensor with a gradient's history refuses.
        tensors = {id(leaf): _cloned(leaf) for leaf in leaves if type(leaf) is torch.Tensor}
        return deepcopy(value, tensors)
    except Exception as error:
        # What a value's own __deepcopy__ raises can be anything.
        found, fix = f"{type(error).__name__}: {error}"[:200], "Keep what can be copied: a state, not what holds it."
        raise UnsupportedValue(error_text(f"{what} can't be copied", found=found, fix=fix)) from error


def _cloned(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)
