"""The models that benchmarks save, trace and convert are the published ones, whole, and of as few bytes as is said."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import pytest
import torch

import shardtree as st
from benchmarks import optimizers, planning, thousands
from benchmarks._many import Case
from benchmarks._measuring import peak
from shardtree.core.plans import plan_load
from shardtree.shell.checkpoint import _packed

MIB = 1024 * 1024
linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, forks servers")


@pytest.mark.slow
@pytest.mark.parametrize("known", [True, False])
def test_a_rank_does_not_hear_of_more_tensors_from_every_rank(known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_packed, "_TOGETHER", 2**14)  # few for 64 ranks, as 2**20 are for thousands
    few, many = (thousands.measured(Case(64, tensors, known=known), quick=True) for tensors in (800, 2_400))
    assert many.shards > 2 * few.shards
    for stage in (thousands.SAVE, thousands.LOAD, thousands.TOGETHER):
        # Names are heard once for the ranks that are alike: some bytes for each of 1,600 more tensors.
        grown = many.stages[stage].heard - few.stages[stage].heard
        assert grown == 0 if known else 0 < grown < 1_600 * 20


@pytest.mark.slow
@pytest.mark.parametrize("case", planning.CASES, ids=lambda case: case.name)
def test_memory_of_a_plan_grows_with_the_chunks_and_no_faster(case: planning.Case) -> None:
    """Four times as many chunks take four times the memory, with room for what is taken once."""
    peaks = []
    for count in (20_000, 80_000):
        job = partial(plan_load, *planning.request(case, count))
        job()
        peaks.append(planning.peak_bytes(job))
    assert peaks[1] < 10 * peaks[0] and peaks[1] < 80_000 * 1000


@linux
@pytest.mark.slow
def test_masters_of_600_mb_take_less_than_half_of_that(tmp_path: Path) -> None:
    shapes = optimizers.llama(4, 1024, 2816, 48_000, 256)
    optimizers.make_zero3(tmp_path / "tiny", optimizers.TINY)
    optimizers.make_zero3(tmp_path / "zero3", shapes)
    masters = 4 * sum(torch.Size(shape).numel() for shape in shapes.values())
    seen = peak(partial(optimizers.convert_zero3, tmp_path), tmp_path)
    assert masters > 540 * MIB and seen.own < 280 * MIB
    loaded = st.load_tensors_metadata(tmp_path / "hf")
    assert {key: shard.global_shape for key, shard in loaded.items()} == shapes
    assert {shard.dtype for shard in loaded.values()} == {torch.bfloat16}
