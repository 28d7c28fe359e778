"""Removing tensors from a checkpoint: a new index each time, and no file stays that nothing refers to."""

from __future__ import annotations

import pytest
import torch

import shardtree as st
from shardtree.errors import CheckpointReplaced
from shardtree.storage import MemoryStorage

OWN = ("model.w", "optimizer.w")
"""Each rank's tensor."""


def files(folder):
    return sorted(name for save in folder.names() for name in folder.names(save))


def test_files_that_nothing_refers_to_are_deleted_and_an_open_checkpoint_says_so():
    folder = MemoryStorage()
    tensors = [st.ShardedTensor.from_rank_offsets(key, torch.full((2,), rank)) for rank, key in enumerate(OWN)]
    st.simulate(2, lambda world: st.save({"s": tensors[world.rank], "step": 4}, folder, world=world))
    opened = st.open_checkpoint(folder)
    st.remove_sharded_tensors(folder, "optimizer.")
    assert files(folder) == ["00000-of-00002.safetensors", "common.safetensors", "index-1.safetensors"]
    with pytest.raises(CheckpointReplaced):
        opened["optimizer.w"].data.read()
    assert opened["model.w"].data.read().tolist() == [0, 0]
    st.remove_sharded_tensors(folder, "")
    assert st.load_plain_tensors(folder) == {} and st.load_common_state_dict(folder) == {"step": 4}
    assert files(folder) == ["common.safetensors", "index-2.safetensors"]
