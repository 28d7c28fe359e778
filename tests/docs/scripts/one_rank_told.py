"""Run docs/scripts/train_until_told.py, of which rank 1 alone gets SIGTERM, in its fifth step, after it had looked."""

from __future__ import annotations

import os
import runpy
import signal
import sys
from pathlib import Path

import torch.distributed as dist

SCRIPT = Path(__file__).parents[3] / "docs" / "scripts" / "train_until_told.py"
all_reduce, calls = dist.all_reduce, []


def counted(*arguments: object) -> None:
    calls.append(arguments)
    if dist.get_rank() == 1 and len(calls) == 5:
        os.kill(os.getpid(), signal.SIGTERM)
    all_reduce(*arguments)


dist.all_reduce = counted
sys.argv[0] = str(SCRIPT)
runpy.run_path(str(SCRIPT), run_name="__main__")
