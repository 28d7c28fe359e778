"""What tests with killed and refused system calls share: the warm process that saves, and what is there afterwards."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import shardtree
from shardtree.testing import outline

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).parent / "scripts" / "saver.py"
OLD, NEW, NEXT = 1.0, 2.0, 3.0
WRITES = "write,writev,pwrite64,pwritev,pwritev2,copy_file_range,sendfile"
RENAMES = "rename,renameat,renameat2,link,linkat,symlink,symlinkat"
SYNCS = "fsync,fdatasync,sync_file_range,syncfs"
OTHERS = "ftruncate,fallocate,mkdir,mkdirat,chmod,fchmod,fchmodat,unlink,unlinkat,rmdir,open,openat"
CALLS = f"{WRITES},{RENAMES},{SYNCS},{OTHERS}"
READS = "read,readv,pread64,preadv,preadv2,openat,open,fstat,newfstatat,stat,statx,lseek,getdents64"
HAS_STRACE = shutil.which("strace") is not None

Ends = list[dict[str, Any]]


@dataclass(frozen=True)
class Job:
    """A save or a load by one process a rank, as tests/faults/scripts/saver.py takes it."""

    folder: str = ""
    backend: tuple[str, int] = ("safetensors", 1)
    old_backend: tuple[str, int] | None = None
    ranks: int = 1
    value: float = NEW
    tensors: int = 1
    columns: int = 3
    overwrite: bool = False
    storage: str = "sound"
    do: str = "save"
    verify: str | None = "all"
    timeout: float = 30.0
    all_die: bool = False
    open_files: int | None = None
    file_bytes: int | None = None
    refuse: bool = False
    nobody: bool = False
    death: str = ""


@dataclass(frozen=True)
class Point:
    """One system call of a rank: the n-th of its name, from 1."""

    rank: int
    call: str
    number: int
    line: str

    def __str__(self) -> str:
        return f"rank {self.rank}, {self.call} {self.number}: {self.line}"


Saver = Callable[..., Ends]


@contextmanager
def warm_saver() -> Iterator[Saver]:
    """Yield a function that has a job done, with options for strace by rank, and returns how the ranks ended."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(SCRIPT)]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1, env=environment
    )
    assert process.stdin is not None and process.stdout is not None
    told, heard = process.stdin, process.stdout

    def ask(job: Job, strace: dict[int, list[str]] | None = None) -> Ends:
        told.write(json.dumps({**vars(job), "strace": strace or {}}) + "\n")
        line = heard.readline()
        assert line, f"the saver died doing {job}"
        ends: Ends = json.loads(line)
        return ends

    try:
        assert heard.readline() == "warm\n"
        yield ask
    finally:
        told.close()
        process.wait(30)
        heard.close()


def traced_points(saver: Saver, job: Job, logs: Path, calls: str = CALLS) -> list[Point]:
    """Return the calls that a job makes on its folder, having done it; opening a file to read it isn't one."""
    wanted = ["-e", f"trace={calls}", "-o"]
    ends = saver(job, {rank: [*wanted, str(logs / f"calls-{rank}")] for rank in range(job.ranks)})
    assert not any(end["error"] or end["signal"] for end in ends), ends
    return [
        point
        for rank in range(job.ranks)
        for point in points_in((logs / f"calls-{rank}").read_text(), rank, job.folder)
        if not (point.call.startswith("open") and "O_CREAT" not in point.line and job.do == "save")
    ]


def points_in(log: str, rank: int, folder: str) -> list[Point]:
    """Return the calls in a log that name something in a folder, each with its place among those of its name."""
    seen: Counter[str] = Counter()
    points = []
    for line in log.splitlines():
        if (found := re.match(r"(\w+)\(", line)) is not None:
            seen[found[1]] += 1
            if is_about(line, folder):
                shown = re.sub(r"[0-9a-f]{16}", "…", line.replace(folder, "").replace(beside(folder), "beside:"))
                points.append(Point(rank, found[1], seen[found[1]], shown[:160]))
    return points


def inject(point: Point, what: str, log: Path, *, for_good: bool = False) -> dict[int, list[str]]:
    """Return strace's options that do something at a point, or from it on."""
    when = f"{point.number}+" if for_good else f"{point.number}"
    fault = f"inject={point.call}:{what}:when={when}"
    return {point.rank: ["-e", f"trace={point.call}", "-e", fault, "-o", str(log)]}


def beside(folder: str) -> str:
    """Return what the paths of folders that are there for a folder's sake begin with."""
    return f"{Path(folder).parent}/.{Path(folder).name}."


def is_about(line: str, folder: str) -> bool:
    """Return whether a line of a log names something in a folder, or beside it for its sake."""
    return folder in line or beside(folder) in line


def was_injected(log: Path, folder: str) -> bool:
    """Return whether strace has put its result in the place of a call on a folder's own."""
    return any("(INJECTED)" in line and is_about(line, folder) for line in log.read_text().splitlines())


def value_in(job: Job) -> float | None:
    """Return the value of the checkpoint in a job's folder, having read and checked all of it, or None."""
    if not shardtree.is_checkpoint(job.folder):
        return None
    tensors = shardtree.load_plain_tensors(job.folder, options=shardtree.LoadOptions(verify="all"))
    value = float(tensors["norm"][0])
    whole = {f"w{n}": torch.full((2 * job.ranks, job.columns), value) for n in range(job.tensors)}
    assert outline(tensors) == outline({"norm": torch.full((3,), value), **whole})
    if job.backend[0] != "huggingface":
        assert shardtree.load_common_state_dict(job.folder)["step"] == value
        assert (
            shardtree.open_checkpoint(job.folder, options=shardtree.LoadOptions(verify="all"))["rng/shard_0_1"].data
            == value
        )
    assert shardtree.verify(job.folder, report=lambda report: None) == ()
    return value


def listing(folder: str) -> list[str]:
    """Return the names of all that is below a folder, or beside it for its sake, without what is random in them."""
    there = [str(path) for path in (*Path(folder).rglob("*"), *Path(folder).parent.glob(f".{Path(folder).name}.*"))]
    short = (path.replace(f"{folder}/", "").replace(beside(folder), "beside:") for path in there)
    return sorted(re.sub(r"save-\d{8}T\d{6}-[0-9a-f]{16}", "save-…", path) for path in short)


def prepared(saver: Saver, job: Job, folder: Path) -> Path:
    """Return a folder as it is before a job: with a checkpoint that is to be overwritten, or not there yet."""
    if job.overwrite:
        backend = job.old_backend or job.backend
        ends = saver(replace(job, folder=str(folder), backend=backend, value=OLD, overwrite=False, storage="sound"))
        assert not any(end["error"] for end in ends), ends
    return folder
