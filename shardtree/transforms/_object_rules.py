"""Rules for loading an array of objects into another shape: for whole values, joined values, and fields of dicts.

A cell is a position in such an array, and holds one object.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import reduce
from itertools import accumulate, chain, pairwise
from typing import Any

import numpy as np
import torch

from ..core.layouts import ObjectArray, ObjectRule, Shape, apply_rule, cell_count, own_copy
from ..core.trees import HOLE, diff, join_data, value_at
from ..errors import IntegrityError, KeyMismatch, TreeError, UnsupportedValue, error_text, render_path

# Rules for whole values: replicate, drop, or fold them into one.


def replicate_objects(array: ObjectArray, shape: Shape) -> Sequence[Any]:
    """Return the value that all source cells share, once for each target cell.

    This function is a rule for `LoadOptions.object_rules`.

    Args:
        array: All values of the source.
        shape: Shape of the target, in objects.

    Raises:
        IntegrityError: The values aren't equal bit for bit; the error names the cells and their differences from the
            first.

    Examples:
        >>> replicate_objects(ObjectArray("seed", (2,), (7, 7)), (3,))
        [7, 7, 7]
    """
    first = array.values[0]
    differing = [line for position, value in enumerate(array.values) for line in _differing(array, position, value)]
    if differing:
        fix = "Choose one cell's value with replicate_cell, or use another function than replicate_objects."
        heading = f"replicate_objects: values that should be equal differ from the value of {array.cell_text(0)}"
        raise IntegrityError(error_text(heading, offenders=differing, fix=fix))
    return [first] * cell_count(shape)


def _differing(array: ObjectArray, position: int, value: Any) -> Iterator[str]:
    """Yield the differences of a value from the array's first value, as lines of an error message.

    Args:
        array: All values of the source.
        position: Index of the value among them.
        value: The value.
    """
    difference = diff(array.values[0], value)
    for path in (*difference.only_left, *difference.only_right, *difference.mismatch):
        own, other = value_at(value, path), value_at(array.values[0], path)
        line = f"{own}, not {other if own != other else 'equal'}"
        yield f"{array.cell_text(position)}: {render_path(path, 'value')} is {line}"


def replicate_cell(cell: tuple[int, ...]) -> ObjectRule:
    """Return a rule that gives every cell the value of one cell; the other values are dropped.

    Args:
        cell: Index of the cell in the source.

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
    """Return `HOLE` for every target cell: the target then keeps its objects.

    This function is a rule for `LoadOptions.object_rules`.

    Args:
        array: Ignored.
        shape: Shape of the target, in objects.

    Examples:
        >>> drop_objects(ObjectArray("rng", (2,), ("a", "b")), (1,))
        [HOLE]
    """
    return [HOLE] * cell_count(shape)


def fold_objects(function: Callable[[Any, Any], Any]) -> ObjectRule:
    """Return a rule that gives every cell one value folded from all, such as their sum.

    Args:
        function: Function of two values that returns one and changes neither. Values come in row-major order.

    Raises:
        TreeError: The argument isn't a function.

    Examples:
        >>> import operator
        >>> fold_objects(operator.add)(ObjectArray("consumed", (3,), (8, 8, 9)), (2,))
        [25, 25]
    """
    if not callable(function):
        found, fix = repr(function)[:200], "Pass a function of two values, such as operator.add or max."
        raise TreeError(
            error_text("fold_objects: the argument is not a function", found=found, expected="a function", fix=fix)
        )

    def fold(array: ObjectArray, shape: Shape) -> Sequence[Any]:
        # Values are copied, since functions like operator.iadd change their first argument.
        first = own_copy(array.values[0], array.cell_text(0))
        # Every cell gets the whole fold, not a share of it: for most state, such as the largest step or the samples
        # seen, that is right for new ranks. Dividing it again needs a rule of the user's.
        return [reduce(function, array.values[1:], first)] * cell_count(shape)

    return fold


