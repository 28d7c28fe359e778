"""Rules for dicts, a rule for each field: a data loader's state, say."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import Any

from ...errors import TreeError, UnsupportedValue, error_text
from ...trees import HOLE
from ._array import ObjectArray, ObjectRule, Shape, cell_count, ruled


def rules_by_field(rules: Mapping[Hashable, ObjectRule]) -> ObjectRule:
    """Return a rule for dicts that applies a rule of its own to each field.

    A field of which a rule gives `HOLE`, as `drop_objects` does, is left out.

    Args:
        rules: by field, one for each that the values have. Those of nested dicts are `rules_by_field` too.

    Raises:
        TreeError: it isn't a dict of functions.

    Examples:
        >>> import operator
        >>> from shardtree.layouts import fold_objects, redistribute_objects
        >>> states = ({"consumed": 8, "buffer": [1, 2, 3]}, {"consumed": 9, "buffer": [4]})
        >>> rule = rules_by_field({"consumed": fold_objects(operator.add), "buffer": redistribute_objects})
        >>> rule(ObjectArray("loader", (2,), states), (2,))
        [{'consumed': 17, 'buffer': [1, 2]}, {'consumed': 17, 'buffer': [3, 4]}]
    """
    wrong = [f"{field!r}: {type(rule).__name__}" for field, rule in _items(rules) if not callable(rule)]
    if wrong:
        fix = "Give each field a rule, such as fold_objects(operator.add)."
        raise TreeError(error_text("rules_by_field: not rules for objects", offenders=wrong, fix=fix))
    known = dict(rules)

    def apply(array: ObjectArray, shape: Shape) -> Sequence[Any]:
        _check_fields(array, known)
        first = array.values[0]
        columns = [_column(array, field, known[field], shape) for field in first]
        rows = zip(*columns, strict=True) if columns else [()] * cell_count(shape)
        return [_filled(first, values) for values in rows]

    return apply


def _items(rules: Any) -> Iterable[tuple[Hashable, Any]]:
    if not isinstance(rules, Mapping):
        fix = "Say which fields they are for: {'consumed': rule}."
        raise TreeError(error_text("rules_by_field: not a dict of rules", found=type(rules).__name__, fix=fix))
    return rules.items()


def _check_fields(array: ObjectArray, rules: Mapping[Hashable, ObjectRule]) -> None:
    for position, value in enumerate(array.values):
        if not isinstance(value, dict):
            what, found = f"rules_by_field: {array.told(position)} isn't a dict", type(value).__name__
            raise UnsupportedValue(error_text(what, found=found, fix="Give its key a rule for whole values."))
    first = array.values[0]
    wrong = [
        f"{array.told(position)} {'has' if field in value else 'lacks'} {field!r}"
        for position, value in enumerate(array.values)
        for field in dict.fromkeys((*value, *first))
        if (field in value) != (field in first)
    ]
    if wrong:
        what, fix = f"rules_by_field: dicts have other fields than {array.told(0)}", "Write a rule of your own."
        raise TreeError(error_text(what, offenders=wrong, fix=fix))
    wrong = [f"no rule for the field {field!r}" for field in first if field not in rules]
    wrong += [f"a rule for {field!r}, which isn't there" for field in rules if field not in first]
    if wrong:
        fix = "Give a rule for each field; drop_objects leaves one out."
        raise TreeError(error_text(f"rules_by_field: rules don't fit {array.key!r}", offenders=wrong, fix=fix))


def _column(array: ObjectArray, field: Hashable, rule: ObjectRule, shape: Shape) -> Sequence[Any]:
    """Return the values of one field, one for each cell of the target."""
    own = replace(array, key=f"{array.key}[{field!r}]", values=tuple(value[field] for value in array.values))
    return ruled(own, rule, shape)


def _filled(first: dict[Hashable, Any], values: Sequence[Any]) -> dict[Hashable, Any]:
    """Return a dict of the same kind, with other values."""
    new = copy(first)
    new.clear()
    new.update((field, value) for field, value in zip(first, values, strict=True) if value is not HOLE)
    return new
