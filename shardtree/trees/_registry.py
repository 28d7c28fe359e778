"""Shards and factories as nodes of optree, whose only child is their data.

They are registered in the namespace ``"shardtree"`` only, for users' own tree maps; functions of shardtree treat them
as leaves. So one tree has two views. This registration is the only side effect of importing shardtree.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from operator import attrgetter
from typing import Any, Final, TypeAlias, TypeVar

import optree
import torch

from ..errors import ShapeError, error_text
from ..lazy import LazyTensor
from ..mapping import ShardedTensor, ShardedTensorFactory
from ..mapping._tensor import check_has_shape
from ._nodes import NAMESPACE

Boxed: TypeAlias = ShardedTensor | ShardedTensorFactory

Leaf = TypeVar("Leaf", bound=Boxed)

_KINDS: Final = (ShardedTensor, ShardedTensorFactory)

_Access: TypeAlias = tuple[Callable[[Any], tuple[Any, ...]], list[Callable[[Any, Any], None]]]


def _access(kind: type[Boxed]) -> _Access:
    """Return a reader of all fields but data in one call, and the setters of their slots, followed by data's."""
    names = [name for name in kind.__dataclass_fields__ if name != "data"]
    return attrgetter(*names), [getattr(kind, name).__set__ for name in [*names, "data"]]


_ACCESS: Final[dict[type, _Access]] = {kind: _access(kind) for kind in _KINDS}


def with_data(leaf: Leaf, data: Any) -> Leaf:
    """Return the leaf with other data, after checking that it fits the metadata.

    The metadata was validated when the leaf was built, so only the data is looked at: the constructor would take
    three times as long as the rest of a tree map.

    Raises:
        ShapeError: a tensor's dtype or shape isn't the leaf's.

    Examples:
        >>> shard = ShardedTensor.from_rank_offsets("w", torch.zeros(2))
        >>> with_data(shard, torch.ones(2)).data
        tensor([1., 1.])
    """
    if isinstance(data, (torch.Tensor, LazyTensor)):
        _check_data(leaf, data)
    kind = type(leaf)
    read, writes = _ACCESS[kind]
    new = object.__new__(kind)
    for write, value in zip(writes, (*read(leaf), data), strict=False):
        write(new, value)
    return new


def described_kind(leaf: Boxed) -> tuple[torch.dtype, tuple[int, ...]] | None:
    """Return the dtype and shape that a leaf's data has; None for a factory without a tensor."""
    if isinstance(leaf, ShardedTensor):
        return leaf.dtype, leaf.data_shape
    data = leaf.data
    return (data.dtype, tuple(data.shape)) if isinstance(data, (torch.Tensor, LazyTensor)) else None


def _check_data(leaf: Boxed, data: torch.Tensor | LazyTensor) -> None:
    kind = described_kind(leaf)
    if kind is None:
        return
    with suppress(RuntimeError):  # nested tensors have no shape; the check below names them
        if (data.dtype, tuple(data.shape)) == kind:
            return
    check_has_shape(f"map_data: the function's value for {leaf.key!r}", data)
    what = f"map_data: the function changed the dtype or shape of {leaf.key!r}, so that its metadata would be wrong"
    found, expected = f"{tuple(data.shape)} {data.dtype}", f"{kind[1]} {kind[0]}"
    fix = "Use `cast` to change the dtype, or `map_shards` to make another shard."
    raise ShapeError(error_text(what, found=found, expected=expected, fix=fix))


def _flatten_leaf(leaf: Boxed) -> tuple[tuple[Any, ...], Boxed, tuple[str, ...]]:
    """Return the data, and the leaf without it, which is comparable and hashable, as optree requires of metadata."""
    return (leaf.data,), with_data(leaf, None), ("data",)


def _unflatten_leaf(empty: Boxed, children: tuple[Any, ...]) -> Boxed:
    return with_data(empty, children[0])


def register_nodes() -> None:
    """Register the node types with optree; `shardtree.trees` does so once, when it is imported."""
    register: Any = optree.register_pytree_node  # its annotations ask for collections, and a leaf isn't one
    for kind in _KINDS:
        register(kind, _flatten_leaf, _unflatten_leaf, path_entry_type=optree.GetAttrEntry, namespace=NAMESPACE)
