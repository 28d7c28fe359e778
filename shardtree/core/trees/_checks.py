"""Checks of whole trees: that a value is a tree, and that no part of a tensor in it would be overlooked."""

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
"""Values that are stored item by item, so that what lies in them is stored as it would be outside."""
_OURS = (ShardedBase, LocalNonpersistentObject, LazyTensor, Record)


def check_is_tree(doing: str, tree: Any) -> None:
    """Raise unless this is a container, of containers whose class comes back.

    Args:
        doing: what is being done, for the message.
        tree: what should be one.

    Raises:
        TreeError: it isn't a dict, list, tuple, or node of a class that is registered with optree; or it is too deep.
        UnsupportedValue: shards or local objects lie in a subclass of dict, list or deque that isn't registered; names
            all.

    Examples:
        >>> check_is_tree("save", {"step": 3})
    """
    if not isinstance(tree, (dict, list, tuple)) and (isinstance(tree, deque) or entries(tree) is None):
        expected, fix = "a dict, list or tuple of shards", REGISTER if is_dataclass(tree) else None
        raise TreeError(error_text(f"{doing}: not a tree", found=type(tree).__name__, expected=expected, fix=fix))
    with refuse_too_deep(doing):
        unknown = subclasses(tree)
    # They would come back as the dict or list that they derive from. One without shards is a value to the codec.
    nodes = [(path, node) for path, node in unknown if any(map(_is_part, reachable([node])))]
    if nodes:
        names = [f"{render_path(path)}: {type(node).__name__}" for path, node in nodes]
        base = next(kind.__name__ for kind in (dict, list, deque) if isinstance(nodes[0][1], kind))
        what, fix = (
            f"{doing}: shards in subclasses of dict, list or deque",
            f"Pass `{base}(value)`, or register the class: {REGISTRATION}",
        )
        raise UnsupportedValue(error_text(what, offenders=names, fix=fix))


@contextmanager
def refuse_too_deep(doing: str) -> Iterator[None]:
    """Name the operation in errors of tree maps: about trees that are too deep, and about hidden shards.

    Args:
        doing: what is being done, for the message.

    Raises:
        TreeError: the tree exceeded Python's recursion limit.
        UnsupportedValue: shards are hidden in values.
    """
    try:
        yield
    except RecursionError:
        raise TreeError(error_text(f"{doing}: {TOO_DEEP}", fix="Flatten it.")) from None
    except (TreeError, UnsupportedValue) as error:
        if not str(error).startswith((TOO_DEEP, HIDDEN)):
            raise
        raise type(error)(f"{doing}: {error}") from None


def refuse_hidden(doing: str, leaves: Sequence[tuple[TreePath, Any]]) -> None:
    """Raise where a leaf hides shards or tensors from tree maps: they would be stored as a plain value, or not at all.

    Raises:
        TreeError: names all leaves that are another library's parts of tensors (DTensors, Megatron-Core's leaves) or
            have a state_dict, and says what to give instead.
        UnsupportedValue: names all values in which shards, such parts or local objects lie, and all instances of
            dataclasses and attrs classes that hold tensors; or all shards whose data is a wrapper subclass.

    Examples:
        >>> refuse_hidden("save", [(("options",), {1, 2})])
    """
    refuse_wrappers(doing, leaves)
    others = [(path, leaf) for path, leaf in leaves if type(leaf) not in PLAIN and type(leaf) is not ShardedTensor]
    forms = {path: form for path, leaf in others if (form := _other_form(leaf))}
    if forms:
        what, fix = f"{doing}: objects where shards are meant", " ".join(dict.fromkeys(forms.values()))
        names = [f"{render_path(path)}: {type(leaf).__name__}" for path, leaf in others if path in forms]
        raise TreeError(error_text(what, offenders=names, fix=fix))
    hosts = [(path, leaf) for path, leaf in others if _hides_any(leaf)]
    if hosts:
        fix = "Put shards, tensors and local objects in dicts, lists and tuples; those are entered."
        fix += f" {REGISTER}" * any(_has_fields(leaf) for _, leaf in hosts)
        names = [f"{render_path(path)}: {_named_type(leaf)}" for path, leaf in hosts]
        raise UnsupportedValue(error_text(f"{doing}: shards or tensors hidden in values", offenders=names, fix=fix))


def _named_type(leaf: Any) -> str:
    if not isinstance(leaf, ShardedObject):
        return type(leaf).__name__
    return f"{type(leaf.data).__name__}, data of the ShardedObject {leaf.key!r}"


