"""The arguments of strategies: an open checkpoint, a pending save, and the request that writes it."""

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
"""Fields of metadata.json, as JSON values."""

_COMMIT_STEPS = ("save: look for another checkpoint", "save: index", "save: common state")

T = TypeVar("T")


def _ignore(*_: object) -> None:
    pass


_nothing = _ignore  # existing pickles refer to this name


Exchange = Literal["auto", "always", "never"]
"""Whether ranks that want the same elements read them once and send them to each other; "auto": if that is faster."""


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """Options for reading a checkpoint.

    Attributes:
        verify: Blocks that are checked against their hashes. "whole": blocks that are read whole or nearly (with at
            most 64 KiB missing), and all touched blocks of files up to 4 MiB; "all": all touched blocks; None: none.
        exchange: Whether one rank of a `load` reads elements that several ranks want, and sends them to the others:
            "always", "never", or "auto": only if all three hold: ranks are on several machines; the storage is an
            object store or a network file system; the exchange saves at least 128 MiB per rank.
        allow_pickle: Whether pickled values may be unpickled, which can run any code.
        types: Enum, dataclass and namedtuple classes; stored records of these classes become instances. For the common
            state that `load` returns, the target's namedtuple classes are added.
        object_rules: Rules that convert arrays of objects stored in another shape than the target of `load` has, by
            patterns of keys (``*`` matches one part between dots, ``**`` any number). The first matching pattern
            counts; without a rule, another shape is an error.
        progress: Function that is called with the number of bytes read since its last call, by one thread at a time.
        report: Function that is called once with this rank's `ReadReport`, at the end of a `load`.
        threads: Number of threads that check files in `verify`; None for torch's number, up to a few.
        parameter_names: Names of an optimizer's parameters, for checkpoints that only number them, or whose
            values alone don't identify them: in the optimizer's order, as one sequence or one for each group.
        shapes: Known global shapes by key, for `dcp_safetensors`; it is an error if the files yield other shapes.

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
    shapes: Mapping[str, Sequence[int]] | None = None


class ReadCache:
    """Memoised results of reading an open checkpoint, by function; never evicted.

    Args:
        results: Initial results, by function.
    """

    __slots__ = ("results",)

    def __init__(self, results: Mapping[Callable[[Checkpoint], Any], Any] | None = None) -> None:
        self.results = dict(results or {})

    def adding(self, read: Callable[[Checkpoint], T], result: T) -> ReadCache:
        """Return a new cache that also has the result of `read`."""
        return ReadCache({**self.results, read: result})


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """An open checkpoint.

    Attributes:
        storage: Storage of the checkpoint's folder.
        fields: Fields of metadata.json.
        world: Ranks that read it together.
        options: Options for reading it.
        cache: Memoised results of formats' reads, such as the parsed index.
        fetched: (content, path or URL) of files that were prefetched and checked, by their field of metadata.json.
        stamp: Name, length and time of each file that makes the folder a checkpoint; a later save changes them.
        traits: Combined traits of its formats.
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
        """Return a function's memoised result for this checkpoint.

        This is for results that several functions of a format need, such as its parsed metadata.
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
        snapshot: Whether a request holds copies of the shards' tensors. Otherwise, as for functional training steps,
            tensors are written from their own memory, and must not change until the request is done. Objects and the
            common state are always copied.
        durable: Whether everything is on the medium before the checkpoint is published. Otherwise a power failure soon
            after the save can leave a checkpoint with incomplete files; a crash of the process can't.
        allow_pickle: Whether values that the format can't hold are pickled; loading them then needs `allow_pickle` too.
        stale_after: Seconds without a change after which another machine's save counts as interrupted, so that its
            orphaned files are removed. A save of this machine counts as interrupted as soon as its process has ended.
        progress: Function that is called with the number of bytes written by this rank since its last call, by one
            thread at a time.
        fingerprint: Whether each tensor's `fingerprint` is computed during the write and stored with it; `verify` then
            reads the tensors back and compares. Only our own format can store it.
        checksums: Whether the hash of each block of 256 KiB is stored, so that loads and `verify` detect changes.
            Without them, a save is a little faster, and damage goes unnoticed. The common state, the index and the
            checksums that belong to a format's own files are hashed in any case.
        check_replicas: Whether hashes of replicas (shards with the same box) are compared before anything is written.
            This detects a spec that omits a sharded axis: ranks then pass different parts as the same whole tensor. For
            this, each rank reads all tensors that it shares with others. Objects aren't compared.
        threads: Number of threads that write, in formats that support it; None for torch's number, up to a few.
        common: "same": the common state must be equal on all ranks; "union": it is the union of the ranks' dicts, for
            pipeline stages with different keys. Values of several ranks under one key must be equal bit by bit. Common
            states are sent only if ranks differ, and each distinct state only once.
        report: Function that each rank (in `convert`, only rank 0) calls with its `SaveReport` after the commit. The
            log has the same information. The function's exceptions are logged: the checkpoint is published by then.

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
            leaf("differing_replicas")  # imported now, since a save may run in a signal handler and imports nothing


@dataclass(frozen=True, slots=True, eq=False)
class Replaced:
    """A checkpoint that a save replaces by exchanging the checkpoint's folder with a new one beside it.

    Attributes:
        storage: Storage of the checkpoint's folder; it has the old files before the exchange, the new ones afterwards.
        sibling: New folder, into which the save writes before the exchange.
        stamp: Name, length and time of each file that made the old folder a checkpoint.
    """

    storage: Storage
    sibling: Sibling
    stamp: Stamp


@dataclass(frozen=True, slots=True, eq=False)
class PendingSave:
    """A checkpoint that is being written.

    Attributes:
        storage: Storage of the folder that is written.
        save_id: Name of the save, and of its own folder inside `storage`.
        world: Ranks that write it together.
        before: Content of metadata.json when the save began; None if there was none.
        options: Options for writing it.
        layout: Columns of all ranks' shards; None if the ranks didn't exchange them.
        replaced: Checkpoint whose folder is exchanged with the written one; None if there is no exchange.
        overwrite: Whether the caller allows a checkpoint to be replaced.
        common: Common state, with holes in place of shards. Formats with the trait `writes_common` store some of it in
            the tensors' files, and so need it in SAVE_SHARDED. None if the caller didn't pass it.
        state: `AsyncRequest.state` of the request that SAVE_SHARDED returned, for PUBLISH and SAVE_COMMON of the same
            format. SAVE_SHARDED itself gets None, or the previous rank's state if one process plays several ranks.
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
        """Storage of the checkpoint's final folder: `replaced.storage` if two folders are exchanged, else `storage`."""
        return self.storage if self.replaced is None else self.replaced.storage


