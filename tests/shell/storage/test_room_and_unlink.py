"""Local files: room that is reserved for what is to come, and small files that are removed without a wait."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as some

from shardtree.shell.storage import _local_files
from shardtree.storage import LocalStorage, MemoryStorage, SizedBuffers, Storage

MIB = 1024 * 1024
CUTS = some.lists(some.integers(0, 3000), max_size=5)


def write_what_is_given(make: Callable[[], Storage], sizes: list[int], told: int) -> None:
    """Whatever length was told before, a file has the bytes that came."""
    buffers = [os.urandom(size) for size in sizes]
    storage = make()
    length = storage.write("f", SizedBuffers(told, map(memoryview, buffers)), durable=False)
    assert storage.read("f") == b"".join(buffers)
    assert length == storage.length("f") == sum(sizes)
    storage.remove("f")


@pytest.mark.parametrize("kind", ["local", "memory"])
@given(sizes=CUTS, told=some.integers(0, 20_000))
def test_a_file_has_the_bytes_that_came_whatever_was_told_before(
    tmp_path_factory: pytest.TempPathFactory, kind: str, sizes: list[int], told: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_local_files, "_RESERVED_BYTES", 1)
        folder = str(tmp_path_factory.mktemp("room"))
        write_what_is_given(MemoryStorage if kind == "memory" else lambda: LocalStorage(folder), sizes, told)


def test_the_law_catches_a_file_that_is_as_long_as_was_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_local_files, "_RESERVED_BYTES", 1)
    monkeypatch.setattr(_local_files, "_KEEP_SIZE", 0)
    monkeypatch.setattr(_local_files.os, "ftruncate", lambda *_: None)
    with pytest.raises(AssertionError):
        write_what_is_given(lambda: LocalStorage(str(tmp_path)), [3000], 20_000)


@pytest.mark.parametrize("told", [0, 1_000_000, 9_000_000])
def test_no_room_is_kept_that_isnt_used(tmp_path: Path, told: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_local_files, "_RESERVED_BYTES", 1)
    LocalStorage(str(tmp_path)).write("f", SizedBuffers(told, [memoryview(bytes(1_000_000))]), durable=True)
    assert (tmp_path / "f").stat().st_blocks * 512 < 1_100_000


def test_a_file_that_is_being_written_is_as_long_as_what_came(tmp_path: Path) -> None:
    """So that what a dead process left is seen to be short."""
    lengths = []

    def buffers() -> Any:
        for _ in range(8):
            yield memoryview(bytes(1024 * 1024))
            lengths.append((tmp_path / "f").stat().st_size)

    LocalStorage(str(tmp_path)).write("f", SizedBuffers(8 * 1024 * 1024, buffers()), durable=False)
    assert all(length <= (number + 1) * 1024 * 1024 for number, length in enumerate(lengths))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """Ranges that the disk was asked to begin with, and how long the file was, by a system that refuses each."""
    asked = list[tuple[int, int, int]]()

    def refuse(name: str, descriptor: int, begin: int, length: int, *how: int) -> int:
        if name == "sync_file_range" and how == (2,):
            asked.append((begin, length, os.fstat(descriptor).st_size))
        return -1

    monkeypatch.setattr(_local_files, "_WRITEBACK_BYTES", 8 * MIB)
    monkeypatch.setattr(_local_files, "_system_call", lambda name, *_: partial(refuse, name))
    return asked


@pytest.mark.parametrize(
    ("places", "ranges"),
    [
        (None, [(0, 8), (8, 8)]),
        ([*range(20)], [(0, 8), (8, 8)]),
        ([*range(2, 20), 0, 1], [(2, 8), (10, 8)]),
        ([*range(9), *range(11, 20)], [(0, 8), (11, 8)]),
        ([*range(0, 20, 2), *range(1, 20, 2)], []),
    ],
)
def test_the_disk_begins_before_a_durable_file_ends(
    tmp_path: Path, asked: list[tuple[int, int, int]], places: list[int] | None, ranges: list[tuple[int, int]]
) -> None:
    data, storage = os.urandom(MIB), LocalStorage(str(tmp_path))
    for durable in (False, True):
        if places is None:
            storage.write("f", [data] * 20, durable=durable)
        else:
            storage.write_parts("f", 20 * MIB, [(place * MIB, data) for place in places], durable=durable)
        assert [(begin // MIB, length // MIB) for begin, length, _ in asked] == (ranges if durable else [])
    assert all(begin + length <= size for begin, length, size in asked)
    assert storage.read("f")[MIB * 3 : MIB * 4] == data


def test_no_room_is_kept_by_a_write_that_fails(tmp_path: Path) -> None:
    def buffers() -> Any:
        yield memoryview(bytes(1024 * 1024))
        raise ValueError("no more")

    with pytest.raises(ValueError, match="no more"):
        LocalStorage(str(tmp_path)).write("f", SizedBuffers(64 * 1024 * 1024, buffers()), durable=False)
    # A file system may count a block of its own, which says where the others are.
    assert (tmp_path / "f").stat().st_blocks * 512 < 1_100_000


# Removing.


def settle() -> None:
    for thread in threading.enumerate():
        if thread.name == "unlink":
            thread.join()


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_removed_file_is_gone_and_no_descriptor_stays(tmp_path: Path) -> None:
    storage = LocalStorage(str(tmp_path))
    before = descriptors()
    for size in (0, 10, 64 * 1024 + 1):
        storage.write("f", [memoryview(bytes(size))], durable=False)
        storage.remove("f")
        assert storage.names() == ()
    settle()
    assert descriptors() == before


def test_another_thread_gives_back_the_blocks_of_a_small_young_file_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[bool] = []
    close = os.close
    monkeypatch.setattr(
        _local_files.os,
        "close",
        lambda each: (closed.append(threading.current_thread().name == "unlink"), close(each))[1],
    )
    path = tmp_path / "f"
    path.write_bytes(b"small")
    _local_files.unlink(str(path))
    settle()
    assert closed == [True]
    path.write_bytes(bytes(64 * 1024 + 1))
    _local_files.unlink(str(path))
    path.write_bytes(b"old")
    os.utime(path, (1, 1))
    _local_files.unlink(str(path))
    assert closed == [True]
    assert not path.exists()


def no_thread(*_: object, **options: object) -> Any:
    def start() -> None:
        raise RuntimeError("cannot start new thread at interpreter shutdown")

    return SimpleNamespace(start=start)


def silly_rename(path: str) -> None:
    """Remove a file as NFS does while it is open: under another name it stays, and its folder with it."""
    os.rename(path, f"{path}.nfs0001")


def stale(descriptor: int) -> os.stat_result:
    raise OSError(116, "Stale file handle")


@pytest.mark.parametrize(
    ("owner", "name", "instead", "left"),
    [
        (_local_files, "Thread", no_thread, []),
        (_local_files.os, "remove", silly_rename, ["f.nfs0001"]),
        (_local_files.sys, "is_finalizing", lambda: True, []),
        (_local_files.os, "fstat", stale, []),
    ],
    ids=["no thread can be begun", "a name while it is open", "the end of the process", "nothing is told of the file"],
)
def test_where_no_thread_may_help_the_file_is_closed_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, instead: Any, left: list[str]
) -> None:
    before = descriptors()
    (tmp_path / "f").write_bytes(b"small")
    with monkeypatch.context() as patch:
        patch.setattr(_local_files, "Thread", None)  # none is asked for, but where it can't be begun
        patch.setattr(owner, name, instead)
        _local_files.unlink(str(tmp_path / "f"))
    assert (os.listdir(tmp_path), descriptors()) == (left, before)


def test_a_link_is_removed_and_not_what_it_leads_to(tmp_path: Path) -> None:
    (tmp_path / "target").write_bytes(b"kept")
    (tmp_path / "link").symlink_to("target")
    LocalStorage(str(tmp_path)).remove("link")
    assert os.listdir(tmp_path) == ["target"]


def test_what_cant_be_removed_is_told_and_leaves_no_descriptor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str) -> None:
        raise PermissionError(1, "not yours")

    monkeypatch.setattr(_local_files.os, "remove", refuse)
    (tmp_path / "f").write_bytes(b"small")
    before = descriptors()
    with pytest.raises(PermissionError):
        _local_files.unlink(str(tmp_path / "f"))
    assert descriptors() == before