# Rules that concatenate values along their first axis, for every cell, or redistributed in order.


def concatenate_objects(array: ObjectArray, shape: Shape) -> Sequence[Any]:
    """Return all values joined into one along their first axis, repeated for each target cell.

    This function is a rule for `LoadOptions.object_rules`.

    Args:
        array: Source values, joined in row-major order: lists, tuples, texts, bytes, tensors or numpy arrays, all of
            one kind. Dicts aren't joined: see `rules_by_field`.
        shape: Shape of the target, in objects.

    Raises:
        UnsupportedValue: The values can't be joined.

    Examples:
        >>> concatenate_objects(ObjectArray("seen", (2,), ([1, 2], [3])), (1,))
        [[1, 2, 3]]
    """
    return [_concatenate("concatenate_objects", array)] * cell_count(shape)


def redistribute_objects(array: ObjectArray, shape: Shape) -> Sequence[Any]:
    """Return all values joined along their first axis, and cut in order into one part for each target cell.

    A cell is a position in an array of objects. The parts' sizes are as even as possible: the first cells may
    get one more. This function is a rule for `LoadOptions.object_rules`.

    Args:
        array: Source values, of the types that `concatenate_objects` takes.
        shape: Shape of the target, in objects.

    Raises:
        UnsupportedValue: The values can't be joined.

    Examples:
        >>> redistribute_objects(ObjectArray("buffer", (2,), ([1, 2, 3], [4, 5])), (3,))
        [[1, 2], [3, 4], [5]]
    """
    whole = _concatenate("redistribute_objects", array)
    each, more = divmod(len(whole), cell_count(shape))
    sizes = (each + (position < more) for position in range(cell_count(shape)))
    bounds = pairwise(accumulate(sizes, initial=0))
    return [whole[start:stop] for start, stop in bounds]


def _concatenate(doing: str, array: ObjectArray) -> Any:
    first = array.values[0]
    wrong = [
        f"{array.cell_text(position)}: {_kind(value)}"
        for position, value in enumerate(array.values)
        if _kind(value) != _kind(first)
    ]
    if wrong:
        heading = f"{doing}: values of different kinds cannot be joined"
        raise UnsupportedValue(
            error_text(heading, expected=f"{_kind(first)}, like {array.cell_text(0)}", offenders=wrong)
        )
    join = _JOINS.get(type(first))
    if join is None or (isinstance(first, (torch.Tensor, np.ndarray)) and not first.ndim):
        expected = ", ".join(kind.__name__ for kind in _JOINS) + "; tensors and arrays need an axis"
        fix = "Use rules_by_field for dicts, fold_objects for numbers, or a function of your own."
        raise UnsupportedValue(
            error_text(f"{doing}: {array.key!r} cannot be joined", found=_kind(first), expected=expected, fix=fix)
        )
    return join(array.values)


def _kind(value: Any) -> str:
    """Return a value's type, and a tensor's dtype, device and row shape, as text; joined values must agree in it."""
    name = type(value).__name__
    if not isinstance(value, (torch.Tensor, np.ndarray)):
        return name
    rows = f"rows of shape {tuple(value.shape[1:])}" if value.ndim else "without axes"
    device = f" on {value.device}" if isinstance(value, torch.Tensor) else ""
    return f"{name}, {value.dtype}{device}, {rows}"


_JOINS: dict[type, Callable[[Sequence[Any]], Any]] = {
    list: lambda values: list(chain.from_iterable(values)),
    tuple: lambda values: tuple(chain.from_iterable(values)),
    str: "".join,
    bytes: b"".join,
    torch.Tensor: lambda values: join_data(torch.cat, values, 0),
    np.ndarray: np.concatenate,
}


# Rules for dicts with a rule for each field, such as a data loader's state.


