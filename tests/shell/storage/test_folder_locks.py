"""The lock of a folder: one has it at a time, and it never outlives its holder."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest

from shardtree.errors import StorageError
from shardtree.shell.storage import _local_files, locked
from shardtree.shell.storage._local_files import lock_folder, unlock_folder
from shardtree.storage import LocalStorage, MemoryStorage


def is_free(path: Path) -> bool:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True


def test_a_folder_on_a_disk_is_locked_for_others(tmp_path: Path) -> None:
    with locked(LocalStorage(str(tmp_path))):
        assert not is_free(tmp_path)
    assert is_free(tmp_path)


@pytest.mark.parametrize("kind", ["memory", "files"])
def test_a_thread_waits_until_the_lock_is_free(kind: str, tmp_path: Path) -> None:
    storage: Any = MemoryStorage() if kind == "memory" else LocalStorage(str(tmp_path))
    order: list[str] = []
    begun = Event()

    def second() -> None:
        begun.set()
        with locked(storage):
            order.append("second")

    with locked(storage):
        thread = Thread(target=second)
        thread.start()
        begun.wait()
        order.append("first")
    thread.join()
    assert order == ["first", "second"]


def test_a_process_that_was_forked_meanwhile_does_not_keep_the_lock(tmp_path: Path) -> None:
    descriptor = lock_folder(str(tmp_path))
    forked = os.dup(descriptor)
    unlock_folder(descriptor)
    assert is_free(tmp_path)
    os.close(forked)


def test_the_lock_is_of_the_folder_that_has_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, flock = tmp_path / "step", fcntl.flock
    folder.mkdir()

    def slow(descriptor: int, operation: int) -> None:
        flock(descriptor, operation)
        if not (tmp_path / "old").exists():  # another save exchanges the folder, and has waited for its lock before
            folder.rename(tmp_path / "old")
            folder.mkdir()

    monkeypatch.setattr(fcntl, "flock", slow)
    with locked(LocalStorage(str(folder))):
        monkeypatch.undo()
        assert is_free(tmp_path / "old") and not is_free(folder)


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_where_nothing_can_be_locked_nothing_is(tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with locked(LocalStorage(str(tmp_path))):
        pass


def test_a_folder_that_is_gone_is_named(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"cannot lock '.*gone'"), locked(LocalStorage(str(tmp_path / "gone"))):
        pass


def test_who_waits_for_another_program_says_so_and_gives_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(_local_files, "_LONG_WAIT", 0.0)
    monkeypatch.setattr(_local_files, "_LONGEST_WAIT", 0.05)
    held = lock_folder(str(tmp_path))
    with pytest.raises(StorageError, match=r"another program holds the lock .*\n.*lslocks"):
        lock_folder(str(tmp_path))
    unlock_folder(held)
    assert caplog.text.count("waiting for the lock") == 1
    unlock_folder(lock_folder(str(tmp_path)))
