"""A folder that is made first and waited for later, with every folder above it that is new, or removed again."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shardtree.errors import StorageError
from shardtree.storage import LocalStorage, MemoryStorage, new_folder


def synced_folders(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that tells of each folder that is waited for."""
    synced: list[str] = []
    fsync = os.fsync

    def told(descriptor: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", told)
    return synced


@pytest.mark.parametrize("inside", ["step", "runs/step", "a/b/runs/step"])
def test_all_that_is_new_is_waited_for(inside: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced = synced_folders(monkeypatch)
    folder = tmp_path.resolve() / inside
    wait = new_folder(LocalStorage(str(folder)), durable=True).wait
    assert folder.is_dir() and synced == []
    wait()
    parents = list(folder.parents)
    assert sorted(synced) == sorted(map(str, parents[: parents.index(tmp_path.resolve()) + 1]))


def test_a_folder_that_is_there_may_be_of_a_moment_ago(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced = synced_folders(monkeypatch)
    new_folder(LocalStorage(str(tmp_path)), durable=True).wait()
    assert synced == [str(tmp_path.resolve().parent)]


def test_nothing_is_waited_for_that_needs_no_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced = synced_folders(monkeypatch)
    new_folder(LocalStorage(str(tmp_path / "step")), durable=False).wait()
    storage = MemoryStorage()
    new_folder(storage, durable=True).wait()
    assert (tmp_path / "step").is_dir() and storage.is_folder() and synced == []


def test_a_wait_that_fails_names_the_folder(tmp_path: Path) -> None:
    wait = new_folder(LocalStorage(str(tmp_path / "runs" / "step")), durable=True).wait
    (tmp_path / "runs" / "step").rmdir()
    (tmp_path / "runs").rmdir()
    with pytest.raises(StorageError, match="runs"):
        wait()


def test_what_may_not_be_listed_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wait = new_folder(LocalStorage(str(tmp_path / "step")), durable=True).wait
    opened = os.open

    def refused(path: str, *rest: int) -> int:
        if path == str(tmp_path.resolve()):
            raise PermissionError(13, "Permission denied", path)
        return opened(path, *rest)

    monkeypatch.setattr(os, "open", refused)
    wait()


@pytest.mark.parametrize("durable", [False, True])
def test_what_was_made_goes_again(durable: bool, tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    new_folder(LocalStorage(str(tmp_path / "runs" / "a" / "step")), durable=durable).remove()
    assert list(tmp_path.rglob("*")) == [tmp_path / "runs"]
    new_folder(LocalStorage(str(tmp_path / "runs")), durable=durable).remove()
    assert (tmp_path / "runs").is_dir()  # it was there


def test_what_is_in_use_by_now_stays(tmp_path: Path) -> None:
    made = new_folder(LocalStorage(str(tmp_path / "runs" / "step")), durable=False)
    (tmp_path / "runs" / "other").mkdir()
    made.remove()
    assert list(tmp_path.rglob("*")) == [tmp_path / "runs", tmp_path / "runs" / "other"]
