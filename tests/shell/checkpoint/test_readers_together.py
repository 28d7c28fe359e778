"""Readers of what a checkpoint holds: with world=, rank 0 reads, and all ranks get its answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

import shardtree as st
from shardtree.errors import NotACheckpoint
from shardtree.storage import MemoryStorage


class Moments(NamedTuple):
    mu: Any
    step: int


TREE = {
    "w": st.ShardedTensor.from_rank_offsets("w", torch.zeros(2, 3)),
    "rng": st.ShardedObject("rng", 5, (1,), (0,)),
    "step": 7,
    "o": [3, st.ShardedTensor.from_rank_offsets("mu", torch.zeros(1))],
}
READERS: dict[str, Callable[..., Any]] = {
    "is_checkpoint": st.is_checkpoint,
    "load_common_state_dict": st.load_common_state_dict,
    "load_content_metadata": st.load_content_metadata,
    "load_sharded_metadata": st.load_sharded_metadata,
    "load_tensors_metadata": st.load_tensors_metadata,
}


def saved() -> MemoryStorage:
    storage = MemoryStorage()
    st.save(TREE, storage, content_metadata={"optimizer": "adam"})
    return storage


@pytest.mark.parametrize("name", READERS)
def test_all_ranks_get_what_one_process_does(name: str) -> None:
    storage = saved()
    alone = READERS[name](storage)
    assert st.simulate(3, lambda world: READERS[name](storage, world=world)) == [alone] * 3
    assert READERS[name](storage, world=st.world.one_process()) == alone


@pytest.mark.parametrize("name", READERS)
def test_rank_0_alone_looks(name: str) -> None:
    """On network storage other ranks may not see yet what rank 0 does: theirs is empty here."""
    storage = saved()
    alone = READERS[name](storage)
    seen = st.simulate(2, lambda world: READERS[name](MemoryStorage() if world.rank else storage, world=world))
    assert seen == [alone, alone]


@pytest.mark.parametrize("name", [name for name in READERS if name != "is_checkpoint"])
def test_where_there_is_none_all_ranks_raise(name: str) -> None:
    def read(world: Any) -> str:
        with pytest.raises(NotACheckpoint) as caught:
            READERS[name](MemoryStorage() if world.rank == 0 else saved(), world=world)
        return str(caught.value)

    assert all("rank 0" in text for text in st.simulate(2, read))
    assert st.simulate(2, lambda world: st.is_checkpoint(MemoryStorage(), world=world)) == [False, False]
