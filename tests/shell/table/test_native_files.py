"""A rank's shards in several files, written at a time: the same tree, and nothing left of a save that failed."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some

import shardtree as st
from shardtree.shell.storage import Buffer
from shardtree.shell.table.safetensors import _layout, _write
from shardtree.testing import STORABLE_DTYPES, bits, random_bits
from tests.options import save_keywords
from tests.shell.storage.threads import torch_threads

FILE = 64


@contextmanager
def several_files(threads: int, *, least: int = FILE) -> Iterator[None]:
    """Have so many threads, and files of few bytes."""
    with pytest.MonkeyPatch.context() as patch, torch_threads(threads):
        patch.setattr(_layout, "FILE_BYTES", least)
        yield


def data_files(folder: st.storage.MemoryStorage) -> dict[str, bytes]:
    """Return the files of tensors and objects that a save left, by their names in its folder."""
    (save,) = [name for name in folder.names() if name.startswith("save-")]
    return {name: folder.read(f"{save}/{name}") for name in folder.names(save) if name[0].isdigit()}


# Trees.

RECIPES = some.lists(some.tuples(some.integers(0, 40), some.sampled_from(STORABLE_DTYPES)), max_size=10)


def tree_of(recipes: list[tuple[int, torch.dtype]], *, filled: bool, world: st.World | None = None) -> dict[str, Any]:
    rank, ranks = (0, 1) if world is None else (world.rank, world.size)
    tree: dict[str, Any] = {"o": st.ShardedObject("o", {"x": [rank]} if filled else None, (ranks,), (rank,))}
    for number, (length, dtype) in enumerate(recipes):
        data = random_bits((length,), dtype, seed=2 * number + filled)
        key = f"w{number}.{rank}"
        tree[key] = st.ShardedTensor.from_rank_offsets(key, data)
    return tree


def comes_back(threads: int, recipes: list[tuple[int, torch.dtype]], ranks: int, **options: Any) -> int:
    """Save and load on some ranks, check all, and return how many data files there are."""
    folder = st.storage.MemoryStorage()

    def save(world: st.World) -> None:
        st.save(tree_of(recipes, filled=True, world=world), folder, world=world, **save_keywords(**options))

    def load(world: st.World) -> None:
        wanted = tree_of(recipes, filled=True, world=world)
        found = st.load(
            tree_of(recipes, filled=False, world=world), folder, world=world, options=st.LoadOptions(verify="all")
        )
        assert found.pop("o") == wanted.pop("o").data
        assert {key: bits(data) for key, data in found.items()} == {key: bits(w.data) for key, w in wanted.items()}

    with several_files(threads):
        st.simulate(ranks, save)
    st.simulate(ranks, load)
    assert not st.verify(folder)
    return len(data_files(folder))


@pytest.mark.slow
@settings(max_examples=40)
@given(some.integers(1, 4), RECIPES, some.integers(1, 2), some.booleans(), some.booleans())
def test_a_tree_is_the_same_from_any_number_of_files(
    threads: int, recipes: list[tuple[int, torch.dtype]], ranks: int, fingerprint: bool, checksums: bool
) -> None:
    assert comes_back(threads, recipes, ranks, fingerprint=fingerprint, checksums=checksums) <= threads * ranks


def test_the_law_of_trees_catches_files_in_another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    in_threads = _write.in_threads
    monkeypatch.setattr(_write, "in_threads", lambda *work, stop: in_threads(*work, stop=stop)[::-1])
    with pytest.raises((AssertionError, st.CheckpointingException)):
        comes_back(2, [(FILE, torch.uint8), (3 * FILE, torch.uint8)], ranks=1)


@pytest.mark.parametrize(("threads", "tensors", "files"), [(1, 9, 1), (2, 9, 2), (4, 9, 4), (4, 2, 1), (4, 5, 2)])
def test_there_is_a_file_for_each_thread_that_has_enough_to_write(threads: int, tensors: int, files: int) -> None:
    """A tensor has half of what a file is worth."""
    folder = st.storage.MemoryStorage()
    half = torch.zeros(FILE // 2, dtype=torch.uint8)
    with several_files(threads):
        st.save([st.ShardedTensor.from_rank_offsets(f"w{number}", half) for number in range(tensors)], folder)
    assert len(data_files(folder)) == files


@pytest.mark.parametrize(("threads", "files"), [(1, 1), (2, 1), (4, 2)])
def test_a_save_in_the_background_leaves_half_of_the_threads_to_the_caller(threads: int, files: int) -> None:
    folder = st.storage.MemoryStorage()
    tensors = {f"w{number}": torch.zeros(FILE, dtype=torch.uint8) for number in range(9)}
    tree = {key: st.ShardedTensor.from_rank_offsets(key, data) for key, data in tensors.items()}
    with several_files(threads):
        request = st.save(tree, folder, async_sharded_save=True)
        assert request is not None
        request.execute_sync()
    assert len(data_files(folder)) == files


def test_what_isnt_in_the_processors_memory_goes_to_one_file() -> None:
    """A lazy tensor's data is read when it is written: by one thread, so that there is never more of it at once."""
    source, folder = st.storage.MemoryStorage(), st.storage.MemoryStorage()
    tensors = {f"w{number}": torch.full((FILE,), number) for number in range(8)}
    with several_files(4):
        st.save({key: st.ShardedTensor.from_rank_offsets(key, data) for key, data in tensors.items()}, source)
        opened = st.open_checkpoint(source)
        st.save({key: opened[key] for key in tensors}, folder)
    assert (len(data_files(source)), len(data_files(folder))) == (4, 1)
    assert all(torch.equal(st.load_plain_tensors(folder)[key], data) for key, data in tensors.items())


