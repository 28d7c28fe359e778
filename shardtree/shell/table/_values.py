"""The values that strategies get: a checkpoint to read, a pending save to write, and the request that writes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Generic, Literal, TypeVar

from ...core.ambient import shielded
from ...core.deferred import leaf
from ...core.layouts import ObjectRule, ShardColumns
from ...errors import CheckpointingException, OutcomeUnknown, WorldError, error_text
from ..storage import Buffer, ReadReport, SaveReport, Sibling, Storage, Verify
from ..world import World, agree, gather_on_rank_zero, on_rank_zero
from ._traits import FormatTraits, Stamp

Fields = Mapping[str, Any]
"""JSON fields of metadata.json."""

_COMMIT_STEPS = ("save: look for another checkpoint", "save: index", "save: common state")

T = TypeVar("T")


def _ignore(*_: object) -> None:
    pass


_nothing = _ignore  # a name that pickles have


Exchange = Literal["auto", "always", "never"]
"""Whether ranks that want the same elements read them once and send them to each other; "auto" if that is faster."""


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """Options for reading a checkpoint; those of one function alone say so.

    Attributes:
        verify: which blocks are checked against their hashes: "whole" those that are read whole or nearly (at most
            64 KiB missing), and in files of at most 4 MiB all that are touched; "all" touched; or none (None).
        exchange: whether of ranks of a `load` that want the same shard one reads it and sends it to the others:
            "always", "never", or "auto": where ranks are on several machines, storage is an object store or a network
            file system, and it saves at least 128 MiB a rank.
        allow_pickle: whether pickled values may be unpickled, which can run any code.
        types: enum, dataclass and namedtuple classes that stored records become instances of; in the common state that
            `load` returns, the namedtuple classes in the target count too.
        object_rules: rules that convert arrays of objects which are stored in another shape than the target of `load`
            has, by patterns of keys (``*`` matches one part between dots, ``**`` any number); the first that matches a
            key counts. Without a rule, another shape is an error.
        progress: called with the bytes that were read since the last call, by one thread at a time.
        report: called once, at the end of a `load`, with what this rank read.
        threads: number of threads that check files in `verify`; None for as many as torch has, up to a few.
        parameter_names: the names of an optimizer's parameters, where a checkpoint has only their numbers: in the
            order in which the optimizer was given them, as one sequence or one for each of its groups; or where
            values alone don't tell them apart.

    Examples:
        >>> LoadOptions(verify="all", exchange="never").allow_pickle
        False
    """

    verify: Verify = "whole"
    exchange: Exchange = "auto"
    allow_pickle: bool = False
    types: tuple[type, ...] = ()
    object_rules: Mapping[str, ObjectRule] | None = None
    progress: Callable[[int], None] = _ignore
    report: Callable[[ReadReport], None] | None = None
    threads: int | None = None
    parameter_names: Sequence[str] | Sequence[Sequence[str]] | None = None


class ReadCache:
    """Memoised results of reading an open checkpoint, by function; never evicted.

    Args:
        results: those that are there already, by their functions.
    """

    __slots__ = ("results",)

    def __init__(self, results: Mapping[Callable[[Checkpoint], Any], Any] | None = None) -> None:
        self.results = dict(results or {})

    def adding(self, read: Callable[[Checkpoint], T], result: T) -> ReadCache:
        """Return one that has a function's result too."""
        return ReadCache({**self.results, read: result})


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """A finished checkpoint.

    Attributes:
        storage: the folder that it is in.
        fields: the fields of metadata.json.
        world: the ranks that read it together.
        options: options for reading it.
        cache: results of formats' reads, such as the parsed index.
        fetched: files that were fetched before they are read, by the field that names them in metadata.json: the bytes,
            which are as they were saved, and the file's name.
        stamp: a mark that changes once another checkpoint takes its place.
        traits: the traits of its formats, together.
    """

    storage: Storage
    fields: Fields
    world: World
    options: LoadOptions = field(default_factory=LoadOptions)
    cache: ReadCache = field(default_factory=ReadCache, repr=False)
    fetched: Mapping[str, tuple[Buffer, str]] = field(default_factory=dict, repr=False)
    stamp: Stamp = ()
    traits: FormatTraits = field(default_factory=FormatTraits)

    def once(self, read: Callable[[Checkpoint], T]) -> T:
        """Return a function's result for this checkpoint; the function is called the first time, and not again.

        For what several rows of a format need, such as its parsed metadata.
        """
        results = self.cache.results
        if read not in results:
            results[read] = read(self)
        value: T = results[read]
        return value


