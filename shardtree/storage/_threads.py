"""A few threads that take work from one list, for reads and checksums, which run without Python's global lock."""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from threading import Lock
from typing import TypeVar

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
    found: dict[int, Result] = {}

    def drain() -> None:
        while True:
            try:
                number, piece = waiting.popleft()
            except IndexError:
                return
            found[number] = do(piece)

    def abandon() -> None:
        waiting.clear()
        stop()

    run_workers(drain, count, stop=abandon)
    return [found[number] for number in range(len(pieces))]


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

    others: list[Future[Result]] = []
    with ThreadPoolExecutor(max(1, threads - 1)) as pool:
        # While the interpreter ends, with a save still in progress, no thread can start: this one does all the work.
        with suppress(RuntimeError):
            for _ in range(threads - 1):
                others.append(pool.submit(work_or_stop))
        try:
            return [work_or_stop(), *(other.result() for other in others)]
        except BaseException:  # an interrupt may come while the others are waited for
            stop()
            raise


def in_turn(progress: Callable[[int], None]) -> Callable[[int], None]:
    """Return a progress function that several threads may call; a lock makes their calls take turns."""
    lock = Lock()

    def locked_progress(size: int) -> None:
        with lock:
            progress(size)

    return locked_progress


# Pausing Python's garbage collector in steps that make many objects and free none.


@contextmanager
def collector_paused() -> Iterator[None]:
    """Turn off the garbage collector until the block ends; what was made in the block counts as old afterwards.

    Only for steps that neither read nor write: garbage of other threads stays in memory until the step ends. Where
    several threads are in such a step, the one that turned the collector off turns it on again, maybe before the others
    are done.

    Examples:
        >>> with collector_paused():
        ...     gc.isenabled()
        False
        >>> gc.isenabled()
        True
    """
    # The collector scans all objects each time their number has grown by a quarter. A step that makes a few for each of
    # 100,000 tensors, and frees none, would spend as much time in these scans as in its own work.
    was_on = gc.isenabled()
    if was_on:  # else another thread turned it off, and turns it on again: simulated ranks end in any order
        gc.disable()
    try:
        yield
    finally:
        if was_on:
            try:
                _mark_as_old()
            finally:
                gc.enable()


_MANY = 10_000
"""Fewer new objects than this are scanned in no time."""

_FEW_FROZEN = 1_000
"""Python 3.12 freezes some hundred objects itself as it starts; a program that freezes, freezes many more."""

_MOST_UNSEEN = 1_000_000
"""How many objects are marked as old before a full collection: without one, cycles among them would never be freed."""

_unseen = {"objects": 0, "full collections": 0}


def _mark_as_old() -> None:
    """Move many new objects to the oldest generation without scanning them.

    A pause alone would only put the work off: the next collection would scan everything, 0.13 s in a load of 20,000
    tensors that takes 0.4 s.
    """
    made, full = gc.get_count()[0], gc.get_stats()[2]["collections"]
    if made <= _MANY or gc.get_freeze_count() > _FEW_FROZEN:  # a program's own frozen objects must stay frozen
        return
    if full != _unseen["full collections"]:
        _unseen.update({"objects": 0, "full collections": full})
    if _unseen["objects"] > _MOST_UNSEEN:
        gc.collect()
        return
    # freeze and unfreeze together move all objects to the oldest generation; Python has no direct call for that.
    _unseen["objects"] += made
    try:
        gc.freeze()
    finally:
        gc.unfreeze()
