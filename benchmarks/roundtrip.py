"""Saving and loading beside raw system calls and peers: ``python -m benchmarks.roundtrip --size 2GB --tensors 100``.

Nobody waits for the medium (shardtree's ``durable=False``, DCP's ``sync_files=False``). Files go to a temporary folder
on a disk, so that they are in the page cache when they are loaded; see docs/performance.md for what is measured.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

from rich.console import Console

from ._report import Row, as_json, print_rows, rows
from ._rounds import measure

_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; returns 0, whatever the ratios, unless ``--strict`` is given and a bar is missed."""
    options = _parser().parse_args(arguments)
    # Plain text where nobody watches; wide enough for every column.
    console = Console(width=None if sys.stdout.isatty() else 130)
    table: list[Row] = []
    for processes in options.processes:
        table += _measured(processes, options, console)
    if options.json:
        options.json.write_text(json.dumps(as_json(table), indent=1))
    missed = any(row.passed is False for row in table)
    return int(options.strict and missed)


def _measured(processes: int, options: argparse.Namespace, console: Console) -> list[Row]:
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
        )
        what = f"{nbytes / 1e9:.3g} GB in {options.tensors} tensors, medians of {options.rounds} rounds"
        title = f"{processes} process{'es' * (processes > 1)}: {what}, files in {Path(folder).parent}"
    table = rows(processes, nbytes, seconds)
    print_rows(title, table, console)
    return table


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.roundtrip", description=__doc__)
    parser.add_argument("--size", type=_bytes, default=_bytes("2GB"), help="of all tensors together, such as 2GB")
    parser.add_argument("--tensors", type=int, default=100, help="how many there are")
    parser.add_argument("--rounds", type=int, default=5, help="that count; one more warms up")
    parser.add_argument("--tries", type=int, default=4, help="in a row, of which the fastest counts")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2], help="one table for each number")
    parser.add_argument("--dir", type=Path, help="a folder on the storage to measure; the system's temporary one")
    parser.add_argument("--json", type=Path, help="a file for the numbers")
    parser.add_argument("--strict", action="store_true", help="exit with 1 if a bar is missed")
    return parser


def _bytes(text: str) -> int:
    for unit, factor in _UNITS.items():
        if text.upper().endswith(unit):
            return int(float(text[: -len(unit)]) * factor)
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
