"""save(checksums=False): the same bytes without hashes of blocks; it loads as ever; verify says what it can't see."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import shardtree as st
from tests.shell.checkpoint.parts import files as names
from tests.shell.checkpoint.parts import saved_by

WHOLE = torch.arange(140_000)
in_both = pytest.mark.parametrize("backend", [("safetensors", 1), ("zarr", 3)])


def saved(backend: tuple[str, int], ranks: int, **options: Any) -> st.storage.MemoryStorage:
    trees = [
        {
            "w": st.ShardedTensor.from_rank_offsets("w", part, (0, rank, ranks)),
            "o": st.ShardedObject("o", {"rank": rank}, (ranks,), (rank,)),
            "step": 3,
        }
        for rank, part in enumerate(WHOLE.chunk(ranks))
    ]
    return saved_by(trees, sharded_strategy=backend, **options)


def data_bytes(folder: st.storage.MemoryStorage) -> list[bytes]:
    """Return the bytes of all files but those that say what is in the others, in an order that knows no save's name."""
    return sorted(folder.read(name) for name in names(folder) if "index" not in name and "json" not in name)


@in_both
def test_the_data_is_what_it_is_with_checksums_and_loads(backend: tuple[str, int]) -> None:
    folder = saved(backend, 2, checksums=False)
    assert data_bytes(folder) == data_bytes(saved(backend, 2))
    assert torch.equal(st.load_plain_tensors(folder)["w"], WHOLE) and st.load_common_state_dict(folder) == {"step": 3}
    assert st.open_checkpoint(folder)["o/shard_1_2"].data == {"rank": 1}


@in_both
def test_verify_says_that_nothing_stands_for_the_data(backend: tuple[str, int]) -> None:
    reports: list[st.strategies.VerifyReport] = []
    with_hashes, without = saved(backend, 2), saved(backend, 2, checksums=False)
    assert st.verify(with_hashes, report=reports.append) == () == st.verify(without, report=reports.append)
    assert reports[0].unchecked == ()
    unchecked = {one.file: one.nbytes for one in reports[1].unchecked}
    assert unchecked and all(without.length(file) == size for file, size in unchecked.items())
    assert sum(unchecked.values()) >= WHOLE.nbytes
    assert {one.why for one in reports[1].unchecked} == {"it was saved without hashes, or by several ranks"}


@in_both
def test_a_file_of_another_length_is_found_all_the_same(backend: tuple[str, int]) -> None:
    folder = saved(backend, 1, checksums=False)
    name = max(names(folder), key=lambda name: folder.length(name) or 0)
    data = folder.read(name)
    folder.remove(name)
    folder.write(name, [memoryview(data)[:-8]], durable=False)
    (damage,) = st.verify(folder)
    assert damage.file == name
    with pytest.raises(st.errors.CorruptCheckpoint):
        st.load_plain_tensors(folder)


def test_tensors_can_be_removed() -> None:
    kept, gone = (st.ShardedTensor.from_rank_offsets(key, torch.arange(10)) for key in ("kept", "gone"))
    folder = saved_by([[kept, gone]], checksums=False)
    st.remove_sharded_tensors(folder, "gone")
    assert st.load_plain_tensors(folder)["kept"].tolist() == [*range(10)]
