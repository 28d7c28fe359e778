"""Names for what functions take and return, as in Megatron-Core."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

StateDict: TypeAlias = dict[str, Any]
CommonStateDict: TypeAlias = dict[str, Any]
ShardedStateDict: TypeAlias = dict[str, Any]
ReplicaId: TypeAlias = int | tuple[int, ...]
FactoryBuildFn: TypeAlias = Callable[[str, Any, ReplicaId, slice | None], Any]
FactoryMergeFn: TypeAlias = Callable[[Any], Any]
RankOffset: TypeAlias = tuple[int, int, int]
