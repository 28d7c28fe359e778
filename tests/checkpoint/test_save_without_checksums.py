"""save(checksums=False): the same bytes without hashes of blocks; it loads as ever; verify says what it can't see."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some

import shardtree as st
from tests.checkpoint.parts import files as names
from tests.options import save_keywords

BACKENDS = [("safetensors", 1), ("zarr", 3)]


def tree(world: st.World, *, filled: bool) -> dict[str, Any]:
    data = torch.arange(70_000) + world.rank if filled else torch.zeros(70_000, dtype=torch.int64)
    return {
        "w": st.ShardedTensor.from_rank_offsets("w", data, (0, world.rank, world.size)),
        "o": st.ShardedObject("o", {"rank": world.rank} if filled else None, (world.size,), (world.rank,)),
        "step": 3,
    }


def saved(backend: tuple[str, int], ranks: int, **options: Any) -> st.storage.MemoryStorage:
    folder = st.storage.MemoryStorage()
    st.simulate(
        ranks, lambda world: st.save(tree(world, filled=True), folder, backend, world=world, **save_keywords(**options))
    )
    return folder


def data_bytes(folder: st.storage.MemoryStorage) -> list[bytes]:
    """Return the bytes of all files but those that say what is in the others, in an order that knows no save's name."""
    return sorted(folder.read(name) for name in names(folder) if "index" not in name and "json" not in name)


@pytest.mark.parametrize("backend", BACKENDS)
@given(ranks=some.integers(1, 3))
def test_it_loads_as_any_other(backend: tuple[str, int], ranks: int) -> None:
    folder = saved(backend, ranks, checksums=False)

    def load(world: st.World) -> None:
        wanted = tree(world, filled=True)
        found = st.load(tree(world, filled=False), folder, world=world)
        assert torch.equal(found["w"], wanted["w"].data)
        assert (found["o"], found["step"]) == ({"rank": world.rank}, 3)

    st.simulate(ranks, load)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_data_is_what_it_is_with_checksums(backend: tuple[str, int]) -> None:
    assert data_bytes(saved(backend, 2, checksums=False)) == data_bytes(saved(backend, 2))


@pytest.mark.parametrize("backend", BACKENDS)
def test_verify_says_that_nothing_stands_for_the_data(backend: tuple[str, int]) -> None:
    reports: list[st.strategies.VerifyReport] = []
    with_hashes, without = saved(backend, 2), saved(backend, 2, checksums=False)
    assert st.verify(with_hashes, report=reports.append) == () == st.verify(without, report=reports.append)
    assert reports[0].unchecked == ()
    unchecked = {one.file: one.nbytes for one in reports[1].unchecked}
    assert unchecked and all(without.length(file) == size for file, size in unchecked.items())
    assert sum(unchecked.values()) >= 2 * 70_000 * 8
    assert {one.why for one in reports[1].unchecked} == {"it was saved without hashes, or by several ranks"}


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_file_of_another_length_is_found_all_the_same(backend: tuple[str, int]) -> None:
    folder = saved(backend, 1, checksums=False)
    name = max(names(folder), key=lambda name: folder.length(name) or 0)
    data = folder.read(name)
    folder.remove(name)
    folder.write(name, [memoryview(data)[:-8]], durable=False)
    (damage,) = st.verify(folder)
    assert damage.file == name
    with pytest.raises(st.errors.CorruptCheckpoint):
        st.simulate(1, lambda world: st.load(tree(world, filled=False), folder, world=world))


def test_tensors_can_be_removed() -> None:
    folder = st.storage.MemoryStorage()
    kept, gone = (st.ShardedTensor.from_rank_offsets(key, torch.arange(10)) for key in ("kept", "gone"))
    st.save([kept, gone], folder, options=st.SaveOptions(checksums=False))
    st.remove_sharded_tensors(folder, "gone")
    assert [*st.load_tensors_metadata(folder)] == ["kept"]
    assert torch.equal(
        st.load([st.ShardedTensor.from_rank_offsets("kept", torch.zeros(10, dtype=torch.int64))], folder)[0], kept.data
    )