@dataclass(frozen=True, slots=True)
class SaveOptions:
    """Options for writing a checkpoint.

    Attributes:
        snapshot: whether a request holds copies of the shards' tensors. Without, as for functional training steps,
            they are written from their own memory, and mustn't change until the request is done; objects and the
            common state are copied in any case.
        durable: whether everything is on the medium before the checkpoint counts. Without, a power failure soon
            after the save can leave a checkpoint whose files are incomplete; a crash of the process can't.
        allow_pickle: whether values that the format can't hold are pickled; loading them then needs it too.
        stale_after: seconds without a change after which another machine's save counts as interrupted, so that its
            orphaned files are removed; one of this machine does as soon as its process is gone.
        progress: called with the bytes that this rank wrote since the last call, by one thread at a time.
        fingerprint: whether each tensor's `fingerprint` is stored with it, added up from the bytes as they are written;
            `verify` then reads the tensors back and compares. Only our own format has a place for that.
        checksums: whether the hash of each block of 256 KiB is stored, so that loads and `verify` find what was
            changed. Without, a save is a little faster, and such checkpoints are taken on trust. The common state, the
            index and what a format's own files carry are hashed all the same.
        check_replicas: whether replicas of tensors that are cut alike are compared, by `fingerprint`, before anything
            is written: a spec that forgets a cut makes every rank call its own part the whole. Each rank then reads
            all that it shares with another one. Objects aren't compared.
        threads: number of threads that write, in formats that can; None for as many as torch has, up to a few.
        common: whether the common state must be the "same" on all ranks, or is the "union" of their dicts, by key, as
            pipeline stages need it that have keys of their own. What several ranks have under one key must be the same
            bits. Only where ranks differ are common states sent, one of each kind.
        report: Function that each rank calls once, after the commit, with its `SaveReport`: what the file system
            refused, such as to sync folders. `convert` calls it on rank 0 alone. The log says the same.
            What it raises is logged: the checkpoint is there by then.

    Examples:
        >>> SaveOptions(durable=False).checksums
        True
    """

    snapshot: bool = True
    durable: bool = True
    allow_pickle: bool = False
    stale_after: float = 3600.0
    progress: Callable[[int], None] = _ignore
    fingerprint: bool = False
    checksums: bool = True
    check_replicas: bool = False
    threads: int | None = None
    common: Literal["same", "union"] = "same"
    report: Callable[[SaveReport], None] | None = None

    def __post_init__(self) -> None:
        if self.check_replicas:
            leaf("differing_replicas")  # imported now: a save imports nothing, since it may run in a signal handler


@dataclass(frozen=True, slots=True, eq=False)
class Replaced:
    """A checkpoint whose folder is exchanged, in the end, for the one that a save writes.

    Attributes:
        storage: the folder, of the old files before and of the new ones after.
        sibling: the folder beside it, which is written.
        stamp: the mark of the old checkpoint.
    """

    storage: Storage
    sibling: Sibling
    stamp: Stamp


