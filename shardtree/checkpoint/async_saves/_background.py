"""The thread that writes: one function after the other, in the order in which they were handed in."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Thread
from typing import Any, TypeVar

T = TypeVar("T")

_Jobs = SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]


class Background:
    """A thread, started when there is something to do.

    It is a daemon, which the interpreter doesn't wait for at its end: that is the exit's business, which knows how
    long to wait and what to say.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: _Jobs = SimpleQueue()
        self._thread: Thread | None = None

    def submit(self, fn: Callable[[], T]) -> Future[T]:
        """Return what will hold what fn returns or raises; it may be cancelled before it begins."""
        if self._thread is None:
            self._thread = Thread(target=_work, args=(self._jobs,), name=self._name, daemon=True)
            self._thread.start()
        future: Future[T] = Future()
        self._jobs.put((future, fn))
        return future

    def stop(self, *, wait: bool = True) -> None:
        """Let the thread end once it has done what was handed in."""
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
        # A snapshot's memory is free for the next one when nothing leads to it.
        del job, future, fn
