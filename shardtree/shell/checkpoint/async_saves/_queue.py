"""A queue of saves, which are written in the background and committed in the order of their calls."""

from __future__ import annotations

import logging
import os
import sys
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from numbers import Real
from queue import SimpleQueue
from threading import TIMEOUT_MAX, Thread, current_thread
from types import TracebackType
from typing import Any, TypeVar

from ....core.ambient import shielded
from ....core.layouts import tensor_shards
from ....errors import CheckpointingException, WorldError, error_text, plural
from ...storage import host_memory
from ...table import AsyncRequest
from ._exit import Calls, QueuedSave, calls_in_progress, check_idle, finalize, finalize_all, watch
from ._snapshot import snapshot_shards

# The thread that writes.

T = TypeVar("T")

_Jobs = SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]


class Background:
    """A thread that runs functions in the order of their submission; started by the first one.

    Megatron-Core forks a process instead. In a thread, the expensive work (copies, hashes, writes) runs without
    Python's global lock, the snapshot is shared, and a failure is an exception that every rank gets at the commit. The
    thread is a daemon: at the interpreter's end, the exit handler waits for it, with a time limit.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: _Jobs = SimpleQueue()
        self._thread: Thread | None = None

    def submit(self, fn: Callable[[], T]) -> Future[T]:
        """Submit a function, and return its future, which can be cancelled until the function begins."""
        if self._thread is None:
            self._thread = Thread(target=_work, args=(self._jobs,), name=self._name, daemon=True)
            self._thread.start()
        future: Future[T] = Future()
        self._jobs.put((future, fn))
        return future

    def stop(self, *, wait: bool = True) -> None:
        """End the thread after it has run all submitted functions.

        Args:
            wait: Whether to wait until the thread has ended.
        """
        if self._thread is not None:
            self._jobs.put(None)
            if wait:
                self._thread.join()
            self._thread, self._jobs = None, SimpleQueue()


def _work(jobs: _Jobs) -> None:
    while (job := jobs.get()) is not None:
        future, fn = job
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(fn())
            except BaseException as error:
                future.set_exception(error)
        # Otherwise the loop's variables would keep the last snapshot's memory alive.
        del job, future, fn


logger = logging.getLogger("shardtree")

EXIT_TIMEOUT = 600.0
"""Time limit in seconds for saves in progress at the end of the process."""


class AsyncCallsQueue:
    """A queue of saves, written one after the other by a thread, and committed in the order of their calls.

    Every rank schedules and finalizes the same saves in the same order. Each process, or simulated rank, has its own
    queue, and uses it from one thread. As a context manager, the queue is closed at the end of the block; if an
    exception ends the block, saves stay in progress until the end of the process.

    Args:
        persistent: Unused, accepted for compatibility with Megatron-Core: the thread always stays for the next save.
        exit_timeout: Time limit in seconds for saves in progress at the end of the process.

    Examples:
        >>> import torch, shardtree as st
        >>> tree = {"w": st.ShardedTensor.from_rank_offsets("w", torch.arange(4))}
        >>> with AsyncCallsQueue() as queue:
        ...     queue.schedule_async_request(st.save(tree, "step-1", async_sharded_save=True))
        ...     queue.maybe_finalize_async_calls(blocking=True)
        0
        [0]
        >>> st.is_checkpoint("step-1")
        True

    References:
        megatron.core.dist_checkpointing.strategies.async_utils.AsyncCallsQueue, megatron-core 0.16.1.
    """

    def __init__(self, persistent: bool = False, *, exit_timeout: float = EXIT_TIMEOUT) -> None:
        self.persistent = persistent
        self.exit_timeout = exit_timeout
        self._next_index = 0
        self._begin()

    def __repr__(self) -> str:
        return f"AsyncCallsQueue({plural(self.get_num_unfinalized_calls(), 'save')} in progress)"

    def _begin(self) -> None:
        """Reset the queue; called when it is made, and in a forked process, which leaves its parent's saves alone."""
        self._calls = Calls()
        self._background = Background("shardtree: async save")
        self._user: Thread | None = None
        self._pid = os.getpid()

    @shielded
    def warm_up(self, sharded_state_dict: Any) -> None:
        """Allocate the memory for a save of this tree, so that the first save blocks no longer than later ones.

        The first access to new memory, or pinning it, takes many times longer than a copy. The tensors are copied once,
        and the copies dropped; their memory is kept for the next save. Closing this queue, or another one of the
        process, frees it.

        Raises:
            TreeError: a leaf is a DTensor.

        Examples:
            >>> import torch, shardtree as st
            >>> tree = {"w": st.ShardedTensor.from_rank_offsets("w", torch.arange(4))}
            >>> with AsyncCallsQueue() as queue:
            ...     queue.warm_up(tree)
            ...     queue.schedule_async_request(st.save(tree, "step-1", async_sharded_save=True))
            0
        """
        snapshot_shards(tensor_shards(sharded_state_dict))

    def schedule_async_request(self, async_request: AsyncRequest[Any]) -> int:
        """Begin to write in the background, and return the call's index, from 0; every rank must call this.

        A request can be scheduled once. Finalizers must be added before: `add_finalize_fn` returns a new request, and
        the queue runs the one that was scheduled.

        Raises:
            CheckpointingException: the argument isn't a request, or is scheduled already; or `exit_timeout` is invalid.
            WorldError: another thread uses this queue.
        """
        self._check_user()
        _check_request(async_request)
        _check_seconds(self.exit_timeout)
        index, self._next_index = self._next_index, self._next_index + 1
        # The reference is weak, so that a dropped queue warns at once even if somebody keeps the request.
        async_request.outcome.commit = partial(_commit, weakref.ref(self))
        # The request is immutable, so the thread runs exactly what was scheduled.
        self._calls.append(QueuedSave(index, async_request, self._background.submit(async_request.async_fn)))
        watch(self._calls, self.exit_timeout)
        return index

    @shielded
    def maybe_finalize_async_calls(self, blocking: bool = False, no_dist: bool = False) -> list[int]:
        """Commit the saves that are written on every rank, in order, and return their indices; every rank must call it.

        If a save failed on some rank, its error is raised on every rank, with a note that names the save. It is
        abandoned, and the previous content of its folder stays; later saves are left to the next call.

        Args:
            blocking: Whether to wait until all saves are written; otherwise, the first save that isn't written yet and
                all later ones stay in progress.
            no_dist: Whether to look only at this rank's writes. A rank whose part is written then waits in the commit
                for the others, which must commit too.

        Raises:
            CheckpointingException: writing, the commit or a finalizer failed on some rank.
            WorldError: a rank can't be reached, or has other saves in progress.
        """
        self._check_user()
        return finalize(self._calls, blocking=blocking, no_dist=no_dist)

    def get_num_unfinalized_calls(self) -> int:
        """Return the number of saves in progress."""
        return len(self._calls) if self._pid == os.getpid() else 0

    @shielded
    def close(self, abort: bool = False) -> None:
        """Commit all saves in progress, end the thread and free the memory of snapshots; every rank must call this.

        Args:
            abort: Whether to abandon uncommitted saves instead, without waiting for other ranks. A write in progress is
                still completed.

        Raises:
            CheckpointingException: a save failed. The first failed save's error is raised; all others are committed.
        """
        self._check_user()
        check_idle(self._calls)
        try:
            if abort:
                self._give_up()
            else:
                failures = finalize_all(self._calls)
                if failures:
                    raise failures[0]
        finally:
            # The ranks disagree about the remaining calls; the exit handler deals with them.
            self._background.stop(wait=not self._calls)
            host_memory.release()

    def _give_up(self) -> None:
        calls = list(self._calls)
        self._calls.clear()
        for call in calls:
            call.writing.cancel()
        for call in calls:
            if not call.writing.cancelled():
                # A running write can't be stopped: without this wait it would continue after its files were removed.
                call.writing.exception()
            call.request.abandon()
            call.request.outcome.error = CheckpointingException(f"{call} was abandoned before it was committed")
            logger.warning("%s was abandoned before it was committed", call)

    def _check_user(self) -> None:
        """Raise if another thread, such as another simulated rank, has saves in progress in this queue."""
        # A fork inherits the queue without its thread, so it resets the queue and leaves its parent's saves alone.
        if self._pid != os.getpid():
            self._begin()
        if self._calls and self._user is not current_thread() and self._user is not None and self._user.is_alive():
            state = f"{plural(len(self._calls), 'save')} in progress of thread {self._user.name!r}"
            fix = "Make an AsyncCallsQueue for each thread, and each simulated rank."
            raise WorldError(error_text("async save: two threads use the same queue", found=state, fix=fix))
        self._user = current_thread()

    def __enter__(self) -> AsyncCallsQueue:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        elif self._calls:
            # Committing them takes all ranks, and the others may not have the exception.
            logger.warning(
                "an exception leaves %s in progress, to be committed at the end of the process", self._names()
            )

    def __del__(self) -> None:
        if sys is None or sys.is_finalizing() or getattr(self, "_pid", None) != os.getpid():
            return  # the exit handler commits the calls, or this is a fork's copy
        if self._calls:
            logger.warning("a queue was dropped with %s in progress, to be committed at the end", self._names())
        self._background.stop(wait=False)

    def _names(self) -> str:
        return ", ".join(map(str, self._calls))


