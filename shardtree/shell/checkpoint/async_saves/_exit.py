"""The end of the process: saves in progress are committed first, or the process fails and names those that aren't."""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import os
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from itertools import takewhile
from multiprocessing.util import Finalize
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from typing import Any

from ....errors import CheckpointReplaced, WorldError, error_text
from ...storage import Directory, is_same_place, storage_at
from ...table import AsyncRequest
from ...world import gather

# Saves in progress: scheduled, and not committed yet


@dataclass(frozen=True, slots=True, eq=False)
class QueuedSave:
    """One scheduled save.

    Attributes:
        index: which one of its queue's, from 0.
        request: what is saved.
        writing: its result is what this rank has written.
    """

    index: int
    request: AsyncRequest[Any]
    writing: Future[Any]

    def __str__(self) -> str:
        folder = self.request.folder
        return f"async save {self.index}" + (f" to {folder.where()!r}" if folder is not None else "")


class Calls(deque[QueuedSave]):
    """A queue's saves in progress, in order.

    Attributes:
        is_committing: whether the first one is being committed; its finalizers may schedule others, and nothing else.
    """

    is_committing = False


# Committing scheduled saves: in order, and each only once every rank has written its part

_LONGEST_WAIT = 60.0  # seconds between two collectives of ranks that wait: a long write isn't taken for a dead rank


def finalize(calls: Calls, *, blocking: bool, no_dist: bool = False) -> list[int]:
    """Commit and remove the first calls as far as they are written on all ranks, and return their indices; collective.

    A call that fails on some rank is abandoned and removed on all of them; those behind it stay.

    Args:
        calls: in order, the same on all ranks.
        blocking: whether to wait until all of them are written.
        no_dist: whether to go by what this rank has written, without asking the others before the commit.

    Raises:
        CheckpointingException: the first call that failed, on every rank; as `AsyncRequest.execute_sync`.
    """
    check_idle(calls)
    indices: list[int] = []
    while calls:
        together = _leading(calls)
        ready = _written_count(together, blocking=blocking, no_dist=no_dist)
        for _ in range(ready):
            indices.append(_finalize_first(calls, indices))
        if ready < len(together) and not blocking:
            break
    return indices


def finalize_all(calls: Calls) -> list[BaseException]:
    """Commit all that can be, and return why others couldn't, in order; what ranks couldn't agree on stays."""
    failures: list[BaseException] = []
    while calls:
        before = len(calls)
        try:
            finalize(calls, blocking=True)
        except BaseException as error:
            failures.append(error)
            if len(calls) == before or not isinstance(error, Exception):
                break
    return failures


def check_idle(calls: Calls) -> None:
    """Raise where a call is being committed: one of its finalizers asks.

    Raises:
        WorldError: names the call.
    """
    if calls.is_committing:
        fix = "Do it after maybe_finalize_async_calls; a finalizer may schedule saves, and not finalize or close."
        raise WorldError(error_text(f"{calls[0]} is being committed, and a finalizer asks for it again", fix=fix))


def _written_count(calls: Sequence[QueuedSave], *, blocking: bool, no_dist: bool) -> int:
    """Return how many of the calls, from the first on, are written on every rank."""
    world = calls[0].request.world

    def count_own() -> tuple[int, int]:
        if blocking:
            wait([call.writing for call in calls], timeout=min(_LONGEST_WAIT, world.timeout / 4))
        return calls[0].index, sum(1 for _ in takewhile(lambda call: call.writing.done(), calls))

    if no_dist:
        return count_own()[1]
    # One collective for ranks that wait and ranks that don't: a rank at the end of its process can so commit together
    # with ranks that still train and only poll.
    progress = gather(world, "async save: look how far ranks are", count_own)
    indices = [index for index, _ in progress]
    if len(set(indices)) > 1:
        offenders = [f"rank {rank}: async save {index}" for rank, index in enumerate(indices)]
        fix = "Schedule and finalize the same saves on every rank, in the same order."
        what = f"{calls[0]}: rank {world.rank} would finalize it, other ranks another one"
        raise WorldError(error_text(what, offenders=offenders, fix=fix))
    return min(count for _, count in progress)


def _finalize_first(calls: Calls, before: Sequence[int]) -> int:
    call = calls[0]
    calls.is_committing = True
    try:
        call.request.finish(call.writing.result)
    except BaseException as error:
        error.add_note(str(call))
        if before:
            error.add_note(f"Committed before it: {', '.join(map(str, before))}")
        raise
    finally:
        calls.is_committing = False
        calls.popleft()
    return call.index


STATUS = 1
"""The exit status of a process that could not commit a save."""

_AFTER_A_FAILURE = 60.0  # seconds that a rank which an exception ended waits for others, which may not have seen it


