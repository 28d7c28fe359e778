"""Global arrays of objects: whole arrays, rules that convert them, and arrays assembled from sharded objects."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import reduce
from math import prod
from typing import Any, Protocol

import numpy as np
import torch

from ...errors import IntegrityError, ShapeError, UnsupportedValue, error_text, missing_numbers
from ..mapping import ShardedObject, is_main_replica
from ..trees import leaves_with_paths

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class ObjectArray:
    """A global array of objects with all its values, stored or in memory; the argument of an `ObjectRule`.

    Attributes:
        key: Key of the array.
        shape: Shape in objects, all sizes known.
        values: Values of the cells, in row-major order.

    Examples:
        >>> array = ObjectArray("rng", (2, 2), ("a", "b", "c", "d"))
        >>> array.cells[1], array.cell_text(1)
        ((0, 1), "'rng' at (0, 1)")
    """

    key: str
    shape: Shape
    values: tuple[Any, ...]

    @property
    def cells(self) -> tuple[Shape, ...]:
        """The cell index of each value."""
        return cells_of(self.shape)

    def cell_text(self, position: int) -> str:
        """Return the name of the cell at a row-major position, for messages."""
        return f"{self.key!r} at {self.cells[position]}"


class ObjectRule(Protocol):
    """A pure function that converts an array of objects to another shape."""

    def __call__(self, array: ObjectArray, shape: Shape, /) -> Sequence[Any]:
        """Return the values of the array converted to `shape`, in row-major order.

        Where a value is `HOLE`, the target's object stays unchanged.
        """


def apply_rule(array: ObjectArray, rule: ObjectRule, shape: Shape) -> Sequence[Any]:
    """Call a rule, and return its values after checking that there is one for each cell of the new shape.

    Args:
        array: All values of the source.
        rule: Rule that converts them.
        shape: Shape of the target, in objects.

    Raises:
        UnsupportedValue: The result isn't a list or tuple of values: a string or a dict would be split into characters
            or keys.
        ShapeError: There are more or fewer values than cells.

    Examples:
        >>> apply_rule(ObjectArray("seed", (2,), (3, 4)), lambda array, shape: [sum(array.values)], (1,))
        (7,)
    """
    try:
        values = rule(array, shape)
    except Exception as error:
        error.add_note(f"from the rule for the objects {array.key!r}, from shape {array.shape} to {shape}")
        raise
    # Any other iterable is most likely a single value: a string for one cell would become its characters.
    if not isinstance(values, (list, tuple)):
        heading, found = f"object_rules: the rule for {array.key!r} returned no list of values", type(values).__name__
        expected, fix = f"a list of length {cell_count(shape)}", "Return a list, even for a single cell."
        raise UnsupportedValue(error_text(heading, found=found, expected=expected, fix=fix))
    if len(values) != cell_count(shape):
        heading = f"object_rules: the rule for {array.key!r} returned a wrong number of values"
        expected, fix = f"{cell_count(shape)}, for shape {shape}", "Return a value for each cell, in row-major order."
        raise ShapeError(error_text(heading, found=len(values), expected=expected, fix=fix))
    return tuple(values)


def cells_of(shape: Shape) -> tuple[Shape, ...]:
    """Return the indices of an array's cells, in row-major order.

    Examples:
        >>> cells_of((2, 1))
        ((0, 0), (1, 0))
    """
    return tuple(np.ndindex(*shape))


def cell_count(shape: Shape) -> int:
    """Return the number of cells of an array."""
    return prod(shape)


def _number(cell: Shape, shape: Shape) -> int:
    """Return the row-major position of a cell."""
    return reduce(lambda number, axis: number * axis[1] + axis[0], zip(cell, shape, strict=True), 0)


def _cell(number: int, shape: Shape) -> Shape:
    """Return the cell at a row-major position; the shape may be too large for NumPy."""
    cell = []
    for size in reversed(shape):
        number, index = divmod(number, size)
        cell.append(index)
    return tuple(reversed(cell))


# Arrays assembled from objects, by shape and cell.


@dataclass(frozen=True, slots=True, eq=False)
class HeldArrays:
    """The arrays that the sharded objects of one key make up, in most cases only one.

    A sharded object states the shape of its array. The size of the last axis may be -1 (unknown); the complete shape
    then has the smallest size with room for all objects of the array.

    Attributes:
        shapes: Dict from stated shapes to complete shapes.
        mains: Main replicas, as a dict from the complete shape of an array to a dict from its cells to their objects.
    """

    shapes: dict[Shape, Shape] = field(default_factory=dict)
    mains: dict[Shape, dict[Shape, ShardedObject]] = field(default_factory=dict)

    @property
    def all_shapes(self) -> tuple[Shape, ...]:
        """The distinct shapes of the arrays, with unknown sizes (-1) completed."""
        return tuple(dict.fromkeys(self.shapes.values()))

    def shape_as(self, shape: Shape) -> Shape | None:
        """Return the complete shape for a stated shape, whose last size may be -1 (unknown).

        A complete shape is returned unchanged. The result is None if there is no array with this shape.
        """
        return self.shapes.get(shape, shape if shape in self.all_shapes else None)

    def whole(self, key: str, shape: Shape) -> ObjectArray:
        """Return an array with the values of all its cells.

        Args:
            key: Key of the array.
            shape: Complete shape of the array.

        Raises:
            IntegrityError: Some cells have no main replica.
        """
        mains = self.mains.get(shape, {})
        if len(mains) != cell_count(shape):
            # The cells are generated lazily, since a file may claim an array of any shape.
            present = {_number(cell, shape) for cell in mains}
            missing = (_cell(number, shape) for number in missing_numbers(present, len(mains), cell_count(shape)))
            heading = f"objects {key!r}, global shape {shape}: no main replica at these indices"
            count, fix = cell_count(shape) - len(mains), "Pass the objects of all ranks."
            raise IntegrityError(error_text(heading, offenders=map(str, missing), count=count, fix=fix))
        return ObjectArray(key, shape, tuple(mains[cell].data for cell in cells_of(shape)))


def held_arrays(objects: Iterable[ShardedObject]) -> Mapping[str, HeldArrays]:
    """Return the arrays that sharded objects make up, by key.

    If the size of an array's last axis is unknown (-1), the object with the largest index along it determines the size.

    Raises:
        IntegrityError: A cell has two main replicas.

    Examples:
        >>> objects = [ShardedObject("rng", rank, (2, -1), (1, rank)) for rank in range(3)]
        >>> held_arrays(objects)["rng"].shapes
        {(2, -1): (2, 3)}
    """
    objects = list(objects)
    arrays: dict[str, HeldArrays] = defaultdict(HeldArrays)
    for item in objects:
        shape = item.global_shape
        if shape and shape[-1] < 0:
            end = arrays[item.key].shapes.get(shape, (0,))[-1]
            arrays[item.key].shapes[shape] = (*shape[:-1], max(end, item.global_offset[-1] + 1))
        else:
            arrays[item.key].shapes[shape] = shape
    _add_mains(arrays, [item for item in objects if is_main_replica(item.replica_id)])
    return dict(arrays)


def _add_mains(arrays: Mapping[str, HeldArrays], mains: Iterable[ShardedObject]) -> None:
    twice = []
    for item in mains:
        array = arrays[item.key]
        cells = array.mains.setdefault(array.shapes[item.global_shape], {})
        if item.global_offset in cells:
            twice.append(f"{item.key!r} at {item.global_offset} of {item.global_shape}")
        cells[item.global_offset] = item
    if twice:
        fix = "Give replicas different replica_ids."
        raise IntegrityError(error_text("objects with two main replicas", offenders=dict.fromkeys(twice), fix=fix))


# Copies of values, so that no two cells share mutable state.


def own_copy(value: Any, what: str) -> Any:
    """Return a copy of a value that shares no mutable state with it.

    Args:
        value: Value to copy; only the elements of a tensor are copied, even if it is a view of a larger storage.
        what: Name of the value in messages.

    Raises:
        UnsupportedValue: The value can't be copied.

    Examples:
        >>> value = {"seen": [1, 2]}
        >>> copy = own_copy(value, "'loader' at (0,)")
        >>> copy == value, copy["seen"] is value["seen"]
        (True, False)
    """
    try:
        leaves = [leaf for _, leaf in leaves_with_paths(value)]
        # `deepcopy` would copy a view's whole storage, and refuses tensors that are part of an autograd graph.
        tensors = [leaf for leaf in leaves if type(leaf) is torch.Tensor]
        return deepcopy(value, {id(item): item.detach().clone().requires_grad_(item.requires_grad) for item in tensors})
    except Exception as error:
        # A value's own __deepcopy__ may raise anything.
        found, fix = f"{type(error).__name__}: {error}"[:200], "Store only values that copy.deepcopy can copy."
        raise UnsupportedValue(error_text(f"{what} cannot be copied", found=found, fix=fix)) from error