def _commit(queue_of: weakref.ref[AsyncCallsQueue]) -> None:
    queue = queue_of()
    if queue is None:
        fix = "Keep the queue, or close it before it is dropped."
        raise WorldError(error_text("async save: the queue was dropped; the save is committed at exit", fix=fix))
    queue.maybe_finalize_async_calls(blocking=True)


def _check_request(request: object) -> None:
    if not isinstance(request, AsyncRequest):
        heading, fix = "async save: invalid request", "Pass the result of `save(..., async_sharded_save=True)`."
        raise CheckpointingException(error_text(heading, found=type(request).__name__, fix=fix))
    for call in calls_in_progress():
        if call.request.async_fn is request.async_fn:
            fix = "Schedule each request only once, after its finalizers are added."
            raise CheckpointingException(error_text(f"{call}: the request is scheduled already", fix=fix))


def _check_seconds(timeout: object) -> None:
    """Raise unless `exit_timeout` is a valid number of seconds; it is used at exit, where an error comes too late."""
    if isinstance(timeout, bool) or not isinstance(timeout, Real) or not 0 < float(timeout) <= TIMEOUT_MAX:
        expected = f"seconds, more than 0 and at most {TIMEOUT_MAX:g}"
        raise CheckpointingException(error_text("async save: bad exit_timeout", found=repr(timeout), expected=expected))


async_calls = AsyncCallsQueue()
"""The queue of asynchronous saves for the whole process, for callers that make no queue themselves."""
