"""Leaves that aren't shards of a tensor: sharded objects, local objects that are never saved, and factories."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from ..errors import MetadataError
from ..geometry import flat_range, integers, refuse
from ._base import (
    FactoryBuildFn,
    FactoryMergeFn,
    ReplicaId,
    ShardedBase,
    check_key,
    describe,
    leaf_name,
    normalise,
    replica,
)

# ShardedObject: one cell of a global array of Python objects.

# Greedy, so that a key may itself contain "/shard_": the last one counts.
_OBJECT_KEY = re.compile(r"(?P<key>.+)/shard_(?P<offset>[0-9.]*)_(?P<shape>[-0-9.]*)", re.DOTALL)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class ShardedObject(ShardedBase):
    """One cell of a global array of Python objects; its layout can't change.

    Args:
        key: the global object's name.
        data: the local object.
        global_shape: the array's shape in objects; -1 as its last size if that is unknown.
        global_offset: the cell's index in the array.
        replica_id: see ShardedTensor.

    Raises:
        MetadataError: the index doesn't lie in the shape.

    Examples:
        >>> ShardedObject("rng", {"seed": 1}, (2, 4), (1, 3)).unique_key
        'rng/shard_1.3_2.4'
    """

    key: str
    data: Any
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    replica_id: ReplicaId = 0

    def __post_init__(self) -> None:
        check_key(self)
        normalise(self, integers, "global_shape", "global_offset")
        normalise(self, replica, "replica_id")
        self.validate_metadata_integrity()

    def validate_metadata_integrity(self) -> None:
        """Raise MetadataError where the cell doesn't lie in the array."""
        shape, offset = self.global_shape, self.global_offset
        if len(shape) != len(offset):
            expected, fix = f"{len(shape)} indices, for global_shape {shape}", "Pass one for each axis."
            refuse(leaf_name(self), "global_offset", offset, expected, fix, error=MetadataError)
        last = len(shape) - 1
        inside = (
            0 <= index < size or (size == -1 and axis == last and index >= 0)
            for axis, (index, size) in enumerate(zip(offset, shape, strict=True))
        )
        if not all(inside):
            expected, fix = f"an index into global_shape {shape}", "Count cells from 0."
            refuse(leaf_name(self), "global_offset", offset, expected, fix, error=MetadataError)

    def without_data(self) -> ShardedObject:
        """Return the same object with None as its data."""
        return replace(self, data=None)

    @property
    def unique_key(self) -> str:
        """The key with the cell's index and the array's shape: `<key>/shard_<offset>_<shape>`."""
        return f"{self.key}/shard_{'.'.join(map(str, self.global_offset))}_{'.'.join(map(str, self.global_shape))}"

    @classmethod
    def empty_from_unique_key(cls, unique_key: str, replica_id: ReplicaId = 0) -> ShardedObject:
        """Return the object, without data, that a unique key names.

        Old checkpoints left out the shape's last size; it becomes -1.

        Raises:
            MetadataError: the key hasn't the form `<key>/shard_<offset>_<shape>`.

        Examples:
            >>> ShardedObject.empty_from_unique_key("a/b_c/shard_1.3_2.4")
            ShardedObject(key='a/b_c', data=None, global_shape=(2, 4), global_offset=(1, 3))
            >>> ShardedObject.empty_from_unique_key("rng/shard_1.3_2").global_shape
            (2, -1)
        """
        parts = _OBJECT_KEY.fullmatch(unique_key)
        try:
            key, *numbers = parts.groups() if parts else ()
            offset, shape = (tuple(map(int, text.split("."))) if text else () for text in numbers)
        except ValueError:
            expected, fix = "'<key>/shard_<offset>_<shape>', as in 'rng/shard_1.3_2.4'", "Pass what `unique_key` gave."
            refuse(cls.__name__, "unique key", repr(unique_key), expected, fix, error=MetadataError)
        # Old checkpoints left out the last size: there is one number less than indices.
        return cls(key, None, (*shape, -1) if len(shape) + 1 == len(offset) else shape, offset, replica_id)


# LocalNonpersistentObject: a value that stays on its rank.


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class LocalNonpersistentObject:
    """A local value that a checkpoint doesn't store: a save leaves it out, and a load returns it in its place.

    Examples:
        >>> LocalNonpersistentObject({"step": 3}).unwrap()
        {'step': 3}
    """

    obj: Any

    def __eq__(self, other: object) -> bool:
        return self.obj is other.obj if isinstance(other, LocalNonpersistentObject) else NotImplemented

    def __hash__(self) -> int:
        return hash((LocalNonpersistentObject, id(self.obj)))

    def __repr__(self) -> str:
        return f"LocalNonpersistentObject({describe(self.obj)})"

    def unwrap(self) -> Any:
        """Return the value."""
        return self.obj


# ShardedTensorFactory: a tensor that is stored in another form.


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class ShardedTensorFactory(ShardedBase):
    """A tensor that is stored in another form: `build_fn` returns the tree of shards, `merge_fn` the tensor again.

    Args:
        key: the tensor's name.
        data: the tensor as the model holds it.
        build_fn: (key, data, replica_id, flattened_range) -> tree of shards.
        merge_fn: the same tree with loaded tensors -> the tensor.
        replica_id: see ShardedTensor.
        flattened_range: where `data` is flat, the slice of the flattened tensor that it is.

    Raises:
        MetadataError: a field isn't of its kind.

    Examples:
        >>> import torch
        >>> from shardtree.mapping import ShardedTensor
        >>> def build(key, data, replica_id, flattened_range):
        ...     return {"t": ShardedTensor.from_rank_offsets(key, data.T, replica_id=replica_id)}
        >>> factory = ShardedTensorFactory("w", torch.zeros(2, 3), build, lambda tree: tree["t"].T)
        >>> factory.build()["t"].global_shape
        (3, 2)
    """

    key: str
    data: Any
    build_fn: FactoryBuildFn
    merge_fn: FactoryMergeFn
    replica_id: ReplicaId = 0
    flattened_range: slice | None = None

    def __post_init__(self) -> None:
        check_key(self)
        normalise(self, replica, "replica_id")
        normalise(self, lambda subject, _, value: flat_range(subject, value), "flattened_range")
        self.validate_metadata_integrity()

    def validate_metadata_integrity(self) -> None:
        """Raise MetadataError where a function can't be called."""
        for field in ("build_fn", "merge_fn"):
            function = getattr(self, field)
            if not callable(function):
                fix = "Pass build_fn, then merge_fn."
                refuse(leaf_name(self), field, type(function).__name__, "a function", fix, error=MetadataError)

    def build(self) -> Any:
        """Return the tree of shards that is stored for the tensor."""
        return self.build_fn(self.key, self.data, self.replica_id, self.flattened_range)

    def without_data(self) -> ShardedTensorFactory:
        """Return the same factory with None as its data."""
        return replace(self, data=None)
