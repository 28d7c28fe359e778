"""A folder of a storage as a storage, and folders that are renamed as a whole."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest

from shardtree.shell.storage import folder_in, is_link, is_same_place, make_folder, remove_files, storage_at
from shardtree.storage import LocalStorage, MemoryStorage, Storage, wrapped
from shardtree.stores._fsspec import FsspecStorage
from shardtree.testing import watched

KINDS = ["local", "memory", "watched", "objects"]


@pytest.fixture(params=KINDS)
def whole(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    return {
        "local": LocalStorage(str(tmp_path)),
        "memory": MemoryStorage(),
        "watched": watched(MemoryStorage()),
        "objects": storage_at(f"memory://{tmp_path.name}"),
    }[request.param]


def test_a_folder_of_the_same_place_is_the_same() -> None:
    whole = MemoryStorage()
    assert is_same_place(folder_in(whole, "a"), folder_in(whole, "a"))
    assert is_same_place(folder_in(folder_in(whole, "a"), "b"), folder_in(whole, "a/b"))
    assert not is_same_place(folder_in(whole, "a"), folder_in(whole, "b"))
    assert not is_same_place(folder_in(whole, "a"), folder_in(MemoryStorage(), "a"))
    assert isinstance(folder_in(storage_at("memory://x"), "a"), FsspecStorage)
    for name in ("a/", "./a", "a//."):
        assert is_same_place(folder_in(whole, name), folder_in(whole, "a")), name


def test_a_folder_takes_names_as_keywords_and_can_be_its_whole(whole: Storage) -> None:
    folder = folder_in(whole, "a")
    make_folder(folder)
    folder.replace(name="x", data=b"1", durable=False)
    assert folder.names(folder="") == folder.names() == ("x",) == whole.names("a")
    assert folder.length(name="x") == folder_in(whole, "").length("a/x") == 1
    remove_files(folder, ["x"])
    assert folder.names() == ()


def test_a_folder_of_a_wrapped_storage_can_be_pickled(tmp_path: Path) -> None:
    folder = folder_in(wrapped(LocalStorage(str(tmp_path))), "a")
    make_folder(folder)
    again = pickle.loads(pickle.dumps(folder))
    again.replace("x", b"1", durable=False)
    assert folder.read("x") == b"1" and is_same_place(again, LocalStorage(str(tmp_path / "a")))


def test_links_are_known(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    os.symlink("a", tmp_path / "b")
    storage = watched(LocalStorage(str(tmp_path)))
    assert (is_link(storage, "a"), is_link(storage, "b"), is_link(storage, "c")) == (False, True, False)
