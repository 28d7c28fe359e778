"""Plans: ``python -m benchmarks.planning``.

A load from a million chunks, saves and loads of 512 ranks beside DCP's planners, and a trillion parameters on 16,384
ranks. No file is read or written, and no rank is more than its layout.
"""

from __future__ import annotations

import sys

from ._bars import Bar, Settings, print_bars, run
from .planning_chunks import chunk_bars
from .planning_ranks import rank_bars
from .planning_trillion import trillion_bars

PARTS = {
    "One rank's request from many stored chunks": chunk_bars,
    "All ranks' plans beside DCP's planners": rank_bars,
    "A trillion parameters on 16,384 ranks": trillion_bars,
}


def bars(settings: Settings) -> list[Bar]:
    """Measure, print a table for each part, and return its bars."""
    found = []
    for title, part in PARTS.items():
        rows = part(settings)
        print_bars(title, rows, settings.console)
        found += rows
    return found


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark and return the exit status."""
    return run(bars, arguments, "benchmarks.planning", __doc__)


if __name__ == "__main__":
    sys.exit(main())
