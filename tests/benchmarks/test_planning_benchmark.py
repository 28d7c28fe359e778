"""The benchmark of plans runs, checks what was planned, and prints a row for everything; nothing is timed."""

from __future__ import annotations

from io import StringIO

import pytest
from rich.console import Console

from benchmarks import planning
from benchmarks._bars import Settings
from benchmarks.planning_chunks import CASES, peak_bytes, request
from benchmarks.planning_ranks import PEER
from benchmarks.planning_trillion import LAYOUTS
from shardtree.plans import plan_load


def test_it_prints_a_row_for_every_plan() -> None:
    printed = StringIO()
    found = planning.bars(Settings(None, True, Console(file=printed, width=200)))
    operations = {bar.operation for bar in found}
    assert all(title in printed.getvalue() for title in planning.PARTS)
    assert {f"plan a load of 4,096 chunks: {case.name}" for case in CASES} <= operations
    assert [bar.most for bar in found if bar.operation == "plan save and load, 16 ranks x 16 tensors"] == [0.02]
    assert sum(bar.beside.startswith(PEER) for bar in found) == 5
    assert {f"{layout}, {how}: a rank says" for layout in LAYOUTS for how in ("known", "exchanged")} <= operations
    assert all(bar.ours > 0 for bar in found)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_memory_grows_with_the_chunks_and_no_faster(case: object) -> None:
    """Four times as many chunks take four times the memory, with room for what is taken once."""
    peaks = []
    for count in (20_000, 80_000):
        wanted, stored = request(case, count)  # type: ignore[arg-type]
        plan_load(wanted, stored)
        peaks.append(peak_bytes(lambda wanted=wanted, stored=stored: plan_load(wanted, stored)))  # type: ignore[misc]
    assert peaks[1] < 10 * peaks[0]
    assert peaks[1] < 80_000 * 1000
