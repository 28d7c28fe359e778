"""The actions of formats, and the signature of each, as protocols that a row's function has to follow."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple, Protocol

from ...core.mapping import ShardedObject, ShardedTensor
from ..storage import ReadReport, Storage
from ._findings import Finding
from ._traits import FormatTraits
from ._values import AsyncRequest, Checkpoint, Fields, PendingSave


class StrategyAction(Enum):
    """An action of a format: the first part of a row's key.

    PUBLISH was named COMMIT once: that name, and the value "commit", still mean it.

    Examples:
        >>> StrategyAction.LOAD_SHARDED.value
        'load_sharded'
    """

    LOAD_COMMON = "load_common"
    LOAD_SHARDED = "load_sharded"
    LOAD_OBJECTS = "load_objects"
    LOAD_METADATA = "load_metadata"
    PARSE = "parse"
    RESOLVE = "resolve"
    SAVE_COMMON = "save_common"
    SAVE_SHARDED = "save_sharded"
    REMOVE_SHARDED = "remove_sharded"
    VERIFY = "verify"
    RECOGNIZE = "recognize"
    PUBLISH = "publish"
    LIST_FILES = "list_files"
    DESCRIBE = "describe"
    COMMIT = PUBLISH

    @classmethod
    def _missing_(cls, value: object) -> StrategyAction | None:
        return cls.PUBLISH if value == "commit" else None


Strategy = Callable[..., Any]
"""A function of the table; its action's protocol says what it takes and returns."""
# Any rather than Enum: keys of a Mapping are invariant, and a dict whose keys have StrategyActions is a table too.
Row = tuple[Any, str, int]
"""An action, a backend and its version; the action may be a member of a user's Enum whose value is a string."""
Strategies = Mapping[Row, Strategy]
"""The type of a dispatch table."""
StoredRows = Mapping[Row, Strategy | str]
"""The rows of one of our formats: functions, or where they are, as "module:function" below `shardtree`."""


class LoadCommon(Protocol):
    """LOAD_COMMON: return the stored common tree, with `HOLE` where shards were."""

    def __call__(self, checkpoint: Checkpoint, /) -> Any: ...


class LoadSharded(Protocol):
    """LOAD_SHARDED: fill each shard's data, a contiguous CPU tensor, in place, and return what was read.

    The data is new memory, which holds anything; the target's own with `donate=True`. It isn't checked that every
    element was filled.

    Elements beyond the stored global shape are left as they are; the shard must have allowed that with
    `allow_shape_mismatch`, else it is an error. Each rank calls it with its own shards.
    """

    def __call__(self, checkpoint: Checkpoint, shards: Sequence[ShardedTensor], /) -> ReadReport: ...


class LoadObjects(Protocol):
    """LOAD_OBJECTS: return the data of each sharded object, in order."""

    def __call__(self, checkpoint: Checkpoint, objects: Sequence[ShardedObject], /) -> list[Any]: ...


class LoadMetadata(Protocol):
    """LOAD_METADATA: return every stored tensor by key, and object by unique key, whole and without data."""

    def __call__(self, checkpoint: Checkpoint, /) -> Mapping[str, ShardedTensor | ShardedObject]: ...


class Parse(Protocol):
    """PARSE: return what the format's other rows need of its metadata; they ask for it by `checkpoint.once(parse)`.

    Where several ranks load together, rank 0 alone calls it, and the others get a copy of the plain data. For formats
    whose metadata takes long to read or to parse; without, each rank reads it for itself.
    """

    def __call__(self, checkpoint: Checkpoint, /) -> Any: ...


class Copies(NamedTuple):
    """The copies of one box of a tensor that files, or parts of one file, have.

    Attributes:
        key: Key of the tensor.
        offset: Offset of the box in the tensor.
        held: (owner, reader) pairs; a reader returns None if the copy is absent.
    """

    key: str
    offset: tuple[int, ...]
    held: Sequence[tuple[str, Callable[[], Any]]]


@dataclass(frozen=True, slots=True)
class Resolution:
    """A way in which the ranks of a load find out together what a format's metadata doesn't say.

    Attributes:
        find: Function that returns plain data, the result of a share of the work, given the share's number and the
            number of shares: one for each rank that needs it.
        keep: Function that stores the gathered results of all shares, in order, on this rank; or raises.
        copies: Function that returns the copies to compare; None if there are none. One rank alone compares them as it
            reads.
    """

    find: Callable[[int, int], Any]
    keep: Callable[[Sequence[Any]], None]
    copies: Callable[[], Iterable[Copies]] | None = None


