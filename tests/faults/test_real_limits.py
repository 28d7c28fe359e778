"""A full disk, a file-size limit, no permission, no descriptors, a folder that vanishes, a file that is cut short."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import shardtree
from shardtree.mapping import ShardedTensor
from shardtree.storage import LocalStorage, Storage
from shardtree.testing import Call, watched
from shardtree.world import World, simulate
from tests.faults.warm_saver import NEW, NEXT, OLD, Ends, Job, Saver, beside, listing, prepared, value_in
from tests.shell.checkpoint.parts import ALL_FORMATS as BACKENDS


def check_errors(ends: Ends, folder: str, *causes: int) -> None:
    """Raise unless every rank has an error of ours that names a file in the folder, or beside it, and a cause."""
    for end in ends:
        assert not end["silent"] and not end["signal"], ends
        assert end["error"] is not None, f"one rank heard nothing: {ends}"
        assert "CheckpointingException" in end["kinds"], ends
        assert folder in end["text"] or beside(folder) in end["text"], ends
        assert any(os.strerror(cause) in end["text"] for cause in causes), ends


@contextmanager
def mounted(folder: Path, size: str) -> Iterator[Path]:
    """Yield a small file system; skip where this user may not mount one."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("NO FULL DISK IS TRIED: this user may not mount a tmpfs; files of limited size are tried instead")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "ranks"), [(BACKENDS[0], 1), (BACKENDS[0], 2), (BACKENDS[1], 1)])
def test_a_full_disk_is_an_error_and_the_old_checkpoint_stays(
    backend: tuple[str, int], ranks: int, saver: Saver, tmp_path: Path
) -> None:
    with mounted(tmp_path / "small", "2m") as disk:
        job = Job(backend=backend, ranks=ranks, overwrite=True, tensors=2, columns=20_000 // ranks)
        there = replace(job, folder=str(prepared(saver, job, disk / "step")))
        names, refused = listing(there.folder), 0
        filler = disk / "filler"
        while True:
            free = 60_000 * refused
            filler.write_bytes(bytes(max(0, shutil.disk_usage(disk).free - free)))
            ends = saver(there)
            if ends[0]["error"] is None:
                break
            check_errors(ends, there.folder, errno.ENOSPC)
            filler.unlink()
            assert value_in(there) == OLD
            assert listing(there.folder) == names, f"left over with {free} bytes free"
            refused += 1
        assert refused > 2
        filler.unlink()
        assert value_in(there) == NEW


def test_a_file_system_that_was_made_read_only_is_an_error(saver: Saver, tmp_path: Path) -> None:
    with mounted(tmp_path / "small", "2m") as disk:
        there = replace(Job(overwrite=True), folder=str(prepared(saver, Job(overwrite=True), disk / "step")))
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        check_errors(saver(there), there.folder, errno.EROFS)
        assert value_in(there) == OLD


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "ranks"),
    [
        *[(backend, 1) for backend in BACKENDS],
        *[pytest.param(backend, 2, marks=pytest.mark.exhaustive) for backend in BACKENDS],
    ],
)
def test_a_limit_on_the_size_of_files_is_an_error_and_the_old_checkpoint_stays(
    backend: tuple[str, int], ranks: int, saver: Saver, tmp_path: Path
) -> None:
    job = Job(backend=backend, ranks=ranks, overwrite=True)
    there = replace(job, folder=str(prepared(saver, job, tmp_path / "step")))
    names = listing(there.folder)
    for most in (0, 10, 100):
        check_errors(saver(replace(there, file_bytes=most, refuse=True)), there.folder, errno.EFBIG)
        assert value_in(there) == OLD
        assert listing(there.folder) == names, f"left over with a limit of {most} bytes"
    assert [end["error"] for end in saver(replace(there, value=NEXT))] == [None] * ranks
    assert value_in(there) == NEXT


def test_no_more_open_files_is_an_error_and_the_old_checkpoint_stays(saver: Saver, tmp_path: Path) -> None:
    there = replace(Job(overwrite=True), folder=str(prepared(saver, Job(overwrite=True), tmp_path / "step")))
    check_errors(saver(replace(there, open_files=0)), there.folder, errno.EMFILE)
    assert value_in(there) == OLD
    check_errors(saver(replace(there, do="load", value=OLD, open_files=0)), there.folder, errno.EMFILE)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can have somebody else save")
@pytest.mark.parametrize("ranks", [1, 2])
def test_no_permission_is_an_error_and_the_old_checkpoint_stays(ranks: int, saver: Saver) -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        job = Job(ranks=ranks, overwrite=True)
        there = replace(job, folder=str(prepared(saver, job, Path(folder, "step"))))
        check_errors(saver(replace(there, nobody=True)), there.folder, errno.EACCES)
        assert value_in(there) == OLD
        os.chmod(Path(there.folder, "metadata.json"), 0o600)
        check_errors(saver(replace(there, nobody=True, do="load", value=OLD)), there.folder, errno.EACCES)


def part_of(world: World, value: float) -> dict[str, Any]:
    shard = ShardedTensor.from_rank_offsets("w", torch.full((2, 3), value), (0, world.rank, world.size))
    return {"w": shard, "step": value}


def vanishing(folder: Path, number: int) -> Callable[[Call], None]:
    """Return what removes the whole folder before the call of that number."""
    return lambda call: shutil.rmtree(folder, ignore_errors=True) if call.number == number else None


def check_vanished(folder: Path, ranks: int, backend: tuple[str, int], number: int) -> bool:
    """Raise unless a save whose folder is removed at a call says so, on every rank; return whether it got so far."""
    heard, calls = list[str](), list[int]()

    def before(call: Call) -> None:
        calls.append(call.number)
        vanishing(folder, number)(call)

    storage = watched(LocalStorage(str(folder)), before=before)

    def save(world: World, to: Storage | Path, value: float) -> None:
        try:
            shardtree.save(part_of(world, value), to, backend, world=world, overwrite=True)
        except shardtree.CheckpointingException as error:
            heard.append(str(error))
            raise

    simulate(ranks, lambda world: save(world, folder, OLD))
    try:
        simulate(ranks, lambda world: save(world, storage, NEW))
    except shardtree.CheckpointingException:
        assert len(heard) == ranks and all(str(folder) in text for text in heard), heard
        assert not shardtree.is_checkpoint(folder)
    else:
        # Removed before the save began, or by the time it was over.
        assert (
            not folder.exists()
            or float(shardtree.load_plain_tensors(folder, options=shardtree.LoadOptions(verify="all"))["w"][0, 0])
            == NEW
        )
    simulate(ranks, lambda world: save(world, folder, NEXT))
    assert bool((shardtree.load_plain_tensors(folder, options=shardtree.LoadOptions(verify="all"))["w"] == NEXT).all())
    return len(calls) > number


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_folder_that_vanishes_is_an_error_on_every_rank(ranks: int, tmp_path: Path) -> None:
    number = 0
    while check_vanished(tmp_path / "step", ranks, ("safetensors", 1), number):
        number += 7
    assert number > 10
