"""A file in parts: several ranks write one file together, each its own parts, in any order."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardtree.errors import StorageError
from shardtree.shell.storage import move, write_parts
from shardtree.storage import MemoryStorage, Storage
from shardtree.testing import watched
from tests.core.trees.samples import assert_caught
from tests.shell.storage.storages import STORAGES, made

Parts = list[tuple[int, memoryview]]
Write = Callable[..., None]

AT_PLACES = ["local", "memory", "file://"]
per_example = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


@pytest.fixture(params=STORAGES)
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    return made(request.param, tmp_path)


@pytest.fixture(params=AT_PLACES)
def shared(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    return made(request.param, tmp_path)


@pytest.fixture(params=sorted(set(STORAGES) - set(AT_PLACES)))
def remote(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    return made(request.param, tmp_path)


@st.composite
def written_together(draw: st.DrawFn) -> tuple[bytes, list[list[tuple[int, int]]], bytes | None]:
    """Draw a file's bytes, which ranges of it each writer writes, in which order, and what lay there before."""
    data = draw(st.binary(max_size=300))
    cuts = sorted({0, len(data), *draw(st.lists(st.integers(0, len(data)), max_size=20))})
    ranges = draw(st.permutations(list(pairwise(cuts))))
    writers = draw(st.integers(1, 3))
    owner = [draw(st.integers(0, writers - 1)) for _ in ranges]
    shares = [[span for span, mine in zip(ranges, owner, strict=True) if mine == writer] for writer in range(writers)]
    return data, shares, draw(st.none() | st.binary(max_size=400))


def parts_of(data: bytes, ranges: Iterable[tuple[int, int]]) -> Parts:
    return [(begin, memoryview(data)[begin:end]) for begin, end in ranges]


def become_the_file(
    storage: Storage, case: tuple[bytes, list[list[tuple[int, int]]], bytes | None], write: Write
) -> None:
    data, shares, before = case
    storage.remove("f")
    if before is not None:
        storage.write("f", [memoryview(before)], durable=False)
    for ranges in shares:
        write("f", len(data), parts_of(data, ranges), durable=False)
    assert storage.read("f") == data
    assert storage.length("f") == len(data)


@per_example
@given(written_together())
def test_parts_become_the_file(shared: Storage, case: tuple[bytes, list[list[tuple[int, int]]], bytes | None]) -> None:
    become_the_file(shared, case, partial(write_parts, shared))


def test_the_parts_law_catches_a_storage_that_truncates() -> None:
    storage = MemoryStorage()

    def truncating(name: str, length: int, parts: Parts, *, durable: bool) -> None:
        storage.remove(name)
        write_parts(storage, name, length, parts, durable=durable)

    assert_caught(lambda write, case: become_the_file(storage, case, write), truncating, written_together())


def test_writers_at_the_same_time(shared: Storage) -> None:
    data = bytes(range(256)) * 4000
    ranges = [(begin, begin + 1000) for begin in range(0, len(data), 1000)]

    def write(writer: int) -> None:
        write_parts(shared, "f", len(data), parts_of(data, ranges[writer::4]), durable=True)

    shared.write("f", [memoryview(b"x" * (len(data) + 77))], durable=False)
    threads = [threading.Thread(target=write, args=(writer,)) for writer in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert shared.read("f") == data


def test_neighbours_in_thousands_and_a_large_part(shared: Storage) -> None:
    data = bytes(range(251)) * 20_000
    cuts = [*range(0, 9000, 3), 2_000_000, len(data)]
    write_parts(shared, "f", len(data), parts_of(data, pairwise(cuts)), durable=False)
    assert shared.read("f") == data


def test_a_reader_of_the_old_length_isnt_disturbed(shared: Storage) -> None:
    shared.write("f", [memoryview(b"abc")], durable=False)
    with shared.open("f") as reader:
        write_parts(shared, "f", 5, [(3, memoryview(b"de"))], durable=False)
        room = memoryview(bytearray(3))
        reader.read_into(0, [room])
    assert bytes(room) == b"abc"
    assert shared.read("f") == b"abcde"


@pytest.mark.parametrize("byte", [-1, 2, 3, 10**20])
def test_a_part_that_reaches_beyond_the_file_is_refused(storage: Storage, byte: int) -> None:
    with pytest.raises(StorageError, match=r"(?s)cannot write.*/?f'.*expected a part of bytes 0 to 3"):
        write_parts(storage, "f", 3, [(byte, memoryview(b"xy"))], durable=False)


@pytest.mark.parametrize("ranges", [[], [(0, 2)], [(1, 3)], [(0, 1), (2, 3)], [(2, 3), (0, 2)]])
def test_a_store_without_places_says_what_to_do(remote: Storage, ranges: list[tuple[int, int]]) -> None:
    with pytest.raises(StorageError, match=r"(?s)f' in parts.*found (a part|parts).*Save from one process"):
        write_parts(remote, "f", 3, parts_of(b"abc", ranges), durable=False)
    assert remote.length("f") is None


def test_an_error_between_parts_comes_through_as_it_is(storage: Storage) -> None:
    def broken() -> Iterable[tuple[int, memoryview]]:
        yield 0, memoryview(b"abc")
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        write_parts(storage, "f", 6, broken(), durable=False)


def test_a_watched_write_that_breaks_off_leaves_half() -> None:
    def refuse(call: object) -> None:
        raise KeyError(call)

    inner = MemoryStorage()
    with pytest.raises(KeyError, match="write_parts"):
        write_parts(watched(inner, before=refuse), "f", 4, parts_of(b"abcd", [(0, 2), (2, 4)]), durable=False)
    assert inner.read("f") == b"ab\0\0"
    with pytest.raises(KeyError, match="move"):
        move(watched(inner, before=refuse), "f", "g")
