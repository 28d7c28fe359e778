"""The actions of formats, and for each action a protocol: the signature of its functions in the dispatch table.

A row of the table is a format's function for one action: its LOAD_COMMON row is its function for LOAD_COMMON.
"""

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
    """An action of a format, such as loading shards; the first part of a key of the dispatch table.

    COMMIT and the value "commit" are old names of PUBLISH.

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
"""A function of the table; its action's protocol is its signature."""
# Any rather than Enum: keys of a Mapping are invariant, and a dict whose keys have StrategyActions is a table too.
Row = tuple[Any, str, int]
"""An action, a backend and its version; the action may be a member of a user's Enum whose value is a string."""
Strategies = Mapping[Row, Strategy]
"""The type of a dispatch table."""
StoredRows = Mapping[Row, Strategy | str]
"""The rows of one of our formats: functions, or their import paths below `shardtree`, as "module:function"."""


class LoadCommon(Protocol):
    """LOAD_COMMON: return the stored common tree, with `HOLE` in place of each shard."""

    def __call__(self, checkpoint: Checkpoint, /) -> Any: ...


class LoadSharded(Protocol):
    """LOAD_SHARDED: fill each shard's data, a contiguous CPU tensor, in place, and return a report.

    The data is uninitialised memory, or the target's own with `donate=True`. Nobody checks that every element was
    filled.

    Elements beyond the stored global shape stay unchanged if the shard has `allow_shape_mismatch`; otherwise they are
    an error. Each rank passes its own shards.
    """

    def __call__(self, checkpoint: Checkpoint, shards: Sequence[ShardedTensor], /) -> ReadReport: ...


class LoadObjects(Protocol):
    """LOAD_OBJECTS: return the data of each sharded object, in order."""

    def __call__(self, checkpoint: Checkpoint, objects: Sequence[ShardedObject], /) -> list[Any]: ...


class LoadMetadata(Protocol):
    """LOAD_METADATA: return all stored tensors by key and objects by unique key, each as a whole and without data."""

    def __call__(self, checkpoint: Checkpoint, /) -> Mapping[str, ShardedTensor | ShardedObject]: ...


class Parse(Protocol):
    """PARSE: return the parsed metadata; the format's other functions get it by `checkpoint.once(parse)`.

    If several ranks load together, rank 0 alone parses, and the others get a copy of the result, which must be plain
    data. A PARSE function is useful if a format's metadata takes long to read or to parse. If a format has none, each
    rank reads the metadata itself.
    """

    def __call__(self, checkpoint: Checkpoint, /) -> Any: ...


class Copies(NamedTuple):
    """The copies of one box of a tensor in several files, or in several parts of a file.

    Attributes:
        key: Key of the tensor.
        offset: Offset of the box in the tensor.
        held: (owner, reader) pairs, one for each copy. The owner is a text for messages, such as the name of the copy's
            file. The reader is a function that returns the copy, or None if it is absent.
    """

    key: str
    offset: tuple[int, ...]
    held: Sequence[tuple[str, Callable[[], Any]]]


@dataclass(frozen=True, slots=True)
class Resolution:
    """A collective search for facts that a format's metadata lacks, with a share of the work for each loading rank.

    Attributes:
        find: Function from a share's number and the number of shares to the share's result, as plain data. Only ranks
            that need the facts have a share.
        keep: Function that stores the results of all shares, in order, on this rank. It may raise.
        copies: Function that returns the `Copies` of boxes that are stored more than once, for a comparison of
            replicas; None if there are none. If it isn't None, a load by a single rank skips the search, and the
            format's functions find the facts as they read.
    """

    find: Callable[[int, int], Any]
    keep: Callable[[Sequence[Any]], None]
    copies: Callable[[], Iterable[Copies]] | None = None


class Resolve(Protocol):
    """RESOLVE: return a search for facts that are missing in the metadata; None if there is nothing to search for.

    Only formats with incomplete metadata need a RESOLVE function. The facts are those without which `keys` can't be
    read. The load executes the search (see `Resolution`), whose results the format keeps. `listed` is True if the load
    also lists all stored keys.
    """

    def __call__(self, checkpoint: Checkpoint, keys: Set[str], listed: bool, /) -> Resolution | None: ...


class SaveCommon(Protocol):
    """SAVE_COMMON: write the common tree and return fields of metadata.json; called on rank 0 only.

    The returned fields replace the save's own fields, so that a backend can name another backend for the common state.
    """

    def __call__(self, pending: PendingSave, common: Any, /) -> Fields: ...


class SaveSharded(Protocol):
    """SAVE_SHARDED: return the request that writes this rank's share of the shards.

    A save has two backends, perhaps the same one: one for the tensor shards, one for the common state. Sharded objects
    go to the shards' backend if it has a LOAD_OBJECTS row, or is the backend of the common state too. Otherwise they go
    to the common state's backend, whose SAVE_SHARDED gets only objects. That backend needs a LOAD_OBJECTS row, and must
    have no PUBLISH row, since the shards' backend publishes the checkpoint. If neither backend can hold objects, the
    save refuses them.
    """

    def __call__(
        self, pending: PendingSave, shards: Sequence[ShardedTensor | ShardedObject], /
    ) -> AsyncRequest[Any]: ...


class RemoveSharded(Protocol):
    """REMOVE_SHARDED: remove every stored tensor and object whose key begins with a prefix; called on rank 0 only."""

    def __call__(self, checkpoint: Checkpoint, key_prefix: str, /) -> None: ...


class VerifyFiles(Protocol):
    """VERIFY: return the findings in a checkpoint: damaged bytes, bytes without a checksum, and checked bytes.

    `checkpoint.options` has the number of threads, and `progress`, which any thread may call. If this backend holds
    only the objects of the checkpoint, and another one the tensors, the function gets a checkpoint with changed fields:
    `checkpoint.fields` name this backend as that of the shards.
    """

    def __call__(self, checkpoint: Checkpoint, /) -> tuple[Finding, ...]: ...


class Recognize(Protocol):
    """RECOGNIZE: return the fields of metadata.json for a folder without one, or None if it isn't in this format.

    The fields contain at least the backends and versions of the shards and of the common state. Formats without a
    metadata.json need this row. It may be called for any folder, and for a single file, whose name is then "".
    """

    def __call__(self, storage: Storage, /) -> Fields | None: ...


class Publish(Protocol):
    """PUBLISH: write the file that makes a folder a checkpoint; the last step, called on rank 0 only.

    A format without this row is published by metadata.json. The argument `fields` is the content of that file.
    """

    def __call__(self, pending: PendingSave, fields: Fields, /) -> None: ...


class ListFiles(Protocol):
    """LIST_FILES: return the names of a checkpoint's files, which are removed when it is replaced as a whole.

    The list may omit metadata.json and may name missing files. Files that aren't listed are kept.
    """

    def __call__(self, checkpoint: Checkpoint, /) -> tuple[str, ...]: ...


class Describe(Protocol):
    """DESCRIBE: return the format's traits: the facts about its files that the rest of the library needs."""

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
