"""ShardedObject: one cell of a global array of Python objects."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from ..errors import MetadataError
from ..geometry import integers, refuse
from ._aliases import ReplicaId
from ._base import ShardedBase, check_key, leaf_name, normalise
from ._replica import replica

_OBJECT_KEY = re.compile(r"(?P<key>.+)/shard_(?P<offset>[0-9.]*)_(?P<shape>[-0-9.]*)", re.DOTALL)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class ShardedObject(ShardedBase):
    """One cell of a global array of Python objects; how the array is cut can't change.

    Args:
        key: the global object's name.
        data: the local object.
        global_shape: the array's shape in objects; -1 as its last size says that it isn't known.
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
        return cls(key, None, (*shape, -1) if len(shape) + 1 == len(offset) else shape, offset, replica_id)