class Resolve(Protocol):
    """RESOLVE: return how to find out what reading given keys takes beyond the metadata, None if nothing.

    For formats whose metadata doesn't say it all. If all keys are to be listed too, that is the third argument.
    """

    def __call__(self, checkpoint: Checkpoint, keys: Set[str], listed: bool, /) -> Resolution | None: ...


class SaveCommon(Protocol):
    """SAVE_COMMON: write the common tree, on rank 0 alone, and return fields of metadata.json.

    They replace the fields that the save has chosen, so that a backend can name another one for the common state.
    """

    def __call__(self, pending: PendingSave, common: Any, /) -> Fields: ...


class SaveSharded(Protocol):
    """SAVE_SHARDED: prepare to write this rank's share of the shards, and return the request that writes them.

    If the backend has a row for LOAD_OBJECTS too, or the common state goes to it, sharded objects are passed here as
    well. Else they go to the SAVE_SHARDED row of the common state's backend, if this has one for LOAD_OBJECTS and none
    for PUBLISH, since the shards' backend is what publishes; any other can't hold them, and the save refuses them.
    """

    def __call__(
        self, pending: PendingSave, shards: Sequence[ShardedTensor | ShardedObject], /
    ) -> AsyncRequest[Any]: ...


class RemoveSharded(Protocol):
    """REMOVE_SHARDED: remove every stored tensor and object whose key begins with a prefix; called on rank 0 alone."""

    def __call__(self, checkpoint: Checkpoint, key_prefix: str, /) -> None: ...


class VerifyFiles(Protocol):
    """VERIFY: return what in a checkpoint isn't what was saved, and which bytes have no checksum.

    `checkpoint.options` has the number of threads, and `progress`, which any thread may call. The fields name the
    backend as the shards' too where it holds the objects beside a backend of tensors alone: these are its shards then.
    """

    def __call__(self, checkpoint: Checkpoint, /) -> tuple[Finding, ...]: ...


class Recognize(Protocol):
    """RECOGNIZE: return the fields of metadata.json for a folder without one, None if it isn't in this format.

    These are at least the backends and versions of the shards and of the common state. A format whose checkpoints have
    no metadata.json has this row. It may be called for any folder, and for a single file, whose name is then "".
    """

    def __call__(self, storage: Storage, /) -> Fields | None: ...


class Publish(Protocol):
    """PUBLISH: write the file that makes a folder a checkpoint; called on rank 0 alone, last of all.

    A format that has no such row is published by metadata.json. The fields are those of that file.
    """

    def __call__(self, pending: PendingSave, fields: Fields, /) -> None: ...


class ListFiles(Protocol):
    """LIST_FILES: return the names of a checkpoint's files, which go when it is replaced as a whole.

    metadata.json needn't be among them, and not all of them need be there. What isn't listed is kept.
    """

    def __call__(self, checkpoint: Checkpoint, /) -> tuple[str, ...]: ...


class Describe(Protocol):
    """DESCRIBE: return what the rest of the library has to know of the format."""

    def __call__(self) -> FormatTraits: ...


PROTOCOLS = {
    StrategyAction.LOAD_COMMON: LoadCommon,
    StrategyAction.LOAD_SHARDED: LoadSharded,
    StrategyAction.LOAD_OBJECTS: LoadObjects,
    StrategyAction.LOAD_METADATA: LoadMetadata,
    StrategyAction.PARSE: Parse,
    StrategyAction.RESOLVE: Resolve,
    StrategyAction.SAVE_COMMON: SaveCommon,
    StrategyAction.SAVE_SHARDED: SaveSharded,
    StrategyAction.REMOVE_SHARDED: RemoveSharded,
    StrategyAction.VERIFY: VerifyFiles,
    StrategyAction.RECOGNIZE: Recognize,
    StrategyAction.PUBLISH: Publish,
    StrategyAction.LIST_FILES: ListFiles,
    StrategyAction.DESCRIBE: Describe,
}
"""The protocol of each action."""
