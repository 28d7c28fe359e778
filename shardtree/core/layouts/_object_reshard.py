"""`reshard_objects`: global arrays of objects converted from one shape to another by rules."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from ...errors import IntegrityError, KeyMismatch, MetadataError, TreeError, error_text
from ..mapping import ShardedObject
from ..offences import offence_text
from ..trees import HOLE, match_keys
from ._object_array import HeldArrays, ObjectRule, Shape, apply_rule, cells_of, held_arrays, own_copy

OBJECT_RULES = (
    "replicate_objects, replicate_cell, concatenate_objects, redistribute_objects, fold_objects, drop_objects, "
    "rules_by_field, or a function of your own"
)
"""The names of the library's rules, for messages."""


@dataclass(frozen=True, slots=True)
class ShapeChange:
    """An array of objects that is requested in another shape than the stored one.

    Attributes:
        key: Key of the array.
        stored: Stored shapes, in most cases only one.
        asked: Requested shape.
    """

    where: ClassVar[str] = ""
    fix: ClassVar[str] = f"Name a rule in object_rules: {OBJECT_RULES}."

    key: str
    stored: tuple[Shape, ...]
    asked: Shape

    __str__ = offence_text

    @property
    def what(self) -> str:
        """The stored and requested shapes, as text."""
        return f"objects of shape {' and '.join(map(str, self.stored))}, asked for in shape {self.asked}"


def reshard_objects(
    sources: Iterable[ShardedObject],
    targets: Sequence[ShardedObject],
    rules: Mapping[str, ObjectRule] | None = None,
) -> list[ShardedObject]:
    """Return the targets with their data; a rule converts an array to another shape.

    An array of the same shape keeps its cells. Each target gets its own copy, which shares no mutable state with a
    source or another target.

    Args:
        sources: Objects of all ranks; only main replicas count. Arrays without a target are ignored.
        targets: Objects with or without data; a target keeps its own data only where a rule returns `HOLE`.
        rules: Dict from patterns of keys to rules; ``*`` matches one part between dots, ``**`` any number of them. The
            first matching pattern counts.

    Returns:
        As many objects as targets, in their order.

    Raises:
        KeyMismatch: A target's key isn't among the sources.
        IntegrityError: An array has another shape and no rule, or a cell has no main replica or two.
        ShapeError: A rule returns more or fewer values than there are cells.
        UnsupportedValue: A value can't be copied, or a rule can't handle it.
        TreeError: A pattern matches no key.

    Examples:
        >>> from shardtree.objects import redistribute_objects
        >>> seen = [ShardedObject("seen", [rank, rank + 10], (2,), (rank,)) for rank in range(2)]
        >>> targets = [ShardedObject("seen", None, (3,), (rank,)) for rank in range(3)]
        >>> [item.data for item in reshard_objects(seen, targets, {"seen": redistribute_objects})]
        [[0, 10], [1], [11]]
    """
    items = list(sources) if isinstance(sources, Iterable) else [sources]
    asked_for = targets if isinstance(targets, Iterable) else [targets]
    others = [type(item).__name__ for item in (*items, *asked_for) if not isinstance(item, ShardedObject)]
    if others:
        heading = "reshard_objects: a source or target is not a ShardedObject"
        fix = "Pass lists of ShardedObject as sources and targets."
        raise MetadataError(error_text(heading, found=others[0], expected="ShardedObject", fix=fix))
    rule_of = rules_by_key("reshard_objects", rules or {}, (item.key for item in (*items, *targets)))
    target_keys = {item.key for item in targets}
    # Arrays without a target may be incomplete, or ambiguous.
    arrays = held_arrays(item for item in items if item.key in target_keys)
    absent = sorted(target_keys.difference(arrays))
    if absent:
        fix = "Pass the objects of all ranks, or leave these out of the target."
        raise KeyMismatch(error_text("reshard_objects: missing source objects", offenders=map(repr, absent), fix=fix))
    check_ruled(reshaped_arrays(arrays, targets), rule_of)
    return objects_by_rule(arrays, targets, rule_of)


def rules_by_key(doing: str, rules: Mapping[str, ObjectRule], keys: Iterable[str]) -> dict[str, ObjectRule]:
    """Return the rule of each key that a pattern matches.

    Args:
        doing: Name of the operation, for the error.
        rules: Dict from patterns of keys to rules.
        keys: Keys of all objects.

    Raises:
        TreeError: A pattern is the first match of no key, a rule isn't a function, or `rules` isn't a dict.

    Examples:
        >>> list(rules_by_key("reshard_objects", {"rng.*": max}, ["rng.0", "loader"]))
        ['rng.0']
    """
    if not isinstance(rules, Mapping):
        fix = "Pass a dict from patterns of keys to rules: {'rng': rule}."
        raise TreeError(error_text(f"{doing}: the rules are not a dict", found=type(rules).__name__, fix=fix))
    wrong = [f"{pattern!r}: {type(rule).__name__}" for pattern, rule in rules.items() if not callable(rule)]
    if wrong:
        raise TreeError(error_text(f"{doing}: rules are not functions", offenders=wrong, fix=f"Use {OBJECT_RULES}."))
    matches = match_keys(doing, rules, dict.fromkeys(keys))
    return {key: rules[pattern] for key, (pattern, _) in matches.items()}


