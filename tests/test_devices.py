"""Tensors on a device: saves, snapshots, loads, fingerprints and redistribution give what they give on the CPU.

Where there is no GPU, the same tests run on the CPU's memory, staged as a device's whose copies are made as late as
they may be, into host memory that is lent again as soon as it is given back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardtree as st
from shardtree.core import limits
from shardtree.shell.storage import HostMemory, host_memory
from shardtree.shell.storage._buffers import DeviceCopies, copies_by_device
from shardtree.storage import MemoryStorage
from shardtree.testing import STORABLE_DTYPES, bits, outline, random_bits
from tests.shell.storage.late_copies import LateDevice, memory_used_again

CPU = torch.device("cpu")


def small_parts(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(limits, "COPIED_BYTES", 64)
    patch.setattr(limits, "STAGED_BYTES", 100)


@pytest.fixture(params=["late copies", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    small_parts(monkeypatch)
    if request.param == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    monkeypatch.setitem(copies_by_device, "cpu", LateDevice(HostMemory().lend).copies)
    return CPU


def tree_on(device: torch.device, seed: int = 0) -> dict[str, st.ShardedTensor]:
    """Return shards of all dtypes, some strided or flat, on a device."""
    made = {}
    for number, dtype in enumerate(STORABLE_DTYPES):
        data = random_bits((6, 10), dtype, seed + number).to(device)
        made[f"{dtype}"] = st.ShardedTensor.from_rank_offsets(f"{dtype}", data)
        made[f"{dtype}, strided"] = st.ShardedTensor.from_rank_offsets(f"{dtype}, strided", data.t()[::2])
    return made


def on_host(tree: dict[str, Any]) -> dict[str, bytes]:
    return {key: bits(getattr(leaf, "data", leaf).cpu()) for key, leaf in tree.items()}


def changed(tree: dict[str, st.ShardedTensor]) -> None:
    """Fill the tensors with zeros; the strided ones are views of the others."""
    for shard in tree.values():
        if shard.data.is_contiguous():
            shard.data.view(torch.uint8).zero_()


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["safetensors", "torch_dist", "dcp"])
def test_a_save_and_a_load_are_right(device: torch.device, backend: str) -> None:
    tree, folder = tree_on(device), MemoryStorage()
    st.save(tree, folder, (backend, 1))
    empty = {key: replace(shard, data=torch.empty_like(shard.data)) for key, shard in tree.items()}
    for donate in (False, True):
        loaded = st.load(empty, folder, donate=donate)
        assert on_host(loaded) == on_host(tree)
        assert {leaf.device for leaf in loaded.values()} == {device}


def test_a_tensor_may_change_once_an_asynchronous_save_has_begun(device: torch.device) -> None:
    tree = tree_on(device)
    queue = st.AsyncCallsQueue()
    queue.warm_up(tree)
    for step in range(3):  # the host's memory is used again each time
        expected, folder = on_host(tree), MemoryStorage()
        queue.schedule_async_request(st.save(tree, folder, async_sharded_save=True))
        changed(tree)
        queue.maybe_finalize_async_calls(blocking=True)
        assert on_host(st.load({key: st.without_data(leaf) for key, leaf in tree.items()}, folder)) == expected, step
    queue.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    "copies",
    [
        pytest.param(replace(LateDevice().copies(CPU), wait=lambda _: None), id="no copy is waited for"),
        pytest.param(LateDevice(memory_used_again(1, 2**20)).copies(CPU), id="memory is lent before its copy is made"),
    ],
)
@pytest.mark.parametrize(
    "law",
    [
        lambda: test_a_save_and_a_load_are_right(CPU, "safetensors"),
        lambda: test_a_tensor_may_change_once_an_asynchronous_save_has_begun(CPU),
    ],
    ids=["save and load", "asynchronous save"],
)
def test_the_laws_catch(law: Callable[[], None], copies: DeviceCopies, monkeypatch: pytest.MonkeyPatch) -> None:
    small_parts(monkeypatch)
    monkeypatch.setitem(copies_by_device, "cpu", lambda _: copies)
    with pytest.raises((AssertionError, st.errors.CorruptCheckpoint)):
        law()


def test_a_fingerprint_is_the_same_wherever_the_tensors_are(device: torch.device) -> None:
    tree = tree_on(device)
    assert st.fingerprint(tree) == st.fingerprint(
        {key: replace(shard, data=shard.data.cpu()) for key, shard in tree.items()}
    )


def test_resharding_stays_on_the_device(device: torch.device) -> None:
    whole = {"w": torch.arange(48.0, device=device).view(8, 6)}
    rows, columns = (st.shard(whole, st.Mesh(dp=2), specs) for specs in (st.P("dp"), st.P(None, "dp")))
    found = st.reshard(rows, [{"w": st.without_data(tree["w"])} for tree in columns])
    assert [bits(tree["w"].data.cpu()) for tree in found] == [bits(tree["w"].data.cpu()) for tree in columns]
    assert {tree["w"].data.device for tree in found} == {device}


@pytest.fixture
def nccl(tmp_path: Any) -> Iterator[None]:
    """A default group of nccl: of one rank, since two can't share a GPU."""
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.cuda
@pytest.mark.usefixtures("nccl")
def test_a_redistribution_goes_by_nccl() -> None:
    whole = {"w": torch.arange(48.0, device="cuda").view(8, 6)}
    rows = st.shard_at(whole, st.Mesh(dp=1), st.P("dp"), 0)
    found = st.redistribute(rows, rows)
    assert outline(found) == outline(rows) and found["w"].data.is_cuda
    assert st.distributed().device_exchange("cuda") is not None


@pytest.mark.cuda
def test_pinned_memory_is_asked_for_once() -> None:
    tree = {"w": st.ShardedTensor.from_rank_offsets("w", torch.ones(2**22, device="cuda"))}
    host_memory.release()
    for _ in range(3):
        st.save(tree, MemoryStorage())
        taken = host_memory.nbytes
    st.save(tree, MemoryStorage())
    assert host_memory.nbytes == taken
