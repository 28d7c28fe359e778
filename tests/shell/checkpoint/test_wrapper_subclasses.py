"""Tensors whose memory isn't their value are refused by key and class wherever they would be read or filled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

import shardtree as st
from shardtree.errors import CheckpointingException, UnsupportedValue
from shardtree.interop.dtensor import load_module
from shardtree.storage import MemoryStorage
from tests.laws.leaf_kinds import Wrapper


def shard(tensor: torch.Tensor) -> dict[str, Any]:
    return {"w": st.ShardedTensor.from_rank_offsets("w", tensor)}


def stored() -> MemoryStorage:
    folder = MemoryStorage()
    st.save(shard(torch.ones(4)), folder)
    return folder


class Quantised(torch.nn.Module):
    """A module whose weight is a wrapper subclass."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(weight)


USES: dict[str, Callable[[torch.Tensor], Any]] = {
    "save": lambda tensor: st.save(shard(tensor), MemoryStorage()),
    "load": lambda tensor: st.load(shard(tensor), stored()),
    "load, donated": lambda tensor: st.load(shard(tensor), stored(), donate=True),
    "load, a plain tensor": lambda tensor: st.load({"w": tensor}, stored(), donate=True),
    "reshard": lambda tensor: st.reshard([shard(tensor)], [shard(torch.zeros(4))]),
    "reshard to": lambda tensor: st.reshard([shard(torch.zeros(4))], [shard(tensor)]),
    "redistribute": lambda tensor: st.redistribute(shard(tensor), shard(torch.zeros(4))),
    "redistribute to": lambda tensor: st.redistribute(shard(torch.zeros(4)), shard(tensor), donate=True),
    "fingerprint": lambda tensor: st.fingerprint(shard(tensor)),
    "load_module": lambda tensor: load_module(Quantised(tensor), stored()),
}


@pytest.mark.parametrize("use", USES)
def test_a_wrapper_subclass_is_refused_by_key_and_class(use: str) -> None:
    inner = torch.arange(4.0)
    with pytest.raises(UnsupportedValue, match=r"'w' .*Wrapper"):
        USES[use](Wrapper(inner))
    assert inner.tolist() == [0, 1, 2, 3]


def test_explain_says_what_a_load_raises() -> None:
    explained = st.explain(shard(Wrapper(torch.zeros(4))), stored())
    assert not explained.ok and "Wrapper" in str(explained)


def test_a_view_of_a_wrapper_is_one_too() -> None:
    view = torch.Tensor._make_wrapper_subclass(Wrapper, (2,), strides=(1,), storage_offset=2, dtype=torch.float32)
    with pytest.raises(CheckpointingException, match="Wrapper"):
        st.save(shard(view), MemoryStorage())


def test_fake_and_empty_ones_stand_for_what_they_describe() -> None:
    with FakeTensorMode():
        fake = torch.empty(4)
    assert st.load(shard(fake), stored())["w"].tolist() == [1, 1, 1, 1]
    folder = MemoryStorage()
    st.save(shard(Wrapper(torch.empty(0))), folder)
    assert st.load_plain_tensors(folder)["w"].shape == (0,)


def test_a_subclass_with_memory_of_its_own_is_a_tensor() -> None:
    class Named(torch.Tensor):
        pass

    folder = MemoryStorage()
    st.save(shard(torch.arange(4.0).as_subclass(Named)), folder)
    assert st.load_plain_tensors(folder)["w"].tolist() == [0, 1, 2, 3]
