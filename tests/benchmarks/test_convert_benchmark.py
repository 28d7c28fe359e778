"""The benchmark of conversions runs, its model is DeepSeek-V3's, and what its sink drops it has seen."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

import shardtree as st
from benchmarks import convert
from benchmarks._deepseek import SMALL, Config, make_folder, nbytes_of, shapes_of


def test_the_model_has_the_tensors_and_bytes_that_were_published() -> None:
    shapes = shapes_of(Config())
    assert len(shapes) == 46_183
    assert round(nbytes_of(shapes) / 1e12, 2) == 1.37
    assert shapes["model.layers.60.mlp.experts.255.down_proj.weight"] == (7168, 2048)
    assert "model.layers.2.mlp.gate_proj.weight" in shapes and "model.layers.3.mlp.gate_proj.weight" not in shapes


def test_its_files_are_a_checkpoint(tmp_path: Path) -> None:
    make_folder(tmp_path / "model", shapes_of(SMALL), 3)
    found = st.open_checkpoint(tmp_path / "model").metadata
    assert {key: shard.global_shape for key, shard in found.items()} == shapes_of(SMALL)
    assert {shard.dtype for shard in found.values()} == {torch.bfloat16}
    assert len(list((tmp_path / "model").glob("*.safetensors"))) == 3


def test_a_conversion_into_the_sink_reaches_its_end(tmp_path: Path) -> None:
    make_folder(tmp_path / "model", shapes_of(SMALL), 3)
    sink = convert.Sink()
    report = st.convert(tmp_path / "model", sink, backend=convert.TO, leave_out=["common"], verify=False)
    assert report.nbytes == nbytes_of(shapes_of(SMALL)) <= sum(sink.lengths.values())


def test_a_copy_by_hand_reads_as_much_as_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(bytes(1000))
    (tmp_path / "b.safetensors").write_bytes(bytes(1000))
    assert sum(one.nbytes for one in convert._windows(tmp_path, 1500)) == 1500


@pytest.mark.slow
@pytest.mark.torchrun
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_each_job_has_its_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "files").mkdir()
    numbers = tmp_path / "numbers.json"
    assert convert.main(["--quick", "--json", str(numbers), "--dir", str(tmp_path / "files")]) == 0
    bars = json.loads(numbers.read_text())
    assert [round(bar["most"], 3) for bar in bars if bar["most"]] == [0.588, 1.111, 2048, 1.111]
    assert list((tmp_path / "files").iterdir()) == []
    assert "2 processes" in capsys.readouterr().out