@dataclass(slots=True, eq=False)
class _Process:
    """The saves in progress of one process; a fork of it has none.

    Attributes:
        pid: the process.
        queues: each queue's calls and the seconds to wait for them at exit, in the order of their first call.
        limits: messages to the watchdog: a limit in seconds from now, or None to lift it.
    """

    pid: int = field(default_factory=os.getpid)
    queues: list[tuple[Calls, float]] = field(default_factory=list)
    limits: SimpleQueue[float | None] = field(default_factory=SimpleQueue)


_process: _Process | None = None
_changing = Lock()  # simulated ranks are threads


def watch(calls: Calls, timeout: float) -> None:
    """Register a queue's calls to be committed before the process ends, or to end it with an error.

    Args:
        calls: looked at again at the end.
        timeout: seconds that they may take then.
    """
    with _changing:
        own = _own() or _begin()
        others = [(other, limit) for other, limit in own.queues if other and other is not calls]
        own.queues = [*others, (calls, timeout)]
        # Functions registered last run first: so this one runs before those that destroy process groups.
        atexit.unregister(_at_exit)
        atexit.register(_at_exit)


def calls_in_progress() -> Iterator[QueuedSave]:
    """Yield every call of this process that isn't committed."""
    own = _own()
    for calls, _ in own.queues if own else ():
        yield from tuple(calls)


def _own() -> _Process | None:
    return _process if _process is not None and _process.pid == os.getpid() else None


def _begin() -> _Process:
    global _process
    _process = _Process()
    # Started now, since no thread can be started once the interpreter is ending.
    Thread(target=_watchdog, args=(_process,), name="shardtree: exit", daemon=True).start()
    if multiprocessing.parent_process() is not None:
        # A child of multiprocessing ends by os._exit, which skips atexit's functions.
        Finalize(None, _at_exit, exitpriority=1000)
    return _process


def _watchdog(own: _Process) -> None:
    """End the process once a limit has passed."""
    # Nothing else limits a write or a commit that hangs in its storage: the world's timeout is for collectives alone. A
    # rank that an exception ended would hold its peers, which wait in the training's collectives, for all of that time.
    limit = own.limits.get()
    while limit is not None:
        try:
            limit = own.limits.get(timeout=limit)
        except Empty:
            _fail(own, [f"not done in {limit:g} seconds"])


def _at_exit() -> None:
    own = _own()
    if own is None or not any(calls for calls, _ in own.queues):
        return
    own.limits.put(max(limit for calls, limit in own.queues if calls))
    failures: list[str] = []
    try:
        _wait_for_writing(own)
        for calls, _ in own.queues:
            failures += map(_text, finalize_all(calls))
    except BaseException as error:  # a second Ctrl-C, say
        failures.append(_text(error))
    if failures:
        _fail(own, failures)
    own.limits.put(None)


def _wait_for_writing(own: _Process) -> None:
    """Wait for this process's own writing; after an exception, set a short limit, as other ranks may not come."""
    for calls, _ in own.queues:
        for call in tuple(calls):
            call.writing.exception()
    # Set by the interpreter for an exception that nothing caught; SystemExit doesn't set it.
    if getattr(sys, "last_value", None) is not None:
        own.limits.put(_AFTER_A_FAILURE)


def _leading(calls: Calls) -> list[QueuedSave]:
    """Return the first calls that are of one world: one collective asks about all of them."""
    world = calls[0].request.world
    return list(takewhile(lambda call: call.request.world is world, calls))


def _text(error: BaseException) -> str:
    return "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])


def _fail(own: _Process, reasons: list[str]) -> None:
    """End the process here with an error status: an exception raised at exit doesn't change the status."""
    names = [str(call) for calls, _ in own.queues for call in calls]
    lines = ["shardtree: the process ends with saves that were not committed", *reasons, *names]
    sys.stderr.write("\n  ".join("\n".join(lines).split("\n")) + "\n")
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(STATUS)


# Two saves to one folder


def refuse_overlap(directory: Directory, rank: int) -> None:
    """Raise if a save of this rank to the same folder is in progress.

    Whichever of the two is committed last would find another checkpoint than the one it was to replace. The commit
    would notice that too, but only after everything was written. Nor is the second save chained to the first: a
    checkpoint would then depend on a save that may still fail.

    Raises:
        CheckpointReplaced: names the save.
    """
    # Simulated ranks share one process, where every rank's saves to the folder would be found.
    own = [call for call in calls_in_progress() if call.request.world.rank == rank]
    for call in own:
        if call.request.folder is not None and is_same_place(call.request.folder, storage_at(directory)):
            fix = "Finalize it first, with maybe_finalize_async_calls(blocking=True), or save to another folder."
            raise CheckpointReplaced(error_text(f"save: {call} isn't committed yet", fix=fix))
