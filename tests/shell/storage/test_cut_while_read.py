"""A file that another program cuts short while it is read is an error, and none is mapped."""

from __future__ import annotations

import errno
import mmap
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

import shardtree as st
from shardtree.errors import StorageError
from shardtree.shell.storage._local_files import LocalReader
from shardtree.storage import LocalStorage
from tests.options import load_keywords
from tests.quick_python.command import quick_python

ROWS = torch.arange(4096 * 64, dtype=torch.float32).view(4096, 64)


def saved(folder: Path, backend: tuple[str, int] = ("safetensors", 1)) -> Path:
    shard = st.ShardedTensor.from_rank_offsets("w", ROWS)
    st.save({"w": shard, "table": torch.arange(300_000), "step": 3}, folder, backend)
    return folder


def columns() -> dict[str, st.ShardedTensor]:
    return {"w": st.ShardedTensor.from_rank_offsets("w", torch.zeros(4096, 16), (1, 1, 4))}


def test_a_range_beyond_the_end_is_an_error_before_memory_is_made(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abcdef")
    with LocalReader(str(tmp_path / "a")) as reader:
        assert bytes(reader.read(2, 4)) == b"cd" and bytes(reader.read()) == b"abcdef"
        with pytest.raises(StorageError, match="ends at byte 6"):
            reader.read(0, 1 << 60)
        os.truncate(tmp_path / "a", 3)
        with pytest.raises(StorageError, match="ends at byte 3"):
            reader.read()


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO])
def test_what_the_system_says_when_a_read_file_is_closed_hides_nothing(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage, close = LocalStorage(str(saved(tmp_path))), os.close

    def failing(descriptor: int) -> None:
        close(descriptor)
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "close", failing)
    assert storage.read("metadata.json").startswith(b"{")
    with storage.open("metadata.json") as reader:
        assert bytes(reader.read(0, 1)) == b"{"
    with pytest.raises(StorageError, match="ends at byte"), storage.open("metadata.json") as reader:
        reader.read(0, 1 << 40)
    assert st.load_plain_tensors(tmp_path)["w"].equal(ROWS) and st.verify(tmp_path) == ()


@pytest.mark.parametrize("backend", [("safetensors", 1), ("torch_dist", 1), ("dcp", 1), ("zarr", 3)])
@pytest.mark.parametrize("verify", ["whole", "all", None])
def test_nothing_is_mapped(backend: Any, verify: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = saved(tmp_path / "a", backend)

    def refuse(*_: Any, **__: Any) -> Any:
        raise OSError(19, "No such device")  # as some FUSE mounts say

    monkeypatch.setattr(mmap, "mmap", refuse)
    loaded = st.load(columns(), folder, **load_keywords(verify=verify, validate_access_integrity=False))
    assert torch.equal(loaded["w"], ROWS[:, 16:32]) and loaded["step"] == 3
    assert torch.equal(loaded["table"], torch.arange(300_000))
    assert torch.equal(st.open_checkpoint(folder)["w"].data[:, 3].read(), ROWS[:, 3])
    assert not st.verify(folder)
    assert str(folder) not in Path("/proc/self/maps").read_text()


MANY = """
import resource, sys, torch, shardtree as st
resource.setrlimit(resource.RLIMIT_NOFILE, (60, 60))
opened = [st.open_checkpoint(sys.argv[1]) for _ in range(100)]
assert all(float(one["w"].data[1, 1].read()) == 65 for one in opened)
"""


def test_open_checkpoints_hold_no_descriptors(tmp_path: Path) -> None:
    folder = saved(tmp_path / "a")
    done = subprocess.run([*quick_python(), "-c", MANY, str(folder)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
