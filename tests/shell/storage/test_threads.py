"""Pieces that another thread writes while those that follow are made; and work in threads that are kept."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardtree.shell.storage import Task, in_threads, write_behind
from tests.core.trees.samples import assert_caught

PIECES = st.lists(st.binary(max_size=5), max_size=12)
SIZES = st.sampled_from([1, 2**18, 2**20])


def written(write_behind: Any, pieces: list[bytes], sizes: int) -> None:
    """Check that a writer gets pieces in order, each of which counts as so many bytes."""
    assert write_behind(lambda taken: [*taken], iter(pieces), lambda piece: len(piece) * sizes) == pieces


@given(PIECES, SIZES)
def test_pieces_come_in_order_and_whole(pieces: list[bytes], sizes: int) -> None:
    written(write_behind, pieces, sizes)


def test_the_law_catches_a_group_that_is_left_out() -> None:
    def without_first(write: Any, pieces: Iterator[bytes], nbytes: Any) -> Any:
        return write_behind(write, islice(pieces, 1, None), nbytes)

    assert_caught(written, without_first, PIECES, SIZES)


@pytest.mark.parametrize("is_much", [False, True])
def test_only_much_is_written_by_another_thread_and_all_is_made_by_this_one(is_much: bool) -> None:
    threads = set[int]()

    def pieces() -> Iterator[bytes]:
        for _ in range(8):
            threads.add(threading.get_ident())
            yield b"abcd"

    writer = write_behind(lambda taken: ([*taken], threading.get_ident())[1], pieces(), lambda _: is_much * 2**20)
    assert (writer != threading.get_ident()) is is_much
    assert threads == {threading.get_ident()}


def failing(count: int, made: list[int]) -> Iterator[bytes]:
    for number in range(count):
        made.append(number)
        yield b"abcd"
    raise KeyError("no more")


@pytest.mark.parametrize("is_much", [False, True])
def test_what_making_them_raises_comes_to_the_writer_and_the_caller(is_much: bool) -> None:
    told = []

    def write(taken: Iterable[bytes]) -> None:
        try:
            assert [*taken] == []
        except BaseException as error:
            told.append(error)
            raise

    with pytest.raises(KeyError, match="no more") as caught:
        write_behind(write, failing(5, []), lambda _: is_much * 2**20)
    assert told == ([caught.value] if is_much else [])  # of little nothing is written


def test_no_more_is_made_than_a_few_mib_once_writing_has_failed() -> None:
    made: list[int] = []

    def write(taken: Iterator[bytes]) -> None:
        next(taken)
        raise OSError("no space")

    with pytest.raises(OSError, match="no space"):
        write_behind(write, failing(100, made), lambda _: 2**20)
    assert len(made) < 16


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
    written(write_behind, [b"ab", b"c"], 2**20)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_process_has_threads_of_its_own() -> None:
    assert Task(lambda: 7).result() == 7
    child = os.fork()
    if not child:
        names = {threading.current_thread().name, *in_threads(lambda _: threading.current_thread().name, range(50), 2)}
        os._exit(0 if names and Task(lambda: 7).result() == 7 else 1)
    assert os.waitpid(child, 0)[1] == 0
