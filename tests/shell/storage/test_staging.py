"""Staged copies: parts arrive whole and in order, one on its way while another is used, and none is used too early."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as draw

import shardtree as st
from shardtree.core import limits
from shardtree.core.plans import Runs, runs_plan
from shardtree.shell.storage import BlockHasher, _transports, hashed, tensor_buffers
from shardtree.shell.storage._buffers import copies_by_device, staged_buffers
from shardtree.shell.storage._requests import Cut, requests_of
from shardtree.storage import MemoryStorage, StoredFile
from shardtree.testing import bits
from tests.shell.storage.late_copies import LateDevice, memory_used_again
from tests.shell.storage.test_tensor_buffers import views

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


def use(patch: pytest.MonkeyPatch, device: LateDevice, limit: int) -> None:
    """Have the CPU's memory staged as that of a device."""
    patch.setitem(copies_by_device, "cpu", device.copies)
    patch.setattr(limits, "COPIED_BYTES", limit)


@pytest.mark.parametrize("limit", [1, 8, 100])
@given(views())
def test_staged_parts_join_to_the_tensor_and_stay_as_they_are(limit: int, tensor: torch.Tensor) -> None:
    with pytest.MonkeyPatch.context() as patch:
        use(patch, LateDevice(), limit)
        # All are kept, as by who writes several at once.
        assert b"".join(list(tensor_buffers(tensor))) == bits(tensor)


@pytest.mark.parametrize("buffers", [1, 2])
def test_it_shows_when_memory_is_used_again_too_early(buffers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, LateDevice(memory_used_again(buffers, 16)), 16)
    tensor = torch.arange(64, dtype=torch.int16)
    assert b"".join(list(tensor_buffers(tensor))) != bits(tensor)


def test_the_next_part_is_on_its_way_while_one_is_used() -> None:
    device = LateDevice()
    parts = staged_buffers(torch.arange(12).view(4, 3), device.copies(torch.device("cpu")))
    seen = []
    for _ in parts:
        seen.append(list(device.log))
        device.log.clear()
    assert seen == [["start", "start", "wait"], ["start", "wait"], ["start", "wait"], ["wait"]]


def test_nothing_is_on_its_way_to_memory_that_was_given_up() -> None:
    device = LateDevice()
    parts = staged_buffers(torch.arange(12).view(4, 3), device.copies(torch.device("cpu")))
    next(parts)
    parts.close()
    assert device.log == ["start", "start", "wait", "wait"]


def test_memory_is_given_back_part_by_part(monkeypatch: pytest.MonkeyPatch) -> None:
    device = LateDevice()
    use(monkeypatch, device, 64)
    for _ in hashed(tensor_buffers(torch.arange(1000)), BlockHasher()):
        pass
    assert device.most <= 4 * 64


WHOLE = torch.arange(96 * 40, dtype=torch.int32).view(96, 40)


def targets() -> tuple[dict[str, st.ShardedTensor], MemoryStorage]:
    """Return targets of rows, columns, whole and flat shards, and a checkpoint of two ranks that has them."""

    def save(world: st.World) -> None:
        half = WHOLE.chunk(2)[world.rank].clone()
        copied = st.ShardedTensor.from_rank_offsets("s", torch.arange(7), replica_id=world.rank)
        st.save([st.ShardedTensor.from_rank_offsets("w", half, (0, world.rank, 2)), copied], storage, world=world)

    storage = MemoryStorage()
    st.simulate(2, save)
    zeros = partial(torch.zeros, dtype=torch.int32)
    asked = {
        "whole": st.ShardedTensor.from_rank_offsets("w", zeros(96, 40)),
        "rows": st.ShardedTensor.from_rank_offsets("w", zeros(32, 40), (0, 1, 3)),
        "columns": st.ShardedTensor.from_rank_offsets("w", zeros(96, 10), (1, 2, 4)),
        "flat": st.ShardedTensor.from_rank_offsets_flat(
            "w", zeros(200), (48, 40), (0, 1, 2), flattened_range=slice(30, 230)
        ),
        "small": st.ShardedTensor.from_rank_offsets("s", torch.zeros(7, dtype=torch.int64)),
    }
    return asked, storage


EXPECTED = {
    "whole": WHOLE,
    "rows": WHOLE[32:64],
    "columns": WHOLE[:, 20:30],
    "flat": WHOLE[48:].reshape(-1)[30:230],
    "small": torch.arange(7),
}


load = partial(st.load, validate_access_integrity=False)


