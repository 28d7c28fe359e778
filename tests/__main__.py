"""The quick tests, on all cores: `python -m tests`, with any options of pytest."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tests.part_of_suite import QUICK

if __name__ == "__main__":
    print("Collecting the quick tests, which takes about 15 seconds", flush=True)  # noqa: T201
    # More than cores, since many tests wait for processes of their own.
    workers = min(len(os.sched_getaffinity(0)) * 3 // 2, 16)
    # Doctests are left to .ci/run; a path among the options takes the place of all of tests/.
    where = [] if any(Path(each.partition("::")[0]).exists() for each in sys.argv[1:]) else ["tests"]
    # A process of its own, in which nothing is imported yet.
    os.execv(sys.executable, [sys.executable, "-m", "pytest", "-q", "-n", str(workers), *QUICK, *where, *sys.argv[1:]])
