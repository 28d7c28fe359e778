"""Run by tests: forks a process a rank for each line on its input, and says how they ended.

A line is one JSON object a rank: the arguments of async_exit.py, its environment, and the file for what it says. A fork
of this process, which has imported everything and has one thread, runs that script and then ends as any interpreter
does: by falling off the end of its main module, with all that is registered for that.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed

import shardtree

SCRIPT = Path(__file__).parent / "async_exit.py"


def become(rank: dict[str, Any]) -> None:
    """Make this fork the process of a rank."""
    quiet, said = os.open(os.devnull, os.O_RDWR), os.open(rank["stderr"], os.O_WRONLY | os.O_CREAT)
    for descriptor, own in ((quiet, 0), (quiet, 1), (said, 2)):
        os.dup2(descriptor, own)
    os.environ |= rank["environment"]
    sys.argv = [str(SCRIPT), *rank["arguments"]]


def ends(pids: list[int]) -> list[int]:
    """Return the exit statuses, negative where a signal ended the process."""
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]


def say(line: str) -> None:
    """Tell who asked."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def warm() -> None:
    """Do what else takes time only once."""
    shardtree.save(
        {"w": shardtree.ShardedTensor.from_rank_offsets("w", torch.ones(3))}, shardtree.storage.MemoryStorage()
    )
    assert len(os.listdir("/proc/self/task")) == 1, "a fork has one thread: others would be missed"


def forked() -> bool:
    """Answer every line; return whether this is a rank's process by then."""
    for line in sys.stdin:
        pids = []
        for rank in json.loads(line):
            pids.append(os.fork())
            if not pids[-1]:
                become(rank)
                return True
        say(json.dumps(ends(pids)))
    return False


warm()
say("warm")
if forked():
    runpy.run_path(str(SCRIPT), run_name="__main__")
