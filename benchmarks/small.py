"""shardtree beside DCP and safetensors on many small tensors: ``python -m benchmarks.small``.

20,000 tensors of 1 to 64 KiB, by turns float32 and bfloat16, in one process and in two that hold half the rows of each.
Everybody saves them, loads them into given tensors, and loads as columns what was saved as rows. What is measured is
not so much bytes as what each tensor costs besides.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median

from ._contenders import (
    DCP,
    LOAD,
    LOAD_COLUMNS,
    OURS,
    OURS_UNCHECKED,
    SAFETENSORS,
    SAVE,
    Contender,
    copying,
    dcp_contender,
    loading,
    mixed_work,
    safetensors_columns,
    safetensors_save,
    safetensors_tensors,
    saving,
    without_columns,
)
from ._measuring import Bar, Settings, print_bars, run
from .roundtrip import Seconds, measure

DCP_BEST = "DCP, 2 threads, kept plans"
OPERATIONS = (SAVE, LOAD, LOAD_COLUMNS)
PEERS = {DCP: 0.2, DCP_BEST: 0.2, SAFETENSORS: 1.5}
"""The most that ours may take of each one's time."""


def contenders(ranks: int) -> tuple[Contender, ...]:
    """Return who takes part with that many processes."""
    everybody = (
        _own(Contender(OURS, saving(), loading(OURS, "whole"))),
        _own(Contender(OURS_UNCHECKED, saving(checksums=False), loading(OURS_UNCHECKED, None))),
        _own(dcp_contender(DCP, {"sync_files": False})),
        _own(dcp_contender(DCP_BEST, {"sync_files": False, "thread_count": 2}, kept_plans=True)),
        _own(Contender(SAFETENSORS, safetensors_save, copying(SAFETENSORS, safetensors_tensors, safetensors_columns))),
    )
    return everybody if ranks > 1 else tuple(map(without_columns, everybody))


def _own(one: Contender) -> Contender:
    return Contender(one.name, one.save, {place: load for place, load in one.loads.items() if place[0] in OPERATIONS})


def bars(settings: Settings) -> list[Bar]:
    """Measure, print a table for each number of processes, and return the bars; those are for no checksums."""
    found: list[Bar] = []
    for processes in (1, 2):
        nbytes, seconds = _measured(settings, processes)
        own = list(_bars(processes, seconds))
        title = f"{processes} process{'es' * (processes > 1)}: {nbytes / 1e6:.3g} MB in small tensors"
        print_bars(title, own, settings.console)
        found += own
    return found


def _measured(settings: Settings, processes: int) -> tuple[int, Seconds]:
    with tempfile.TemporaryDirectory(dir=settings.folder, prefix="shardtree-benchmark-") as folder:
        return measure(
            processes,
            Path(folder),
            size=2048 if settings.quick else 64 * 1024,
            tensors=20 if settings.quick else 20_000,
            rounds=1 if settings.quick else 3,
            tries=1 if settings.quick else 3,  # at least; DCP, which takes most of a minute for each round, has one
            threads=max(1, (os.cpu_count() or 1) // processes),
            everybody=contenders,
            make=mixed_work,
        )


def _bars(processes: int, seconds: Seconds) -> Iterator[Bar]:
    for operation in OPERATIONS:
        for ours in (OURS_UNCHECKED, OURS):
            for peer in PEERS:
                if (operation, peer) in seconds:
                    yield _bar(f"{operation}, {processes} x, {ours}", operation, ours, peer, seconds)


def _bar(name: str, operation: str, ours: str, peer: str, seconds: Seconds) -> Bar:
    own, other = seconds[operation, ours], seconds[operation, peer]
    figure = median(one / two for one, two in zip(own, other, strict=True))
    return Bar(name, peer, median(own), median(other), figure, PEERS[peer] if ours == OURS_UNCHECKED else None)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and return the exit status."""
    return run(bars, arguments, "benchmarks.small", __doc__)


if __name__ == "__main__":
    sys.exit(main())
