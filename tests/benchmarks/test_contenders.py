"""Who takes part, who is found out, and how ratios become bars."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardtree as st
from benchmarks import _contenders, imports, maps, opening
from benchmarks._contenders import (
    HASH,
    LOAD,
    LOAD_COLUMNS,
    LOAD_NEW,
    OURS,
    OURS_UNCHECKED,
    PEER_NAMES,
    PEER_TERMS,
    RAW,
    SAFETENSORS,
    SAVE,
    Contender,
    Work,
    everybody,
    missing_peers,
    mixed_work,
    orbax_contenders,
    work,
)
from benchmarks._measuring import Bar
from benchmarks.async_save import COPY, MEGATRON, MOST_COPIES, Job, Measured, Save, bars_of, measured
from benchmarks.async_save import OURS as OUR_ASYNC
from benchmarks.async_save import everybody as everybody_async
from benchmarks.roundtrip import BARS, _chosen, _round, rows
from benchmarks.roundtrip import bars_of as bars_of_round_trip

REPOSITORY = Path(__file__).parents[2]
TINY = Job(2000, 2, 2, 2, ())


# Round trips.


def places(ranks: int) -> set[tuple[str, str]]:
    """Return every (operation, row) that has to be printed."""
    found = {(SAVE, one.name) for one in everybody(ranks)} | {place for one in everybody(ranks) for place in one.loads}
    return {place for place in found if place[0] != HASH}


@pytest.mark.exhaustive
@pytest.mark.torchrun
def test_a_round_trip_prints_a_row_for_everybody_and_every_bar(tmp_path: Path) -> None:
    numbers, tiny = tmp_path / "numbers.json", ["--size", "20KB", "--tensors", "3", "--rounds", "1", "--tries", "1"]
    command = [sys.executable, "-m", "benchmarks.roundtrip", *tiny, "--dir", str(tmp_path), "--json", str(numbers)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    found = [Bar(**bar) for bar in json.loads(numbers.read_text())]
    for processes in (1, 2):
        job = f" 2e-05 GB, {processes} process{'es' * (processes > 1)}"
        told = {(bar.operation.removesuffix(job), bar.beside) for bar in found if bar.operation.endswith(job)}
        asked = {(operation, name) for operation, name in places(processes) if operation in BARS.get(name, {})}
        assert told == asked | {(SAVE, name) for name in PEER_NAMES if missing_peers(processes)}
        checked = {bar.operation for bar in found if bar.operation.endswith(f"{job}, checksums on")}
        assert len(checked) == 2 + processes
    assert all(bar.ours > 0 and (bar.note if bar.other is None else bar.other > 0) for bar in found)
    assert all(name in done.stdout for _, name in places(2))


def test_who_takes_part_can_be_chosen() -> None:
    assert {one.name for one in _chosen([SAFETENSORS], 2)} == {RAW, OURS, OURS_UNCHECKED, SAFETENSORS}
    assert len(_chosen([], 1)) == 3
    assert [one.name for one in _chosen(None, 1)] == [one.name for one in everybody(1)]
    there = {(operation, name) for name, bars in BARS.items() if name not in PEER_NAMES for operation in bars}
    assert there <= places(2) and not any(operation == LOAD_COLUMNS for operation, _ in places(1))


def test_a_peer_that_is_not_installed_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(PEER_TERMS) == set(PEER_NAMES)
    assert orbax_contenders(2) == () and missing_peers(2)
    monkeypatch.setattr(_contenders, "find_spec", lambda name: None)
    assert orbax_contenders(1) == ()
    assert missing_peers(1).startswith("not installed: pip install ")
    assert missing_peers(1).split()[-1] in (REPOSITORY / "pyproject.toml").read_text()


def test_ratios_are_ours_by_theirs_and_a_round_that_is_slow_for_all_changes_none() -> None:
    seconds = {(operation, name): [1.0, 9.0, 1.0] if name == RAW else [1.2, 10.8, 1.2] for operation, name in places(1)}
    raw = {row.operation: row for row in rows(1, 10**9, seconds) if row.name == RAW}
    assert [raw[operation].checked for operation in (SAVE, LOAD, LOAD_NEW)] == pytest.approx([1.2] * 3)
    assert (raw[SAVE].passed, raw[LOAD].passed, raw[LOAD_NEW].passed) == (False, False, None)
    assert raw[SAVE].speed == 1.0


def test_checksums_are_compared_with_none_in_one_process_and_with_raw_and_the_hash_in_two() -> None:
    for ranks in (1, 2):
        seconds = {place: [1.0] for place in places(ranks)} | {(HASH, RAW): [0.5]}
        seconds |= {(operation, OURS): [1.2] for operation in (SAVE, LOAD, LOAD_NEW)}
        bars = bars_of_round_trip("1 GB", ranks, seconds)
        found = {bar.beside: bar for bar in bars if bar.operation.startswith("save 1 GB, ")}
        alone, both = found["the same without"], found["raw, and the hash alone"]
        assert (alone.figure, both.figure) == pytest.approx((1.2, 0.8))
        assert (alone.passed, both.passed) == ((False, None) if ranks == 1 else (None, True))


def test_a_contender_that_loads_something_else_is_found(tmp_path: Path) -> None:
    liar = Contender("liar", lambda mine, folder: None, {(LOAD, "liar"): lambda mine, folder: mine.targets})
    with pytest.raises(ValueError, match="was loaded wrong"):
        _round(work(0, 1, tmp_path, size=1000, tensors=2), (liar,), check=True, tries=1)


def test_small_tensors_are_of_many_sizes(tmp_path: Path) -> None:
    mine = mixed_work(0, 2, tmp_path, size=64 * 1024, tensors=1000)
    sizes = [2 * tensor.nbytes for tensor in mine.rows.values()]
    assert min(sizes) < 4096 and 60_000 < max(sizes) <= 64 * 1024 + 4096 and len(set(sizes)) > 50


# Asynchronous saves.


def measured_here(tmp_path: Path, contenders: dict[str, Save]) -> Measured:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    try:
        return measured(work(0, 1, tmp_path, size=TINY.size, tensors=TINY.tensors), contenders, TINY)
    finally:
        dist.destroy_process_group()


def test_who_fails_saves_something_else_or_nothing_is_found_out(tmp_path: Path) -> None:
    ours = everybody_async([OUR_ASYNC])[OUR_ASYNC]

    def late(mine: Work, folder: Path) -> Any:
        wait, commit = ours(mine, folder)
        for tensor in mine.rows.values():
            tensor.add_(1)  # so that what is read isn't what it was
        return wait, commit

    def nothing(mine: Work, folder: Path) -> Any:
        wait, commit = ours(mine, folder)
        return wait, lambda: (commit(), shutil.rmtree(folder))

    broken = {"broken": lambda mine, folder: 1 // 0, "late": late, "nothing": nothing}
    found = measured_here(tmp_path, {OUR_ASYNC: ours, **broken})
    assert found.errors.keys() == broken.keys()
    assert found.errors["broken"] == "ZeroDivisionError: integer division or modulo by zero"
    assert "isn't what was saved" in found.errors["late"]
    bars = bars_of(found, 1)
    assert [(bar.beside, bar.most) for bar in bars[:2]] == [(COPY, MOST_COPIES), ("broken", 1.0)]
    assert bars[1].passed is None and "ZeroDivisionError" in bars[1].note


@pytest.mark.torchrun
@pytest.mark.exhaustive
def test_megatron_takes_part(tmp_path: Path) -> None:
    pytest.importorskip("megatron.core")
    found = measured_here(tmp_path, everybody_async([MEGATRON]))
    assert not found.errors and len(found.seconds[MEGATRON]) == TINY.rounds


# Maps, imports, reads of rows.


def test_a_map_that_keeps_data_or_loses_a_leaf_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    keeping = st.map_shards
    monkeypatch.setattr(st, "map_data", lambda f, tree: keeping(maps._same, tree))
    with pytest.raises(ValueError, match="is another"):
        maps._check(maps._flat(3))
    monkeypatch.setattr(st, "map_shards", lambda f, tree: {**tree, "k0": None})
    with pytest.raises(ValueError, match="differ"):
        maps._check(maps._flat(3))


def test_an_import_of_what_is_loaded_already_is_refused() -> None:
    code = "import sys, numpy\n" + imports._CHILD
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "already loaded: {'numpy'}" in done.stderr


def test_a_wrong_element_is_noticed() -> None:
    with pytest.raises(ValueError, match="not the elements"):
        opening._check_elements(torch.zeros(2), torch.ones(2))
    with pytest.raises(ValueError, match="names"):
        opening._check("names", ["a"], ["b"])


def test_dcp_loads_one_ranks_rows_alone(tmp_path: Path) -> None:
    tensor = torch.arange(128 * 4, dtype=torch.int32).reshape(128, 4)
    opening._save_dcp(tensor, tmp_path)
    target = torch.zeros(2, 4, dtype=torch.int32)
    with opening._one_of_many(5, target) as sharded:
        assert sharded.shape == (128, 4)
        assert opening._load_dcp(tmp_path, sharded).tolist() == tensor[10:12].tolist()
    assert not dist.is_initialized()
