"""The benchmark of many small tensors runs, checks what everybody loaded, and has its bars; nothing is timed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from rich.console import Console

from benchmarks._bars import Settings
from benchmarks._contenders import DCP, LOAD, LOAD_COLUMNS, OURS, OURS_UNCHECKED, SAFETENSORS, SAVE
from benchmarks._work import mixed_work
from benchmarks.small import PEERS, bars, contenders

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.mark.exhaustive
def test_each_operation_has_a_bar_beside_each_peer(tmp_path: Path) -> None:
    found = bars(Settings(tmp_path, quick=True, console=Console(quiet=True)))
    measured = {(bar.operation, bar.beside): bar for bar in found}
    operations = [(SAVE, 1), (LOAD, 1), (SAVE, 2), (LOAD, 2), (LOAD_COLUMNS, 2)]
    for peer in PEERS:
        for operation, processes in operations:
            for name in (OURS, OURS_UNCHECKED):
                bar = measured[f"{operation}, {processes} x, {name}", peer]
                assert bar.ours > 0 and bar.other and bar.figure == pytest.approx(bar.ours / bar.other)
    asked = {(bar.operation, bar.beside): bar.most for bar in found if bar.most is not None}
    assert asked[f"{SAVE}, 2 x, {OURS_UNCHECKED}", DCP] == 0.2
    assert asked[f"{LOAD}, 1 x, {OURS_UNCHECKED}", SAFETENSORS] == 1.5
    assert asked[f"{LOAD_COLUMNS}, 2 x, {OURS_UNCHECKED}", DCP] == 0.2
    assert not any(OURS in operation and OURS_UNCHECKED not in operation for operation, _ in asked)
    assert list(tmp_path.iterdir()) == []


def test_tensors_are_small_and_of_many_sizes(tmp_path: Path) -> None:
    mine = mixed_work(0, 2, tmp_path, size=64 * 1024, tensors=1000)
    sizes = [2 * tensor.nbytes for tensor in mine.rows.values()]
    assert min(sizes) < 4096 and 60_000 < max(sizes) <= 64 * 1024 + 4096 and len(set(sizes)) > 50
    assert {tensor.dtype for tensor in mine.rows.values()} == {torch.float32, torch.bfloat16}


def test_columns_are_loaded_where_there_are_several_ranks() -> None:
    assert not any(operation == LOAD_COLUMNS for one in contenders(1) for operation, _ in one.loads)
    assert all(any(operation == LOAD_COLUMNS for operation, _ in one.loads) for one in contenders(2))
