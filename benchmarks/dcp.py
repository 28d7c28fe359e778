"""shardtree beside DCP on DCP's own format: ``python -m benchmarks.dcp --size 512MB --tensors 50 --processes 2``.

Both load the same files, which DCP wrote, into the same warm memory: in the sharding that was saved, and row shards as
column shards. Both save the same tensors in this format; each then loads what shardtree wrote too. Nobody waits for the
medium, and files are in the page cache when they are loaded.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from shardtree.storage import Verify

from ._contenders import LOAD, LOAD_COLUMNS, SAVE, Contender, Load, _dcp, _without_columns, loading, saving
from ._rounds import Seconds, measure
from .roundtrip import _bytes

DCP, OURS, OURS_UNCHECKED, OWN_FILES = "DCP", "shardtree", "shardtree, verify=None", "shardtree, its own files"
OPERATIONS = (SAVE, LOAD, LOAD_COLUMNS)

Place = tuple[str, str]


def contenders(ranks: int) -> tuple[Contender, ...]:
    """Return DCP, shardtree on the files that DCP writes, and shardtree on its own files of the same format."""
    peer = _dcp(DCP, {})
    on_its_files = Contender(OURS, peer.save, {**_own_loads(OURS, "whole"), **_own_loads(OURS_UNCHECKED, None)})
    on_own_files = Contender(OWN_FILES, saving(("dcp", 1)), {**_own_loads(OWN_FILES, "whole"), **_renamed(peer.loads)})
    everybody = (Contender(DCP, peer.save, _kept(peer.loads)), on_its_files, on_own_files)
    return everybody if ranks > 1 else tuple(map(_without_columns, everybody))


def _own_loads(name: str, verify: Verify) -> dict[Place, Load]:
    return _kept(loading(name, verify))


def _renamed(loads: Mapping[Place, Load]) -> dict[Place, Load]:
    return {(operation, f"{name}, shardtree's files"): load for (operation, name), load in _kept(loads).items()}


def _kept(loads: Mapping[Place, Load]) -> dict[Place, Load]:
    return {place: load for place, load in loads.items() if place[0] in OPERATIONS}


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark and print a table for each number of processes; returns 0."""
    options = _parser().parse_args(arguments)
    console = Console(width=None if sys.stdout.isatty() else 110)
    for processes in options.processes:
        threads = max(1, (os.cpu_count() or 1) // processes)
        with tempfile.TemporaryDirectory(dir=options.dir, prefix="shardtree-benchmark-") as folder:
            nbytes, seconds = measure(
                processes,
                Path(folder),
                size=options.size,
                tensors=options.tensors,
                rounds=options.rounds,
                tries=options.tries,
                threads=threads,
                everybody=contenders,
            )
        what = f"{nbytes / 1e9:.3g} GB in {options.tensors} tensors, medians of {options.rounds} rounds"
        console.print(table(f"{processes} process{'es' * (processes > 1)}: {what}", nbytes, seconds))
    return 0


def table(title: str, nbytes: int, seconds: Seconds) -> Table:
    """Return what was measured, a row for each operation and contender, with the ratio to DCP in the same round."""
    drawn = Table(title=title, title_justify="left")
    for heading in ("operation", "by", "seconds", "GB/s", "times DCP's time"):
        drawn.add_column(heading, justify="left" if heading in ("operation", "by") else "right")
    for operation in OPERATIONS:
        rows = {name: taken for (what, name), taken in seconds.items() if what == operation}
        # shardtree's row for saving DCP's files is DCP's own save once more.
        for name, taken in rows.items():
            if (operation, name) == (SAVE, OURS):
                continue
            ratio = median(one / two for one, two in zip(taken, rows[DCP], strict=True))
            speed = nbytes / median(taken) / 1e9
            drawn.add_row(operation, name, f"{median(taken):.3f}", f"{speed:.2f}", f"{ratio:.2f}")
        drawn.add_section()
    return drawn


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.dcp", description=__doc__)
    parser.add_argument("--size", type=_bytes, default=_bytes("512MB"), help="of all tensors together, such as 2GB")
    parser.add_argument("--tensors", type=int, default=50, help="how many there are")
    parser.add_argument("--rounds", type=int, default=5, help="that count; one more warms up")
    parser.add_argument("--tries", type=int, default=3, help="in a row, of which the fastest counts")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2], help="one table for each number")
    parser.add_argument("--dir", type=Path, help="a folder on the storage to measure; the system's temporary one")
    return parser


if __name__ == "__main__":
    sys.exit(main())
