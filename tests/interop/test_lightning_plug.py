"""Lightning's Trainer and Fabric over our checkpoints, beside their own on their own folders."""

from __future__ import annotations

import inspect
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.strategies import ModelParallelStrategy as FabricStrategy
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.strategies import ModelParallelStrategy

import shardtree as st
from shardtree.errors import KeyMismatch, TreeError, UnsafeFile, UnsupportedValue
from shardtree.interop.lightning import ShardtreeFabricStrategy, ShardtreeIO, ShardtreeStrategy
from shardtree.live import run_processes
from shardtree.world import one_process
from tests.interop.lightning_jobs import QUICK, Fit, fabric_job, fit, fits

pytestmark = [
    pytest.mark.peers,
    pytest.mark.filterwarnings("ignore"),  # Lightning's advice
]


def close(found: dict[int, float], expected: dict[int, float]) -> bool:
    return found == {step: pytest.approx(expected[step], rel=1e-4) for step in found}


@pytest.mark.slow
def test_saved_on_two_ranks_resumed_on_three_as_by_lightning(tmp_path: Path) -> None:
    ours, theirs, again = tmp_path / "ours", tmp_path / "theirs", tmp_path / "again"
    saved = [Fit(ours, 2), Fit(theirs, 2, strategy="theirs"), Fit(again, 4)]
    first, other, whole = run_processes(2, partial(fits, saved))[0]
    assert first == other == {step: whole[step] for step in first}
    # Of four epochs the best two and the last remain (save_top_k=2, save_last=True); the others' folders are gone.
    kept = sorted(path.name for path in again.iterdir())
    assert len(kept) == 3 and kept[-1] == "last.ckpt"
    assert all(st.verify(path) == () for path in again.iterdir())
    resumed = [
        Fit(tmp_path / "1", 4, ours / "last.ckpt"),
        Fit(tmp_path / "2", 4, theirs / "last.ckpt", "theirs"),
        Fit(tmp_path / "3", 4, theirs / "last.ckpt", weights_only=False),
        Fit(theirs, 4, theirs / "last.ckpt", weights_only=False),  # into the folder of Lightning's run
        Fit(tmp_path / "4", 5, theirs / "last.ckpt"),
    ]
    by_us, by_them, of_theirs, into_theirs, onward = run_processes(3, partial(fits, resumed))[0]
    assert by_us == by_them == of_theirs == into_theirs
    assert list(by_us) == [5, 6, 7, 8] and close(by_us, whole)
    assert list(onward) == [9, 10]


@pytest.mark.slow
def test_shards_of_tensor_parallelism_are_resumed_without_it(tmp_path: Path) -> None:
    first = run_processes(4, partial(fit, Fit(tmp_path / "4", 2, tensor_parallel=2)))[0]
    (resumed,) = {*map(str, run_processes(2, partial(fits, [Fit(tmp_path / "2", 3, tmp_path / "4" / "last.ckpt")])))}
    (whole,) = run_processes(2, partial(fits, [Fit(tmp_path / "whole", 3)]))[0]
    assert close(first, whole) and close(eval(resumed)[0], whole)


@pytest.mark.slow
def test_fabric_saves_on_two_ranks_and_loads_on_three(tmp_path: Path) -> None:
    for theirs in (False, True):
        first = run_processes(2, partial(fabric_job, tmp_path / f"a{theirs}", None, theirs, 3))
    ours = run_processes(3, partial(fabric_job, tmp_path / "b", tmp_path / "aFalse", False, 3))
    own = run_processes(3, partial(fabric_job, tmp_path / "c", tmp_path / "aTrue", True, 3))
    of_theirs = run_processes(3, partial(fabric_job, tmp_path / "d", tmp_path / "aTrue", False, 3))
    assert ours == own == of_theirs
    common = st.load_common_state_dict(tmp_path / "b")
    assert (common["step"], common["schedule"]["last_epoch"]) == (6, 6)


@pytest.mark.slow
def test_a_folder_converted_to_dcp_is_lightnings(tmp_path: Path) -> None:
    first, whole = run_processes(2, partial(fits, [Fit(tmp_path / "ours", 2), Fit(tmp_path / "all", 4)]))[0]
    common = st.load_common_state_dict(tmp_path / "ours" / "last.ckpt")
    st.convert(tmp_path / "ours" / "last.ckpt", tmp_path / "back", backend="dcp", save_options=QUICK)
    torch.save({k: v for k, v in common.items() if not k.startswith("optimizer_")}, tmp_path / "back" / "meta.pt")
    by_them = Fit(tmp_path / "theirs", 4, tmp_path / "back", "theirs")
    (resumed,) = run_processes(2, partial(fits, [by_them]))[0]
    assert resumed == {step: whole[step] for step in (5, 6, 7, 8)}
