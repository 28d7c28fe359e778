"""The models that benchmarks save, trace and convert are the published ones, whole, and of as few bytes as is said."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import shardtree as st
from benchmarks import convert, opening, optimizers, planning, thousands, trace
from benchmarks._deepseek import SMALL, THIN, TRAINING, Config, make_folder, nbytes_of, shapes_of
from benchmarks._many import Case, by_rank, layout, shards_of
from benchmarks._measuring import peak
from benchmarks.convert import SparseFolder
from shardtree.checkpoint import _packed
from shardtree.checkpoint.conversion import ConversionReport
from shardtree.layouts import access_problems, shard_columns
from shardtree.plans import plan_load

MIB = 1024 * 1024
linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, forks servers")


def test_deepseek_has_the_tensors_and_bytes_that_were_published(tmp_path: Path) -> None:
    shapes = shapes_of(Config())
    assert len(shapes) == 46_183
    assert round(nbytes_of(shapes) / 1e12, 2) == 1.37
    assert shapes["model.layers.60.mlp.experts.255.down_proj.weight"] == (7168, 2048)
    thin = shapes_of(THIN)
    assert thin.keys() == shapes.keys() and 200 < nbytes_of(shapes) / nbytes_of(thin) < 300
    assert "model.layers.2.mlp.gate_proj.weight" in shapes and "model.layers.3.mlp.gate_proj.weight" not in shapes
    make_folder(tmp_path / "model", shapes_of(SMALL), 3)
    found = st.open_checkpoint(tmp_path / "model").metadata
    assert {key: shard.global_shape for key, shard in found.items()} == shapes_of(SMALL)
    assert {shard.dtype for shard in found.values()} == {torch.bfloat16}


def test_an_engine_of_it_loses_nothing() -> None:
    shapes = shapes_of(SMALL)
    first, *others = [trace.traced(shapes, rank, 4) for rank in range(4)]
    assert first.check(*others) == ()
    whole = trace.traced(shapes, 0, 1)
    assert whole.inverse().inverse() == whole


def test_the_sink_keeps_what_is_not_zero(tmp_path: Path) -> None:
    zeros, some = memoryview(bytes(2**20)), memoryview(b"abc" * 50_000)
    sink = SparseFolder(str(tmp_path))
    assert sink.write("a", [some, zeros, some], durable=False) == 2**20 + 300_000
    assert sink.read("a") == bytes(some) + bytes(zeros) + bytes(some)
    sink.write_parts("b", 2**21, [(2**20, zeros), (5, some)], durable=False)
    assert sink.read("b") == bytes(5) + bytes(some) + bytes(2**21 - 5 - 150_000)
    (tmp_path / "c.safetensors").write_bytes(bytes(1000))
    (tmp_path / "d.safetensors").write_bytes(bytes(1000))
    assert sum(one.nbytes for one in convert._windows(tmp_path, 1500)) == 1500


def _killed_after(source: str, sink: str, nbytes: int) -> None:
    def count(written: int, left: list[int] = [nbytes]) -> None:  # noqa: B006 - kept between calls on purpose
        left[0] -= written
        if left[0] < 0:
            os.kill(os.getpid(), signal.SIGKILL)

    torch.set_num_threads(1)
    _convert(source, sink, count)


def _convert(source: str, sink: str, progress: Callable[[int], None] = lambda _: None) -> ConversionReport:
    how: dict[str, Any] = {"backend": convert.TO, "layout": TRAINING, "max_bytes_in_flight": 4096}
    options = st.SaveOptions(durable=False, progress=progress)
    return st.convert(source, SparseFolder(sink), leave_out=["common"], save_options=options, **how)


@linux
@pytest.mark.slow
def test_a_conversion_of_it_that_is_killed_fifty_times_reaches_its_end(tmp_path: Path) -> None:
    source, sink = tmp_path / "model", tmp_path / "sink"
    make_folder(source, shapes_of(SMALL), 3)
    sink.mkdir()
    context = get_context("forkserver")
    context.set_forkserver_preload(["torch", __name__])
    for _ in range(50):
        # Each gets a little further: to the end of some batches, and into the next, which is lost.
        one = context.Process(target=_killed_after, args=(str(source), str(sink), nbytes_of(shapes_of(SMALL)) // 55))
        one.start()
        one.join()
        assert one.exitcode == -signal.SIGKILL
    report = _convert(str(source), str(sink))
    assert not st.compare(source, sink) and report.fingerprints == st.fingerprint(source)


@pytest.mark.parametrize("flat", [False, True])
def test_the_model_of_thousands_of_ranks_is_whole_and_its_shards_are_its_columns(flat: bool) -> None:
    columns = layout(Case(8, 800, flat=flat))
    assert not access_problems(columns)
    for rank, part in enumerate(by_rank(columns, 8)):
        made = shard_columns(shards_of(part), rank)
        assert (made.keys, made.kinds) == (part.keys, part.kinds)
        for name in ("key", "offset", "shape", "start", "stop", "rank", "main"):
            assert np.array_equal(getattr(made, name), getattr(part, name))


def test_dcp_agrees_on_the_same_model() -> None:
    found = thousands.measured(Case(8, 800), peer=True, quick=True)
    save = found.stages[thousands.SAVE]
    assert found.shards > 0 and save.seconds > 0 and save.heard > save.said


@pytest.mark.parametrize("known", [True, False])
def test_a_rank_does_not_hear_of_more_tensors_from_every_rank(known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_packed, "_TOGETHER", 2**14)  # few for 64 ranks, as 2**20 are for thousands
    few, many = (thousands.measured(Case(64, tensors, known=known), quick=True) for tensors in (800, 2_400))
    assert many.shards > 2 * few.shards
    for stage in (thousands.SAVE, thousands.LOAD, thousands.TOGETHER):
        # Names are heard once for the ranks that are alike: some bytes for each of 1,600 more tensors.
        grown = many.stages[stage].heard - few.stages[stage].heard
        assert grown == 0 if known else 0 < grown < 1_600 * 20


@pytest.mark.parametrize("case", planning.CASES, ids=lambda case: case.name)
def test_memory_of_a_plan_grows_with_the_chunks_and_no_faster(case: planning.Case) -> None:
    """Four times as many chunks take four times the memory, with room for what is taken once."""
    peaks = []
    for count in (20_000, 80_000):
        job = partial(plan_load, *planning.request(case, count))
        job()
        peaks.append(planning.peak_bytes(job))
    assert peaks[1] < 10 * peaks[0] and peaks[1] < 80_000 * 1000


def test_the_sparse_checkpoint_is_one(tmp_path: Path) -> None:
    opening.sparse_checkpoint(tmp_path, 3, 70)
    tree = st.open_checkpoint(tmp_path, options=st.LoadOptions(verify=None))  # no file has what its hashes say
    assert list(tree) == [f"model.layers.{number}.weight" for number in range(3)]
    whole = tree["model.layers.1.weight"]
    assert whole.global_shape == (280, 8) and not whole.data[100:200].read().isnan().any()
    assert st.load_common_state_dict(tmp_path) == {"step": 1}


@pytest.mark.slow
def test_buckets_become_their_weights_masters(tmp_path: Path) -> None:
    optimizers.make_buckets(tmp_path / "tiny", 2, 8, 100)
    optimizers.make_buckets(tmp_path / "buckets", 2, 8, 100)
    optimizers.convert_buckets(tmp_path, 0, 1)()
    found = st.load_plain_tensors(tmp_path / "full")
    for name in ("linear_proj", "linear_fc1", "linear_fc2"):
        key = f"decoder.layers.{name}.weight"
        assert torch.equal(found[f"optimizer.state.param.{key}"].bfloat16(), found[key])


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
