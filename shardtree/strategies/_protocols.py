"""The signature of each action, as protocols: what a function must be to take a row of the table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from ..mapping import ShardedObject, ShardedTensor
from ..storage import ReadReport
from ._values import AsyncRequest, Checkpoint, Damage, Draft, Fields
from .base import StrategyAction


class LoadCommon(Protocol):
    """LOAD_COMMON: return the stored common tree, with `HOLE` where shards were."""

    def __call__(self, checkpoint: Checkpoint, /) -> Any: ...


class LoadSharded(Protocol):
    """LOAD_SHARDED: fill each shard's data, a contiguous CPU tensor, in place, and return what was read.

    Elements that aren't stored are left as they are; the shard must have allowed that with `allow_shape_mismatch`,
    else it is an error. Each rank calls it with its own shards.
    """

    def __call__(self, checkpoint: Checkpoint, shards: Sequence[ShardedTensor], /) -> ReadReport: ...


class LoadObjects(Protocol):
    """LOAD_OBJECTS: return the data of each sharded object, in order."""

    def __call__(self, checkpoint: Checkpoint, objects: Sequence[ShardedObject], /) -> list[Any]: ...


class LoadMetadata(Protocol):
    """LOAD_METADATA: return every stored tensor by key, and object by unique key, whole and without data."""

    def __call__(self, checkpoint: Checkpoint, /) -> Mapping[str, ShardedTensor | ShardedObject]: ...


class SaveCommon(Protocol):
    """SAVE_COMMON: write the common tree, on rank 0 alone, and return what metadata.json should say about it."""

    def __call__(self, draft: Draft, common: Any, /) -> Fields: ...


class SaveSharded(Protocol):
    """SAVE_SHARDED: prepare to write the shards that are this rank's to write, and return the request that does it.

    Where the backend has a row for SAVE_OBJECTS too, sharded objects come along here.
    """

    def __call__(self, draft: Draft, shards: Sequence[ShardedTensor | ShardedObject], /) -> AsyncRequest[Any]: ...


class SaveObjects(Protocol):
    """SAVE_OBJECTS: prepare to write sharded objects, beside a backend that can't hold them."""

    def __call__(self, draft: Draft, objects: Sequence[ShardedObject], /) -> AsyncRequest[Any]: ...


class RemoveSharded(Protocol):
    """REMOVE_SHARDED: remove every stored tensor and object whose key begins with a prefix; called on rank 0 alone."""

    def __call__(self, checkpoint: Checkpoint, key_prefix: str, /) -> None: ...


class VerifyFiles(Protocol):
    """VERIFY: return what in a checkpoint isn't as it was saved, as far as the format can tell."""

    def __call__(self, checkpoint: Checkpoint, /) -> tuple[Damage, ...]: ...


PROTOCOLS = {
    StrategyAction.LOAD_COMMON: LoadCommon,
    StrategyAction.LOAD_SHARDED: LoadSharded,
    StrategyAction.LOAD_OBJECTS: LoadObjects,
    StrategyAction.LOAD_METADATA: LoadMetadata,
    StrategyAction.SAVE_COMMON: SaveCommon,
    StrategyAction.SAVE_SHARDED: SaveSharded,
    StrategyAction.SAVE_OBJECTS: SaveObjects,
    StrategyAction.REMOVE_SHARDED: RemoveSharded,
    StrategyAction.VERIFY: VerifyFiles,
}
"""The protocol of each action."""
