"""The benchmark of conversions runs, its model is DeepSeek-V3's, and what its sink drops it has seen."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch

import shardtree as st
from benchmarks import convert, convert_whole
from benchmarks._deepseek import SMALL, THIN, TRAINING, Config, make_folder, nbytes_of, shapes_of
from benchmarks._sparse import SparseFolder
from shardtree.checkpoint.conversion import ConversionReport


def test_the_model_has_the_tensors_and_bytes_that_were_published() -> None:
    shapes = shapes_of(Config())
    assert len(shapes) == 46_183
    assert round(nbytes_of(shapes) / 1e12, 2) == 1.37
    assert shapes["model.layers.60.mlp.experts.255.down_proj.weight"] == (7168, 2048)
    thin = shapes_of(THIN)
    assert thin.keys() == shapes.keys() and 200 < nbytes_of(shapes) / nbytes_of(thin) < 300
    assert "model.layers.2.mlp.gate_proj.weight" in shapes and "model.layers.3.mlp.gate_proj.weight" not in shapes


def test_its_files_are_a_checkpoint(tmp_path: Path) -> None:
    make_folder(tmp_path / "model", shapes_of(SMALL), 3)
    found = st.open_checkpoint(tmp_path / "model").metadata
    assert {key: shard.global_shape for key, shard in found.items()} == shapes_of(SMALL)
    assert {shard.dtype for shard in found.values()} == {torch.bfloat16}
    assert len(list((tmp_path / "model").glob("*.safetensors"))) == 3


def test_what_went_there_and_back_is_the_same_bytes(tmp_path: Path) -> None:
    shapes = shapes_of(SMALL)
    make_folder(tmp_path / "model", shapes, 3)
    convert._trips(tmp_path / "model", tmp_path, 2**14, 0, 1)()
    assert len((tmp_path / "seconds").read_text().split()) == 2


def test_a_sink_keeps_what_is_not_zero(tmp_path: Path) -> None:
    zeros, some = memoryview(bytes(2**20)), memoryview(b"abc" * 50_000)
    sink = SparseFolder(str(tmp_path))
    assert sink.write("a", [some, zeros, some], durable=False) == 2**20 + 300_000
    assert sink.read("a") == bytes(some) + bytes(zeros) + bytes(some)
    sink.write_parts("b", 2**21, [(2**20, zeros), (5, some)], durable=False)
    assert sink.read("b") == bytes(5) + bytes(some) + bytes(2**21 - 5 - 150_000)


def test_a_copy_by_hand_reads_as_much_as_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(bytes(1000))
    (tmp_path / "b.safetensors").write_bytes(bytes(1000))
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


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="forks servers")
def test_a_conversion_that_is_killed_fifty_times_reaches_its_end(tmp_path: Path) -> None:
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


@pytest.mark.slow
@pytest.mark.torchrun
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_each_job_has_its_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "files").mkdir()
    numbers = tmp_path / "numbers.json"
    assert convert.main(["--quick", "--json", str(numbers), "--dir", str(tmp_path / "files")]) == 0
    bars = json.loads(numbers.read_text())
    assert [round(bar["most"], 3) for bar in bars if bar["most"]] == [0.588, 1.111, 2048, 1.111, 2048]
    assert list((tmp_path / "files").iterdir()) == []
    assert "2 processes" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_whole_model_goes_there_and_back_though_it_is_killed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    numbers = tmp_path / "numbers.json"
    arguments = ["--quick", "--kills", "2", "--json", str(numbers), "--dir", str(tmp_path)]
    assert convert_whole.main(arguments) == 0
    assert [bar["most"] for bar in json.loads(numbers.read_text())] == [*[None] * 5, 2048]
    printed = " ".join(capsys.readouterr().out.split())
    assert "there, killed 2 times" in printed and "back, killed 0 times" in printed


def test_a_model_that_comes_back_changed_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = iter([{"w": 1}, {"w": 2}])
    monkeypatch.setattr(convert_whole, "_through", lambda *_, **__: (0.0, 0.0))
    monkeypatch.setattr(convert_whole, "_fingerprints", lambda _: (0.0, next(numbers)))
    with pytest.raises(ValueError, match="in \\['there'\\] isn't what was sent"):
        convert_whole.main(["--quick", "--kills", "0", "--there", "--dir", str(tmp_path)])
