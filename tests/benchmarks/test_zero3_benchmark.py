"""A ZeRO-3 folder becomes a model's files in bounded memory, whatever its size."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from rich.console import Console

import shardtree as st
from benchmarks import zero3
from benchmarks._bars import Settings
from benchmarks._peak import peak

MIB = 1024 * 1024

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")]


def test_masters_of_600_mb_take_less_than_half_of_that(tmp_path: Path) -> None:
    shapes = zero3.llama(4, 1024, 2816, 48_000, 256)
    zero3.make_folder(tmp_path / "tiny", zero3.TINY)
    zero3.make_folder(tmp_path / "zero3", shapes)
    masters = 4 * sum(torch.Size(shape).numel() for shape in shapes.values())
    seen = peak(partial(zero3.convert, tmp_path), tmp_path)
    assert masters > 540 * MIB and seen.own < 280 * MIB
    loaded = st.load_tensors_metadata(tmp_path / "hf")
    assert {key: shard.global_shape for key, shard in loaded.items()} == shapes
    assert {shard.dtype for shard in loaded.values()} == {torch.bfloat16}


def test_it_runs(tmp_path: Path) -> None:
    (bar,) = zero3.bars(Settings(tmp_path, True, Console(quiet=True)))
    assert bar.passed and "billion parameters" in bar.note
