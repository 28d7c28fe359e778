"""What leaves share: type aliases, replica ids, validation, comparison and repr, and whether they have memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import Any, TypeAlias

import torch

from .._deferred import notebook_html
from ..errors import MetadataError
from ..geometry import integer, integers, refuse

# Type aliases, as in Megatron-Core.

StateDict: TypeAlias = dict[str, Any]
"""A tree of dicts, lists and tuples with any leaves."""
CommonStateDict: TypeAlias = dict[str, Any]
"""What is the same on every rank."""
ShardedStateDict: TypeAlias = dict[str, Any]
"""A tree with shards, objects, factories and plain values as leaves."""
ReplicaId: TypeAlias = int | tuple[int, ...]
"""Which copy of a shard: an int, or a tuple of ints; the one with only zeros is the main one."""
FactoryBuildFn: TypeAlias = Callable[[str, Any, ReplicaId, slice | None], Any]
"""From key, data, replica_id and flattened_range to a tree of shards."""
FactoryMergeFn: TypeAlias = Callable[[Any], Any]
"""From the loaded tree, as it was built, to one tensor."""
RankOffset: TypeAlias = tuple[int, int, int]


# Replica ids: which of several equal copies of a shard is the main one.


def is_main_replica(replica_id: ReplicaId) -> bool:
    """Return whether a replica is the main one: 0, or nothing but zeros.

    Raises:
        MetadataError: `replica_id` is neither an int nor a sequence of ints.

    Examples:
        >>> is_main_replica(0), is_main_replica((0, 0)), is_main_replica((0, 1))
        (True, True, False)
    """
    if type(replica_id) is int:
        return replica_id == 0
    ids = replica("is_main_replica", "replica_id", replica_id)
    return ids == 0 if isinstance(ids, int) else not any(ids)


def replica(subject: str, field: str, value: Any) -> ReplicaId:
    """Return a replica id as an int or a tuple of ints; what is neither raises MetadataError."""
    # Bools are accepted as numbers: replica ids are often the result of comparing ranks.
    many = isinstance(value, Iterable) and not hasattr(value, "__index__")  # a tensor of one number is iterable too
    ids = [int(item) if isinstance(item, bool) else item for item in (value if many else (value,))]
    return integers(subject, field, ids) if many else integer(subject, field, ids[0])


# The base class.


class ShardedBase(ABC):
    """Base class of sharded leaves: a key, data, a replica id, comparison and repr.

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
        # Comparing elements would read lazy tensors, and wait for accelerators.
        return self.data is other.data and metadata_of(self) == metadata_of(other)

    def __hash__(self) -> int:
        # Other fields are left out: slices and some callables aren't hashable.
        return hash((type(self), self.key, self.replica_id, getattr(self, "global_offset", None), id(self.data)))

    def _repr_html_(self) -> str:
        return notebook_html(self)

    def __repr__(self) -> str:
        shown = [f"{name}={value!r}" for name, (value, default) in metadata_of(self).items() if value != default]
        shown.insert(1, f"data={describe(self.data)}")
        return f"{type(self).__name__}({', '.join(shown)})"


def leaf_name(leaf: ShardedBase) -> str:
    """Return a leaf's name in errors."""
    return f"{type(leaf).__name__} {leaf.key!r}"


def metadata_of(leaf: Any) -> dict[str, tuple[Any, Any]]:
    """Return the value and the default of each field but the data."""
    return {field.name: (getattr(leaf, field.name), field.default) for field in fields(leaf) if field.name != "data"}


def describe(value: object) -> str:
    """Return a value's type, and a tensor's dtype, shape and device, without its elements."""
    if value is None:
        return "None"
    dtype, shape = getattr(value, "dtype", None), getattr(value, "shape", None)
    if dtype is None or shape is None:
        return f"<{type(value).__name__}>"
    kind = f"{str(dtype).removeprefix('torch.')} {tuple(shape)}"
    return f"<{kind} {value.device}>" if isinstance(value, torch.Tensor) else f"<{type(value).__name__} {kind}>"


def normalise(leaf: ShardedBase, function: Callable[[str, str, Any], object], *names: str) -> None:
    """Replace each named field by a function's value, while a frozen leaf is being constructed."""
    for name in names:
        object.__setattr__(leaf, name, function(leaf_name(leaf), name, getattr(leaf, name)))


def check_key(leaf: ShardedBase) -> None:
    """Raise MetadataError unless the key is text that can be stored."""
    key: Any = leaf.key
    if not isinstance(key, str) or not key:
        found, fix = repr(key) if isinstance(key, str) else type(key).__name__, "Name the global tensor or object."
        refuse(type(leaf).__name__, "key", found, "a string that isn't empty", fix, error=MetadataError)
    try:
        # Formats store keys as UTF-8, which has no lone surrogates.
        key.encode()
    except UnicodeEncodeError:
        fix = "Leave lone surrogates out."
        refuse(leaf_name(leaf), "key", ascii(key), "text that UTF-8 can encode", fix, error=MetadataError)


# A leaf's tensor: its bits, and whether it has elements and memory.

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By item size, dtypes that torch joins, fills and copies bit for bit on every device, as it can't all others."""


def given_tensor(shard: ShardedBase) -> torch.Tensor | None:
    """Return a shard's tensor; None where it has no memory of its own: no data, a meta, fake or lazy tensor.

    Examples:
        >>> from shardtree.mapping import ShardedTensor
        >>> given_tensor(ShardedTensor.from_rank_offsets("w", torch.empty(2, device="meta"))) is None
        True
    """
    data = shard.data
    return data if isinstance(data, torch.Tensor) and has_elements(data) else None


def has_elements(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has elements: it isn't a meta tensor, nor a fake one, as ``torch.export`` makes them.

    Examples:
        >>> has_elements(torch.zeros(2)), has_elements(torch.zeros(2, device="meta"))
        (True, False)
    """
    return not tensor.is_meta and not hasattr(tensor, "fake_mode")


def lacks_memory(data: Any) -> bool:
    """Return whether data is a tensor whose storage was freed, as FSDP does between steps: elements without memory.

    Examples:
        >>> freed = torch.zeros(2)
        >>> nothing = freed.untyped_storage().resize_(0)
        >>> lacks_memory(torch.zeros(2)), lacks_memory(freed)
        (False, True)
    """
    # Wrapper subclasses have no storage of their own, and would look freed.
    is_plain = type(data) in (torch.Tensor, torch.nn.Parameter) and data.layout is torch.strided
    return is_plain and not data.untyped_storage().nbytes() and data.numel() > 0