@pytest.mark.parametrize(("rows", "files"), [(2**10, 2), (2**11, 1)])
def test_large_views_that_have_to_be_copied_go_to_one_file(rows: int, files: int) -> None:
    """Of small ones, each thread may hold a copy."""
    folder = st.storage.MemoryStorage()
    view = torch.zeros(rows, 2**12, dtype=torch.uint8).T
    with several_files(2):
        st.save([st.ShardedTensor.from_rank_offsets(f"w{number}", view) for number in range(2)], folder)
    assert len(data_files(folder)) == files


# What goes wrong.


class Refusing(st.storage.MemoryStorage):
    """Memory in which the second file can't be written, once the first one is half written."""

    begun = threading.Event()
    refused = threading.Event()
    taken = 0

    def write(self, name: str, buffers: Iterable[Buffer], *, durable: bool) -> int:
        if name.endswith("-1.safetensors"):
            assert self.begun.wait(60)
            self.refused.set()
            raise st.errors.StorageError("no room")
        own = name.endswith("00000-of-00001.safetensors")
        return super().write(name, self._taken(buffers) if own else buffers, durable=durable)

    def _taken(self, buffers: Iterable[Buffer]) -> Iterator[Buffer]:
        for number, buffer in enumerate(buffers):
            yield buffer
            type(self).taken = number
            self.begun.set()
            assert self.refused.wait(60)
            time.sleep(0.5)  # until it is known, which is at once but on a very busy machine


def test_where_one_file_fails_the_others_end_and_nothing_stays() -> None:
    folder = Refusing()
    tensors = {f"w{number}": torch.zeros(20 * 2**20, dtype=torch.uint8) for number in range(2)}
    with several_files(2), pytest.raises(st.errors.StorageError, match="no room"):
        st.save({key: st.ShardedTensor.from_rank_offsets(key, data) for key, data in tensors.items()}, folder)
    assert Refusing.taken < 19  # of 21 parts
    assert folder.all_names() == ()


def test_progress_is_told_by_one_thread_at_a_time() -> None:
    inside, told = threading.Lock(), []

    def tell(count: int) -> None:
        assert inside.acquire(blocking=False), "two threads at once"
        told.append(count)
        inside.release()

    with several_files(4):
        st.save(
            tree_of([(FILE, torch.uint8)] * 50, filled=True),
            st.storage.MemoryStorage(),
            options=st.SaveOptions(progress=tell),
        )
    assert sum(told) >= 50 * FILE
