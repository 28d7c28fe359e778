"""A file's bytes on their way: passed on as they are and hashed right, whoever hashes them, and nobody stays behind."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from shardtree.storage import BlockHasher, Buffer, _blocks, hash_column, hashed, hashed_beside, in_parts
from tests.storage.threads import torch_threads
from tests.trees.samples import assert_caught

BLOCK = 16
PART = 4 * BLOCK
BESIDE = 16 * BLOCK

OnTheWay = Callable[[Iterable[Buffer], BlockHasher], Iterator[Buffer]]

SIZES = st.lists(
    st.builds(
        lambda unit, count, more: max(unit * count + more, 0),
        st.sampled_from([BLOCK, PART, BESIDE]),
        st.integers(0, 3),
        st.integers(-1, 1) | st.integers(0, BESIDE),
    ),
    max_size=6,
)


class Late:
    """A thread that does its work as late as it may: when somebody waits for it."""

    def __init__(self, threads: int) -> None:
        self.work: list[Callable[[], None]] = []

    def __enter__(self) -> Late:
        return self

    def __exit__(self, *_: object) -> None:
        self.catch_up()

    def submit(self, do: Callable[..., None], *arguments: object) -> Late:
        self.work.append(partial(do, *arguments))
        return self

    def catch_up(self) -> None:
        while self.work:
            self.work.pop(0)()

    result = catch_up


class Closed(Late):
    """A thread as there is none: the interpreter ends."""

    def submit(self, do: Callable[..., None], *arguments: object) -> Late:
        raise RuntimeError("cannot schedule new futures after interpreter shutdown")


class Reluctant(Late):
    """A thread that couldn't be begun at first; later it finds what it was given then."""

    refused = False

    def submit(self, do: Callable[..., None], *arguments: object) -> Late:
        super().submit(do, *arguments)
        if not self.refused:
            self.refused = True
            raise RuntimeError("can't start new thread")
        return self


WAYS: dict[str, tuple[int, Callable[[int], Any]]] = {
    "one thread": (1, ThreadPoolExecutor),
    "two threads": (2, ThreadPoolExecutor),
    "late": (2, Late),
    "closed": (2, Closed),
    "reluctant": (2, Reluctant),
}
WAY = st.sampled_from(sorted(WAYS))


@contextmanager
def going(way: str) -> Iterator[None]:
    """Have small blocks, and as many threads as a way has."""
    count, pool = WAYS[way]
    with pytest.MonkeyPatch.context() as patch, torch_threads(count):
        patch.setattr(_blocks, "BLOCK_BYTES", BLOCK)
        patch.setattr(_blocks, "_PART_BYTES", PART)
        patch.setattr(_blocks, "_BACKGROUND_BYTES", BESIDE)
        patch.setattr(_blocks, "ThreadPoolExecutor", pool)
        yield


