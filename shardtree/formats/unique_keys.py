"""Recognition of sharded objects by their unique keys, in formats that list them together with plain values."""

from __future__ import annotations

from ..errors import MetadataError
from ..kit import ShardedObject


def is_object(name: str) -> bool:
    """Return whether a name is the unique key of a sharded object.

    Examples:
        >>> is_object("rng_state/shard_0.1_1.2"), is_object("optimizer.step")
        (True, False)
    """
    try:
        ShardedObject.empty_from_unique_key(name)
    except MetadataError:
        return False
    return True
