"""A few threads for reads and checksums, which run without Python's global lock: they share a list, or write behind."""

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
    """Return how many threads read by default: as many as torch uses for its own work, up to `_MOST_THREADS`."""
    return min(torch.get_num_threads(), _MOST_THREADS)


def background_threads() -> int:
    """Return how many threads write in the background: half of the usual ones, at least one.

    Examples:
        >>> 1 <= background_threads() <= usual_threads()
        True
    """
    # With all threads, on two cores, the training step after the call took 0.19 s in place of 0.05 s, for a save that
    # finished hardly earlier.
    return max(1, usual_threads() // 2)


def in_threads(
    do: Callable[[Work], Result],
    work: Iterable[Work],
    threads: int | None = None,
    *,
    stop: Callable[[], None] = lambda: None,
) -> list[Result]:
    """Return what a function returns for each piece of work, in their order.

    Args:
        do: called by several threads at once.
        work: pieces of it, which are started in this order.
        threads: how many; None for the usual number.
        stop: called after the first error or an interrupt, so that pieces in progress can end early.

    Raises:
        Exception: the first that `do` raised; pieces that weren't started by then are dropped.

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
    """Call a function in several threads, the calling one among them, and return what each call returned.

    Args:
        work: called by each thread; returns when there is nothing left to do.
        threads: how many at most.
        stop: called after an error or an interrupt; leaves nothing to do for the others.

    Raises:
        Exception: the first that a thread raised.
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
    """Call a function in this thread and as many others of a pool as have begun it by then."""
    futures: list[Future[Result]] = []
    # While the interpreter ends, with a save still in progress, no thread can start: this one does all the work.
    with suppress(RuntimeError):
        futures.extend(pool.submit(work) for _ in range(others))
    try:
        results = [work()]
        return results + [other.result() for other in futures if not other.cancel()]
    except BaseException:  # an interrupt may come while the others are waited for
        stop()
        raise
    finally:
        # Nothing goes on behind the caller's back: what is read into may be freed by him.
        wait([other for other in futures if not other.cancel()])


class Task(Generic[Result]):
    """Work that another thread does, unless all are busy until its result is asked for: then it is done there.

    So nothing waits for threads that are busy, and nothing is lost while the interpreter ends.

    Args:
        work: called once at most.

    Examples:
        >>> total = Task(lambda: sum(range(5)))
        >>> total.result()
        10
    """

    __slots__ = ("_future", "_work")

    def __init__(self, work: Callable[[], Result]) -> None:
        self._work = work
        self._future: Future[Result] | None = None
        with suppress(RuntimeError):  # no thread takes work any more
            self._future = _kept_threads().submit(work)

    def result(self) -> Result:
        """Return what the work returned, or raise what it raised; called once at most."""
        return self._work() if self._future is None or self._future.cancel() else self._future.result()

    def drop(self) -> None:
        """Wait until the work is done if a thread has begun it, else leave it undone."""
        if self._future is not None and not self._future.cancel():
            wait([self._future])


# Starting a thread takes up to some milliseconds where all cores are busy, and a read of a few MiB takes one.

_pools: list[ThreadPoolExecutor] = []


def _kept_threads() -> ThreadPoolExecutor:
    """Return threads that wait for more work; made when first needed, and again in a process that was forked."""
    if not _pools:
        _pools.append(ThreadPoolExecutor(2 * _MOST_THREADS, "shardtree"))
    return _pools[0]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pools.clear)


_HANDED_BYTES = 1024 * 1024  # what is less is written by the thread that makes it: handing it over takes longer
_GROUPS = 8


def write_behind(
    write: Callable[[Iterator[Work]], Result], pieces: Iterable[Work], nbytes: Callable[[Work], int]
) -> Result:
    """Return what a function returns that writes pieces in another thread, while this one makes those that follow.

    The calling thread makes them, and not the other one: what other threads allocate, the C library doesn't give back.

    Args:
        write: takes the pieces, in order; gets the error that making them has raised, so that it can clean up.
        pieces: made by this thread; each must stay as it is. A few MiB of them are in memory at a time.
        nbytes: returns a piece's length.

    Raises:
        BaseException: what making the pieces or writing them has raised.

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
        except RuntimeError:  # while the interpreter ends no thread can start
            return write(chain.from_iterable(chain(begin, groups)))
        try:
            writing.add_done_callback(lambda _: room.release())  # so that its end is noticed
            for group in chain(begin, groups):
                room.acquire()
                if writing.done():
                    break
                ready.put(group)
            ready.put(None)
        except BaseException as error:  # an interrupt too: the writer would wait for ever
            ready.put(error)
            raise
        return writing.result()


def _groups(pieces: Iterator[Work], nbytes: Callable[[Work], int]) -> Iterator[list[Work]]:
    """Yield pieces in groups that are worth another thread's while."""
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
    """Return a progress function that several threads may call; a lock makes their calls take turns."""
    lock = Lock()

    def locked_progress(size: int) -> None:
        with lock:
            progress(size)

    return locked_progress
