"""What every storage does, whatever it keeps its files in."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from itertools import chain, pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import shardtree
from shardtree.errors import CheckpointingException, CorruptCheckpoint, StorageError
from shardtree.storage import (
    LocalStorage,
    MemoryStorage,
    Storage,
    make_folder,
    storage_at,
)
from shardtree.world import World
from tests.storage.storages import STORAGES
from tests.trees.samples import assert_caught

PARTS = st.lists(st.binary(max_size=40), max_size=5)
CLIMBING = ["../x", "a/../../x", "a/../..", "a/..", "/etc/x", "..", "a\0b"]
per_example = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(params=STORAGES)
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    made = STORAGES[request.param](tmp_path)
    make_folder(made)
    return made


def views(parts: list[bytes]) -> list[memoryview]:
    return [memoryview(part) for part in parts]


def read_ranges(storage: Storage, name: str, byte: int, sizes: list[int]) -> list[bytes]:
    buffers = [memoryview(bytearray(size)) for size in sizes]
    with storage.open(name) as reader:
        reader.read_into(byte, buffers)
    return [bytes(buffer) for buffer in buffers]


def gives_back(storage: Storage, parts: list[bytes], cuts: list[int], write: Callable[..., int] | None = None) -> None:
    """Write parts, and read the file in every way there is, in pieces of other sizes."""
    whole = b"".join(parts)
    assert (write or storage.write)("f", views(parts), durable=False) == len(whole)
    assert storage.length("f") == len(whole)
    assert storage.read("f") == whole
    edges = sorted({min(cut, len(whole)) for cut in cuts})
    sizes = [stop - start for start, stop in pairwise(edges)]
    if edges:
        assert b"".join(read_ranges(storage, "f", edges[0], sizes)) == whole[edges[0] : edges[-1]]
    with storage.open("f") as reader:
        assert reader.length == len(whole)
        assert bytes(reader.read()) == whole
        for begin, end in pairwise(edges):
            assert bytes(reader.read(begin, end)) == whole[begin:end]


@per_example
@given(PARTS, st.lists(st.integers(0, 200), max_size=5))
def test_what_is_written_is_read(storage: Storage, parts: list[bytes], cuts: list[int]) -> None:
    gives_back(storage, parts, cuts)


def test_reading_back_catches_a_storage_that_appends() -> None:
    storage = MemoryStorage()

    def appended(name: str, buffers: list[memoryview], *, durable: bool) -> int:
        before = storage.read(name) if storage.length(name) is not None else b""
        return storage.write(name, [memoryview(before), *buffers], durable=durable) - len(before)

    def law(write: Callable[..., int], parts: list[bytes]) -> None:
        gives_back(storage, parts, [0, 5], write)

    assert_caught(law, appended, PARTS)


def test_a_file_of_thousands_of_buffers(storage: Storage) -> None:
    gives_back(storage, [bytes([number % 256]) * (number % 7) for number in range(5000)], list(range(0, 15000, 3)))


@pytest.mark.slow
def test_a_large_file_in_few_buffers(storage: Storage) -> None:
    gives_back(storage, [os.urandom(3_000_000), b"", os.urandom(17_000_001)], [1, 2_999_999, 20_000_000])


def test_a_mapping_outlives_its_reader(storage: Storage) -> None:
    storage.write("f", views([b"abc"]), durable=False)
    with storage.open("f") as reader:
        mapped = reader.read()
    storage.remove("f")
    assert bytes(mapped) == b"abc"


def test_reading_past_the_end_says_where_the_file_ends(storage: Storage) -> None:
    storage.write("f", views([b"abcdef"]), durable=False)
    with pytest.raises(StorageError, match=r"(?s)f' ends at byte .*expected"):
        read_ranges(storage, "f", 4, [1, 4])
    with storage.open("f") as reader, pytest.raises(StorageError, match=r"(?s)f' ends at byte .*expected"):
        reader.read(4, 9)


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
    ]
    for call in calls:
        with pytest.raises(StorageError, match="would leave the folder"):
            call()


def test_a_storage_follows_the_protocol(storage: Storage) -> None:
    assert isinstance(storage, Storage)
    assert storage_at(storage) is storage
    assert storage.where("a/b").endswith("a/b")


@pytest.mark.parametrize("wrong", ["", "a\0b", 7, None, b"bytes"])
def test_what_is_no_directory_is_refused(wrong: object) -> None:
    with pytest.raises(StorageError, match="where is the checkpoint"):
        storage_at(wrong)  # type: ignore[arg-type]


def test_a_path_is_a_local_storage(tmp_path: Path) -> None:
    assert storage_at(tmp_path) == LocalStorage(str(tmp_path)) == storage_at(f"file://{tmp_path}")


def test_a_missing_fsspec_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(StorageError, match=r"pip install 'shardtree\[remote\]'"):
        storage_at("memory://x")


def test_an_unknown_protocol_is_named() -> None:
    with pytest.raises(StorageError, match="no file system for 'nosuch://x'"):
        storage_at("nosuch://x")


def test_a_folder_stands_in_the_way_of_a_file(tmp_path: Path) -> None:
    storage = LocalStorage(str(tmp_path))
    make_folder(storage, "a")
    for write in (partial(storage.write, "a", views([b"x"])), partial(storage.replace, "a", b"x")):
        with pytest.raises(StorageError, match="cannot"):
            write(durable=False)


def test_a_file_that_may_not_be_written_to() -> None:
    with pytest.raises(StorageError, match=r"ostype'\n  found (Permission denied|Read-only)"):
        LocalStorage("/proc/sys/kernel").write("ostype", views([b"x"]), durable=False)


def test_a_folder_that_is_made_is_in_its_parent_on_the_medium(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []

    def noted(descriptor: int, sync: Callable[[int], None] = os.fsync) -> None:
        synced.append(os.fstat(descriptor).st_ino)
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    storage = LocalStorage(str(tmp_path / "runs" / "step_1"))
    storage.make_folder("part")
    parents = [tmp_path, tmp_path / "runs", tmp_path / "runs" / "step_1"]
    assert sorted(synced) == sorted(parent.stat().st_ino for parent in parents)
    make_folder(storage, "part")
    assert len(synced) == 3, "nothing was made, so nothing is waited for"


def test_a_folder_is_made_relative_to_where_we_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    LocalStorage("step_1").make_folder()
    LocalStorage("runs/../step_2/").make_folder("a")
    assert (tmp_path / "step_1").is_dir()
    assert (tmp_path / "step_2" / "a").is_dir()


def test_a_full_disk_is_a_storage_error() -> None:
    with pytest.raises(StorageError, match="No space left"):
        LocalStorage("/dev").write("full", views([b"x" * 100]), durable=False)


def shards(world: World, size: int = 6) -> dict[str, object]:
    part = torch.arange(size) + world.rank * size
    return {"w": shardtree.ShardedTensor.from_rank_offsets("w", part, (0, world.rank, world.size)), "step": 3}


@pytest.mark.parametrize("kind", STORAGES)
def test_two_ranks_save_and_three_load(kind: str, tmp_path: Path) -> None:
    storage = STORAGES[kind](tmp_path)

    def saved(world: World) -> None:
        shardtree.save(shards(world), storage, world=world)
        shardtree.save(shards(world), storage, world=world, overwrite=True)

    def loaded(world: World) -> list[int]:
        target = shards(world, 4)
        return shardtree.load(target, storage, world=world)["w"].tolist()

    shardtree.simulate(2, saved)
    assert list(chain(*shardtree.simulate(3, loaded))) == list(range(12))
    folders = [name for name in storage.names() if name != "metadata.json"]
    assert len(folders) == 1, "the first save's folder is gone"


def test_files_of_two_ranks_that_changed_places_are_not_loaded() -> None:
    storage = MemoryStorage()
    shardtree.simulate(2, lambda world: shardtree.save(shards(world), storage, world=world))
    (folder,) = (name for name in storage.names() if name != "metadata.json")
    first, second = (f"{folder}/{name}" for name in storage.names(folder) if "0000" in name)
    contents = storage.read(first), storage.read(second)
    assert len(contents[0]) == len(contents[1])
    for name, content in zip((second, first), contents, strict=True):
        storage.replace(name, content, durable=False)
    with pytest.raises(CorruptCheckpoint):
        shardtree.load_plain_tensors(storage)


def test_a_url_is_a_directory() -> None:
    def saved(world: World) -> None:
        shardtree.save(shards(world), "memory://urls/step_1", world=world)

    shardtree.simulate(2, saved)
    opened = shardtree.open_checkpoint("memory://urls/step_1")
    assert opened["w"].data.read().tolist() == list(range(12))
    with pytest.raises(CheckpointingException, match="already holds a checkpoint"):
        shardtree.simulate(2, saved)
