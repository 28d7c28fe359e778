"""Each benchmark runs, checks what everybody moved, prints its rows and leaves nothing behind; nothing is timed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import async_save, device, hashes, limit, maps, memory, opening, planning, reshard, small, trace
from benchmarks.__main__ import BENCHMARKS

REPOSITORY = Path(__file__).parents[2]
linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
pytestmark = [pytest.mark.exhaustive, pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]

# By benchmark: what it prints.
TOLD: dict[str, list[str]] = {
    "async_save": [async_save.COPY, async_save.OURS_UNCOPIED, async_save.DCP_THREAD_STAGED],
    "convert": ["2 processes", "back, the same fingerprints", "a copy by hand"],
    "imports": ["ms more", "the command line: --help", "wrong usage", "inspect of a small checkpoint"],
    "limit": [*limit.RAW.values(), "in all", "load of one small tensor"],
    "maps": [maps.PLAIN, maps.ASKED, maps.NEW],
    "memory": ["mapped pages", "through a cast", "figure: MiB more", *(case.operation for case in memory.CASES)],
    "opening": [*opening.PARTS],
    "optimizers": ["ZeRO-3 to a model's files", "billion parameters", "a copy"],
    "planning": [*planning.PARTS, "kept plans"],
    "quantised": ["FP8 by blocks to bfloat16"],
    "remote": ["save, 50 ms", "columns of saved rows", "requests: open", "extra memory of a load"],
    "small": [*small.PEERS],
    "thousands": ["grids exchanged", "layout=", "flat ranges exchanged", "One of 8 ranks"],
    "trace": [trace.READ, trace.MAPPED, trace.LOADER],
}


@linux
@pytest.mark.torchrun
@pytest.mark.parametrize("name", TOLD)
def test_it_prints_its_rows(name: str, tmp_path: Path) -> None:
    printed, rows = run(name, tmp_path, "--quick")
    said = " ".join([printed, *(f"{row['operation']} {row['beside']} {row['note']}" for row in rows)])  # tables fold
    assert [one for one in TOLD[name] if one not in said] == []
    # Memory is a difference of two peaks, which --quick's few bytes may leave below nothing.
    assert not [row for row in rows if row["ours"] <= 0 and row["unit"] != "MiB"] and "Error" not in printed


def run(name: str, folder: Path, *arguments: str) -> tuple[str, list[dict[str, Any]]]:
    """Return what a benchmark prints and its numbers; in a process of its own, whose peers may warn."""
    files, numbers = folder / "files", folder / "numbers.json"
    files.mkdir()
    command = [sys.executable, "-m", f"benchmarks.{name}", *arguments, "--dir", str(files), "--json", str(numbers)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert list(files.iterdir()) == []
    return done.stdout, json.loads(numbers.read_text())


def test_who_has_bars_runs_with_all_the_others() -> None:
    assert {*TOLD, "device", "roundtrip"} == {*BENCHMARKS} | {"quantised"}
    assert all(callable(import_module(f"benchmarks.{name}").bars) for name in BENCHMARKS)


def test_hashes_and_resharding_print_a_row_for_everybody(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny = ["--size", "256KB", "--tensors", "2", "--rounds", "1", "--threads", "1"]
    assert hashes.main([*tiny, "--dir", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert all(
        printed.count(f" {name} ") == 7 + (name == hashes.SUM) for name in (hashes.SUM, hashes.COPY, hashes.HASH)
    )
    assert all(name in printed for name in (hashes.ALONE, *hashes.VERIFY, "save, fingerprint=True"))
    assert list(tmp_path.iterdir()) == []
    assert reshard.main([*tiny, "--pairs", "4096", "--parts", "memory", "plan"]) == 0
    printed = capsys.readouterr().out
    assert all(printed.count(f"│ {name} ") == 3 for name in (reshard.COPY, *reshard.LAYOUTS))
    assert "plan of 4,096 pairs of chunks" in printed


@pytest.mark.torchrun
def test_resharding_between_processes_has_dtensor_beside_it_where_that_can_do_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert reshard.main(["--size", "1MB", "--tensors", "2", "--rounds", "1", "--parts", "live"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("│ redistribute ") == len(reshard.CASES)
    assert printed.count(f"│ {reshard.PEER} ") == sum(case.placements is not None for case in reshard.CASES)


def test_the_rehearsal_of_devices_has_every_bar(tmp_path: Path) -> None:
    _, rows = run("device", tmp_path, "--quick")
    assert [(row["operation"], row["most"]) for row in rows] == list(device.MOST.items())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_that_is_said(tmp_path: Path) -> None:
    printed, rows = run("device", tmp_path)
    assert "no GPU here" in printed and rows == []