def reshaped_arrays(arrays: Mapping[str, HeldArrays], targets: Iterable[ShardedObject]) -> tuple[ShapeChange, ...]:
    """Return a `ShapeChange` for each array that targets request in a shape that it doesn't have in the source.

    Args:
        arrays: Arrays of the source; targets with other keys are ignored.
        targets: Requested objects.

    Examples:
        >>> held = held_arrays([ShardedObject("rng", 7, (1,), (0,))])
        >>> print(*reshaped_arrays(held, [ShardedObject("rng", None, (2,), (rank,)) for rank in range(2)]))
        'rng': objects of shape (1,), asked for in shape (2,)
    """
    requests = dict.fromkeys((item.key, item.global_shape) for item in targets if item.key in arrays)
    return tuple(
        ShapeChange(key, arrays[key].all_shapes, shape)
        for key, shape in requests
        if arrays[key].shape_as(shape) is None
    )


def check_ruled(arrays: Iterable[ShapeChange], rules: Mapping[str, ObjectRule]) -> None:
    """Raise unless each array of objects that changes its shape has a rule, and both its shapes are unambiguous.

    Args:
        arrays: Arrays of objects that change their shape.
        rules: Rule of each key.

    Raises:
        IntegrityError: An array has no rule, or an ambiguous shape; the error names each of them.

    Examples:
        >>> check_ruled([ShapeChange("rng", ((1,),), (2,))], {"rng": max})
    """
    arrays = list(arrays)
    lacking = [str(array) for array in arrays if array.key not in rules]
    if lacking:
        heading, fix = "arrays of objects change shape, but no rule covers them", f"Pass a rule: {OBJECT_RULES}."
        raise IntegrityError(error_text(heading, offenders=lacking, fix=fix))
    unclear = [str(array) for array in arrays if len(array.stored) > 1 or min(array.asked, default=0) < 0]
    if unclear:
        heading, fix = "these arrays of objects have ambiguous shapes", "Give each key one global_shape, without -1."
        raise IntegrityError(error_text(heading, offenders=unclear, fix=fix))


def objects_by_rule(
    arrays: Mapping[str, HeldArrays], targets: Iterable[ShardedObject], rules: Mapping[str, ObjectRule]
) -> list[ShardedObject]:
    """Return the targets with copies of the source's data; the key's rule converts an array if its shape changes.

    Args:
        arrays: Arrays of the source, by key; each target's key is among them.
        targets: Requested objects.
        rules: Rule of each key whose array changes its shape.

    Raises:
        IntegrityError: An object has no main replica in the source.
        ShapeError: A rule returns more or fewer values than the requested array has objects.
        UnsupportedValue: A value can't be copied, or a rule can't handle it.

    Examples:
        >>> held = held_arrays([ShardedObject("rng", 7, (1,), (0,))])
        >>> objects_by_rule(held, [ShardedObject("rng", None, (1,), (0,))], {})[0].data
        7
    """
    values: dict[tuple[str, Shape], Mapping[Shape, Any]] = {}
    objects = []
    for item in targets:
        array = (item.key, item.global_shape)
        # A rule runs once for each array, not for each target: it may be slow, and call a user's function.
        if array not in values:
            values[array] = _values(arrays[item.key], *array, rules)
        value = values[array].get(item.global_offset, _MISSING)
        if value is _MISSING:
            where, fix = f"at {item.global_offset}, global shape {item.global_shape}", "Pass the objects of all ranks."
            raise IntegrityError(error_text(f"objects {item.key!r}: no main replica {where}", fix=fix))
        name = f"the object {item.key!r} at {item.global_offset}"
        # Each target gets a copy: replicas and a rule's repeated values would share mutable state.
        objects.append(item if value is HOLE else replace(item, data=own_copy(value, name)))
    return objects


_MISSING = object()


def _values(arrays: HeldArrays, key: str, shape: Shape, rules: Mapping[str, ObjectRule]) -> Mapping[Shape, Any]:
    """Return a key's values in a shape, by cell: stored values if the source has this shape, or else a rule's."""
    same = arrays.shape_as(shape)
    if same is not None:
        return {cell: item.data for cell, item in arrays.mains.get(same, {}).items()}
    (source,) = arrays.all_shapes
    return dict(zip(cells_of(shape), apply_rule(arrays.whole(key, source), rules[key], shape), strict=True))
