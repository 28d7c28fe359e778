"""Tensors joined bit for bit: of one dtype, or not at all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from shardtree.core.trees import join_data
from shardtree.errors import ShapeError
from shardtree.layouts import AxisSplit, Mesh, PartitionSpec, from_local


@pytest.mark.parametrize("join", [torch.cat, torch.stack])
@pytest.mark.parametrize("other", [torch.int32, torch.float16, torch.float64])
def test_tensors_of_several_dtypes_are_not_joined(join: Callable[..., Any], other: torch.dtype) -> None:
    words = rf"(?s)tensors of several dtypes.*0: torch.float32.*1: {other}.*one dtype"
    with pytest.raises(ShapeError, match=words):
        join_data(join, [torch.ones(2), torch.ones(2, dtype=other)], 0)


def test_a_factory_does_not_merge_tensors_of_several_dtypes() -> None:
    spec = PartitionSpec((AxisSplit("tp", split_factor=2),))
    factory = from_local({"w": torch.arange(4.0)}, Mesh(tp=2), spec, 1)["w"]
    with pytest.raises(ShapeError, match="several dtypes"):
        factory.merge_fn([torch.ones(2), torch.ones(2).int()])
