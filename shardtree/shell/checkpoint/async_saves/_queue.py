"""The queue of saves that are written in the background and committed in the order of their calls."""

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

# The writing thread

T = TypeVar("T")

_Jobs = SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]


class Background:
    """A thread that runs functions one after the other, in the order of their submission; started at the first.

    A thread, where Megatron-Core forks a process: what takes time (copies, hashes, writes) runs without Python's lock,
    the snapshot is shared, and a failure is an exception that every rank gets at the commit. It is a daemon, which the
    interpreter doesn't wait for at its end: the exit handler does, with a time limit.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: _Jobs = SimpleQueue()
        self._thread: Thread | None = None

    def submit(self, fn: Callable[[], T]) -> Future[T]:
        """Return the future of fn's result; it may be cancelled before fn begins."""
        if self._thread is None:
            self._thread = Thread(target=_work, args=(self._jobs,), name=self._name, daemon=True)
            self._thread.start()
        future: Future[T] = Future()
        self._jobs.put((future, fn))
        return future

    def stop(self, *, wait: bool = True) -> None:
        """Let the thread end once it has run what was submitted."""
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
        # Without this, the loop would keep the last snapshot's memory from the next save.
        del job, future, fn


logger = logging.getLogger("shardtree")

EXIT_TIMEOUT = 600.0
"""Seconds that saves in progress may take at the end of the process."""


