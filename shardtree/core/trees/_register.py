"""`register_dataclass` makes instances of a dataclass nodes of trees."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import Field, dataclass, fields, is_dataclass
from typing import Any, TypeVar

import optree

from ...errors import MetadataError, error_text
from ._key_patterns import near_names, with_guesses
from ._nodes import NAMESPACE

_Class = TypeVar("_Class", bound=type)


def register_dataclass(cls: _Class, *, static: Collection[str] = ()) -> _Class:
    """Register and return a dataclass, so that tree maps, saves and loads enter its instances.

    Paths name its fields, as in ``state.params.w``. New instances are made without `__init__` or `__post_init__`, which
    might not accept a map's values. Attributes that aren't fields are dropped. A file stores an instance as a dict of
    its fields. A load makes an instance again where the target has one.

    Classes of Flax and Equinox are dataclasses: ``register_dataclass(flax.training.train_state.TrainState)``. Fields
    that these libraries exclude from the tree, by ``flax.struct.field(pytree_node=False)`` or
    ``eqx.field(static=True)``, are static here too. A class made by
    ``optree.dataclasses.dataclass(namespace="shardtree")`` is registered already.

    Args:
        cls: A dataclass. Its subclasses are registered one by one.
        static: Names of further fields that aren't part of the tree, such as functions. They are neither mapped nor
            stored, and their values must be equal in nodes that are mapped together.

    Raises:
        MetadataError: The class isn't a dataclass, lacks a field named in `static`, or is registered in another way.

    Examples:
        >>> import torch
        >>> from dataclasses import dataclass
        >>> from shardtree.mapping import ShardedTensor
        >>> from shardtree.trees import prefix, register_dataclass
        >>> @register_dataclass
        ... @dataclass(frozen=True)
        ... class TrainState:
        ...     params: dict
        ...     step: int = 0
        >>> state = TrainState({"w": ShardedTensor.from_rank_offsets("w", torch.ones(2))})
        >>> prefix(state, "model.").params["w"].key
        'model.w'

    References:
        jax.tree_util.register_dataclass.
    """
    if not (isinstance(cls, type) and is_dataclass(cls)):
        fix = "Pass the dataclass itself; register a class of another kind by `optree.register_pytree_node`."
        raise MetadataError(
            error_text("register_dataclass: not a dataclass", found=repr(cls)[:200], expected="a dataclass", fix=fix)
        )
    names = [field.name for field in fields(cls)]
    if unknown := [name for name in static if name not in names]:
        heading = f"register_dataclass: static= names unknown fields of {cls.__name__}"
        lines = with_guesses(unknown, near_names(unknown, names))
        raise MetadataError(error_text(heading, offenders=lines, fix="Correct the names."))
    if issubclass(cls, (dict, list, tuple)):
        heading, fix = f"register_dataclass: {cls.__name__} is a container itself", "Hold the container in a field."
        raise MetadataError(error_text(heading, fix=fix))
    fixed = tuple(field.name for field in fields(cls) if field.name in static or _is_static(field))
    node = _DataclassNode(cls, tuple(name for name in names if name not in fixed), fixed)
    register: Any = optree.register_pytree_node
    known = register.get(cls, namespace=NAMESPACE)
    if known is None or known.type is not cls:
        register(cls, node.flatten, node.unflatten, path_entry_type=optree.GetAttrEntry, namespace=NAMESPACE)
    elif getattr(known.flatten_func, "__self__", None) != node:
        heading, fix = f"register_dataclass: {cls.__name__} was registered with other arguments", "Register it once."
        raise MetadataError(error_text(heading, fix=fix))
    return cls


def node_data(node: Any) -> Any:
    """Return the static data of an instance of a registered class: everything except the children that `entries` gives.

    Examples:
        >>> @dataclass
        ... class Layer:
        ...     w: int
        ...     name: str = "up"
        >>> node_data(register_dataclass(Layer, static=["name"])(3))
        {'name': 'up'}
    """
    return optree.tree_flatten_one_level(node, none_is_leaf=True, namespace=NAMESPACE)[1]


def _is_static(field: Field[Any]) -> bool:
    return bool(field.metadata.get("static")) or not field.metadata.get("pytree_node", True)


@dataclass(frozen=True, slots=True)
class _DataclassNode:
    """The functions with which a dataclass is registered in optree, to flatten and unflatten its instances.

    Attributes:
        cls: The class.
        children: Names of the fields that are part of the tree.
        static: Names of the other fields.
    """

    cls: type
    children: tuple[str, ...]
    static: tuple[str, ...]

    def flatten(self, value: Any) -> tuple[list[Any], dict[str, Any], tuple[str, ...]]:
        """Return an instance's children, its static fields by name, and the children's names."""
        if unset := [name for name in (*self.static, *self.children) if not hasattr(value, name)]:
            heading = f"an instance of {self.cls.__name__} has fields without a value"
            raise MetadataError(error_text(heading, offenders=unset, fix="Set them, or give them a default."))
        static = {name: getattr(value, name) for name in self.static}
        return [getattr(value, name) for name in self.children], static, self.children

    def unflatten(self, static: dict[str, Any], children: Any) -> Any:
        """Return a new instance with these static fields and children, without a call of `__init__`."""
        value: Any = object.__new__(self.cls)
        for name, child in (*zip(self.children, children, strict=True), *static.items()):
            object.__setattr__(value, name, child)  # a frozen class's own `__setattr__` would refuse it
        return value
