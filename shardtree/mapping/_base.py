"""What the leaves have in common: how they are checked, compared and shown."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch

from ..errors import MetadataError
from ..geometry import refuse
from ._aliases import ReplicaId


class ShardedBase(ABC):
    """What sharded leaves have in common: a key, data, a replica id, and how they are compared and shown.

    Equal means the same kind, equal metadata and the same data object; elements are never compared or printed.
    """

    __slots__ = ()

    key: str
    data: Any
    replica_id: ReplicaId

    @abstractmethod
    def validate_metadata_integrity(self) -> None:
        """Raise MetadataError or ShapeError where a field contradicts another."""

    @abstractmethod
    def without_data(self) -> ShardedBase:
        """Return the same leaf with None as its data."""

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return self.data is other.data and metadata_of(self) == metadata_of(other)

    def __hash__(self) -> int:
        # The rest stays out: slices and some callables have no hash.
        return hash((type(self), self.key, self.replica_id, getattr(self, "global_offset", None), id(self.data)))

    def __repr__(self) -> str:
        shown = [f"{name}={value!r}" for name, (value, default) in metadata_of(self).items() if value != default]
        shown.insert(1, f"data={describe(self.data)}")
        return f"{type(self).__name__}({', '.join(shown)})"


def leaf_name(leaf: ShardedBase) -> str:
    """Return what errors call a leaf."""
    return f"{type(leaf).__name__} {leaf.key!r}"


def metadata_of(leaf: Any) -> dict[str, tuple[Any, Any]]:
    """Return the value and the default of each field but the data."""
    return {field.name: (getattr(leaf, field.name), field.default) for field in fields(leaf) if field.name != "data"}


def describe(value: object) -> str:
    """Return what a value is, without its elements."""
    if value is None:
        return "None"
    dtype, shape = getattr(value, "dtype", None), getattr(value, "shape", None)
    if dtype is None or shape is None:
        return f"<{type(value).__name__}>"
    kind = f"{str(dtype).removeprefix('torch.')} {tuple(shape)}"
    return f"<{kind} {value.device}>" if isinstance(value, torch.Tensor) else f"<{type(value).__name__} {kind}>"


def normalise(leaf: ShardedBase, function: Callable[[str, str, Any], object], *names: str) -> None:
    """Put each named field through a function: how a frozen leaf is written to, while it is being built."""
    for name in names:
        object.__setattr__(leaf, name, function(leaf_name(leaf), name, getattr(leaf, name)))


def check_key(leaf: ShardedBase) -> None:
    """Raise MetadataError unless the key is text that can be stored."""
    key: Any = leaf.key
    if not isinstance(key, str) or not key:
        found, fix = repr(key) if isinstance(key, str) else type(key).__name__, "Name the global tensor or object."
        refuse(type(leaf).__name__, "key", found, "a string that isn't empty", fix, error=MetadataError)
    try:
        key.encode()
    except UnicodeEncodeError:
        fix = "Leave lone surrogates out."
        refuse(leaf_name(leaf), "key", ascii(key), "text that UTF-8 can encode", fix, error=MetadataError)
