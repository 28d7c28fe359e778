"""load(device=): where tensors are put whose target has no memory of its own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import shardtree as st
from shardtree.storage import MemoryStorage, _transports
from shardtree.storage._buffers import copies_by_device
from tests.options import load_keywords
from tests.storage.late_copies import LateDevice

W = torch.arange(12.0).view(3, 4)
SHARD = st.ShardedTensor.from_rank_offsets("w", W)
CUDA = pytest.param("cuda", marks=pytest.mark.cuda)


def stored() -> MemoryStorage:
    folder = MemoryStorage()
    st.save({"w": SHARD, "step": 3}, folder)
    return folder


@pytest.mark.parametrize("device", [None, "cpu", torch.device("cpu"), CUDA])
@pytest.mark.parametrize("meta", [False, True])
def test_tensors_of_targets_without_data_are_put_on_the_device(device: Any, meta: bool) -> None:
    [loaded, report] = load(st.without_data(SHARD, meta=meta), device=device)
    assert loaded.device.type == torch.device(device or "cpu").type
    assert torch.equal(loaded.cpu(), W) and report.bytes_read >= W.nbytes


def load(shard: Any, **options: Any) -> tuple[torch.Tensor, st.storage.ReadReport]:
    reports: list[st.storage.ReadReport] = []
    loaded = st.load({"w": shard}, stored(), **load_keywords(report=reports.append, **options))
    return loaded["w"], reports[0]


@pytest.mark.parametrize("options", [{"cast": True}, {"exchange": "always"}, {"donate": True}])
@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_conversions_and_exchanges_reach_the_device(device: str, options: dict[str, Any]) -> None:
    dtype = torch.float64 if "cast" in options else W.dtype
    loaded, _ = load(replace(SHARD, data=None, dtype=dtype), device=device, **options)
    assert loaded.device.type == device and loaded.dtype == dtype and torch.equal(loaded.cpu().float(), W)


@pytest.mark.parametrize("device", [CUDA])
def test_targets_with_tensors_keep_their_own_device(device: str) -> None:
    assert load(SHARD, device=device)[0].device.type == "cpu"
    assert load(replace(SHARD, data=W.to(device)), device="cpu")[0].device.type == device


def test_a_device_without_the_host_s_memory_is_filled_part_by_part(monkeypatch: pytest.MonkeyPatch) -> None:
    device = LateDevice()
    folder = stored()
    monkeypatch.setitem(copies_by_device, "cpu", device.copies)
    monkeypatch.setattr(_transports, "PART_BYTES", 16)
    assert torch.equal(st.load({"w": st.without_data(SHARD)}, folder, device="cpu")["w"], W)
    assert device.log.count("start") > 1


def test_each_rank_says_its_own_device_and_all_fail_where_one_has_none() -> None:
    folder = stored()
    target = {"w": st.without_data(SHARD)}

    def load_on(world: st.World) -> Any:
        mine = {"w": replace(target["w"], replica_id=world.rank)}
        return st.load(mine, folder, world=world, device="meta" if world.rank else "cpu")

    with pytest.raises(st.errors.RemoteError, match="rank 1: MetadataError: load: tensors on the meta device"):
        st.simulate(2, load_on)