def refuse_wrappers(doing: str, leaves: Sequence[tuple[TreePath, Any]]) -> None:
    """Raise where the data of a shard is a wrapper subclass: its memory isn't its value.

    Raises:
        UnsupportedValue: names all of them with their classes.

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
        fix = "Give their inner tensors (`__tensor_flatten__` names them) as shards of their own, or their values as"
        fix += " plain tensors (torchao's `dequantize()`)."
        if any(_is_dtensor(leaf.data) for _, leaf in wrappers):
            fix += " Of DTensors, `from_dtensors` of shardtree.interop.dtensor makes shards."
        what = f"{doing}: tensors of wrapper subclasses, whose memory isn't their value"
        raise UnsupportedValue(error_text(what, offenders=names, fix=fix))


def _other_form(leaf: Any) -> str:
    """Return in which form a leaf is to be given instead; nothing where it is right as it is."""
    kind = type(leaf)
    if _is_dtensor(leaf):
        return "Use `from_dtensors` of shardtree.interop.dtensor on each rank's tree: DTensors know their own layout."
    if megatron_kind(leaf) is not None:
        return "Use `from_megatron` of shardtree.interop.megatron on each rank's tree: it makes our leaves of theirs."
    if hasattr(kind, "state_dict") and hasattr(kind, "load_state_dict"):
        return "Put its state_dict() in its place, and give what is loaded there to its load_state_dict."
    return ""


def _hides_any(leaf: Any) -> bool:
    """Return whether parts lie anywhere in a leaf, or tensors where it would be stored without its class."""
    if any(map(_is_part, reachable(inside(leaf)))):
        return True
    # Together, so that what many of them share is searched once.
    return holds_tensors([value for value in reachable([leaf], into=_BY_VALUE) if _has_fields(value)])


# Recognised by names and attributes: importing the classes would load torch.distributed, or need Megatron-Core. A
# name alone isn't enough, since torch.distributed has a ShardedTensor too.
_MEGATRON: Final = {
    "ShardedTensor": ("key", "data", "local_shape", "global_shape", "global_offset"),
    "ShardedObject": ("key", "data", "global_shape", "global_offset"),
    "ShardedTensorFactory": ("key", "data", "build_fn", "merge_fn"),
    "LocalNonpersistentObject": ("obj",),
}


def megatron_kind(leaf: Any) -> str | None:
    """Return the name of a leaf's Megatron-Core class, of any version; None if it is ours or anything else.

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
    """Return whether a value is a part of a whole that ranks hold together, or stays with its rank."""
    ours = isinstance(value, (ShardedBase, LocalNonpersistentObject))
    return ours or _is_dtensor(value) or megatron_kind(value) is not None


def _has_fields(value: Any) -> bool:
    """Return whether a value is of a dataclass or an attrs class of the user's."""
    return (is_dataclass(type(value)) or hasattr(type(value), "__attrs_attrs__")) and not isinstance(value, _OURS)


def holds_tensors(value: Any) -> bool:
    """Return whether a value is a tensor, or has one in its items or attributes, however deep.

    Examples:
        >>> holds_tensors({"a": [torch.zeros(2)]}), holds_tensors({1, 2})
        (True, False)
    """
    # Most leaves of a tree's plain values are numbers and texts: a search of each would cost as much as the rest.
    return type(value) not in SCALARS and any(
        isinstance(each, (torch.Tensor, LazyTensor)) for each in reachable([value])
    )


def is_plain_tensor(leaf: Any) -> bool:
    """Return whether a target's leaf holds tensors that it doesn't share with other ranks, and wants them filled.

    Examples:
        >>> is_plain_tensor(torch.zeros(2)), is_plain_tensor(LocalNonpersistentObject(torch.zeros(2)))
        (True, False)
    """
    return not isinstance(leaf, (ShardedBase, LocalNonpersistentObject)) and holds_tensors(leaf)


def refuse_without_elements(doing: str, leaves: Sequence[tuple[TreePath, Any]]) -> None:
    """Raise where a plain tensor, or one in an object, has no memory: torch would read what isn't there.

    Raises:
        UnsupportedValue: names every such place.

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
        fix = "Save while their memory is there; run a module with lazy parameters once before."
        raise UnsupportedValue(error_text(f"{doing}: tensors without elements", offenders=offenders, fix=fix))


def refuse_shapeless(doing: str, leaves: Iterable[tuple[TreePath, Any]]) -> None:
    """Raise where a plain tensor has no single shape: a parameter that isn't initialised yet, or a nested tensor.

    Raises:
        TreeError: names every such place.

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
