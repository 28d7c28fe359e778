"""The benchmark of devices has every bar; without a GPU it measures nothing, and its rehearsal goes the same ways."""

from __future__ import annotations

import io

import pytest
import torch
from rich.console import Console

from benchmarks import device
from benchmarks._bars import Settings
from shardtree.storage._buffers import copies_by_device


@pytest.mark.exhaustive
def test_its_rehearsal_has_every_bar() -> None:
    before = dict(copies_by_device)
    bars = device.bars(Settings(None, True, Console(file=io.StringIO(), width=130)))
    assert [bar.operation for bar in bars] == list(device.MOST)
    assert [bar.most for bar in bars] == list(device.MOST.values())
    assert all(bar.figure > 0 for bar in bars if not bar.note) and copies_by_device == before


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so() -> None:
    said = io.StringIO()
    assert device.bars(Settings(None, False, Console(file=said, width=130))) == []
    assert "no GPU here" in said.getvalue()
