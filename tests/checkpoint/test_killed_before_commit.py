"""A save that is killed right before its commit: the next one knows that it is dead, and removes its files."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch

import shardtree as st
from tests.quick_python.command import quick_python

DIES = """
import os, signal, sys, torch, shardtree as st

def die(event, arguments):
    if event == "os.rename" and str(arguments[1]).endswith("metadata.json"):
        os.kill(os.getpid(), signal.SIGKILL)

sys.addaudithook(die)
st.save({"w": st.ShardedTensor.from_rank_offsets("w", torch.ones(4))}, sys.argv[1], overwrite=True)
"""


def save(folder: Path) -> None:
    st.save({"w": st.ShardedTensor.from_rank_offsets("w", torch.arange(4.0))}, folder, overwrite=True)
    assert st.load_plain_tensors(folder)["w"].tolist() == [0, 1, 2, 3]


def killed(folder: Path) -> None:
    done = subprocess.run([*quick_python(), "-c", DIES, str(folder)], check=False, timeout=900)
    assert done.returncode in (-9, 137), done


def files(folder: Path) -> list[str]:
    """Return the names of all files in a folder; one that is still to be renamed goes once it is an hour old."""
    return sorted(path.name for path in folder.rglob("*") if path.is_file() and path.suffix != ".new")


@pytest.mark.slow
@pytest.mark.parametrize("is_first", [True, False])
def test_the_next_save_removes_its_files(is_first: bool, tmp_path: Path) -> None:
    save(tmp_path / "alone")
    if not is_first:
        save(tmp_path / "step")
    killed(tmp_path / "step")
    save(tmp_path / "step")
    assert files(tmp_path / "step") == files(tmp_path / "alone")


@pytest.mark.slow
def test_it_catches_a_note_that_is_gone_before_the_commit(tmp_path: Path) -> None:
    save(tmp_path / "alone")
    killed(tmp_path / "step")
    (note,) = (tmp_path / "step").glob("save-*/owner.json")
    note.unlink()
    note.parent.rename(f"{str(note.parent)[:-16]}0123456789abcdef")  # its name would tell too whose it was
    save(tmp_path / "step")
    assert files(tmp_path / "step") != files(tmp_path / "alone")
