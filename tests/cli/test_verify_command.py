"""`shardtree verify`: its exit status, and what it shows of damage."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

import shardtree as st
from tests.cli.checkpoints import ROOT, document, run, save_training_state


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "step-100"
    save_training_state(folder)
    return folder


def data_file(folder: Path) -> Path:
    return next(path for path in sorted(folder.rglob("*.safetensors")) if "-of-" in path.name)


def flip(path: Path, byte: int) -> None:
    data = bytearray(path.read_bytes())
    data[byte] ^= 4
    path.write_bytes(data)


def test_a_sound_checkpoint(folder: Path) -> None:
    done = run("verify", folder)
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout.startswith(f"✓ no damage found in {folder}: ")
    found = document("verify", folder)
    assert (found["sound"], found["damage"]) == (True, [])
    assert (
        found["bytes_read"]
        == found["bytes_checked"]
        == sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    )
    assert (found["bytes_unchecked"], found["unchecked"]) == (0, [])
    assert run("verify", folder, "--require-checksums").exit_code == 0


def test_json_says_what_the_library_says(folder: Path) -> None:
    path = data_file(folder)
    flip(path, 9)
    found = document("verify", folder, status=1)
    assert list(found) == [
        "checkpoint",
        "sound",
        "bytes_read",
        "bytes_checked",
        "bytes_unchecked",
        "damage",
        "unchecked",
    ]
    assert found["sound"] is False
    assert found["damage"] == json.loads(json.dumps([asdict(one) for one in st.verify(folder)]))
    assert found["damage"][0]["regions"][0]["begin"] == [0, 0]


def test_damage_in_what_another_program_wrote(tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(ROOT / "tests" / "fixtures" / "megatron_0161_tp2", copy)
    sound = run("verify", copy, "--threads", "2")
    assert sound.exit_code == 0 and sound.stdout.startswith(f"? {copy} is checked in part: ")
    assert "  no checksum for " in sound.stdout and "1 file: metadata.json has no hash in this format\n" in sound.stdout
    unchecked = document("verify", copy)["unchecked"]
    assert {one["file"] for one in unchecked} >= {".metadata", "metadata.json", "__0_0.distcp"}
    flip(copy / "__0_0.distcp", 997)  # in what is pickled; heads of archives have no CRC
    for options in ([], ["--require-checksums"]):
        done = run("verify", copy, *options)
        assert done.exit_code == 1
        assert "__0_0.distcp" in done.stdout


def test_files_without_checksums_are_unchecked_and_not_sound(tmp_path: Path) -> None:
    st.save({"w": st.ShardedTensor.from_rank_offsets("w", torch.arange(64.0))}, tmp_path, ("huggingface", 1))
    path = next(tmp_path.glob("*.safetensors"))
    flip(path, path.stat().st_size - 1)
    for options, status in ([], 0), (["--require-checksums"], 2):
        found = document("verify", tmp_path, *options, status=status)
        nbytes = path.stat().st_size
        assert (found["sound"], found["bytes_checked"], found["bytes_unchecked"]) == (None, 0, nbytes)
        done = run("verify", tmp_path, *options)
        assert done.exit_code == status
        assert done.stdout.startswith(f"? {tmp_path} is unchecked: its {nbytes} B have no checksum. 0 B read")
    assert f"shardtree verify: some bytes have no checksum\n  found {nbytes} B of {tmp_path}" in done.stderr
    assert run("verify", tmp_path, "--require-checksums", "--replicas").exit_code == 2
