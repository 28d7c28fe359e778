"""Saving and loading beside raw system calls and peers: ``python -m benchmarks.roundtrip --size 2GB --tensors 100``.

Nobody waits for the medium (shardtree's ``durable=False``, DCP's ``sync_files=False``). Files go to a temporary folder
on a disk, so that they are in the page cache when they are loaded; see docs/performance.md for what is measured.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from functools import partial
from pathlib import Path

from . import _bars
from ._bars import Bar, Settings, finish, print_bars, settings_of
from ._contenders import OURS, OURS_UNCHECKED, RAW, Contender
from ._peers import everybody
from ._report import bars_of, print_rows, rows
from ._rounds import measure

_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; returns 0, whatever the ratios, unless ``--strict`` is given and a bar is missed."""
    options = _parser().parse_args(arguments)
    return finish(_all_bars(options, settings_of(options)), options)


def bars(settings: Settings) -> list[Bar]:
    """Return the bars of 2 GB in 100 tensors, in one process and in two."""
    small = ["--size", "20KB", "--tensors", "3", "--rounds", "1", "--tries", "1"] if settings.quick else []
    return _all_bars(_parser().parse_args(small), settings)


def _all_bars(options: argparse.Namespace, settings: Settings) -> list[Bar]:
    found = [bar for processes in options.processes for bar in _measured(processes, options, settings)]
    print_bars(f"Save and load, medians of {options.rounds} rounds", found, settings.console)
    return found


def _measured(processes: int, options: argparse.Namespace, settings: Settings) -> list[Bar]:
    threads = max(1, (os.cpu_count() or 1) // processes)
    with tempfile.TemporaryDirectory(dir=settings.folder, prefix="shardtree-benchmark-") as folder:
        nbytes, seconds = measure(
            processes,
            Path(folder),
            size=options.size,
            tensors=options.tensors,
            rounds=options.rounds,
            tries=options.tries,
            threads=threads,
            everybody=partial(_chosen, options.by),
        )
        size = f"{nbytes / 1e9:.3g} GB"
        what = f"{size} in {options.tensors} tensors, medians of {options.rounds} rounds"
        title = f"{processes} process{'es' * (processes > 1)}: {what}, files in {Path(folder).parent}"
    print_rows(title, rows(processes, nbytes, seconds), settings.console)
    return bars_of(size, processes, seconds)


def _chosen(by: list[str] | None, ranks: int) -> tuple[Contender, ...]:
    """Return who takes part with that many processes: raw calls and shardtree always, and whoever was asked for."""
    always = (RAW, OURS, OURS_UNCHECKED)
    return tuple(one for one in everybody(ranks) if by is None or one.name in (*always, *by))


def _parser() -> argparse.ArgumentParser:
    parser = _bars.parser("benchmarks.roundtrip", __doc__)
    parser.add_argument("--size", type=_bytes, default=_bytes("2GB"), help="of all tensors together, such as 2GB")
    parser.add_argument("--tensors", type=int, default=100, help="how many there are")
    parser.add_argument("--rounds", type=int, default=5, help="that count; one more warms up")
    parser.add_argument("--tries", type=int, default=4, help="in a row at least; the fastest counts")
    parser.add_argument(
        "--by", nargs="*", help="who takes part beside raw calls, such as safetensors; everybody if left out"
    )
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2], help="one table for each number")
    return parser


def _bytes(text: str) -> int:
    for unit, factor in _UNITS.items():
        if text.upper().endswith(unit):
            return int(float(text[: -len(unit)]) * factor)
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