@pytest.mark.slow
@pytest.mark.parametrize("verify", ["whole", "all", None])
@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("part", [64, 1000, 2**20])
def test_a_load_to_a_device_is_a_load(
    part: int, donate: bool, verify: st.Verify, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = LateDevice()
    asked, storage = targets()
    plain: list[st.storage.ReadReport] = []
    load(asked, storage, options=st.LoadOptions(verify=verify, report=plain.append))
    monkeypatch.setitem(copies_by_device, "cpu", device.copies)
    monkeypatch.setattr(limits, "STAGED_BYTES", part)
    staged: list[st.storage.ReadReport] = []
    options = st.LoadOptions(verify=verify, report=staged.append)
    loaded = load(asked, storage, donate=donate, options=options)
    for name, tensor in EXPECTED.items():
        assert torch.equal(loaded[name], tensor), name
        assert (loaded[name] is asked[name].data) == donate
    assert "start" in device.log and device.log.count("start") == device.log.count("wait")
    assert staged[0].bytes_read == plain[0].bytes_read and staged[0].files == plain[0].files


def test_it_shows_when_the_host_s_memory_is_read_into_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    device = LateDevice(memory_used_again(1, 2**20))
    asked, storage = targets()
    monkeypatch.setitem(copies_by_device, "cpu", device.copies)
    monkeypatch.setattr(limits, "STAGED_BYTES", 1000)
    assert not torch.equal(load({"w": asked["whole"]}, storage)["w"], WHOLE)


def test_a_load_to_a_device_has_two_parts_in_the_host_s_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    device = LateDevice()
    storage = MemoryStorage()
    whole = torch.arange(2**16)
    st.save({"w": st.ShardedTensor.from_rank_offsets("w", whole)}, storage)
    monkeypatch.setitem(copies_by_device, "cpu", device.copies)
    monkeypatch.setattr(limits, "STAGED_BYTES", 2**14)
    target = st.ShardedTensor.from_rank_offsets("w", torch.zeros_like(whole))
    assert torch.equal(st.load({"w": target}, storage)["w"], whole)
    assert device.most <= 2 * 2**14 and device.log[:4] == ["start", "start", "wait", "start"]


@pytest.mark.slow
@settings(max_examples=30)
@given(draw.integers(1, 4 * 2**18), draw.sampled_from([2**20, 2**21]))
def test_every_block_that_a_load_reads_whole_is_checked(size: int, part: int) -> None:
    storage = MemoryStorage()
    st.save({"w": st.ShardedTensor.from_rank_offsets("w", torch.ones(5 * 2**20 + size, dtype=torch.uint8))}, storage)
    target = {"w": st.ShardedTensor.from_rank_offsets("w", torch.zeros(5 * 2**20 + size, dtype=torch.uint8))}
    reports: list[st.storage.ReadReport] = []
    st.load(target, storage, options=st.LoadOptions(report=reports.append))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(copies_by_device, "cpu", LateDevice().copies)
        patch.setattr(limits, "STAGED_BYTES", part)
        st.load(target, storage, options=st.LoadOptions(report=reports.append))
    assert reports[0] == reports[1] and reports[0].blocks_unchecked <= 1


def test_a_failure_leaves_nothing_on_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    device = LateDevice()
    asked, storage = targets()
    for name in storage.all_names():
        if name.endswith("-of-00002.safetensors"):
            data = bytearray(storage.read(name))
            data[-1] ^= 1
            storage.replace(name, bytes(data), durable=False)
    monkeypatch.setitem(copies_by_device, "cpu", device.copies)
    monkeypatch.setattr(limits, "STAGED_BYTES", 2**20)
    with pytest.raises(st.errors.CorruptCheckpoint):
        load(asked, storage)
    assert device.log.count("start") == device.log.count("wait")


def test_conversions_and_exchanges_stay_right_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    device = LateDevice()
    storage = MemoryStorage()
    st.save({"w": st.ShardedTensor.from_rank_offsets("w", torch.arange(8.0))}, storage)
    monkeypatch.setitem(copies_by_device, "cpu", device.copies)
    converted = st.ShardedTensor.from_rank_offsets("w", torch.zeros(8, dtype=torch.float64))
    assert load({"w": converted}, storage, cast=True)["w"].tolist() == list(range(8))

    def exchanged(world: st.World) -> list[float]:
        target = st.ShardedTensor.from_rank_offsets("w", torch.zeros(8), replica_id=world.rank)
        return list(
            st.load({"w": target}, storage, world=world, options=st.LoadOptions(exchange="always"))["w"].tolist()
        )

    assert st.simulate(2, exchanged) == [list(range(8))] * 2


def test_a_function_of_the_caller_s_gets_memory_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    device = LateDevice()
    storage = MemoryStorage()
    st.save({"w": st.ShardedTensor.from_rank_offsets("w", torch.arange(8.0))}, storage)
    monkeypatch.setitem(copies_by_device, "cpu", device.copies)
    asked = {"w": st.ShardedTensor.from_rank_offsets("w", torch.zeros(8))}

    def fill(checkpoint: st.strategies.Checkpoint, shards: list[st.ShardedTensor]) -> st.storage.ReadReport:
        shards[0].data.fill_(7)
        return st.storage.ReadReport()

    assert st.load(asked, storage, fill)["w"].tolist() == [7.0] * 8
    assert device.log == []


def test_targets_on_the_host_and_on_devices_come_out_of_one_plan() -> None:
    size = 1000
    byte = np.array([0, size, 2 * size, 3 * size])
    target = np.array([2, 0, 1, 2])
    target_byte = np.array([0, 0, 0, size])
    plan = runs_plan(Runs(np.zeros(4, dtype=np.int64), byte, target, target_byte, np.full(4, size)))
    [request], _ = requests_of({0: StoredFile("f", 4 * size)}, plan, None, Cut(2**20, whole=False))
    staged = _transports.stage(request, np.array([True, False, True]), 0)
    assert staged.request.runs.target.tolist() == [3, 3, 1, 3] and staged.runs.target.tolist() == [2, 0, 2]
    assert staged.request.runs.target_byte.tolist() == [0, 1024, 0, 2048] and staged.end == 3 * 1024
