"""Sharded objects that are asked for in another shape than is stored: which those are, and what rules make of them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ...layouts import (
    ObjectRule,
    check_ruled,
    drop_objects,
    held_arrays,
    objects_by_rule,
    reshaped_arrays,
    rules_by_key,
)
from ...mapping import ShardedObject
from ...plans import Misfit, find_unexpected
from ...strategies import Checkpoint, Strategies, StrategyAction, find_strategy, old_unique_key
from ...strategies.index import IndexMetadata
from .._dispatch import Choice, backend_of, common_backend, sharded_backend
from .._open import Metadata


@dataclass(frozen=True, slots=True, eq=False)
class ObjectsFit:
    """How the objects that are asked for fit those that are stored.

    Attributes:
        problems: why some can't be loaded.
        reshaped: the arrays that change their shape, as (key, shape that is asked for).
        stored: all cells that are stored of such arrays, without data.
        rules: by key, for them.
    """

    problems: tuple[Misfit, ...] = ()
    reshaped: frozenset[tuple[str, tuple[int, ...]]] = frozenset()
    stored: tuple[ShardedObject, ...] = ()
    rules: Mapping[str, ObjectRule] = field(default_factory=dict)

    def changes(self, item: ShardedObject) -> bool:
        """Return whether a target's object is of an array that changes its shape."""
        return (item.key, item.global_shape) in self.reshaped

    @property
    def read(self) -> list[ShardedObject]:
        """The stored cells that rules look at."""
        return [item for item in self.stored if self.rules[item.key] is not drop_objects]


def objects_metadata(
    checkpoint: Checkpoint, metadata: Metadata, choice: Choice, strategies: Strategies | None
) -> Metadata | None:
    """Return what the format holds that a checkpoint's objects are in; None where it doesn't tell.

    Args:
        checkpoint: what is loaded.
        metadata: what the format of the tensors holds.
        choice: the caller's, of how shards are loaded.
        strategies: the dispatch table; None for the process's.
    """
    backend = backend_of(choice, sharded_backend(checkpoint.fields))
    if find_strategy(StrategyAction.LOAD_OBJECTS, *backend, strategies=strategies) is not None:
        return metadata
    row = (StrategyAction.LOAD_METADATA, *common_backend(checkpoint.fields))
    fallback = find_strategy(*row, strategies=strategies)
    return None if fallback is None else fallback(checkpoint)


def fit_objects(
    objects: Sequence[ShardedObject],
    metadata: Metadata | None,
    rules: Mapping[str, ObjectRule] | None,
    others: Iterable[str] = (),
) -> ObjectsFit:
    """Return how a target's objects fit those that are stored, as far as the format that holds them tells.

    Args:
        objects: what is asked for.
        metadata: what is stored, None where nobody knows.
        rules: by patterns of keys.
        others: keys that rules may name beside those that are stored and asked for.

    Raises:
        TreeError: a rule's pattern fits no key.
        IntegrityError: there is a rule, but it isn't clear from which shape to which.
    """
    if metadata is None or not (objects or rules):
        return ObjectsFit()
    absent = [item for item in objects if item.unique_key not in metadata]
    stored = stored_objects(metadata, {item.key for item in absent})
    held = held_arrays(stored)
    asked = {item.key for item in objects}
    chosen = rules_by_key("load: object_rules", rules, asked.union(others, _keys(metadata))) if rules else {}
    changed = reshaped_arrays(held, absent)
    check_ruled([array for array in changed if array.key in chosen], chosen)
    reshaped = frozenset((array.key, array.asked) for array in changed)
    unexpected = [
        item.unique_key
        for item in absent
        if (item.key, item.global_shape) not in reshaped and old_unique_key(item) not in metadata
    ]
    problems = find_unexpected(unexpected, metadata, is_object=True) if unexpected else ()
    unruled = (array for array in changed if array.key not in chosen)
    keys = {key for key, _ in reshaped}
    cells = tuple(item for item in stored if item.key in keys)
    return ObjectsFit((*problems, *unruled), reshaped, cells, chosen)


def stored_objects(metadata: Metadata, keys: Collection[str]) -> list[ShardedObject]:
    """Return the stored cells of some arrays of objects, without data."""
    if not keys:
        return []
    if isinstance(metadata, IndexMetadata):
        return metadata.objects(keys)
    return [item for item in metadata.values() if isinstance(item, ShardedObject) and item.key in keys]


def _keys(metadata: Metadata) -> set[str]:
    if isinstance(metadata, IndexMetadata):
        return metadata.object_keys()
    return {item.key for item in metadata.values() if isinstance(item, ShardedObject)}


def reshaped_values(fit: ObjectsFit, objects: Sequence[ShardedObject], read: Sequence[Any]) -> list[Any]:
    """Return what rules make of stored objects, a value for each of a target's objects that they concern.

    Args:
        fit: how the target's objects fit.
        objects: those of arrays that change their shape.
        read: the data of `fit.read`.

    Raises:
        IntegrityError: a cell isn't stored, or values that should be equal aren't.
        ShapeError: a rule gives more or fewer values than there are cells.
        UnsupportedValue: a rule can't handle a value.
    """
    filled = [replace(item, data=data) for item, data in zip(fit.read, read, strict=True)]
    dropped = [item for item in fit.stored if fit.rules[item.key] is drop_objects]
    return [item.data for item in objects_by_rule(held_arrays([*filled, *dropped]), objects, fit.rules)]
