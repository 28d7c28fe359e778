"""Checks of whole trees: that a value is a tree, and that no shard or DTensor in it would be overlooked."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import is_dataclass
from types import BuiltinFunctionType, FunctionType, MemberDescriptorType, ModuleType
from typing import Any

import numpy as np
import torch

from ..errors import TreeError, TreePath, UnsupportedValue, error_text, render_path
from ..mapping import LocalNonpersistentObject, ShardedBase, ShardedObject
from ._nodes import NAMESPACE, TOO_DEEP, entries

_DEEPEST = 100  # levels that are searched for hidden shards; the codec refuses deeper values anyway
_PLAIN = frozenset((type(None), bool, int, float, complex, str, bytes, torch.Tensor, torch.Size, torch.dtype))
_CLOSED = (type, ModuleType, FunctionType, BuiltinFunctionType, torch.Tensor, np.ndarray, np.generic)
"""Values that hold no shards, or are pickled by name."""
_REGISTER = (
    "Of a class of yours, pass a dict of its fields (`vars` gives one), or register the class: "
    f"`optree.register_pytree_node(cls, flatten, unflatten, namespace={NAMESPACE!r})`."
)


def check_is_tree(doing: str, tree: Any) -> None:
    """Raise unless this is a container.

    Args:
        doing: what is being done, for the message.
        tree: what should be one.

    Raises:
        TreeError: it isn't a dict, list, tuple, or node of a class that is registered with optree.

    Examples:
        >>> check_is_tree("save", {"step": 3})
    """
    if not isinstance(tree, (dict, list, tuple)) and (isinstance(tree, deque) or entries(tree) is None):
        expected, fix = "a dict, list or tuple of shards", _REGISTER if is_dataclass(tree) else None
        raise TreeError(error_text(f"{doing}: not a tree", found=type(tree).__name__, expected=expected, fix=fix))


@contextmanager
def refuse_too_deep(doing: str) -> Iterator[None]:
    """Name the operation in errors about trees that are too deep.

    Args:
        doing: what is being done, for the message.

    Raises:
        TreeError: the tree exceeded Python's recursion limit.
    """
    try:
        yield
    except RecursionError:
        raise TreeError(error_text(f"{doing}: {TOO_DEEP}", fix="Flatten it.")) from None
    except TreeError as error:
        if not str(error).startswith(TOO_DEEP):
            raise
        raise TreeError(f"{doing}: {error}") from None


def refuse_hidden(doing: str, leaves: Sequence[tuple[TreePath, Any]]) -> None:
    """Raise where a shard or local object lies in a value that tree maps don't enter: it would count as plain.

    Raises:
        UnsupportedValue: names every such place.

    Examples:
        >>> refuse_hidden("save", [(("options",), {1, 2})])
    """
    hidden = [(path, leaf) for path, leaf in leaves if type(leaf) not in _PLAIN and _holds_shards(_inside(leaf), set())]
    if hidden:
        fix = "Put shards and local objects in dicts, lists and tuples; those are entered."
        fix += f" {_REGISTER}" * any(is_dataclass(leaf) and not isinstance(leaf, ShardedBase) for _, leaf in hidden)
        names = [f"{render_path(path)}: {type(leaf).__name__}" for path, leaf in hidden]
        raise UnsupportedValue(error_text(f"{doing}: shards hidden in values", offenders=names, fix=fix))


def refuse_dtensors(doing: str, leaves: Sequence[tuple[TreePath, Any]]) -> None:
    """Raise where a leaf is a DTensor: it is a part of a tensor, and would be saved as a plain value.

    Raises:
        TreeError: names every such place.

    Examples:
        >>> refuse_dtensors("save", [(("step",), torch.tensor(3))])
    """
    # Recognised by an attribute: importing the class would load torch.distributed.
    cut = [render_path(path) for path, leaf in leaves if isinstance(leaf, torch.Tensor) and hasattr(leaf, "placements")]
    if cut:
        fix = "Use `from_dtensors` of shardtree.interop.dtensor on each rank's tree: DTensors know their own layout."
        raise TreeError(error_text(f"{doing}: DTensors where shards are meant", offenders=cut, fix=fix))


def _inside(value: Any) -> Iterable[Any]:
    """Return what a value that tree maps don't enter holds: its items, or what a pickle of it would include."""
    if type(value) in _PLAIN or isinstance(value, _CLOSED):
        return ()
    if isinstance(value, Mapping):
        return value.values()
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        return value
    if isinstance(value, ShardedObject):
        return (value.data,)
    slots = (name for kind in type(value).__mro__ for name in _slot_names(kind))
    # Only slots' descriptors are read by getattr: a property may run any code.
    return [*getattr(value, "__dict__", {}).values(), *(getattr(value, name, None) for name in slots)]


def _slot_names(kind: type) -> Iterable[str]:
    names = vars(kind).get("__slots__", ())
    found = (names,) if isinstance(names, str) else tuple(names)
    return (name for name in found if isinstance(vars(kind).get(name), MemberDescriptorType))


def _holds_shards(values: Iterable[Any], seen: set[int], depth: int = 0) -> bool:
    """Return whether a shard lies anywhere below; `seen` holds the ids of visited values, which ends cycles."""
    if depth > _DEEPEST:
        return False
    for value in values:
        if isinstance(value, (ShardedBase, LocalNonpersistentObject)):
            return True
        if type(value) in _PLAIN or id(value) in seen:
            continue
        seen.add(id(value))
        if _holds_shards(_inside(value), seen, depth + 1):
            return True
    return False
