"""`torchrun -m shardtree convert`: real processes write one checkpoint, and fail and are resumed together."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

import shardtree as st
from tests.cli.checkpoints import run
from tests.quick_python.command import quick_python, torchrun

DYING = Path(__file__).parent / "scripts" / "dying_convert.py"
SIGKILL = 9

pytestmark = [pytest.mark.torchrun, pytest.mark.slow]


def words(folder: Path, there: Path) -> list[str]:
    return ["convert", str(folder), str(there), "--to", "safetensors", "--max-bytes-in-flight", "40"]


def both(*arguments: str) -> list[tuple[int, str, str]]:
    """Return status, output and errors of each of two processes, which no torchrun ends when the other dies."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    command = [*quick_python(), "-W", "error", *arguments]
    started = [
        subprocess.Popen(command, **pipes, env={**os.environ, **meeting, "RANK": str(rank)}) for rank in range(2)
    ]
    said = [one.communicate(timeout=300) for one in started]
    return [(one.returncode, *texts) for one, texts in zip(started, said, strict=True)]


def test_two_processes_write_one_checkpoint_and_the_first_prints(folder: Path, tmp_path: Path) -> None:
    done = torchrun(2, "-m", "shardtree", *words(folder, tmp_path / "b"), "--allow-pickle")
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first.startswith(f"✓ {tmp_path / 'b'}: 5 tensors, 644 B, 4 objects, in ") and first.endswith("2 processes")
    assert second == "  read back and compared, by fingerprint"
    assert done.stderr.count("warning: --allow-pickle") == 1
    assert run("diff", folder, tmp_path / "b").exit_code == 0
    alone = run(*words(folder, tmp_path / "alone"))
    assert alone.exit_code == 0
    there, other = ({one.name for one in (tmp_path / name).glob("save-*/*")} for name in ("b", "alone"))
    assert there == other, "they wrote other files than one process"


def test_the_first_prints_json(folder: Path, tmp_path: Path) -> None:
    (status, output, errors), other = both("-m", "shardtree", *words(folder, tmp_path / "b"), "--json")
    assert (status, errors) == (0, "")
    assert json.loads(output)["verified_bytes"] == 644
    assert other == (0, "", "")


def test_what_fails_is_printed_once_and_is_the_status_of_both(folder: Path, tmp_path: Path) -> None:
    st.save({"step": 7}, tmp_path)
    (status, output, errors), other = both("-m", "shardtree", *words(folder, tmp_path))
    assert (status, output) == (2, "")
    assert errors.count("already holds a checkpoint") == 1, errors
    assert other == (2, "", "")
    assert st.load_common_state_dict(tmp_path) == {"step": 7}
    (status, output, errors), other = both("-m", "shardtree", *words(tmp_path / "nothing", tmp_path / "c"))
    assert (status, output) == (2, "") and "nothing" in errors
    assert other == (2, "", "")


def check_resumed(folder: Path, there: Path) -> None:
    assert not st.is_checkpoint(there)
    done = run(*words(folder, there))
    assert done.exit_code == 0, done.output
    assert "had been written by an earlier run" in done.stdout
    assert run("diff", folder, there).exit_code == 0


def test_where_one_is_killed_the_other_says_so_and_one_process_resumes(folder: Path, tmp_path: Path) -> None:
    (status, output, errors), killed = both(str(DYING), *words(folder, tmp_path / "b"))
    assert killed[0] in (-SIGKILL, 128 + SIGKILL)
    assert (status, output) == (2, "")
    assert "cannot reach its peers" in errors and "Traceback" not in errors
    check_resumed(folder, tmp_path / "b")
