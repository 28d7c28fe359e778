"""Comparison of a target's objects with the stored ones, and rules for arrays that are stored in another shape.

An array is the global array of all objects with one key, and its cells are the single objects. If the target has the
array in another shape than the stored one, a rule from `LoadOptions.object_rules` computes the cells to load.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ....core.deferred import leaf
from ....core.layouts import (
    ObjectRule,
    check_ruled,
    held_arrays,
    objects_by_rule,
    reshaped_arrays,
    rules_by_key,
)
from ....core.mapping import ShardedObject
from ....core.plans import Misfit, find_unexpected
from ...table import old_unique_key
from ...table.index import IndexMetadata
from .._open import Metadata


@dataclass(frozen=True, slots=True, eq=False)
class ObjectsFit:
    """The result of comparing a target's objects with the stored ones.

    Attributes:
        problems: The reasons why some objects can't be loaded.
        arrays: The arrays of objects that are stored in another shape than the target's, as (key, target's shape).
        cells: All stored objects of these arrays, one for each cell of an array, without data.
        rules: The rules for these arrays, by key.
    """

    problems: tuple[Misfit, ...] = ()
    arrays: frozenset[tuple[str, tuple[int, ...]]] = frozenset()
    cells: tuple[ShardedObject, ...] = ()
    rules: Mapping[str, ObjectRule] = field(default_factory=dict)

    def changes(self, item: ShardedObject) -> bool:
        """Return whether a target's object belongs to an array that is stored in another shape."""
        return (item.key, item.global_shape) in self.arrays

    @property
    def cells_to_read(self) -> list[ShardedObject]:
        """The stored cells whose data the rules need; the rule `drop_objects` needs none of its array's cells."""
        drop_objects = leaf("drop_objects")
        return [item for item in self.cells if self.rules[item.key] is not drop_objects]


def fit_objects(
    objects: Sequence[ShardedObject],
    metadata: Metadata | None,
    rules: Mapping[str, ObjectRule] | None,
    others: Iterable[str] = (),
) -> ObjectsFit:
    """Compare a target's objects with the stored ones.

    Args:
        objects: The target's objects.
        metadata: The stored tensors and objects; None if the format can't list them, and then no problems are found.
        rules: Rules that convert arrays to another shape, by patterns of keys.
        others: Keys that were left out of the target; patterns of rules may match them, too.

    Raises:
        TreeError: A rule's pattern matches no key.
        IntegrityError: An array with a rule is stored in several shapes, or is requested in a shape with an unknown
            length (-1).
    """
    if metadata is None or not (objects or rules):
        return ObjectsFit()
    absent = [item for item in objects if item.unique_key not in metadata]
    items = stored_objects(metadata, {item.key for item in absent})
    arrays = held_arrays(items)
    own_keys = {item.key for item in objects}
    rules_of = rules_by_key("load: object_rules", rules, own_keys.union(others, _keys(metadata))) if rules else {}
    changes = reshaped_arrays(arrays, absent)
    check_ruled([array for array in changes if array.key in rules_of], rules_of)
    pairs = frozenset((array.key, array.asked) for array in changes)
    unexpected = [
        item.unique_key
        for item in absent
        # Old releases of Megatron-Core truncated objects' names; an object that is stored under such a name isn't
        # unexpected.
        if (item.key, item.global_shape) not in pairs and old_unique_key(item) not in metadata
    ]
    problems = find_unexpected(unexpected, metadata, is_object=True) if unexpected else ()
    without_rule = (array for array in changes if array.key not in rules_of)
    keys = {key for key, _ in pairs}
    cells = tuple(item for item in items if item.key in keys)
    return ObjectsFit((*problems, *without_rule), pairs, cells, rules_of)


def stored_objects(metadata: Metadata, keys: Collection[str]) -> list[ShardedObject]:
    """Return the stored cells of arrays of objects with the given keys, without data."""
    if not keys:
        return []
    if isinstance(metadata, IndexMetadata):
        return metadata.objects(keys)
    return [item for item in metadata.values() if isinstance(item, ShardedObject) and item.key in keys]


def _keys(metadata: Metadata) -> set[str]:
    if isinstance(metadata, IndexMetadata):
        return metadata.object_keys()
    return {item.key for item in metadata.values() if isinstance(item, ShardedObject)}


def reshaped_values(fit: ObjectsFit, objects: Sequence[ShardedObject], values: Sequence[Any]) -> list[Any]:
    """Return the values that the rules of `fit` compute from stored objects, one for each object in `objects`.

    Args:
        fit: The result of `fit_objects`.
        objects: The target's objects whose arrays are stored in another shape.
        values: The data of each cell in `fit.cells_to_read`.

    Raises:
        IntegrityError: A cell isn't stored, or values that must be equal differ.
        ShapeError: A rule returns a wrong number of values.
        UnsupportedValue: A rule can't handle a value.
    """
    cells = [replace(item, data=data) for item, data in zip(fit.cells_to_read, values, strict=True)]
    others = [item for item in fit.cells if fit.rules[item.key] is leaf("drop_objects")]
    return [item.data for item in objects_by_rule(held_arrays([*cells, *others]), objects, fit.rules)]