class AsyncCallsQueue:
    """A queue of saves: written by a thread, one after the other, and committed in the order of their calls.

    Every rank schedules and finalizes the same saves in the same order; each process has a queue of its own, and each
    simulated rank too. One thread uses it. As a context manager, it is closed at the end of the block; if an exception
    ends that, saves stay in progress until the end of the process.

    Args:
        persistent: unused, accepted as in Megatron-Core: the thread always stays for the next save.
        exit_timeout: seconds that saves in progress may take at the end of the process.

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
        """Have no calls, as a new queue, or in a fork of the process that has them."""
        self._calls = Calls()
        self._background = Background("shardtree: async save")
        self._user: Thread | None = None
        self._pid = os.getpid()

    @shielded
    def warm_up(self, sharded_state_dict: Any) -> None:
        """Take the memory that a save of this tree needs, so that the first one blocks no longer than later ones.

        The first touch of new memory, or pinning it, takes many times longer than copying to memory that is there. The
        tensors are copied once, and the copies dropped; their memory stays for the next save until a queue is closed.

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
        """Begin to write in the background, and return the call's index, from 0; every rank calls it.

        The request is run as it is now: `add_finalize_fn` makes another one, and a request is scheduled once.

        Raises:
            CheckpointingException: it isn't a request, or is scheduled already; or `exit_timeout` is no time.
            WorldError: another thread uses this queue.
        """
        self._check_user()
        _check_request(async_request)
        _check_seconds(self.exit_timeout)
        index, self._next_index = self._next_index, self._next_index + 1
        # A weak reference: a queue that is dropped says so at once, though somebody keeps the request.
        async_request.outcome.commit = partial(_commit, weakref.ref(self))
        # The request is immutable, so the thread runs exactly what was scheduled.
        self._calls.append(QueuedSave(index, async_request, self._background.submit(async_request.async_fn)))
        watch(self._calls, self.exit_timeout)
        return index

    @shielded
    def maybe_finalize_async_calls(self, blocking: bool = False, no_dist: bool = False) -> list[int]:
        """Commit the saves that are written on every rank, in order, and return their indices; every rank calls it.

        Where a save failed on some rank, the first such call raises on every rank, with a note that names it. It is
        given up then, and what its folder held before stays; those behind it are for the next time.

        Args:
            blocking: whether to wait until all are written; else those behind the first one that isn't stay.
            no_dist: whether to go by what this rank has written. Then a rank whose part is written waits in the commit
                for the others, which must come there too.

        Raises:
            CheckpointingException: writing, the commit or a finalizer failed on some rank.
            WorldError: a rank can't be reached, or has other saves in progress.
        """
        self._check_user()
        return finalize(self._calls, blocking=blocking, no_dist=no_dist)

    def get_num_unfinalized_calls(self) -> int:
        """Return how many saves are in progress."""
        return len(self._calls) if self._pid == os.getpid() else 0

    @shielded
    def close(self, abort: bool = False) -> None:
        """Commit what is in progress, end the thread and free the memory of snapshots; every rank calls it.

        Args:
            abort: whether to give up what isn't committed instead, without waiting for other ranks. What is being
                written at the moment still is.

        Raises:
            CheckpointingException: as `maybe_finalize_async_calls`, for the first save that failed; all others are
                committed.
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
            # Calls that are left couldn't be agreed on with the other ranks; the exit handler deals with them.
            self._background.stop(wait=not self._calls)
            host_memory.release()

    def _give_up(self) -> None:
        calls = list(self._calls)
        self._calls.clear()
        for call in calls:
            call.writing.cancel()
        for call in calls:
            if not call.writing.cancelled():
                # A write can't be stopped: without this wait it would go on after its files were removed.
                call.writing.exception()
            call.request.abandon()
            call.request.outcome.error = CheckpointingException(f"{call} was given up before it was committed")
            logger.warning("%s was given up before it was committed", call)

    def _check_user(self) -> None:
        """Raise if another thread has saves in progress here; each simulated rank is a thread."""
        # A fork inherits the queue and not its thread: it starts anew, and leaves its parent's saves alone.
        if self._pid != os.getpid():
            self._begin()
        if self._calls and self._user is not current_thread() and self._user is not None and self._user.is_alive():
            state = f"{plural(len(self._calls), 'save')} in progress of thread {self._user.name!r}"
            fix = "Make an AsyncCallsQueue for each thread, and each simulated rank."
            raise WorldError(error_text("async save: two threads use one queue", found=state, fix=fix))
        self._user = current_thread()

    def __enter__(self) -> AsyncCallsQueue:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        elif self._calls:
            # One rank alone can't commit them: the others may not have seen the exception.
            logger.warning(
                "an exception leaves %s in progress, to be committed at the end of the process", self._names()
            )

    def __del__(self) -> None:
        if sys is None or sys.is_finalizing() or getattr(self, "_pid", None) != os.getpid():
            return  # the exit handler sees to the calls, or this is a fork's copy
        if self._calls:
            logger.warning("a queue was dropped with %s in progress, to be committed at the end", self._names())
        self._background.stop(wait=False)

    def _names(self) -> str:
        return ", ".join(map(str, self._calls))


def _commit(queue_of: weakref.ref[AsyncCallsQueue]) -> None:
    queue = queue_of()
    if queue is None:
        fix = "Keep the queue, or close it before it is dropped."
        raise WorldError(error_text("async save: the queue was dropped; it commits at the end of the process", fix=fix))
    queue.maybe_finalize_async_calls(blocking=True)


def _check_request(request: object) -> None:
    if not isinstance(request, AsyncRequest):
        what, fix = "async save: nothing to schedule", "Pass what `save(..., async_sharded_save=True)` returns."
        raise CheckpointingException(error_text(what, found=type(request).__name__, fix=fix))
    for call in calls_in_progress():
        if call.request.async_fn is request.async_fn:
            fix = "Schedule a request once; add finalizers before."
            raise CheckpointingException(error_text(f"{call}: the same request is scheduled already", fix=fix))


def _check_seconds(timeout: object) -> None:
    """Raise unless it is a time limit: here rather than at the end of the process, where it is too late to change."""
    if isinstance(timeout, bool) or not isinstance(timeout, Real) or not 0 < float(timeout) <= TIMEOUT_MAX:
        expected = f"seconds, more than 0 and at most {TIMEOUT_MAX:g}"
        raise CheckpointingException(error_text("async save: exit_timeout", found=repr(timeout), expected=expected))


async_calls = AsyncCallsQueue()
"""This process's queue."""
