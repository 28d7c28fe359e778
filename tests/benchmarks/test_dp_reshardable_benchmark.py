"""The benchmark of Megatron-Core's buckets runs, and what it converts is what was made."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console

import shardtree as st
from benchmarks import dp_reshardable
from benchmarks._bars import Settings

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")]


def test_it_runs(tmp_path: Path) -> None:
    memory, _ = dp_reshardable.bars(Settings(tmp_path, True, Console(quiet=True)))
    assert memory.passed


def test_states_are_their_weights_masters(tmp_path: Path) -> None:
    dp_reshardable.make_folder(tmp_path / "tiny", 2, 8, 100)
    dp_reshardable.make_folder(tmp_path / "buckets", 2, 8, 100)
    dp_reshardable.convert(tmp_path, 0, 1)()
    found = st.load_plain_tensors(tmp_path / "full")
    for name in ("linear_proj", "linear_fc1", "linear_fc2"):
        key = f"decoder.layers.{name}.weight"
        assert torch.equal(found[f"optimizer.state.param.{key}"].bfloat16(), found[key])
