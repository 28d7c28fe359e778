"""ObjectArray: all values of a global array of objects; what a rule is given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

import numpy as np

from ...errors import ShapeError, UnsupportedValue, error_text

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
