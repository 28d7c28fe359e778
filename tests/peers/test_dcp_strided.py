"""A rank that holds several boxes of a tensor: DCP loads others in silence, and we those."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import shardtree as st
from shardtree.interop.dtensor import from_dtensors, to_dtensors
from tests.interop.dtensor_cases import Case, numbered

pytestmark = [
    pytest.mark.peers,
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized"),
]

Load = Callable[[DTensor, str], torch.Tensor]

SQUARE = torch.arange(4).view(2, 2)
STRIDED = Case(numbered((8, 3)), SQUARE, ("dp", "tp"), (Shard(0), _StridedShard(0, split_factor=2)))
UNEVEN = Case(numbered((10, 3)), SQUARE, ("dp", "tp"), (Shard(0), _StridedShard(0, split_factor=3)))


def with_dcp(target: DTensor, folder: str) -> torch.Tensor:
    state: dict[str, Any] = {"w": target}
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    loaded: torch.Tensor = state["w"].to_local()
    return loaded


def with_ours(target: DTensor, folder: str) -> torch.Tensor:
    asked = from_dtensors({"w": target})
    loaded = to_dtensors(st.load(asked, folder, validate_access_integrity=False), like={"w": target})
    result: torch.Tensor = loaded["w"].to_local()
    return result


def wrong_ranks(load: Load, case: Case, folder: Path) -> list[int]:
    """Return the ranks that don't get what they hold, of a whole tensor that torch saved."""
    dcp.save({"w": case.whole}, checkpoint_id=str(folder), no_dist=True)
    wrong = []
    for rank, expected in case.dtensors().items():
        target = DTensor.from_local(
            torch.full_like(expected.to_local(), -1.0),
            expected.device_mesh,
            case.placements,
            shape=expected.shape,
            stride=expected.stride(),
        )
        if not torch.equal(load(target, str(folder)), expected.to_local()):
            wrong.append(rank)
    return wrong


@pytest.mark.parametrize("case", [STRIDED, UNEVEN], ids=["even", "uneven"])
def test_a_local_tensor_of_several_boxes_is_loaded_box_by_box(case: Case, tmp_path: Path) -> None:
    assert wrong_ranks(with_ours, case, tmp_path) == []


@pytest.mark.parametrize("case", [STRIDED, UNEVEN], ids=["even", "uneven"])
def test_dcp_loads_other_elements_and_says_nothing(case: Case, tmp_path: Path) -> None:
    assert wrong_ranks(with_dcp, case, tmp_path) == [0, 1, 2, 3]
