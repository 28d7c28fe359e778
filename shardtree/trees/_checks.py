"""Whether something is a tree whose shards are found: what is done with whole trees asks this first."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any

import torch

from ..errors import TreeError, TreePath, UnsupportedValue, error_text, render_path
from ..mapping import LocalNonpersistentObject, ShardedBase, ShardedObject

_DEEPEST = 100  # levels that are searched for hidden shards; the codec stores no deeper ones


def check_is_tree(doing: str, tree: Any) -> None:
    """Raise unless this is a container.

    Args:
        doing: what is being done, for the message.
        tree: what should be one.

    Raises:
        TreeError: it isn't a dict, list or tuple.

    Examples:
        >>> check_is_tree("save", {"step": 3})
    """
    if not isinstance(tree, (dict, list, tuple)):
        expected = "a dict, list or tuple of shards"
        raise TreeError(error_text(f"{doing}: not a tree", found=type(tree).__name__, expected=expected))


@contextmanager
def told_of_depth(doing: str) -> Iterator[None]:
    """Say what running out of stack means.

    Args:
        doing: what is being done, for the message.

    Raises:
        TreeError: there was no stack left.
    """
    try:
        yield
    except RecursionError:
        raise TreeError(error_text(f"{doing}: the tree is too deep, or contains itself", fix="Flatten it.")) from None


def refuse_hidden(doing: str, leaves: Sequence[tuple[TreePath, Any]]) -> None:
    """Raise where a shard or local object lies in a value that trees don't enter: it would be taken for a plain value.

    Raises:
        UnsupportedValue: names every such place.

    Examples:
        >>> refuse_hidden("save", [(("options",), {1, 2})])
    """
    hidden = [f"{render_path(path)}: {type(leaf).__name__}" for path, leaf in leaves if _holds_shards(_inside(leaf))]
    if hidden:
        fix = "Put shards and local objects in dicts, lists and tuples; those are entered."
        raise UnsupportedValue(error_text(f"{doing}: shards hidden in values", offenders=hidden, fix=fix))


def refuse_dtensors(doing: str, leaves: Sequence[tuple[TreePath, Any]]) -> None:
    """Raise where a leaf is a DTensor: it is a part of a tensor, and would be taken for a plain value.

    Raises:
        TreeError: names every such place.

    Examples:
        >>> refuse_dtensors("save", [(("step",), torch.tensor(3))])
    """
    # Told by an attribute: importing the class would load torch.distributed.
    cut = [render_path(path) for path, leaf in leaves if isinstance(leaf, torch.Tensor) and hasattr(leaf, "placements")]
    if cut:
        fix = "Use `from_dtensors` of shardtree.interop.dtensor on each rank's tree: DTensors know their own layout."
        raise TreeError(error_text(f"{doing}: DTensors where shards are meant", offenders=cut, fix=fix))


def _inside(value: Any) -> Iterable[Any]:
    """Return what a value holds, of the kinds of value that can hold shards and aren't trees."""
    if isinstance(value, Namespace):
        return vars(value).values()
    if isinstance(value, (set, frozenset)):
        return value
    if isinstance(value, ShardedObject):
        return (value.data,)
    if is_dataclass(value) and not isinstance(value, (type, ShardedBase)):
        return [getattr(value, field.name, None) for field in fields(value)]
    return ()


def _holds_shards(values: Iterable[Any], depth: int = 0) -> bool:
    if depth > _DEEPEST:
        return False
    for value in values:
        if isinstance(value, (ShardedBase, LocalNonpersistentObject)):
            return True
        inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else None
        if _holds_shards(_inside(value) if inner is None else inner, depth + 1):
            return True
    return False
