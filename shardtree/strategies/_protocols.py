"""The signature of each action, as protocols: what a function must be to take a row of the table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from ..mapping import ShardedObject, ShardedTensor
from ..storage import ReadReport, Storage
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
    """SAVE_COMMON: write the common tree, on rank 0 alone, and return what metadata.json should say about it.

    What it returns counts, so that a backend can name another one as that of the common state.
    """

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


class Recognize(Protocol):
    """RECOGNIZE: return what metadata.json would say of a folder without one, None if it isn't in this format.

    That is at least the backends and versions of the shards and of the common state. A format whose checkpoints have no
    metadata.json has this row. It may be asked about any folder, and about a single file: that is then named "".
    """

    def __call__(self, storage: Storage, /) -> Fields | None: ...


class Commit(Protocol):
    """COMMIT: write the file that makes a folder a checkpoint; called on rank 0 alone, last of all.

    A format that has no such row is committed by metadata.json. The fields are what that would say.
    """

    def __call__(self, draft: Draft, fields: Fields, /) -> None: ...


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
    StrategyAction.RECOGNIZE: Recognize,
    StrategyAction.COMMIT: Commit,
}
"""The protocol of each action."""
