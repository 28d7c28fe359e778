"""Padded vocabularies and other dtypes beside Megatron-Core's own `load`: the same elements of the same checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import shardtree as st
from shardtree.errors import ShapeError

pytestmark = [pytest.mark.peers, pytest.mark.usefixtures("one_process"), pytest.mark.filterwarnings("ignore")]
megatron = pytest.importorskip("megatron.core.dist_checkpointing")
from shardtree.interop.megatron import to_megatron  # noqa: E402

ROWS, WIDTH = 24, 4
STORED = torch.arange(float(ROWS * WIDTH)).view(ROWS, WIDTH) + 1


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mismatch") / "saved"
    folder.mkdir()
    st.save({"w": st.ShardedTensor.from_rank_offsets("w", STORED)}, folder, ("torch_dist", 1))
    return folder


def target(rows: int, *, value: float = 0.0, **fields: Any) -> dict[str, Any]:
    data = torch.full((rows, WIDTH), value, dtype=fields.pop("dtype", torch.float32))
    return {"w": st.ShardedTensor.from_rank_offsets("w", data, **fields)}


@pytest.mark.parametrize("rows", [1, 23, 24, 25, 32, 100])
def test_a_padded_vocabulary_is_loaded_as_there(folder: Path, rows: int) -> None:
    theirs = megatron.load(to_megatron(target(rows, allow_shape_mismatch=True)), str(folder))["w"]
    ours = st.load(target(rows, allow_shape_mismatch=True), folder)["w"]
    assert torch.equal(ours, theirs)
    assert torch.equal(ours[:ROWS], STORED[:rows]) and not ours[ROWS:].any()
    kept = st.load(target(rows, value=7.0, allow_shape_mismatch=True), folder)["w"]
    assert torch.equal(kept[:ROWS], STORED[:rows]) and (kept[ROWS:] == 7).all()


def test_without_leave_both_refuse_another_shape(folder: Path) -> None:
    with pytest.raises(ShapeError, match=r"checkpoint has \(24, 4\) float32, target asks for \(25, 4\) float32"):
        st.load(target(25), folder)
    with pytest.raises(torch.distributed.checkpoint.CheckpointException, match="25"):
        megatron.load(to_megatron(target(25)), str(folder))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_another_dtype_is_converted_as_there_but_only_when_asked_for(folder: Path, dtype: torch.dtype) -> None:
    theirs = megatron.load(to_megatron(target(ROWS, dtype=dtype)), str(folder))["w"]
    ours = st.load(target(ROWS, dtype=dtype), folder, cast=True)["w"]
    assert ours.dtype == theirs.dtype == dtype and torch.equal(ours, theirs)
    with pytest.raises(ShapeError, match="cast=True"):
        st.load(target(ROWS, dtype=dtype), folder)