@dataclass(frozen=True, slots=True, eq=False)
class PendingSave:
    """A checkpoint that is being written.

    Attributes:
        storage: the folder that is written.
        save_id: the name of this save, and of the folder inside `storage` that is this save's alone.
        world: the ranks that write it together.
        before: metadata.json as it was when the save began, None if there was none.
        options: options for writing it.
        layout: all ranks' shards, None if the ranks didn't exchange them.
        replaced: the checkpoint whose place the folder takes in the end; None if the folder has its place already.
        overwrite: whether the caller lets a checkpoint be replaced.
        common: the common state with holes where shards were, for SAVE_SHARDED of a format whose files of tensors have
            room for some of it (`FormatTraits.writes_common`); None where a caller hasn't given it.
        state: the state of the request that SAVE_SHARDED returned, for the format's PUBLISH row and for SAVE_COMMON.
            For SAVE_SHARDED itself None, or where one process plays several ranks, the state of the one before.
    """

    storage: Storage
    save_id: str
    world: World
    before: bytes | None = None
    options: SaveOptions = field(default_factory=SaveOptions)
    layout: ShardColumns | None = None
    replaced: Replaced | None = None
    overwrite: bool = True
    common: Any = field(default=None, repr=False)
    state: Any = None

    @property
    def destination(self) -> Storage:
        """The folder that holds the checkpoint in the end: `storage`, unless that takes another one's place."""
        return self.storage if self.replaced is None else self.replaced.storage