def rules_by_field(rules: Mapping[Hashable, ObjectRule]) -> ObjectRule:
    """Return a rule for dicts that applies a separate rule to each field.

    A field whose rule returns `HOLE`, as `drop_objects` does, is left out.

    Args:
        rules: Rules by field, one for each field of the values. Rules of nested dicts are `rules_by_field` too.

    Raises:
        TreeError: The argument isn't a dict of functions.

    Examples:
        >>> import operator
        >>> from shardtree.objects import fold_objects, redistribute_objects
        >>> states = ({"consumed": 8, "buffer": [1, 2, 3]}, {"consumed": 9, "buffer": [4]})
        >>> rule = rules_by_field({"consumed": fold_objects(operator.add), "buffer": redistribute_objects})
        >>> rule(ObjectArray("loader", (2,), states), (2,))
        [{'consumed': 17, 'buffer': [1, 2]}, {'consumed': 17, 'buffer': [3, 4]}]
    """
    if not isinstance(rules, Mapping):
        fix = "Pass a dict with a function for each field, such as {'consumed': fold_objects(operator.add)}."
        raise TreeError(error_text("rules_by_field: rules is not a dict", found=type(rules).__name__, fix=fix))
    wrong = [f"{field!r}: {type(rule).__name__}" for field, rule in rules.items() if not callable(rule)]
    if wrong:
        fix = "Give each field a function, such as fold_objects(operator.add)."
        raise TreeError(error_text("rules_by_field: rules that are not functions", offenders=wrong, fix=fix))
    rule_of = dict(rules)

    def apply(array: ObjectArray, shape: Shape) -> Sequence[Any]:
        _check_fields(array, rule_of)
        first = array.values[0]
        columns = [_column(array, field, rule_of[field], shape) for field in first]
        rows = zip(*columns, strict=True) if columns else [()] * cell_count(shape)
        return [_dict_like(first, values) for values in rows]

    return apply


def _check_fields(array: ObjectArray, rules: Mapping[Hashable, ObjectRule]) -> None:
    for position, value in enumerate(array.values):
        if not isinstance(value, dict):
            heading, found = f"rules_by_field: {array.cell_text(position)} is not a dict", type(value).__name__
            fix = "Use rules_by_field only for keys whose values are dicts."
            raise UnsupportedValue(error_text(heading, found=found, fix=fix))
    first = array.values[0]
    wrong = [
        f"{array.cell_text(position)} {'has' if field in value else 'lacks'} {field!r}"
        for position, value in enumerate(array.values)
        # Fields are in the dicts' order: a set's differs from process to process, and so would the error.
        for field in dict.fromkeys((*value, *first))
        if (field in value) != (field in first)
    ]
    if wrong:
        heading = f"rules_by_field: dicts whose fields differ from those of {array.cell_text(0)}"
        fix = "As the rule of this key, pass a function of your own instead of rules_by_field."
        raise TreeError(error_text(heading, offenders=wrong, fix=fix))
    wrong = [f"no rule for the field {field!r}" for field in first if field not in rules]
    wrong += [f"a rule for {field!r}, which no value has" for field in rules if field not in first]
    if wrong:
        fix = "Give one rule for each field; the rule drop_objects leaves its field out."
        raise TreeError(error_text(f"rules_by_field: rules do not fit {array.key!r}", offenders=wrong, fix=fix))


def _column(array: ObjectArray, field: Hashable, rule: ObjectRule, shape: Shape) -> Sequence[Any]:
    """Apply a rule to one field of all dicts, and return the field's value for each target cell."""
    own = replace(array, key=f"{array.key}[{field!r}]", values=tuple(value[field] for value in array.values))
    return apply_rule(own, rule, shape)


def _dict_like(first: dict[Hashable, Any], values: Sequence[Any]) -> dict[Hashable, Any]:
    """Return a dict with the type and keys of `first`, but with new values; a key whose value is `HOLE` is left out."""
    # The dict is copied, so that subclasses keep their attributes, such as a defaultdict's factory.
    new = copy(first)
    new.clear()
    new.update((field, value) for field, value in zip(first, values, strict=True) if value is not HOLE)
    return new
