"""Threads that share work stop early after an error or an interrupt, wherever it comes, and may be few."""

from __future__ import annotations

import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from shardtree.shell.storage import in_threads


def test_an_interrupt_stops_the_others_while_they_are_waited_for() -> None:
    stopped, begun = threading.Event(), threading.Event()

    def work(piece: int) -> None:
        if threading.current_thread() is threading.main_thread():
            assert begun.wait(60)
            threading.Timer(0.2, signal.pthread_kill, (threading.get_ident(), signal.SIGINT)).start()
        else:
            begun.set()
            assert stopped.wait(60), "nobody stopped it"

    # Processes that run tests for another one ignore the signal.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            in_threads(work, range(2), 2, stop=stopped.set)
    finally:
        signal.signal(signal.SIGINT, before)
    assert stopped.is_set()


def test_an_error_stops_the_others_and_is_the_one_that_is_raised() -> None:
    stopped = threading.Event()

    def work(piece: int) -> None:
        if piece == 1:
            raise ValueError("the first one")
        assert stopped.wait(60), "nobody stopped it"

    with pytest.raises(ValueError, match="the first one"):
        in_threads(work, range(2), 2, stop=stopped.set)


@pytest.mark.parametrize("begun", [0, 1])
def test_work_is_done_where_no_more_threads_can_be_begun(begun: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As at the end of a process, while an asynchronous save adds up its fingerprints."""
    submit, calls = ThreadPoolExecutor.submit, iter(range(3))

    def refused(*arguments: Any) -> Any:
        if next(calls) >= begun:
            raise RuntimeError("cannot schedule new futures after interpreter shutdown")
        return submit(*arguments)

    monkeypatch.setattr(ThreadPoolExecutor, "submit", refused)
    assert in_threads(abs, [-1, 2, -3], threads=2) == [1, 2, 3]
