"""Tensors without memory, and parameters that aren't initialised yet: refused by path, not read."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import shardtree as st
from shardtree.errors import CheckpointingException, UnsupportedValue
from shardtree.storage import MemoryStorage


def freed() -> torch.Tensor:
    tensor = torch.zeros(3)
    tensor.untyped_storage().resize_(0)
    return tensor


TREES = {
    "a plain tensor": {"a": [1, freed()]},
    "a lazy module's": {"a": [1, torch.nn.LazyLinear(3).weight]},
    "in an object": {"a": [1, st.ShardedObject("o", {"x": freed()}, (1,), (0,))]},
    "in a set": {"a": [1, {freed()}]},
}


@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
@pytest.mark.parametrize("later", [False, True])
def test_a_tensor_without_elements_is_refused(tree: Any, later: bool) -> None:
    folder = MemoryStorage()
    with pytest.raises(UnsupportedValue, match=r"tensors without elements\n  tree\['a'\]\[1\]: (its storage|not init)"):
        st.save(tree, folder, async_sharded_save=later)
    assert not folder.names()


@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
@pytest.mark.parametrize("use", [lambda tree: st.redistribute(tree, {}), lambda tree: st.plans.reshard([tree], [{}])])
def test_nor_is_it_moved(tree: Any, use: Any) -> None:
    with pytest.raises(UnsupportedValue, match=r"tensors without elements\n  tree\['a'\]\[1\]"):
        use(tree)


@pytest.mark.parametrize("tensor", [freed(), torch.nn.LazyLinear(3).weight])
def test_it_is_not_cut_either(tensor: Any) -> None:
    with pytest.raises(CheckpointingException, match=r"tree\['a'\]"):
        st.shard({"a": tensor}, st.Mesh(tp=2), st.PartitionSpec("tp"))
