"""What leaves print: their metadata, and of their data the kind, shape and device, never the elements."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

import shardtree as st
from shardtree.trees import HOLE

SECRET = 77.0


class Function:
    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, *arguments: Any) -> Any:
        raise NotImplementedError

    def __repr__(self) -> str:
        return self.name


def tensor(*shape: int) -> torch.Tensor:
    return torch.full(shape, SECRET)


WHOLE = st.ShardedTensor.from_rank_offsets("w", tensor(2, 3))
OF_WHOLE = "local_shape=(2, 3), global_shape=(2, 3), global_offset=(0, 0), axis_fragmentations=(1, 1))"
BUILD, MERGE = Function("build"), Function("merge")

SHOWN: Mapping[str, tuple[Any, str]] = {
    "a whole tensor": (WHOLE, f"ShardedTensor(key='w', data=<float32 (2, 3) cpu>, dtype=torch.float32, {OF_WHOLE}"),
    "no data": (st.without_data(WHOLE), f"ShardedTensor(key='w', data=None, dtype=torch.float32, {OF_WHOLE}"),
    "meta data": (
        st.without_data(WHOLE, meta=True),
        f"ShardedTensor(key='w', data=<float32 (2, 3) meta>, dtype=torch.float32, {OF_WHOLE}",
    ),
    "a box of a replica": (
        st.ShardedTensor.from_rank_offsets("w", tensor(2, 3), (0, 1, 4), replica_id=(0, 1)),
        "ShardedTensor(key='w', data=<float32 (2, 3) cpu>, dtype=torch.float32, local_shape=(2, 3), "
        "global_shape=(8, 3), global_offset=(2, 0), axis_fragmentations=(4, 1), replica_id=(0, 1))",
    ),
    "a prepended axis": (
        st.ShardedTensor.from_rank_offsets("w", tensor(3), (0, 1, 4), prepend_axis_num=1),
        "ShardedTensor(key='w', data=<float32 (3,) cpu>, dtype=torch.float32, local_shape=(3,), "
        "global_shape=(4, 3), global_offset=(1, 0), axis_fragmentations=(4, 1), prepend_axis_num=1)",
    ),
    "a flat range": (
        st.ShardedTensor.from_rank_offsets_flat("w", tensor(3), (2, 3), (0, 1, 4), flattened_range=slice(1, 4)),
        "ShardedTensor(key='w', data=<float32 (3,) cpu>, dtype=torch.float32, local_shape=(2, 3), "
        "global_shape=(8, 3), global_offset=(2, 0), axis_fragmentations=(4, 1), flattened_range=slice(1, 4, None))",
    ),
    "an object": (
        st.ShardedObject("rng", {"seed": SECRET}, (2,), (1,)),
        "ShardedObject(key='rng', data=<dict>, global_shape=(2,), global_offset=(1,))",
    ),
    "a factory": (
        st.ShardedTensorFactory("qkv", tensor(4), BUILD, MERGE),
        "ShardedTensorFactory(key='qkv', data=<float32 (4,) cpu>, build_fn=build, merge_fn=merge)",
    ),
    "a local value": (st.LocalNonpersistentObject({"cache": SECRET}), "LocalNonpersistentObject(<dict>)"),
    "a hole": (HOLE, "HOLE"),
}


@pytest.mark.parametrize("what", SHOWN)
def test_a_leaf_prints_its_metadata_and_none_of_its_elements(what: str) -> None:
    leaf, shown = SHOWN[what]
    assert repr(leaf) == shown and repr([leaf]) == f"[{shown}]"
    assert str(SECRET)[:2] not in shown
