"""Fingerprints in save, verify, convert and remove, on trees and checkpoints of every format."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

import shardtree as st
from shardtree.shell.table import read_metadata, replace_metadata, stored_fingerprints
from shardtree.shell.table._metadata import write_checked
from shardtree.shell.table.index import Index, encode_index, read_index, text_at
from shardtree.testing import random_bits
from tests.options import save_keywords
from tests.shell.checkpoint.parts import ALL_FORMATS

WHOLE = {"a": random_bits((6, 4), torch.bfloat16, 1), "b": random_bits((8,), torch.float64, 2)}
NUMBERS = st.fingerprint([st.ShardedTensor.from_rank_offsets(key, data) for key, data in WHOLE.items()])


def rows(rank: int = 0, ranks: int = 1) -> list[st.ShardedTensor]:
    pieces = {key: data.chunk(ranks)[rank] for key, data in WHOLE.items()}
    return [st.ShardedTensor.from_rank_offsets(key, piece, (0, rank, ranks)) for key, piece in pieces.items()]


def saved(ranks: int = 2, **options: Any) -> st.storage.MemoryStorage:
    folder = st.storage.MemoryStorage()
    st.simulate(
        ranks, lambda world: st.save([*rows(world.rank, ranks), 7], folder, world=world, **save_keywords(**options))
    )
    return folder


def stored(folder: Any) -> dict[str, int]:
    return stored_fingerprints(st.open_checkpoint(folder).metadata)


def forge(folder: st.storage.MemoryStorage, **columns: Any) -> None:
    """Give a checkpoint another index, with hashes that fit."""
    index = read_index(st.open_checkpoint(folder).checkpoint)
    before, fields = read_metadata(folder)
    fields["index"] = write_checked(
        folder, fields["index"]["name"], encode_index(replace(index, **columns)), durable=False
    )
    replace_metadata(folder, before, fields, durable=False)


def index_of(folder: st.storage.MemoryStorage) -> Index:
    return read_index(st.open_checkpoint(folder).checkpoint)


def test_replicas_that_differ_are_named() -> None:
    def tree(world: st.World) -> list[st.ShardedTensor]:
        shards = [replace(shard, replica_id=world.rank) for shard in rows()]
        return shards if world.rank < 2 else [replace(shards[0], data=-shards[0].data), shards[1]]

    with pytest.raises(st.errors.IntegrityError, match="'a': rank 2 holds other elements than ranks 0, 1") as caught:
        st.simulate(3, lambda world: st.fingerprint(tree(world), world=world))
    assert "'b'" not in str(caught.value)


def test_a_tensor_that_is_held_twice_on_one_rank_is_told_so() -> None:
    shard = rows()[0]
    with pytest.raises(st.errors.IntegrityError, match="'a': rank 0 holds it twice, with different elements"):
        st.fingerprint([shard, replace(shard, data=-shard.data, replica_id=1)])


def test_tensors_without_shards_have_no_fingerprint_that_could_be_taken_for_one() -> None:
    with pytest.raises(st.errors.TreeError, match=r"tree\['a'\]"):
        st.fingerprint(WHOLE)
    assert st.fingerprint({"step": 3}) == st.fingerprint([]) == {}
    assert st.fingerprint({"a": rows()[0], "mask": torch.ones(2)}) == {"a": NUMBERS["a"]}
    ranks = st.simulate(2, lambda world: st.fingerprint(WHOLE if world.rank else rows(), world=world))
    assert ranks == [NUMBERS] * 2


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_asynchronous_save_stores_what_it_writes(ranks: int) -> None:
    folder = st.storage.MemoryStorage()

    def save(world: st.World) -> None:
        request = st.save(
            rows(world.rank, ranks),
            folder,
            async_sharded_save=True,
            world=world,
            options=st.SaveOptions(fingerprint=True),
        )
        assert request is not None
        request.execute_sync()

    st.simulate(ranks, save)
    assert stored(folder) == NUMBERS == st.fingerprint(folder)


def test_a_tensor_that_is_not_contiguous_is_written_and_summed_alike() -> None:
    folder, data = st.storage.MemoryStorage(), torch.arange(3000 * 1100, dtype=torch.int32).view(3000, 1100).T
    st.save([st.ShardedTensor.from_rank_offsets("w", data)], folder, options=st.SaveOptions(fingerprint=True))
    assert stored(folder) == st.fingerprint([st.ShardedTensor.from_rank_offsets("w", data.contiguous())])


def test_removing_tensors_keeps_the_others_fingerprints() -> None:
    folder = saved(fingerprint=True)
    st.remove_sharded_tensors(folder, "a")
    assert stored(folder) == {"b": NUMBERS["b"]} == st.fingerprint(folder)
    assert st.verify(folder) == ()


def test_verify_finds_chunks_that_the_index_swaps() -> None:
    folder = saved(fingerprint=True)
    index = index_of(folder)
    first, second = np.flatnonzero(index.chunk_key == 0)
    swapped = {name: getattr(index, name).copy() for name in ("chunk_file", "chunk_byte")}
    for column in swapped.values():
        column[[first, second]] = column[[second, first]]
    forge(folder, **swapped)
    (damage,) = st.verify(folder)
    assert damage.keys == ("a",) and f"{NUMBERS['a']:016x}" in damage.what
    unmarked = saved()
    forge(unmarked, **swapped)
    assert st.verify(unmarked) == ()  # block hashes alone can't know


def test_verify_names_a_tensor_with_another_fingerprint() -> None:
    folder = saved(fingerprint=True)
    forge(folder, x_fingerprint=index_of(folder).x_fingerprint + np.array([0, 1], dtype=np.uint64))
    assert [damage.keys for damage in st.verify(folder)] == [("b",)]


def test_damaged_blocks_are_reported_once() -> None:
    folder = saved(fingerprint=True)
    index = index_of(folder)
    path = text_at(index.file_text, index.file_start, 0)
    data = bytearray(folder.read(path))
    data[-1] ^= 1
    folder.write(path, [memoryview(bytes(data))], durable=False)
    assert len(st.verify(folder)) == 1


@pytest.mark.parametrize("column", [np.zeros(1, dtype=np.uint64), np.zeros(2, dtype=np.int64)])
def test_a_column_that_does_not_fit_is_refused(column: Any) -> None:
    folder = saved(fingerprint=True)
    forge(folder, x_fingerprint=column)
    with pytest.raises(st.errors.CorruptCheckpoint, match="x_fingerprint"):
        st.open_checkpoint(folder)


@pytest.mark.parametrize("backend", ALL_FORMATS, ids=str)
def test_convert_reports_what_it_read_back(backend: tuple[str, int], tmp_path: Any) -> None:
    options: Any = {"backend": backend, "leave_out": ["common"], "max_bytes_in_flight": 64}
    report = st.convert(saved(fingerprint=True), tmp_path / "to", **options)
    assert report.fingerprints == NUMBERS == st.fingerprint(tmp_path / "to")


def test_convert_refuses_what_is_not_what_the_source_says() -> None:
    folder = saved(fingerprint=True)
    forge(folder, x_fingerprint=index_of(folder).x_fingerprint + np.array([1, 0], dtype=np.uint64))
    with pytest.raises(st.errors.IntegrityError, match="'a' has the fingerprint"):
        st.convert(folder, st.storage.MemoryStorage(), backend="safetensors")


def test_convert_does_not_hold_what_was_transformed_against_the_source() -> None:
    halved = partial(st.map_data, lambda data: data.read() / 2)
    report = st.convert(saved(fingerprint=True), st.storage.MemoryStorage(), backend="safetensors", transform=halved)
    assert not st.diff(list(report.fingerprints), list(NUMBERS)) and report.fingerprints != NUMBERS
