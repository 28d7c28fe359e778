"""A few threads that take work from one list: for reads and checksums, which leave other threads the interpreter."""

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
    """Return how many threads read by default: as many as torch has for its own work, up to a few."""
    return min(torch.get_num_threads(), _MOST_THREADS)


def background_threads() -> int:
    """Return how many threads write while their caller goes on, which half of the usual ones are left to.

    Examples:
        >>> 1 <= background_threads() <= usual_threads()
        True
    """
    return max(1, usual_threads() // 2)


def in_threads(
    do: Callable[[Work], Result],
    work: Iterable[Work],
    threads: int | None = None,
    *,
    stop: Callable[[], None] = lambda: None,
) -> list[Result]:
    """Return what a function gives for each piece of work, in their order.

    Args:
        do: called by several threads at once.
        work: pieces of it, which are begun in this order.
        threads: how many; None for the usual number.
        stop: called after the first error or an interrupt, so that pieces on their way can end early.

    Raises:
        Exception: the first that `do` raised; pieces that nobody has begun by then are left.

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

    def leave() -> None:
        waiting.clear()
        stop()

    in_company(drain, count, stop=leave)
    return [found[number] for number in range(len(pieces))]


def in_company(work: Callable[[], Result], threads: int, *, stop: Callable[[], None]) -> list[Result]:
    """Return what each of some threads gives that do the same work, this one among them.

    Args:
        work: what each does until nothing is left to do.
        threads: how many at the most. At the end of the process, while a save is still on its way, no other thread can
            be begun; then this one is alone.
        stop: leaves nothing to do for the others, after an error or an interrupt.

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
        with suppress(RuntimeError):
            for _ in range(threads - 1):
                others.append(pool.submit(work_or_stop))
        try:
            return [work_or_stop(), *(other.result() for other in others)]
        except BaseException:  # an interrupt may come while the others are waited for
            stop()
            raise


def in_turn(progress: Callable[[int], None]) -> Callable[[int], None]:
    """Return a progress function that several threads may call: one at a time."""
    lock = Lock()

    def tell(size: int) -> None:
        with lock:
            progress(size)

    return tell


# A pause of Python's garbage collector, for steps that make many objects which all stay.


@contextmanager
def collector_paused() -> Iterator[None]:
    """Let no search for garbage begin until the block ends, and then search as before; what was made counts as old.

    The collector looks at all objects again each time their number has grown by a quarter. A step that makes a few for
    each of 100,000 tensors, and lets go of none, would wait for that as long as it takes itself. Only for steps that
    neither read nor write: what other threads drop meanwhile stays until they end. Where several threads are in such a
    step, the one that turned it off turns it on again, maybe before the others are done.

    Examples:
        >>> with collector_paused():
        ...     gc.isenabled()
        False
        >>> gc.isenabled()
        True
    """
    was_on = gc.isenabled()
    if was_on:  # else it stays as whoever turned it off leaves it: simulated ranks are threads, and end in any order
        gc.disable()
    try:
        yield
    finally:
        if was_on:
            try:
                _take_as_old()
            finally:
                gc.enable()


_MANY = 10_000
"""Objects. Fewer are looked at in no time."""

_MOST_UNSEEN = 1_000_000
"""Objects that are taken as old before there is a look at everything: else cycles among them would stay for good."""

_unseen = {"objects": 0, "full collections": 0}


def _take_as_old() -> None:
    """Have many new objects taken as old ones without a look: else they would soon bring one at everything."""
    made, full = gc.get_count()[0], gc.get_stats()[2]["collections"]
    if made <= _MANY or gc.get_freeze_count():  # what a program has frozen stays so
        return
    if full != _unseen["full collections"]:
        _unseen.update({"objects": 0, "full collections": full})
    if _unseen["objects"] > _MOST_UNSEEN:
        gc.collect()
        return
    _unseen["objects"] += made
    try:
        gc.freeze()
    finally:
        gc.unfreeze()
