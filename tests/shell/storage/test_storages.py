"""What every storage does, whatever it keeps its files in."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from shardtree.errors import StorageError
from shardtree.shell.storage import folder_in, make_folder, move, storage_at, write_parts
from shardtree.storage import LocalStorage, MemoryStorage, Storage
from tests.shell.storage.storages import STORAGES

CLIMBING = ["../x", "a/../../x", "a/../..", "a/..", "/etc/x", "..", "a\0b"]


@pytest.fixture(params=[*STORAGES, "a folder"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    made = STORAGES[request.param](tmp_path) if request.param in STORAGES else folder_in(MemoryStorage(), "a")
    make_folder(made)
    return made


def views(parts: list[bytes]) -> list[memoryview]:
    return [memoryview(part) for part in parts]


def read_ranges(storage: Storage, name: str, byte: int, sizes: list[int]) -> list[bytes]:
    buffers = [memoryview(bytearray(size)) for size in sizes]
    with storage.open(name) as reader:
        reader.read_into(byte, buffers)
    return [bytes(buffer) for buffer in buffers]


@pytest.mark.parametrize("name", CLIMBING)
def test_a_name_that_climbs_out_is_refused_everywhere(storage: Storage, name: str) -> None:
    calls: list[Callable[[], object]] = [
        partial(storage.where, name),
        partial(storage.write, name, views([b"x"]), durable=False),
        partial(storage.replace, name, b"x", durable=False),
        partial(storage.read, name),
        partial(read_ranges, storage, name, 0, [1]),
        partial(storage.length, name),
        partial(storage.names, name),
        partial(make_folder, storage, name),
        partial(storage.remove, name),
        partial(write_parts, storage, name, 1, [(0, memoryview(b"x"))], durable=False),
        partial(move, storage, name, "g"),
        partial(move, storage, "f", name),
    ]
    storage.write("f", views([b"x"]), durable=False)
    for call in calls:
        with pytest.raises(StorageError, match="cannot be a name in the folder"):
            call()


def test_a_path_is_a_local_storage(tmp_path: Path) -> None:
    assert storage_at(tmp_path) == LocalStorage(str(tmp_path)) == storage_at(f"file://{tmp_path}")


def test_a_missing_fsspec_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(StorageError, match=r"pip install 'shardtree\[remote\]'"):
        storage_at("memory://x")


def test_a_folder_stands_in_the_way_of_a_file(tmp_path: Path) -> None:
    storage = LocalStorage(str(tmp_path))
    make_folder(storage, "a")
    for write in (partial(storage.write, "a", views([b"x"])), partial(storage.replace, "a", b"x")):
        with pytest.raises(StorageError, match="cannot"):
            write(durable=False)


def test_a_folder_is_made_relative_to_where_we_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    LocalStorage("step_1").make_folder()
    LocalStorage("runs/../step_2/").make_folder("a")
    assert (tmp_path / "step_1").is_dir()
    assert (tmp_path / "step_2" / "a").is_dir()
