"""Threads for reads, checksums and writes, which run without Python's global lock."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from itertools import chain, islice
from queue import SimpleQueue
from threading import Lock, Semaphore
from typing import Generic, TypeVar

import torch

Work = TypeVar("Work")
Result = TypeVar("Result")

_MOST_THREADS = 4


def usual_threads() -> int:
    """Return the default number of reading threads: that of torch, up to `_MOST_THREADS`."""
    return min(torch.get_num_threads(), _MOST_THREADS)


def background_threads() -> int:
    """Return the number of threads that write in the background: half of the usual ones, at least one.

    Examples:
        >>> 1 <= background_threads() <= usual_threads()
        True
    """
    # With all threads, on two cores, the training step after the call took 0.19 s instead of 0.05 s, and the save
    # finished hardly earlier.
    return max(1, usual_threads() // 2)


def in_threads(
    do: Callable[[Work], Result],
    work: Iterable[Work],
    threads: int | None = None,
    *,
    stop: Callable[[], None] = lambda: None,
) -> list[Result]:
    """Map a function over items in several threads, and return the results in order.

    Args:
        do: Function of an item; several threads call it at once.
        work: Items, which are started in this order.
        threads: Number of threads; None for the usual number.
        stop: Function that is called after the first error or an interrupt, so that running calls can end early.

    Raises:
        Exception: the first error of `do`; items that weren't started by then are dropped.

    Examples:
        >>> in_threads(abs, [-1, 2, -3], threads=2)
        [1, 2, 3]
    """
    pieces = list(work)
    count = min(usual_threads() if threads is None else threads, len(pieces))
    if count < 2:
        return [do(piece) for piece in pieces]
    waiting = deque(enumerate(pieces))
    results: dict[int, Result] = {}

    def drain() -> None:
        while True:
            try:
                number, piece = waiting.popleft()
            except IndexError:
                return
            results[number] = do(piece)

    def abandon() -> None:
        waiting.clear()
        stop()

    run_workers(drain, count, stop=abandon)
    return [results[number] for number in range(len(pieces))]


def run_workers(work: Callable[[], Result], threads: int, *, stop: Callable[[], None]) -> list[Result]:
    """Call a function in several threads, including the calling one, and return the results.

    Args:
        work: Function that each thread calls once, and that returns when there is nothing left to do.
        threads: Maximum number of threads.
        stop: Function that is called after an error or an interrupt, and lets the calls in other threads return early.

    Raises:
        Exception: the first error of a thread.
    """

    def work_or_stop() -> Result:
        try:
            return work()
        except BaseException:
            stop()
            raise

    others = threads - 1
    if others < _MOST_THREADS:
        return _work_together(work_or_stop, others, _kept_threads(), stop=stop)
    with ThreadPoolExecutor(others) as pool:
        return _work_together(work_or_stop, others, pool, stop=stop)


def _work_together(
    work: Callable[[], Result], others: int, pool: ThreadPoolExecutor, *, stop: Callable[[], None]
) -> list[Result]:
    """Call a function in this thread and in up to `others` threads of a pool; return the results of all that ran."""
    futures: list[Future[Result]] = []
    # During the interpreter's shutdown no thread can start: this thread does all the work.
    with suppress(RuntimeError):
        futures.extend(pool.submit(work) for _ in range(others))
    try:
        results = [work()]
        return results + [other.result() for other in futures if not other.cancel()]
    except BaseException:  # an interrupt may come while this thread waits for the others
        stop()
        raise
    finally:
        # No thread may go on after the return: the caller may free the memory that it reads into.
        wait([other for other in futures if not other.cancel()])


class Task(Generic[Result]):
    """A function call in another thread; if no thread has begun it, `result` makes the call itself.

    Hence a task never waits for busy threads, and isn't lost during the interpreter's shutdown.

    Args:
        work: Function to call, at most once.

    Examples:
        >>> total = Task(lambda: sum(range(5)))
        >>> total.result()
        10
    """

    __slots__ = ("_future", "_work")

    def __init__(self, work: Callable[[], Result]) -> None:
        self._work = work
        self._future: Future[Result] | None = None
        with suppress(RuntimeError):  # during the interpreter's shutdown no thread takes work
            self._future = _kept_threads().submit(work)

    def result(self) -> Result:
        """Return the function's result or raise its error; may be called once."""
        return self._work() if self._future is None or self._future.cancel() else self._future.result()

    def drop(self) -> None:
        """Cancel the call, or wait for its end if a thread has begun it."""
        if self._future is not None and not self._future.cancel():
            wait([self._future])


# Threads are kept: starting one takes milliseconds if all cores are busy, while a read of a few MiB takes one.

_pools: list[ThreadPoolExecutor] = []


def _kept_threads() -> ThreadPoolExecutor:
    """Return the pool of idle threads, made on first use and again after a fork."""
    if not _pools:
        _pools.append(ThreadPoolExecutor(2 * _MOST_THREADS, "shardtree"))
    return _pools[0]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pools.clear)


_HANDED_BYTES = 1024 * 1024  # handing fewer bytes to another thread takes longer than writing them
_GROUPS = 8


def write_behind(
    write: Callable[[Iterator[Work]], Result], pieces: Iterable[Work], nbytes: Callable[[Work], int]
) -> Result:
    """Write pieces in another thread while this thread produces the next ones, and return the writer's result.

    The calling thread is the producer, since the C library doesn't return other threads' memory to the system.

    Args:
        write: Function that consumes the pieces in order. An error of the producer is raised in it too, so that it can
            clean up.
        pieces: Iterable of pieces, run by the calling thread; a yielded piece must not change. A few MiB of them are in
            memory at a time.
        nbytes: Function that returns a piece's length.

    Raises:
        BaseException: an error of the producer or of the writer.

    Examples:
        >>> write_behind(b"".join, [b"a", b"bc"], len)
        b'abc'
    """
    groups = _groups(iter(pieces), nbytes)
    begin = [*islice(groups, 2)]
    if len(begin) < 2:
        return write(chain.from_iterable(begin))
    ready, room = SimpleQueue[list[Work] | BaseException | None](), Semaphore(_GROUPS)

    def taken() -> Iterator[Work]:
        while (group := ready.get()) is not None:
            if isinstance(group, BaseException):
                raise group
            yield from group
            room.release()

    with ThreadPoolExecutor(1, "shardtree-write") as pool:
        try:
            writing = pool.submit(write, taken())
        except RuntimeError:  # during the interpreter's shutdown no thread can start
            return write(chain.from_iterable(chain(begin, groups)))
        try:
            writing.add_done_callback(lambda _: room.release())  # wakes this thread if the writer ends early
            for group in chain(begin, groups):
                room.acquire()
                if writing.done():
                    break
                ready.put(group)
            ready.put(None)
        except BaseException as error:  # after an interrupt too, since the writer would wait for ever
            ready.put(error)
            raise
        return writing.result()


def _groups(pieces: Iterator[Work], nbytes: Callable[[Work], int]) -> Iterator[list[Work]]:
    """Yield pieces in groups that are large enough to hand to another thread."""
    group, size = list[Work](), 0
    for piece in pieces:
        group.append(piece)
        size += nbytes(piece)
        if size >= _HANDED_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group


def in_turn(progress: Callable[[int], None]) -> Callable[[int], None]:
    """Return a function that several threads may call at once, and that calls `progress` from one at a time."""
    lock = Lock()

    def locked_progress(size: int) -> None:
        with lock:
            progress(size)

    return locked_progress
