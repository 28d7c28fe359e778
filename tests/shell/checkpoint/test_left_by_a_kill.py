"""What a killed save left before it could leave its note: the next save of the same machine removes it at once."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import torch

import shardtree as st
from shardtree.shell.storage import claim, is_temporary, maker_is_dead, process_token
from tests.quick_python.command import quick_python

FORMATS = [("safetensors", 1), ("torch_dist", 1), ("zarr", 3)]


@pytest.fixture(scope="module")
def dead() -> str:
    """Digits of a process that has ended."""
    code = "from shardtree.shell.storage import process_token; print(process_token())"
    return subprocess.run([*quick_python(), "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def save(folder: Path, backend: tuple[str, int]) -> None:
    shard = st.ShardedTensor.from_rank_offsets("w", torch.ones(3))
    st.save({"w": shard, "step": 1}, folder, backend, overwrite=True, options=st.SaveOptions(durable=False))


def leave(folder: Path, token: str) -> list[Path]:
    save_id = f"save-20260102T030405-{token}"
    another = f"{save_id[:-2]}{255 - int(save_id[-2:], 16):02x}"  # another save of the same process: the last two count
    left = [folder / save_id, folder / another, folder.with_name(f".{folder.name}.{save_id}")]
    for path in left:
        path.mkdir(parents=True)
    files = [left[1] / f".owner.json.{token}.new", folder / f".metadata.json.{token}.new"]
    for file in files:
        file.write_bytes(b"{")
    return [*left, *files]


def test_digits_tell_only_of_a_process_that_has_ended(dead: str) -> None:
    assert maker_is_dead(dead) and maker_is_dead(process_token()) is None
    assert maker_is_dead("0123456789abcdef") is None and is_temporary(f".a.{dead}.new")


@pytest.mark.parametrize("backend", FORMATS, ids=lambda backend: backend[0])
def test_what_a_dead_process_left_goes_with_the_next_save(backend: tuple[str, int], dead: str, tmp_path: Path) -> None:
    folder = tmp_path / "c"
    save(folder, backend)
    left = leave(folder, dead)
    save(folder, backend)
    save(folder, backend)
    assert not [path for path in left if path.exists()]
    assert st.load({}, folder)["step"] == 1


def test_what_this_process_has_left_goes(tmp_path: Path) -> None:
    folder, save_id = tmp_path / "c", f"save-20260102T030405-{process_token()}"
    save(folder, FORMATS[0])
    held = claim(save_id)
    (folder / save_id).mkdir()
    save(folder, FORMATS[0])
    assert (folder / save_id).exists(), "it is about to leave its note"
    del held
    save(folder, FORMATS[0])
    assert not (folder / save_id).exists()


def test_what_may_be_of_a_live_process_stays(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    save(folder, FORMATS[0])
    above = f"{process_token()[:8]}{os.getppid():06x}00"
    left = [*leave(folder, above), *leave(folder, "ab" * 8)]
    save(folder, FORMATS[0])
    assert [path.name for path in left if not path.exists()] == []
