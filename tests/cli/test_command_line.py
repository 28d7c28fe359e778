"""`python -m shardtree`, as a process: what it prints, and its exit status."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import shardtree as st

ROOT = Path(__file__).parents[2]


def run(*arguments: str, code: str = "") -> subprocess.CompletedProcess[str]:
    """Run the command line, or code, where nothing is a terminal and warnings are errors."""
    command = [sys.executable, "-W", "error", *(("-c", code) if code else ("-m", "shardtree")), *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.torchrun
def test_demo_saves_loads_and_finds_everything_the_same(tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    done = run("demo", "--small", "--keep", str(folder))
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout
    assert done.stdout.count("✓") == 6
    assert "✗" not in done.stdout
    for text in ("because of --small", "00003-of-00004.safetensors", "0 rank 0 0", "149,056 of 149,056 elements"):
        assert text in done.stdout
    assert st.open_checkpoint(folder)["optimizer.exp_avg.pooler.dense.bias"].global_shape == (64,)


@pytest.mark.torchrun
def test_demo_replaces_no_checkpoint(tmp_path: Path) -> None:
    st.save({"step": 7}, tmp_path)
    done = run("demo", "--small", "--keep", str(tmp_path))
    assert done.returncode == 1
    assert "already holds a checkpoint" in done.stderr
    assert "Traceback" not in done.stderr
    assert st.load_common_state_dict(tmp_path) == {"step": 7}


def test_version() -> None:
    assert run("--version").stdout == f"shardtree {st.__version__}\n"


def test_help_names_the_commands() -> None:
    assert "demo" in run("--help").stdout


def test_an_unknown_command_is_an_error() -> None:
    assert run("dome").returncode == 2


@pytest.mark.parametrize("library", ["typer", "rich"])
def test_a_missing_library_is_named_with_what_installs_it(library: str) -> None:
    code = f"import sys; sys.modules[{library!r}] = None; from shardtree.cli import main; main()"
    done = run("demo", code=code)
    assert done.returncode == 1
    what = f"shardtree: the command line needs {library}. Install what it needs: pip install 'shardtree[cli]'\n"
    assert done.stderr == what