@dataclass(slots=True, eq=False)
class Outcome:
    """Result of a save on this rank; a request and its copies, such as those of `add_finalize_fn`, share it.

    Attributes:
        fields: Fields of metadata.json, once the save is committed and finalized.
        error: Error of a failed save.
        commit: Function that waits for the save and commits it, or raises; None until the request is in a queue.
    """

    fields: Fields | None = None
    error: BaseException | None = None
    commit: Callable[[], object] | None = None


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class AsyncRequest(Generic[T]):
    """A prepared save: an immutable value until `execute_sync` or an `AsyncCallsQueue` runs it.

    A queue runs exactly the request that was scheduled: adding a finalizer later returns a new request. Megatron-Core's
    request has only finalizers and functions that write. Here, the commit needs the results of all ranks, which a
    finalizer doesn't get; hence `index` and `publish`, which are the two halves of the commit.

    Attributes:
        world: Ranks that save; used only by the thread that commits.
        async_fn: Function that writes this rank's files, without any collective; it may run in another thread.
        index: Function that rank 0 calls with the results of all ranks, by rank. It writes the index of the checkpoint,
            without any collective, and returns the fields of metadata.json.
        finalize_fns: Functions that every rank calls after the commit, in order; an error in one is raised on all
            ranks.
        abandon: Function that each rank calls after it learns of a failed write or commit, to remove the written files.
            Never raises.
        folder: Storage of the destination; None if unknown.
        clean_up: Function that every rank calls right after the commit, to remove obsolete files. Its error is raised
            on that rank only, unless there are `finalize_fns`.
        outcome: Result of the save, filled in when it ends; copies of the request share it.
        state: Any value that the format's later functions in the same save need.
        removes_saves: Whether `clean_up` removes this save's owner note and the folders of interrupted saves.
        publish: Function that rank 0 calls last, with the fields from `index`, to make the folder a checkpoint.
            Does nothing in a request that a format returns, since the save then publishes the folder itself.
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
        """Return a copy of the request with one more function at the end of `finalize_fns`."""
        return replace(self, finalize_fns=(*self.finalize_fns, fn))

    def commit(self, results: Sequence[T]) -> Fields:
        """Write the index from all ranks' results, publish the save, and return metadata.json's fields; rank 0 only."""
        fields = self.index(results)
        self.publish(fields)
        return fields

    def execute_sync(self) -> Fields:
        """Write, commit and finalize now, and return the fields of metadata.json; collective.

        It may be called again after a failure, but not after a success.

        Raises:
            CheckpointingException: some rank failed; nothing was committed, unless a finalizer failed.
        """
        return self.finish(self.async_fn)

    def result(self) -> Fields:
        """Wait for the save's commit, and return the fields of metadata.json or raise the save's error; collective.

        The queue commits a scheduled save after all earlier ones. A save that isn't scheduled is executed now. Once
        this save has ended, further calls return its fields or raise its error again, and aren't collective.

        Raises:
            CheckpointingException: this save failed. Or an earlier save of the queue failed, and the error's notes name
                it. Then this save is still in progress, and another call waits for it.
            WorldError: another thread uses the queue, or the process was forked.

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
            fix = "Call result() in the process that scheduled the save."
            raise WorldError(error_text(f"async save{where}: the save is not in progress in this process", fix=fix))
        return outcome.fields

    @shielded
    def finish(self, written: Callable[[], T]) -> Fields:
        """Commit and finalize written files, and return the fields of metadata.json; collective.

        Args:
            written: Function that returns the result of `async_fn` on this rank, or raises its error.

        Raises:
            CheckpointingException: some rank failed; see `execute_sync`.
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
            # A rank that lost contact after it wrote doesn't know whether rank 0 commits: its files may belong to the
            # checkpoint. A RemoteError is a WorldError too, but then all ranks know of the failure.
            is_cut_off = type(error) is WorldError or not isinstance(error, CheckpointingException)
            if wrote and self.world.rank != 0 and is_cut_off:
                error.add_note("save: rank 0 may have committed, so the files of this rank stay")
            elif not isinstance(error, OutcomeUnknown):  # a store may still execute rank 0's last request
                self.abandon()
            raise
        # This isn't a phase: the checkpoint is published, so no rank needs to wait while rank 0 removes old files.
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
