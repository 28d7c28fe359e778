"""Checks of whole trees: a value must be a tree, and must not hide shards or tensors from functions over trees."""

from __future__ import annotations

from argparse import Namespace
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import is_dataclass
from typing import Any, Final

import torch
from torch.nn.parameter import is_lazy

from ...errors import TreeError, TreePath, UnsupportedValue, error_text, render_path
from ..lazy import LazyTensor
from ..mapping import (
    SHAPE_FIX,
    LocalNonpersistentObject,
    ShardedBase,
    ShardedObject,
    ShardedTensor,
    is_wrapper,
    lacks_memory,
    without_shape,
)
from ._hidden import HIDDEN, PLAIN, REGISTER, REGISTRATION, SCALARS, inside, reachable
from ._join import Record
from ._nodes import TOO_DEEP, entries, subclasses

_BY_VALUE = (dict, list, tuple, deque, set, frozenset, Namespace, Record)
"""Containers that are stored item by item, each item as if it were outside of the container."""
_OURS = (ShardedBase, LocalNonpersistentObject, LazyTensor, Record)


def check_is_tree(doing: str, tree: Any) -> None:
    """Raise unless a value is a tree, whose shards are all in containers that functions over trees enter.

    Args:
        doing: Name of the operation, for the message.
        tree: Value to check.

    Raises:
        TreeError: The value isn't a dict, list, tuple, or node of a class that is registered with optree; or the tree
            is too deep.
        UnsupportedValue: Shards or local objects lie in a subclass of dict, list or deque that isn't registered; the
            error names all such containers.

    Examples:
        >>> check_is_tree("save", {"step": 3})
    """
    if not isinstance(tree, (dict, list, tuple)) and (isinstance(tree, deque) or entries(tree) is None):
        expected, fix = "a dict, list or tuple of shards", REGISTER if is_dataclass(tree) else None
        raise TreeError(error_text(f"{doing}: not a tree", found=type(tree).__name__, expected=expected, fix=fix))
    with refuse_too_deep(doing):
        unknown = subclasses(tree)
    # A load would return the dict or list that they derive from. A subclass without shards is a value for the codec.
    nodes = [(path, node) for path, node in unknown if any(map(_is_part, reachable([node])))]
    if nodes:
        names = [f"{render_path(path)}: {type(node).__name__}" for path, node in nodes]
        base = next(kind.__name__ for kind in (dict, list, deque) if isinstance(nodes[0][1], kind))
        heading, fix = (
            f"{doing}: shards in subclasses of dict, list or deque",
            f"Pass `{base}(value)`, or register the class: {REGISTRATION}",
        )
        raise UnsupportedValue(error_text(heading, offenders=names, fix=fix))


@contextmanager
def refuse_too_deep(doing: str) -> Iterator[None]:
    """Return a context manager that puts the operation's name before errors about deep trees and hidden shards.

    Args:
        doing: Name of the operation.

    Raises:
        TreeError: The tree exceeded Python's recursion limit.
        UnsupportedValue: Shards are hidden in leaves, as in an instance of a class that isn't registered.
    """
    try:
        yield
    except RecursionError:
        raise TreeError(error_text(f"{doing}: {TOO_DEEP}", fix="Flatten the tree.")) from None
    except (TreeError, UnsupportedValue) as error:
        if not str(error).startswith((TOO_DEEP, HIDDEN)):
            raise
        raise type(error)(f"{doing}: {error}") from None


