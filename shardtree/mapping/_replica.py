"""Replica ids: which of several equal copies of a shard counts as the main one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..geometry import integer, integers
from ._aliases import ReplicaId


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
    # A bool is let through as a number: replica ids are often the outcome of comparing ranks.
    many = isinstance(value, Iterable) and not hasattr(value, "__index__")  # a tensor of one number has both
    ids = [int(item) if isinstance(item, bool) else item for item in (value if many else (value,))]
    return integers(subject, field, ids) if many else integer(subject, field, ids[0])
