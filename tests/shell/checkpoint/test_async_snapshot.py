"""Snapshots: copies are the tensors, and the memory that they lie in is nobody else's while they can be read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as draw

import shardtree as st
from shardtree.shell.checkpoint.async_saves import _snapshot
from shardtree.shell.checkpoint.async_saves._snapshot import snapshot_shards
from shardtree.shell.storage import HostMemory
from shardtree.shell.storage._buffers import copies_by_device, plain_copies
from shardtree.testing import STORABLE_DTYPES, bits, random_bits
from tests.shell.storage.late_copies import LateDevice


def shard(key: str, data: torch.Tensor) -> st.ShardedTensor:
    return st.ShardedTensor.from_rank_offsets(key, data)


@pytest.mark.parametrize("dtype", STORABLE_DTYPES, ids=str)
def test_a_copy_is_the_tensor(dtype: torch.dtype) -> None:
    data = random_bits((4, 6), dtype, 3)
    tensors = [data, data.t(), data[1:3, ::2], data[0, 0], data[:0], data[:1].expand(5, 6)]
    shards = [st.ShardedTensor.from_rank_offsets(str(number), tensor) for number, tensor in enumerate(tensors)]
    before = [bits(tensor) for tensor in tensors]
    copies = snapshot_shards(shards)
    data.view(torch.uint8).zero_()
    for copy, tensor, expected in zip(copies, tensors, before, strict=True):
        assert copy.data.shape == tensor.shape and copy.data.dtype == dtype
        assert bits(copy.data) == expected


@pytest.mark.parametrize("dtype", STORABLE_DTYPES, ids=str)
def test_a_copy_from_a_device_is_the_tensor_however_late_it_is_made(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = LateDevice()
    monkeypatch.setitem(copies_by_device, "cpu", device.copies)
    test_a_copy_is_the_tensor(dtype)
    assert device.log == ["start", "wait"]


def test_a_device_that_fails_leaves_no_copy_in_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copies of one device are waited for, though another's can't be begun."""

    def start(pairs: Sequence[object]) -> None:
        raise ValueError("the device is gone")

    device = LateDevice()
    monkeypatch.setitem(copies_by_device, "cpu", device.copies)
    monkeypatch.setitem(copies_by_device, "meta", lambda its: replace(plain_copies(its), start=start))
    with pytest.raises(ValueError, match="is gone"):
        snapshot_shards([shard("w", torch.ones(3)), shard("m", torch.ones(3, device="meta"))])
    assert device.log == ["start", "wait"]


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 3])
def test_large_tensors_are_cut_for_threads_and_whole_again(threads: int) -> None:
    cut = _snapshot._PART_BYTES
    sizes = [1, _snapshot._LEAST_PART_BYTES - 1, _snapshot._LEAST_PART_BYTES, cut - 1, cut, cut + 1, 3 * cut - 5]
    tensors = [random_bits((size,), torch.uint8, seed=size) for size in sizes]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        kept = snapshot_shards([shard(str(size), tensor) for size, tensor in zip(sizes, tensors, strict=True)])
    finally:
        torch.set_num_threads(before)
    expected = [tensor.clone() for tensor in tensors]
    for tensor in tensors:
        tensor.zero_()
    assert all(torch.equal(copy.data, tensor) for copy, tensor in zip(kept, expected, strict=True))


def test_shared_memory_is_copied_once_and_expanded_tensors_are_not_blown_up() -> None:
    memory = HostMemory()
    big = torch.arange(2**20, dtype=torch.float32)
    tensors = [big, big.view(1024, 1024), big.view(1024, 1024).t(), big[:1].expand(2**28), torch.ones(2).conj()]
    kept = snapshot_shards([shard(str(number), tensor) for number, tensor in enumerate(tensors)], memory)
    assert memory.nbytes <= 8 * 2**20
    assert kept[3].data.shape == (2**28,) and kept[1].data[3, 5] == 3 * 1024 + 5


def test_conjugated_and_negated_views_keep_their_values() -> None:
    data = torch.tensor([1 + 2j, 3 - 1j])
    kept = snapshot_shards([shard("c", data.conj()), shard("i", data.conj().imag)])
    assert kept[0].data.tolist() == [1 - 2j, 3 + 1j] and kept[1].data.tolist() == [-2, 1]


# What happens to a request while others get memory: it fails or not, is tried again or not, and is dropped or not.
FATES = draw.tuples(draw.booleans(), draw.integers(0, 2), draw.booleans())


def check_memory(fates: Sequence[tuple[bool, int, bool]], memory: HostMemory) -> None:
    """Raise if a snapshot's bytes change as long as something can read them, whatever happens to others."""
    kept: list[tuple[torch.Tensor, float]] = []
    for value, (is_viewed, dropped, is_given_back) in enumerate(fates):
        [own] = snapshot_shards([shard("w", torch.full((64, 64), float(value)))], memory)
        kept.append((own.data[3:, ::2].view(torch.int32) if is_viewed else own.data, float(value)))
        del own, kept[:dropped]
        if is_given_back:
            memory.release()
        for data, expected in kept:
            assert data.view(torch.float32).eq(expected).all(), f"snapshot {expected} was written over"


@given(draw.lists(FATES, min_size=1, max_size=12))
def test_no_snapshot_is_written_over_while_it_can_be_read(fates: list[tuple[bool, int, bool]]) -> None:
    check_memory(fates, HostMemory())


class Hasty(HostMemory):
    """The planted fault: the same memory for everybody."""

    def __init__(self) -> None:
        super().__init__()
        self.block = torch.empty(2**21, dtype=torch.uint8)

    def lend(self, nbytes: int, kind: str = "cpu", new: object = None) -> torch.Tensor:
        return self.block


def test_the_law_catches_memory_that_is_lent_too_early() -> None:
    with pytest.raises(AssertionError, match=r"snapshot 0\.0 was written over"):
        check_memory([(False, 0, False), (False, 0, False)], Hasty())
