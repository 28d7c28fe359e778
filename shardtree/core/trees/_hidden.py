"""Search inside values that tree maps don't enter, and the error for shards that are hidden there."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from types import BuiltinFunctionType, FunctionType, MemberDescriptorType, ModuleType
from typing import Any

import numpy as np
import optree
import torch

from ...errors import UnsupportedValue, error_text, render_path
from ..lazy import LazyTensor
from ..mapping import LocalNonpersistentObject, ShardedBase, ShardedObject
from ._nodes import LEAVES, NAMESPACE, Tree, flatten_with_kinds

_DEEPEST = 100  # levels of the search for hidden shards; the codec refuses deeper values anyway
SCALARS = frozenset((type(None), bool, int, float, complex, str, bytes, torch.Size, torch.dtype))
PLAIN = SCALARS | {torch.Tensor, torch.nn.Parameter}
OPAQUE = (type, ModuleType, FunctionType, BuiltinFunctionType, torch.Tensor, LazyTensor, np.ndarray, np.generic)
"""Types of values that hold no shards, or are pickled by name. Arrays of objects are searched nevertheless."""
_VISIBLE = LEAVES | PLAIN | {ShardedObject, LocalNonpersistentObject, LazyTensor}
"""Types of leaves that a tree map doesn't search."""

REGISTRATION = f"`optree.register_pytree_node(cls, flatten, unflatten, namespace={NAMESPACE!r})`."
REGISTER = (
    "For a class of yours, pass a dict of the fields, such as `vars(value)`, or register the class: a dataclass by "
    f"`shardtree.trees.register_dataclass(cls)`, another class by {REGISTRATION}"
)
HIDDEN = "shards hidden in values"


def flatten_visible(tree: Tree) -> tuple[list[Any], optree.PyTreeSpec]:
    """Return a tree's leaves and structure, with shards as leaves, after checking that no leaf hides shards.

    Raises:
        UnsupportedValue: Shards lie in values that aren't nodes, such as an instance of a class that isn't registered.

    Examples:
        >>> flatten_visible({"b": 1, "a": (2, 3)})[0]
        [2, 3, 1]
    """
    leaves, spec, kinds = flatten_with_kinds(tree)
    # One search for all leaves, so that contents that many of them share are searched once.
    if not kinds <= _VISIBLE and hides_shards(*[leaf for leaf in leaves if type(leaf) not in _VISIBLE]):
        hosts = [(path, leaf) for path, leaf in zip(spec.paths(), leaves, strict=True) if hides_shards(leaf)]
        fix = "Put shards in dicts, lists or tuples: no other value is searched."
        fix += f" {REGISTER}" * any(type(leaf).__module__ != "builtins" for _, leaf in hosts)
        names = [f"{render_path(path)}: {type(leaf).__name__}" for path, leaf in hosts]
        raise UnsupportedValue(error_text(HIDDEN, offenders=names, fix=fix))
    return leaves, spec


def hides_shards(*leaves: Any) -> bool:
    """Return whether shards or local objects lie inside of leaves, where tree maps miss them.

    Examples:
        >>> hides_shards({1, 2}, LocalNonpersistentObject(3)), hides_shards({LocalNonpersistentObject(3)})
        (False, True)
    """
    inner = chain.from_iterable(inside(leaf) for leaf in leaves if type(leaf) not in _VISIBLE)
    return any(isinstance(value, (ShardedBase, LocalNonpersistentObject)) for value in reachable(inner))


def inside(value: Any) -> Iterable[Any]:
    """Return the values directly inside a value: a container's items, or else the attributes, slots included."""
    if isinstance(value, np.ndarray) and value.dtype == object:
        return value.flat
    if type(value) in PLAIN or isinstance(value, OPAQUE):
        return ()
    if isinstance(value, Mapping):
        return value.values()
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        return value
    if isinstance(value, ShardedObject):
        return (value.data,)
    slots = (name for kind in type(value).__mro__ for name in _slot_names(kind))
    # Only the descriptors of slots are read by getattr, since a property may run any code.
    return [*getattr(value, "__dict__", {}).values(), *(getattr(value, name, None) for name in slots)]


def _slot_names(kind: type) -> Iterable[str]:
    slots = vars(kind).get("__slots__", ())
    names = (slots,) if isinstance(slots, str) else tuple(slots)
    return (name for name in names if isinstance(vars(kind).get(name), MemberDescriptorType))


def reachable(values: Iterable[Any], into: Any = object) -> Iterator[Any]:
    """Yield values and everything inside them, each object once, so that cycles end.

    Args:
        values: Values at which the search begins.
        into: Class or classes whose instances are entered; other values are yielded, but not searched.
    """
    seen: set[int] = set()
    left = [(value, 0) for value in values]
    while left:
        value, depth = left.pop()
        if id(value) not in seen:
            seen.add(id(value))
            yield value
            if depth < _DEEPEST and isinstance(value, into):
                left += [(inner, depth + 1) for inner in inside(value)]
