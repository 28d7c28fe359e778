"""Commits of scheduled saves, also at the end of the process; if one fails there, the exit status is 1."""

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

# Saves in progress: scheduled, but not committed yet.


@dataclass(frozen=True, slots=True, eq=False)
class QueuedSave:
    """A scheduled save.

    Attributes:
        index: Number of the save in its queue, from 0.
        request: Request of the save.
        writing: Future of the request's `async_fn` on this rank.
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
        is_committing: Whether the first save is being committed. Meanwhile, its finalizers may schedule saves, but not
            commit any.
    """

    is_committing = False


# Commits of scheduled saves, in order, each after every rank has written its part.

_LONGEST_WAIT = 60.0  # seconds between collectives of waiting ranks, so that a long write isn't taken for a dead rank


def finalize(calls: Calls, *, blocking: bool, no_dist: bool = False) -> list[int]:
    """Commit the saves that all ranks have written, in order up to the first unwritten one; collective.

    Committed saves are removed from `calls`. A save that fails on some rank is abandoned and removed on all ranks;
    later ones stay.

    Args:
        calls: Saves in progress, in the order of their scheduling; the same on all ranks.
        blocking: Whether to wait until all of them are written.
        no_dist: Whether to look only at this rank's writes, without a collective before the commit.

    Returns:
        The indices of the committed saves.

    Raises:
        CheckpointingException: a save failed; the first failure is raised on every rank, as
            `AsyncRequest.execute_sync` does.
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
    """Commit all saves in order, and return the errors of failed ones.

    If ranks disagree about which save is next, the remaining saves stay in `calls`.
    """
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
    """Raise if a finalizer calls this while its save is being committed: finalizers must not commit saves.

    Raises:
        WorldError: a save is being committed; the error names it.
    """
    if calls.is_committing:
        fix = "In finalizers, only schedule saves; call `maybe_finalize_async_calls` and `close` elsewhere."
        raise WorldError(error_text(f"{calls[0]}: a finalizer of the save tries to commit it again", fix=fix))


def _written_count(calls: Sequence[QueuedSave], *, blocking: bool, no_dist: bool) -> int:
    """Return the number of saves in `calls` that are written, up to the first one that isn't.

    Args:
        calls: Saves in progress, all with the same world.
        blocking: Whether to wait for this rank's writes first, for at most a minute.
        no_dist: Whether to count this rank's writes alone. Otherwise the call is collective, and a save counts if every
            rank has written it.
    """
    world = calls[0].request.world

    def count_own() -> tuple[int, int]:
        if blocking:
            wait([call.writing for call in calls], timeout=min(_LONGEST_WAIT, world.timeout / 4))
        return calls[0].index, sum(1 for _ in takewhile(lambda call: call.writing.done(), calls))

    if no_dist:
        return count_own()[1]
    # Waiting and polling ranks share the collective, so that a rank at the end of its process can commit together with
    # ranks that still train.
    progress = gather(world, "async save: look how far ranks are", count_own)
    indices = [index for index, _ in progress]
    if len(set(indices)) > 1:
        offenders = [f"rank {rank}: async save {index}" for rank, index in enumerate(indices)]
        fix = "Schedule and finalize the same saves on every rank, in the same order."
        heading = f"rank {world.rank} would finalize {calls[0]}, but other ranks would finalize another save"
        raise WorldError(error_text(heading, offenders=offenders, fix=fix))
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
"""Exit status of a process that couldn't commit a save."""

_AFTER_A_FAILURE = 60.0  # seconds that a rank waits for other ranks after an uncaught exception


@dataclass(slots=True, eq=False)
class _Process:
    """The saves in progress of this process; a forked process starts without any.

    Attributes:
        pid: Id of the process.
        queues: The saves in progress of each queue, with the seconds to wait for them at exit.
        limits: Messages to the watchdog thread: a time limit in seconds from now, or None to end the thread.
    """

    pid: int = field(default_factory=os.getpid)
    queues: list[tuple[Calls, float]] = field(default_factory=list)
    limits: SimpleQueue[float | None] = field(default_factory=SimpleQueue)


_process: _Process | None = None
_changing = Lock()  # simulated ranks are threads


