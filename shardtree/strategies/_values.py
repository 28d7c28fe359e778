"""The values that strategies are given: a checkpoint to read, a draft to write, and the request that writes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

from ..layouts import ShardColumns
from ..storage import Storage, Verify
from ..world import World, agree, gather

Fields = Mapping[str, Any]
"""JSON fields of metadata.json."""

T = TypeVar("T")


def _ignore(_: int) -> None:
    pass


def _nothing() -> None:
    pass


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How a checkpoint is read.

    Attributes:
        verify: which blocks are checked against their hashes: "whole" those that are read whole or nearly (at most
            64 KiB missing), and in files of at most 4 MiB all that are touched; "all" touched; or none (None).
        allow_pickle: whether pickled values may be unpickled, which can run any code.
        types: enum, dataclass and namedtuple classes that stored records become instances of.
        progress: is told, now and then, how many bytes were read since the last time.
    """

    verify: Verify = "whole"
    allow_pickle: bool = False
    types: tuple[type, ...] = ()
    progress: Callable[[int], None] = _ignore


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """A finished checkpoint.

    Attributes:
        storage: the folder that it is in.
        fields: what metadata.json says.
        world: who reads it together.
        options: how it is read.
        memo: what strategies remember of it, such as the parsed index.
    """

    storage: Storage
    fields: Fields
    world: World
    options: LoadOptions = field(default_factory=LoadOptions)
    memo: dict[str, Any] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True)
class Damage:
    """Something in a checkpoint that isn't what was saved.

    Attributes:
        file: the file's name in the checkpoint.
        what: what is wrong, in words.
        begin: first byte of the damaged stretch of the file.
        end: one past its last byte; 0 where the file is damaged as a whole.
        keys: tensors' keys and objects' unique keys that have bytes there.
    """

    file: str
    what: str
    begin: int = 0
    end: int = 0
    keys: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SaveOptions:
    """How a checkpoint is written.

    Attributes:
        durable: whether files and folders are on the medium before the checkpoint counts as saved.
        allow_pickle: whether values that the format can't hold are pickled.
        stale_after: seconds without a change after which the left-overs of a dead save may be removed.
        progress: is told, now and then, how many bytes were written since the last time.
    """

    durable: bool = True
    allow_pickle: bool = False
    stale_after: float = 3600.0
    progress: Callable[[int], None] = _ignore


@dataclass(frozen=True, slots=True, eq=False)
class Draft:
    """A checkpoint that is being written.

    Attributes:
        storage: the folder that it goes to.
        save_id: the name of this save, and of the folder inside `storage` that is this save's alone.
        world: who writes it together.
        before: metadata.json as it was when the save began, None if there was none.
        options: how it is written.
        layout: all ranks' shards, None where they didn't tell each other.
        memo: what the strategies of one save remember on their rank until the commit.
    """

    storage: Storage
    save_id: str
    world: World
    before: bytes | None = None
    options: SaveOptions = field(default_factory=SaveOptions)
    layout: ShardColumns | None = None
    memo: dict[str, Any] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True, eq=False)
class AsyncRequest(Generic[T]):
    """A save that is prepared and not yet done: a value until `execute_sync` or a queue runs it.

    Attributes:
        world: who saves.
        async_fn: writes this rank's files, without any collective; may run in another thread.
        commit: given every rank's result, by rank, makes the checkpoint count; collective.
        finalize_fns: called on every rank after the commit, in order.
        abandon: called on every rank when writing or the commit failed; removes what was written. Never raises.
    """

    world: World
    async_fn: Callable[[], T]
    commit: Callable[[Sequence[T]], Fields]
    finalize_fns: tuple[Callable[[], None], ...] = ()
    abandon: Callable[[], None] = _nothing

    def add_finalize_fn(self, fn: Callable[[], None]) -> AsyncRequest[T]:
        """Return the request with one more function to call after the commit, after those that it has."""
        return replace(self, finalize_fns=(*self.finalize_fns, fn))

    def execute_sync(self) -> Fields:
        """Write, commit and finalize now, and return what metadata.json says; collective.

        It may be tried again after a failure; once it has succeeded, a second call is refused.

        Raises:
            CheckpointingException: some rank failed; nothing was committed unless a finalizer is what failed.
        """
        try:
            fields = self.commit(gather(self.world, "save: write", self.async_fn))
        except BaseException:
            self.abandon()
            raise
        for fn in self.finalize_fns:
            agree(self.world, "save: finalize", fn)
        return fields