def refuse_hidden(doing: str, leaves: Sequence[tuple[TreePath, Any]]) -> None:
    """Raise if a leaf hides shards or tensors from functions over trees: they would be lost, or stored as plain values.

    Args:
        doing: Name of the operation, for the message.
        leaves: Path and value of each leaf.

    Raises:
        TreeError: Leaves are sharded tensors of another library (DTensors, Megatron-Core's leaves, JAX's arrays), or
            objects with a state_dict; the error names all of them, and the values to pass instead.
        UnsupportedValue: A leaf is a shard whose data is a wrapper subclass; the error names all such shards, and no
            other leaves.
        UnsupportedValue: A leaf contains shards, local objects, DTensors or Megatron-Core's leaves; or it is, or
            contains, an instance of a dataclass or attrs class with tensors. The error names all such leaves.

    Examples:
        >>> refuse_hidden("save", [(("options",), {1, 2})])
    """
    refuse_wrappers(doing, leaves)
    others = [(path, leaf) for path, leaf in leaves if type(leaf) not in PLAIN and type(leaf) is not ShardedTensor]
    forms = {path: form for path, leaf in others if (form := _other_form(leaf))}
    if forms:
        heading, fix = f"{doing}: leaves must be shards or plain values", " ".join(dict.fromkeys(forms.values()))
        names = [f"{render_path(path)}: {type(leaf).__name__}" for path, leaf in others if path in forms]
        raise TreeError(error_text(heading, offenders=names, fix=fix))
    hosts = [(path, leaf) for path, leaf in others if _hides_any(leaf)]
    if hosts:
        fix = "Put shards, tensors and LocalNonpersistentObjects in dicts, lists or tuples: no other value is searched."
        fix += f" {REGISTER}" * any(_has_fields(leaf) for _, leaf in hosts)
        names = [f"{render_path(path)}: {_named_type(leaf)}" for path, leaf in hosts]
        raise UnsupportedValue(error_text(f"{doing}: shards or tensors hidden in values", offenders=names, fix=fix))


def _named_type(leaf: Any) -> str:
    if not isinstance(leaf, ShardedObject):
        return type(leaf).__name__
    return f"{type(leaf.data).__name__}, data of the ShardedObject {leaf.key!r}"


def refuse_wrappers(doing: str, leaves: Sequence[tuple[TreePath, Any]]) -> None:
    """Raise if the data of a shard is a wrapper subclass, whose elements are in its inner tensors.

    Args:
        doing: Name of the operation, for the message.
        leaves: Path and value of each leaf.

    Raises:
        UnsupportedValue: Such shards exist; the error names all of them with their classes.

    Examples:
        >>> refuse_wrappers("save", [(("w",), ShardedTensor.from_rank_offsets("w", torch.zeros(2)))])
    """
    wrappers = [
        (path, leaf)
        for path, leaf in leaves
        if type(leaf) is ShardedTensor and type(leaf.data) not in PLAIN and is_wrapper(leaf.data)
    ]
    if wrappers:
        names = [f"{leaf.key!r} at {render_path(path)}: {type(leaf.data).__name__}" for path, leaf in wrappers]
        fix = "Pass their inner tensors (`__tensor_flatten__` names them) as shards of their own, or their values as"
        fix += " plain tensors (as torchao's `dequantize()` returns them)."
        if any(_is_dtensor(leaf.data) for _, leaf in wrappers):
            fix += " `from_dtensors` of shardtree.interop.dtensor makes shards of DTensors."
        heading = f"{doing}: shards hold tensors of wrapper subclasses, whose elements are in inner tensors"
        raise UnsupportedValue(error_text(heading, offenders=names, fix=fix))


def _other_form(leaf: Any) -> str:
    """Return advice on the value to pass instead of a leaf; an empty string if the leaf is allowed."""
    kind = type(leaf)
    if _is_dtensor(leaf):
        return "Use `from_dtensors` of shardtree.interop.dtensor on each rank's tree: DTensors know their own layout."
    if megatron_kind(leaf) is not None:
        return "Use `from_megatron` of shardtree.interop.megatron on each rank's tree: it converts its leaves."
    if hasattr(kind, "sharding") and hasattr(kind, "dtype"):
        return "Use `from_jax` of shardtree.interop.jax: it makes shards of JAX's arrays, also of abstract arrays."
    if hasattr(kind, "state_dict") and hasattr(kind, "load_state_dict"):
        return "Put its state_dict() there instead, and pass the loaded value to its load_state_dict."
    return ""


def _hides_any(leaf: Any) -> bool:
    """Return whether shards lie inside a leaf, or tensors in an instance of a dataclass or attrs class.

    Such an instance would lose its class. DTensors, Megatron-Core's leaves and local objects count as shards.
    """
    if any(map(_is_part, reachable(inside(leaf)))):
        return True
    # One search for all values, so that contents that many of them share are searched once.
    return holds_tensors([value for value in reachable([leaf], into=_BY_VALUE) if _has_fields(value)])


