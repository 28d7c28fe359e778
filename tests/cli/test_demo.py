"""`shardtree demo`, as a process: what it prints, and its exit status."""

from __future__ import annotations

from pathlib import Path

import pytest

import shardtree as st
from shardtree.cli import _demo
from tests.cli.checkpoints import process, run


@pytest.mark.slow
@pytest.mark.torchrun
def test_demo_saves_loads_and_finds_everything_the_same(tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    done = process("demo", "--small", "--keep", folder)
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout
    assert done.stdout.count("✓") == 5
    assert "✗" not in done.stdout
    for text in ("because of --small", "00003-of-00004.safetensors", "0 rank 0 0", "140,032 of 140,032 elements"):
        assert text in done.stdout
    assert st.open_checkpoint(folder)["optimizer.exp_avg.encoder.layer.1.output.dense.bias"].global_shape == (64,)


@pytest.mark.slow
@pytest.mark.torchrun
def test_demo_replaces_no_checkpoint(tmp_path: Path) -> None:
    st.save({"step": 7}, tmp_path)
    done = process("demo", "--small", "--keep", tmp_path)
    assert done.returncode == 1
    assert "already holds a checkpoint" in done.stderr
    assert "Traceback" not in done.stderr
    assert st.load_common_state_dict(tmp_path) == {"step": 7}


@pytest.mark.parametrize("passed", [True, False])
def test_the_exit_status_is_1_where_something_differs(passed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_demo, "run_demo", lambda **options: passed)
    assert run("demo").exit_code == (0 if passed else 1)
