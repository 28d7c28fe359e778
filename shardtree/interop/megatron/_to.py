"""to_megatron: a tree with our leaves becomes one with Megatron-Core's."""

from __future__ import annotations

from dataclasses import MISSING, fields
from functools import partial
from typing import Any

from ...errors import CheckpointingException, TreePath, UnsupportedValue, error_text, render_path
from ...mapping import LocalNonpersistentObject, ShardedBase, ShardedTensorFactory
from ...trees import shard_leaves
from ._functions import build_for_them, merge_for_them
from ._kinds import describe_failure

_FLAT = "Flat shards went with Megatron-Core 0.16: save the tree here, whose formats hold them, or unflatten it first."


def to_megatron(tree: Any, *, mapping: Any = None) -> Any:
    """Return the tree with Megatron-Core's shards, objects and factories in the place of ours.

    Containers are new; tensors are shared. The factories build with factories inside applied, and merge those too.

    Args:
        tree: dicts and lists of our leaves and plain values.
        mapping: the module with Megatron-Core's classes, of a fork for example; the installed
            `megatron.core.dist_checkpointing.mapping` by default, which only this function imports.

    Raises:
        UnsupportedValue: that version of Megatron-Core can't hold a shard: it is flat, or stands in a tuple, which
            Megatron-Core doesn't look into. Names its key and path.
        CheckpointingException: Megatron-Core isn't installed.

    Examples:
        >>> to_megatron({"step": 3}, mapping=object())
        {'step': 3}

    References:
        megatron.core.dist_checkpointing.mapping, megatron-core 0.16.1.
    """
    classes = _installed() if mapping is None else mapping
    pairs, rebuild = shard_leaves(tree)
    return rebuild([_to_leaf(classes, tree, path, leaf) for path, leaf in pairs])


def _installed() -> Any:
    try:
        from megatron.core.dist_checkpointing import mapping
    except ImportError as error:
        what, fix = "to_megatron: Megatron-Core can't be imported", "pip install megatron-core, or pass mapping=..."
        raise CheckpointingException(error_text(what, found=error, fix=fix)) from error
    return mapping


def _to_leaf(classes: Any, tree: Any, path: TreePath, leaf: Any) -> Any:
    if not isinstance(leaf, (ShardedBase, LocalNonpersistentObject)):
        return leaf
    kind = type(leaf).__name__
    try:
        _check_place(tree, path)
        return _like(getattr(classes, kind), leaf, partial(to_megatron, mapping=classes))
    except Exception as error:  # Megatron-Core's errors have no base in common with ours
        fix = _FLAT if getattr(leaf, "flattened_range", None) is not None else None
        raise UnsupportedValue(describe_failure("to_megatron", kind, leaf, path, error, fix)) from error


def _check_place(tree: Any, path: TreePath) -> None:
    for depth, entry in enumerate(path):
        if not isinstance(tree, (dict, list)):
            what = f"Megatron-Core looks for shards in dicts and lists alone: {render_path(path[:depth])}"
            raise UnsupportedValue(error_text(what, found=type(tree).__name__, fix="Use a list."))
        tree = tree[entry]


def _like(cls: type, ours: Any, convert: Any) -> Any:
    """Return Megatron-Core's leaf with the fields of one of ours."""
    if isinstance(ours, LocalNonpersistentObject):
        return cls(ours.obj)
    values = {field.name: getattr(ours, field.name) for field in fields(ours)}
    if isinstance(ours, ShardedTensorFactory):
        values |= {"build_fn": build_for_them(ours, convert), "merge_fn": merge_for_them(ours)}
    known = {field.name for field in fields(cls)}
    for field in fields(ours):
        if field.name not in known and (field.default is MISSING or values[field.name] != field.default):
            what = f"{cls.__module__}.{cls.__name__} has no field {field.name!r}"
            raise UnsupportedValue(error_text(what, found=values[field.name], expected="nothing to say there"))
    return cls(**{name: value for name, value in values.items() if name in known})