# The classes are recognised by names and attributes, since importing them would load torch.distributed, or need
# Megatron-Core. A name alone isn't enough: torch.distributed has a ShardedTensor too.
_MEGATRON: Final = {
    "ShardedTensor": ("key", "data", "local_shape", "global_shape", "global_offset"),
    "ShardedObject": ("key", "data", "global_shape", "global_offset"),
    "ShardedTensorFactory": ("key", "data", "build_fn", "merge_fn"),
    "LocalNonpersistentObject": ("obj",),
}


def megatron_kind(leaf: Any) -> str | None:
    """Return the name of a leaf's Megatron-Core class, such as "ShardedTensor"; None for our leaves and other values.

    The class is recognised by its name and attributes, so that any version will do.

    Examples:
        >>> megatron_kind(LocalNonpersistentObject(3)), megatron_kind(3.5)
        (None, None)
    """
    if isinstance(leaf, (ShardedBase, LocalNonpersistentObject, type)):
        return None
    names = (base.__name__ for base in type(leaf).__mro__)
    return next((name for name in names if name in _MEGATRON and all(hasattr(leaf, a) for a in _MEGATRON[name])), None)


def _is_dtensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and hasattr(value, "placements")


def _is_part(value: Any) -> bool:
    """Return whether a value is a shard, a DTensor, a Megatron-Core leaf or a local object."""
    ours = isinstance(value, (ShardedBase, LocalNonpersistentObject))
    return ours or _is_dtensor(value) or megatron_kind(value) is not None


def _has_fields(value: Any) -> bool:
    """Return whether a value is an instance of a user's dataclass or attrs class."""
    return (is_dataclass(type(value)) or hasattr(type(value), "__attrs_attrs__")) and not isinstance(value, _OURS)


def holds_tensors(value: Any) -> bool:
    """Return whether a value is a tensor, or has one in its items or attributes at any depth.

    Examples:
        >>> holds_tensors({"a": [torch.zeros(2)]}), holds_tensors({1, 2})
        (True, False)
    """
    # Most plain values of a tree are numbers and strings: searching each of them would double the cost of a check.
    return type(value) not in SCALARS and any(
        isinstance(part, (torch.Tensor, LazyTensor)) for part in reachable([value])
    )


def is_plain_tensor(leaf: Any) -> bool:
    """Return whether a target's leaf is or contains plain tensors, which a load fills on this rank alone.

    Examples:
        >>> is_plain_tensor(torch.zeros(2)), is_plain_tensor(LocalNonpersistentObject(torch.zeros(2)))
        (True, False)
    """
    return not isinstance(leaf, (ShardedBase, LocalNonpersistentObject)) and holds_tensors(leaf)


def refuse_without_elements(doing: str, leaves: Sequence[tuple[TreePath, Any]]) -> None:
    """Raise if a plain tensor, or a tensor inside an object, is freed or uninitialised: torch would still read it.

    Args:
        doing: Name of the operation, for the message.
        leaves: Path and value of each leaf.

    Raises:
        UnsupportedValue: Such tensors exist; the error names all of them.

    Examples:
        >>> refuse_without_elements("save", [(("step",), torch.tensor(3))])
    """
    offenders = []
    for path, leaf in leaves:
        if type(leaf) in SCALARS:
            continue
        content = leaf.data if isinstance(leaf, ShardedObject) else leaf
        offenders += [f"{render_path(path)}: {kind}" for value in reachable([content]) if (kind := _lacking(value))]
    if offenders:
        fix = "Pass freed tensors before they are freed; for parameters not initialised yet, run their module first."
        raise UnsupportedValue(error_text(f"{doing}: tensors without allocated memory", offenders=offenders, fix=fix))


def refuse_shapeless(doing: str, leaves: Iterable[tuple[TreePath, Any]]) -> None:
    """Raise if a plain tensor has no single shape: an uninitialised parameter, or a nested tensor.

    Args:
        doing: Name of the operation, for the message.
        leaves: Path and value of each leaf.

    Raises:
        TreeError: Such tensors exist; the error names all of them.

    Examples:
        >>> refuse_shapeless("load", [(("step",), torch.tensor(3))])
    """
    offenders = [f"{render_path(path)}: {kind}" for path, leaf in leaves if (kind := without_shape(leaf))]
    if offenders:
        raise TreeError(error_text(f"{doing}: tensors without a shape", offenders=offenders, fix=SHAPE_FIX))


def _lacking(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return ""
    if is_lazy(value):
        return "not initialised yet"
    return "its storage is freed" if lacks_memory(value) else ""
