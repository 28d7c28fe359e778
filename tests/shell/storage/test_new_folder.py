"""A folder that is made first and waited for later, with every folder above it that is new, or removed again."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shardtree.errors import StorageError
from shardtree.shell.storage import new_folder
from shardtree.storage import LocalStorage, MemoryStorage, wrapped


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
    assert (tmp_path / "step").is_dir() and synced == []


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
@pytest.mark.parametrize("inside", ["runs/a/step", "runs/a/../step"])
def test_what_was_made_goes_again(inside: str, durable: bool, tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    folder = LocalStorage(f"{tmp_path}/{inside}")
    new_folder(folder, durable=durable).remove()
    assert not folder.is_folder() and (tmp_path / "runs" / "a").is_dir()  # another save may be about to use that
    new_folder(LocalStorage(str(tmp_path / "runs" / "a")), durable=durable).remove()
    assert (tmp_path / "runs" / "a").is_dir()  # it was there


def test_what_is_in_use_by_now_stays(tmp_path: Path) -> None:
    made = new_folder(LocalStorage(str(tmp_path / "runs" / "step")), durable=False)
    (tmp_path / "runs" / "step" / "other").mkdir()
    made.remove()
    assert (tmp_path / "runs" / "step" / "other").is_dir()


def test_a_folder_above_that_goes_meanwhile_is_made_once_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mkdir, tried = os.mkdir, list[str]()

    def taken_back(path: str, *rest: int) -> None:
        tried.append(path)
        if len(tried) == 2:
            (tmp_path / "runs").rmdir()
        mkdir(path, *rest)

    monkeypatch.setattr(os, "mkdir", taken_back)
    LocalStorage(str(tmp_path / "runs" / "step")).make_folder(durable=False)
    assert (tmp_path / "runs" / "step").is_dir() and len(tried) == 4


def test_elsewhere_a_folder_is_made_by_what_is_in_it() -> None:
    storage = MemoryStorage()
    made = new_folder(storage, durable=True)
    made.wait()
    made.remove()
    assert storage.names() == ()


@pytest.mark.parametrize("durable", [False, True])
def test_a_storage_of_another_kind_makes_its_folder_itself(durable: bool, tmp_path: Path) -> None:
    made: list[bool] = []

    own = wrapped(MemoryStorage(), make_folder=lambda name, *, durable: made.append(durable))
    new_folder(own, durable=durable).wait()
    assert made == [durable]
