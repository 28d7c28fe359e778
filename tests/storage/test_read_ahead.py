"""Buffers that another thread makes while those before are used; and work in threads that are kept."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, count, cycle, islice, repeat
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardtree.storage import Buffer, Task, in_threads, read_ahead
from tests.trees.samples import assert_caught

PIECES = st.lists(st.binary(max_size=5), max_size=12)


CLOCKS = st.lists(st.booleans(), min_size=1, max_size=12).map(cycle)
"""Which of the groups are slow to make, again and again."""


def clocked(slow: Iterator[bool]) -> Callable[[], float]:
    """Return a clock by which making a group takes a second or no time."""
    times = chain.from_iterable((begin, begin + next(slow)) for begin in count(0, 2))
    return lambda: float(next(times))


def same_buffers(ahead: Any, pieces: list[bytes], nbytes: int, slow: Iterator[bool]) -> None:
    assert [bytes(buffer) for buffer in ahead(map(memoryview, pieces), nbytes, clocked(slow))] == pieces


@given(PIECES, st.integers(1, 8), CLOCKS)
def test_buffers_come_in_order_and_whole_however_fast(pieces: list[bytes], nbytes: int, slow: Iterator[bool]) -> None:
    same_buffers(read_ahead, pieces, nbytes, slow)


def test_the_law_catches_a_group_that_is_left_out() -> None:
    def without_first(buffers: Iterator[Buffer], nbytes: int, clock: Callable[[], float]) -> Iterator[Buffer]:
        return islice(read_ahead(buffers, nbytes, clock), 1, None)

    assert_caught(same_buffers, without_first, PIECES, st.integers(1, 8), CLOCKS)


@pytest.mark.parametrize("is_slow", [False, True])
def test_only_what_is_slow_to_make_is_made_by_another_thread(is_slow: bool) -> None:
    makers = list[int]()

    def buffers() -> Iterator[Buffer]:
        for _ in range(8):
            makers.append(threading.get_ident())
            yield memoryview(b"abcd")

    assert len(list(read_ahead(buffers(), 8, clocked(cycle([is_slow]))))) == 8
    # A thread may begin too late, and this one does its work then: so there is no exact count.
    assert is_slow or {*makers} == {threading.get_ident()}
    assert makers[0] == threading.get_ident()


def failing(count: int, made: list[int]) -> Iterator[Buffer]:
    for number in range(count):
        made.append(number)
        yield memoryview(b"abcd")
    raise ValueError("no more")


def test_an_error_comes_after_what_was_made_in_groups_before_it() -> None:
    buffers = read_ahead(failing(5, []), 8, clocked(repeat(True)))  # the first alone, and two groups of two
    assert [bytes(next(buffers)) for _ in range(5)] == [b"abcd"] * 5
    with pytest.raises(ValueError, match="no more"):
        next(buffers)


def test_no_more_is_made_than_two_groups() -> None:
    made: list[int] = []
    buffers = read_ahead(failing(100, made), 8, clocked(repeat(True)))
    assert [bytes(next(buffers)) for _ in range(2)] == [b"abcd"] * 2
    buffers.close()
    assert 2 <= len(made) <= 5  # the first one, by which the speed is known, and two groups


def test_what_comes_quickly_is_made_when_it_is_asked_for() -> None:
    made: list[int] = []
    buffers = read_ahead(failing(100, made), 8, clocked(repeat(False)))
    next(buffers)
    buffers.close()
    assert made == [0]


def test_lazy_data_is_computed_in_the_mode_of_the_caller() -> None:
    def modes() -> Iterator[Buffer]:
        for _ in range(3):
            yield memoryview(bytes([torch.is_grad_enabled()]))

    with torch.no_grad():
        slow = clocked(repeat(True))
        assert [bytes(mode) for mode in read_ahead(modes(), 1, slow)] == [b"\0"] * 3


def test_busy_threads_delay_nobody() -> None:
    done, busy = threading.Event(), [Task(lambda: done.wait(60)) for _ in range(20)]
    assert Task(lambda: 7).result() == 7
    assert in_threads(abs, [-1, 2, -3], threads=2) == [1, 2, 3]
    done.set()
    for one in busy:
        one.drop()


def test_what_no_thread_has_begun_is_dropped_undone() -> None:
    done, begun = threading.Event(), list[int]()
    busy = [Task(lambda: done.wait(60)) for _ in range(20)]
    Task(lambda: begun.append(1)).drop()
    done.set()
    for one in busy:
        one.drop()
    assert begun == []


def test_work_is_done_where_no_thread_takes_any(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any) -> Any:
        raise RuntimeError("cannot schedule new futures after interpreter shutdown")

    monkeypatch.setattr(ThreadPoolExecutor, "submit", refused)
    assert Task(lambda: 7).result() == 7
    same_buffers(read_ahead, [b"ab", b"c"], 1, repeat(True))


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_process_has_threads_of_its_own() -> None:
    assert Task(lambda: 7).result() == 7
    child = os.fork()
    if not child:
        names = {threading.current_thread().name, *in_threads(lambda _: threading.current_thread().name, range(50), 2)}
        os._exit(0 if names and Task(lambda: 7).result() == 7 else 1)
    assert os.waitpid(child, 0)[1] == 0