def watch(calls: Calls, timeout: float) -> None:
    """Register a queue's saves to be committed before the process ends; if a commit fails, the exit status is 1.

    Args:
        calls: The queue's saves; those that are still in progress when the process ends are committed then.
        timeout: Time limit in seconds for these commits.
    """
    with _changing:
        process = _own() or _begin()
        others = [(other, limit) for other, limit in process.queues if other and other is not calls]
        process.queues = [*others, (calls, timeout)]
        # Functions that are registered last run first, so this one runs before those that destroy process groups.
        atexit.unregister(_at_exit)
        atexit.register(_at_exit)


def calls_in_progress() -> Iterator[QueuedSave]:
    """Yield every uncommitted save of this process."""
    process = _own()
    for calls, _ in process.queues if process else ():
        yield from tuple(calls)


def _own() -> _Process | None:
    return _process if _process is not None and _process.pid == os.getpid() else None


def _begin() -> _Process:
    global _process
    _process = _Process()
    # The thread is started now, since no thread can start during the interpreter's shutdown.
    Thread(target=_watchdog, args=(_process,), name="shardtree: exit", daemon=True).start()
    if multiprocessing.parent_process() is not None:
        # Children of multiprocessing end by os._exit, which skips atexit's functions.
        Finalize(None, _at_exit, exitpriority=1000)
    return _process


def _watchdog(own: _Process) -> None:
    """End the process, with an error status, once a time limit has passed; `own.limits` receives the limits."""
    # Nothing else limits a write or commit that hangs in its storage, since the world's timeout only limits
    # collectives. After an exception, a rank that waited here without a limit would block peers that still train.
    limit = own.limits.get()
    while limit is not None:
        try:
            limit = own.limits.get(timeout=limit)
        except Empty:
            _fail(own, [f"writes and commits took more than {limit:g} seconds"])


def _at_exit() -> None:
    process = _own()
    if process is None or not any(calls for calls, _ in process.queues):
        return
    process.limits.put(max(limit for calls, limit in process.queues if calls))
    failures: list[str] = []
    try:
        _wait_for_writing(process)
        for calls, _ in process.queues:
            failures += map(_text, finalize_all(calls))
    except BaseException as error:  # such as a second Ctrl-C
        failures.append(_text(error))
    if failures:
        _fail(process, failures)
    process.limits.put(None)


def _wait_for_writing(own: _Process) -> None:
    """Wait until this process has written its saves.

    If an uncaught exception ends the process, the time limit of the commits is then set to a minute, since other ranks
    may not take part in them.
    """
    for calls, _ in own.queues:
        for call in tuple(calls):
            call.writing.exception()
    # The interpreter sets this attribute for an uncaught exception, but not for SystemExit.
    if getattr(sys, "last_value", None) is not None:
        own.limits.put(_AFTER_A_FAILURE)


def _leading(calls: Calls) -> list[QueuedSave]:
    """Return the saves at the head of a queue that share one world, so that one collective can compare them all."""
    world = calls[0].request.world
    return list(takewhile(lambda call: call.request.world is world, calls))


def _text(error: BaseException) -> str:
    return "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])


def _fail(own: _Process, reasons: list[str]) -> None:
    """Print the reasons, and end the process with an error status; an exception at exit would not set one."""
    names = [str(call) for calls, _ in own.queues for call in calls]
    lines = ["shardtree: the process ends with saves that were not committed", *reasons, *names]
    sys.stderr.write("\n  ".join("\n".join(lines).split("\n")) + "\n")
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(STATUS)


# Overlapping saves to one folder.


def refuse_overlap(directory: Directory, rank: int) -> None:
    """Raise if a save of this rank to the same folder is in progress.

    The save that is committed second would find another checkpoint than the one that it should replace. Its commit
    would notice that too, but only after everything was written. The second save isn't chained to the first either:
    its checkpoint would depend on a save that may still fail.

    Raises:
        CheckpointReplaced: such a save is in progress; the error names it.
    """
    # Simulated ranks share one process, so the saves of other ranks are filtered out.
    calls = [call for call in calls_in_progress() if call.request.world.rank == rank]
    for call in calls:
        if call.request.folder is not None and is_same_place(call.request.folder, storage_at(directory)):
            fix = "Finalize that save first, with maybe_finalize_async_calls(blocking=True), or save to another folder."
            raise CheckpointReplaced(error_text(f"save: {call} is not committed yet, and has the same folder", fix=fix))
