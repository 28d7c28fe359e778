"""How much memory of its own a job takes at its peak, in new processes.

Counted is what is the process's own (RssAnon and RssShmem of /proc/PID/status), seen from outside up to a thousand
times a second, so that no lock of the interpreter hides a peak. Pages of mapped files belong to the page cache, which
the system takes back when it likes; the figure with them is told apart, from the high-water mark that the kernel keeps
(VmHWM, reset through /proc/self/clear_refs), which misses nothing.
"""

from __future__ import annotations

import ctypes
import gc
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

Action = Callable[[], int]
"""Does what is measured, and returns how many bytes of its result are no extra."""

Prepare = Callable[[int, int], Action]
"""From a rank and the number of ranks; what it makes is there before anything is measured."""


@dataclass(frozen=True, slots=True)
class Peak:
    """Bytes beyond those that were there before and those of the result.

    Attributes:
        own: of the process's own memory.
        mapped: with the pages of mapped files.
        samples: how often the memory was looked at.
    """

    own: int
    mapped: int
    samples: int


def peak(prepare: Prepare, folder: Path, ranks: int = 1) -> Peak:
    """Return the largest peak of some ranks, each in a new process.

    Args:
        prepare: a function that a new process can import, or a `partial` of one.
        folder: an existing one, where ranks meet.
        ranks: how many there are.
    """
    # Each process is forked from one that has imported everything and done nothing.
    context = get_context("forkserver")
    context.set_forkserver_preload(["torch", "shardtree._later", __name__])
    lines = [context.Pipe() for _ in range(ranks)]
    meeting = folder / f"meeting-{time.monotonic_ns()}"
    started = [
        context.Process(target=_child, args=(dict(os.environ), prepare, rank, ranks, meeting, line[1]))
        for rank, line in enumerate(lines)
    ]
    for process, (_, its) in zip(started, lines, strict=True):
        process.start()
        its.close()  # so that a process that fails ends its line
    peaks = _watched([line[0] for line in lines], [process.pid or 0 for process in started])
    for process in started:
        process.join()
    meeting.unlink(missing_ok=True)
    return max(peaks, key=lambda one: one.own)


def _child(environment: dict[str, str], prepare: Prepare, rank: int, ranks: int, meeting: Path, line: Any) -> None:
    os.environ |= environment  # the server of forks may be older than what is set now
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))
    if ranks > 1:
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=ranks)
    action = prepare(rank, ranks)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what was freed before can't be taken again unseen
    line.send("ready")
    line.recv()
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("self")
    result = action()
    after = _status("self")
    line.send((before["VmRSS"], after["VmHWM"], result))
    if ranks > 1:
        dist.barrier()
        dist.destroy_process_group()


def _watched(lines: list[Any], pids: list[int]) -> list[Peak]:
    """Let all ranks go at once, and look at them until each is done."""
    for line in lines:
        line.recv()
    before = [_own(pid) for pid in pids]
    most, samples = list(before), 0
    for line in lines:
        line.send("go")
    done = False
    while not done:
        done = all(line.poll() for line in lines)
        most = [max(most[number], _own(pid)) for number, pid in enumerate(pids)]
        samples += 1
        time.sleep(0.0005)
    told = [line.recv() for line in lines]
    return [
        Peak(high - low - result, mapped - start - result, samples)
        for high, low, (start, mapped, result) in zip(most, before, told, strict=True)
    ]


def resident() -> int:
    """Return how many bytes of this process are in memory now, pages of mapped files included."""
    return _status("self")["VmRSS"]


def _own(pid: int) -> int:
    status = _status(str(pid))
    return status.get("RssAnon", 0) + status.get("RssShmem", 0)  # neither where it has just ended


def _status(pid: str) -> dict[str, int]:
    """Return a process's figures in bytes; none of one that has ended."""
    try:
        lines = [line.split() for line in Path(f"/proc/{pid}/status").read_text().splitlines()]
    except (FileNotFoundError, ProcessLookupError):
        return {}
    return {line[0].rstrip(":"): int(line[1]) * 1024 for line in lines if line[-1] == "kB"}
