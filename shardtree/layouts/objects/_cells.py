"""Rules that treat a value as one thing: replicate it, drop it, or fold all of them to one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from typing import Any

from ...errors import IntegrityError, KeyMismatch, TreeError, error_text, render_path
from ...trees import HOLE, diff
from ..integrity._common import value_at
from ._array import ObjectArray, ObjectRule, Shape, cell_count
from ._copied import own_copy


def replicate_objects(array: ObjectArray, shape: Shape) -> Sequence[Any]:
    """Return the one value that all cells have, for every cell: a rule.

    Args:
        array: all values of the source.
        shape: of the target, in objects.

    Raises:
        IntegrityError: the values aren't equal to the last bit; says where which cells differ from the first.

    Examples:
        >>> replicate_objects(ObjectArray("seed", (2,), (7, 7)), (3,))
        [7, 7, 7]
    """
    first = array.values[0]
    differing = [line for position, value in enumerate(array.values) for line in _differing(array, position, value)]
    if differing:
        fix = "Say which one counts with replicate_cell, or use another rule."
        what = f"replicate_objects: values that should be equal differ from that of {array.told(0)}"
        raise IntegrityError(error_text(what, offenders=differing, fix=fix))
    return [first] * cell_count(shape)


def _differing(array: ObjectArray, position: int, value: Any) -> Iterator[str]:
    """Yield where a value isn't what the first one is."""
    found = diff(array.values[0], value)
    for path in (*found.only_left, *found.only_right, *found.mismatch):
        own, other = value_at(value, path), value_at(array.values[0], path)
        yield f"{array.told(position)}: {render_path(path, 'value')} is {own}, not {other if own != other else 'equal'}"


def replicate_cell(cell: tuple[int, ...]) -> ObjectRule:
    """Return a rule by which every cell gets the value of one; the others are dropped.

    Args:
        cell: its index in the source.

    Examples:
        >>> replicate_cell((0, 1))(ObjectArray("rng", (1, 2), ("a", "b")), (3,))
        ['b', 'b', 'b']
    """

    def replicate(array: ObjectArray, shape: Shape) -> Sequence[Any]:
        if cell not in array.cells:
            expected, fix = f"an index into shape {array.shape}", "Name a cell that the source has."
            raise KeyMismatch(
                error_text(f"replicate_cell: {array.key!r} has no such cell", found=cell, expected=expected, fix=fix)
            )
        return [array.values[array.cells.index(cell)]] * cell_count(shape)

    return replicate


def drop_objects(array: ObjectArray, shape: Shape) -> Sequence[Any]:
    """Return holes, so that targets keep what they hold: a rule.

    Args:
        array: counts for nothing.
        shape: of the target, in objects.

    Examples:
        >>> drop_objects(ObjectArray("rng", (2,), ("a", "b")), (1,))
        [HOLE]
    """
    return [HOLE] * cell_count(shape)


def fold_objects(function: Callable[[Any, Any], Any]) -> ObjectRule:
    """Return a rule by which every cell gets all values folded into one: their sum, say, or the largest.

    Args:
        function: takes two values and returns one, without changing either. Values come in row-major order.

    Raises:
        TreeError: it isn't a function.

    Examples:
        >>> import operator
        >>> fold_objects(operator.add)(ObjectArray("consumed", (3,), (8, 8, 9)), (2,))
        [25, 25]
    """
    if not callable(function):
        found, fix = repr(function)[:200], "Pass a function of two values, as operator.add or max."
        raise TreeError(error_text("fold_objects: not a function", found=found, expected="a function", fix=fix))

    def fold(array: ObjectArray, shape: Shape) -> Sequence[Any]:
        # A copy, for functions like operator.iadd, which change their first argument.
        first = own_copy(array.values[0], array.told(0))
        return [reduce(function, array.values[1:], first)] * cell_count(shape)

    return fold