def content(sizes: list[int]) -> list[bytes]:
    """Return buffers of bytes that no block repeats."""
    whole = b"".join(number.to_bytes(4, "little") for number in range(sum(sizes) // 4 + 1))
    return [whole[sum(sizes[:number]) :][:size] for number, size in enumerate(sizes)]


def in_one_memory(buffers: list[bytes]) -> Iterator[Buffer]:
    """Yield buffers that all lie in the same memory: each is overwritten when the next is asked for."""
    memory = bytearray(max(map(len, buffers), default=0))
    for buffer in buffers:
        memory[: len(buffer)] = buffer
        yield memoryview(memory)[: len(buffer)]
        memory[:] = bytes(len(memory))


def passes_on_and_hashes(on_the_way: OnTheWay, way: str, sizes: list[int]) -> None:
    buffers = content(sizes)
    whole = b"".join(buffers)
    hasher = BlockHasher()
    with going(way):
        found = [bytes(part) for part in on_the_way(in_one_memory(buffers), hasher)]
        assert list(map(len, found)) == [part.nbytes for part in in_parts(map(memoryview, buffers))]
    assert b"".join(found) == whole
    expected = [xxhash.xxh3_64_intdigest(whole[at : at + BLOCK]) for at in range(0, len(whole), BLOCK)]
    assert hash_column(hasher).tolist() == expected


@pytest.mark.parametrize("on_the_way", [hashed, hashed_beside])
@settings(max_examples=100)
@given(WAY, SIZES)
def test_bytes_and_hashes_are_the_same_whoever_hashes(on_the_way: OnTheWay, way: str, sizes: list[int]) -> None:
    passes_on_and_hashes(on_the_way, way, sizes)


def waits_at_the_end(buffers: Iterable[Buffer], hasher: BlockHasher) -> Iterator[Buffer]:
    with _blocks.ThreadPoolExecutor(1) as thread:
        at = 0
        for buffer in buffers:
            with suppress(RuntimeError):
                thread.submit(hasher.update, buffer)
            yield from in_parts([buffer], at)
            at += buffer.nbytes
    hasher.finish()


def forgets_where_it_is(buffers: Iterable[Buffer], hasher: BlockHasher) -> Iterator[Buffer]:
    for buffer in buffers:
        hasher.update(buffer)
        yield from in_parts([buffer])
    hasher.finish()


def takes_work_for_done(buffers: Iterable[Buffer], hasher: BlockHasher) -> Iterator[Buffer]:
    for buffer in in_parts(buffers):
        with suppress(RuntimeError):
            _blocks.ThreadPoolExecutor(1).submit(hasher.update, buffer).result()
        yield buffer
    hasher.finish()


@pytest.mark.parametrize(
    ("broken", "way"),
    [(waits_at_the_end, "late"), (forgets_where_it_is, "two threads"), (takes_work_for_done, "closed")],
)
def test_the_law_catches(broken: OnTheWay, way: str) -> None:
    assert_caught(passes_on_and_hashes, broken, st.just(way), SIZES)


def stops(on_the_way: OnTheWay, at: str, number: int) -> None:
    """Go on until something fails, or until nobody wants more."""

    def buffers() -> Iterator[Buffer]:
        for _ in range(number):
            yield memoryview(bytes(2 * BESIDE))
        if at == "buffers":
            raise OSError("no more buffers")
        yield memoryview(bytes(2 * BESIDE))

    class Hasher(BlockHasher):
        def update(self, buffer: Buffer, byte: int | None = None) -> None:
            if at == "hasher" and self._at == number * 2 * BESIDE:
                raise OSError("no more hashes")
            super().update(buffer, byte)

    parts = on_the_way(buffers(), Hasher())
    if at == "consumer":
        for _ in zip(range(number + 1), parts, strict=False):
            pass
        parts.close()
    else:
        with pytest.raises(OSError, match=f"no more {'buffers' if at == 'buffers' else 'hashes'}"):
            for _ in parts:
                pass


def leaves_no_thread(on_the_way: OnTheWay, way: str, at: str, number: int) -> None:
    before = set(threading.enumerate())
    with going(way):
        stops(on_the_way, at, number)
    assert set(threading.enumerate()) == before


STOPS = WAY, st.sampled_from(["buffers", "hasher", "consumer"]), st.integers(0, 3)


@given(*STOPS)
def test_what_stops_half_way_is_told_and_leaves_no_thread(way: str, at: str, number: int) -> None:
    leaves_no_thread(hashed_beside, way, at, number)


def test_the_law_of_threads_catches_one_that_nobody_ends() -> None:
    left = []

    def keeps_its_thread(buffers: Iterable[Buffer], hasher: BlockHasher) -> Iterator[Buffer]:
        left.append(ThreadPoolExecutor(1))
        for buffer in buffers:
            beside = left[-1].submit(hasher.update, buffer)
            yield from in_parts([buffer])
            beside.result()

    try:
        assert_caught(leaves_no_thread, keeps_its_thread, *STOPS)
    finally:
        for pool in left:
            pool.shutdown()


def test_the_law_of_threads_catches_a_hasher_whose_error_nobody_hears() -> None:
    def silent(buffers: Iterable[Buffer], hasher: BlockHasher) -> Iterator[Buffer]:
        with ThreadPoolExecutor(1) as thread:
            for buffer in buffers:
                thread.submit(hasher.update, buffer)
                yield from in_parts([buffer])

    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        stops(silent, "hasher", 1)


def test_another_thread_hashes_what_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the law doesn't hold for want of it."""
    by: list[tuple[int, bool]] = []

    class Hasher(BlockHasher):
        def update(self, buffer: Buffer, byte: int | None = None) -> None:
            by.append((buffer.nbytes, threading.current_thread() is threading.main_thread()))
            super().update(buffer, byte)

    with going("two threads"):
        for _ in hashed_beside(map(memoryview, content([BESIDE - 1, BESIDE, 1])), Hasher()):
            pass
    assert by == [(BESIDE - 1, True), (BESIDE, False), (1, True)]