@dataclass(slots=True, eq=False)
class Outcome:
    """Result of a save on this rank; a request and those that are made from it share one.

    Attributes:
        fields: the fields of metadata.json, once the save is committed and finalized.
        error: the error with which it failed.
        commit: function that waits for the save and commits it, or raises; None before a queue has it.
    """

    fields: Fields | None = None
    error: BaseException | None = None
    commit: Callable[[], object] | None = None


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class AsyncRequest(Generic[T]):
    """A save that is prepared and not yet done: a value until `execute_sync` or an `AsyncCallsQueue` runs it.

    It is immutable, so a queue runs exactly what was scheduled: a finalizer that is added later is in another request.
    Megatron-Core's request has only functions that write and finalizers. Whether the checkpoint counts is decided from
    all ranks' results, which a finalizer doesn't have: hence `index` and `publish`, which together are the commit.

    Attributes:
        world: the ranks that save; used only by the thread that commits.
        async_fn: function that writes this rank's files, without any collective; may run in another thread.
        index: function that rank 0 calls with every rank's result, by rank: writes what of the checkpoint only all
            ranks together know, and returns the fields of metadata.json. No collective.
        finalize_fns: functions for every rank after the commit, in order; if one fails, it is an error on all ranks.
        abandon: function for every rank that knows that writing or the commit failed; removes what was written. Never
            raises.
        folder: the destination, None if unknown.
        clean_up: function for every rank right after the commit; removes what isn't needed any more. Its error is
            raised on that rank alone, unless there are `finalize_fns`.
        outcome: the result.
        state: a value of the format's own class, which the format's later rows of the same save need.
        removes_saves: whether `clean_up` removes the folders of interrupted saves, and the note in its own.
        publish: function that rank 0 calls with these fields, last of all: makes the folder a checkpoint. A format's
            own request has none: its PUBLISH row does that, or metadata.json.
    """

    world: World
    async_fn: Callable[[], T]
    index: Callable[[Sequence[T]], Fields]
    finalize_fns: tuple[Callable[[], None], ...] = ()
    abandon: Callable[[], None] = _ignore
    folder: Storage | None = None
    clean_up: Callable[[], None] = _ignore
    outcome: Outcome = field(default_factory=Outcome)
    state: Any = None
    removes_saves: bool = False
    publish: Callable[[Fields], None] = _ignore

    def __repr__(self) -> str:
        of, state = self.outcome, "not executed yet"
        if of.error is not None:
            state = f"failed: {type(of.error).__name__}"
        elif of.fields is not None:
            state = "committed"
        elif of.commit is not None:
            state = "scheduled"
        return f"AsyncRequest({f'to {self.folder!r}, ' if self.folder is not None else ''}{state})"

    def add_finalize_fn(self, fn: Callable[[], None]) -> AsyncRequest[T]:
        """Return the request with one more function to call after the commit, after those that it has."""
        return replace(self, finalize_fns=(*self.finalize_fns, fn))

    def commit(self, results: Sequence[T]) -> Fields:
        """Index and publish the results of `async_fn`, by rank, and return the fields of metadata.json; on rank 0."""
        fields = self.index(results)
        self.publish(fields)
        return fields

    def execute_sync(self) -> Fields:
        """Write, commit and finalize now, and return the fields of metadata.json; collective.

        After a failure it may be called again; once it has succeeded, a second call is refused.

        Raises:
            CheckpointingException: some rank failed; nothing was committed unless a finalizer is what failed.
        """
        return self.finish(self.async_fn)

    def result(self) -> Fields:
        """Return the fields of metadata.json once the save is committed, or raise why it isn't; collective.

        A scheduled save is waited for, and its queue commits it, after those that were scheduled before it. One that
        isn't scheduled is executed now. Later calls return or raise the same, and aren't collective.

        Raises:
            CheckpointingException: this save failed; or one before it in the queue did, which the error's notes name:
                then call it again.
            WorldError: another thread uses the queue, or it was forked.

        Examples:
            >>> import torch, shardtree as st
            >>> tree = {"w": st.ShardedTensor.from_rank_offsets("w", torch.arange(4))}
            >>> with st.AsyncCallsQueue() as queue:
            ...     request = st.save(tree, "step-1", async_sharded_save=True)
            ...     queue.schedule_async_request(request)
            ...     request.result()["sharded_backend"]
            0
            'safetensors'
        """
        outcome = self.outcome
        if outcome.fields is None and outcome.error is None:
            (outcome.commit or self.execute_sync)()
        if outcome.error is not None:
            raise outcome.error
        if outcome.fields is None:
            where = "" if self.folder is None else f" to {self.folder.where()!r}"
            fix = "Ask in the process that scheduled it."
            raise WorldError(error_text(f"async save{where}: it isn't in progress in this process", fix=fix))
        return outcome.fields

    @shielded
    def finish(self, written: Callable[[], T]) -> Fields:
        """Commit and finalize what was written, and return the fields of metadata.json; collective.

        Args:
            written: returns the result of `async_fn` on this rank, or raises its error.

        Raises:
            CheckpointingException: some rank failed, as in `execute_sync`.
        """
        try:
            fields = self._finish(written)
        except BaseException as error:
            self.outcome.error = error
            raise
        self.outcome.fields, self.outcome.error = fields, None
        return fields

    def _finish(self, written: Callable[[], T]) -> Fields:
        wrote = False

        def write() -> T:
            nonlocal wrote
            result = written()
            wrote = True
            return result

        try:
            results = gather_on_rank_zero(self.world, "save: write", write)
            fields = on_rank_zero(self.world, "save: commit", partial(self.commit, results), steps=_COMMIT_STEPS)
        except BaseException as error:
            # A rank that lost contact after it wrote doesn't know whether rank 0 commits: its files may be the
            # checkpoint's. A RemoteError is a kind of WorldError too, but then all ranks know of the failure.
            is_cut_off = type(error) is WorldError or not isinstance(error, CheckpointingException)
            if wrote and self.world.rank != 0 and is_cut_off:
                error.add_note("save: rank 0 may have committed, so what this rank wrote stays")
            elif not isinstance(error, OutcomeUnknown):  # else a store may take rank 0's last request after all
                self.abandon()
            raise
        # No phase of its own: the checkpoint counts by now, so no rank waits while rank 0 removes what it replaced.
        if not self.finalize_fns:
            self.clean_up()
            return fields
        finalize, *others = self.finalize_fns

        def first() -> None:
            self.clean_up()
            finalize()

        for fn in (first, *others):
            agree(self.world, "save: finalize", fn)
        return fields
