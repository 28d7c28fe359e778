"""Saves and loads beside raw loops that hash what lies in the cache: ``python -m benchmarks.limit``.

A checked load is at best a loop that reads 1 MiB at a time and hashes it in the processor's cache, a save a loop
that hashes before it writes. Those loops run here in as many threads as ours, beside loops without hashes, on files
in the page cache. 0.5 and 2 GB are moved, so that the slope, the cost of a further byte, is told apart from what a call
costs; by the clock and by the processor time of all threads, which others on the machine change least. Nobody waits for
the medium. Rounds alternate, in each the fastest of a few tries counts, and a figure is the median of rounds' ratios.
"""

from __future__ import annotations

import gc
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from statistics import median

import torch

import shardtree as st
from shardtree.shell.storage import Verify

from ._contenders import LOAD as OURS_LOAD
from ._contenders import Load, Work, loading, raw_hashing, raw_loading, raw_saving, saving, work
from ._measuring import Bar, Settings, print_bars, run

SAVE, SAVE_UNHASHED, LOAD, LOAD_UNCHECKED, VERIFY = "save", "save, no hashes", "load", "load, unchecked", "verify"
RAW = {
    SAVE: "raw hash, pwrite",
    SAVE_UNHASHED: "raw pwrite",
    LOAD: "raw preadv, hash",
    LOAD_UNCHECKED: "raw preadv",
    VERIFY: "raw preadv, hash, one buffer",
}
BARS = {
    SAVE: (1.08, 1.05),
    SAVE_UNHASHED: (1.05, 1.05),
    LOAD: (1.08, 1.06),
    LOAD_UNCHECKED: (1.05, 1.05),
    VERIFY: (1.08, 1.08),
}
"""The most that ours may take of the raw loop's clock time and of its processor time, by operation."""

FIXED_MILLISECONDS = 10.0
MEGABYTE = 10**6


@dataclass(frozen=True, slots=True)
class Taken:
    """The cost of one call.

    Attributes:
        clock: Seconds by the clock.
        processor: Processor seconds of all threads.
    """

    clock: float
    processor: float


COSTS: dict[str, Callable[[Taken], float]] = {"clock": lambda one: one.clock, "processors": lambda one: one.processor}

Round = dict[tuple[str, str], dict[int, Taken]]
"""The fastest try by (operation, name of who did it) and bytes moved."""


def bars(settings: Settings) -> list[Bar]:
    """Return the bars of a further byte's cost and of the fixed costs."""
    sizes = (2 * MEGABYTE, 4 * MEGABYTE) if settings.quick else (500 * MEGABYTE, 2000 * MEGABYTE)
    rounds, tries = (1, 1) if settings.quick else (5, 4)
    with tempfile.TemporaryDirectory(dir=settings.folder, prefix="shardtree-benchmark-") as folder:
        jobs = [work(0, 1, Path(folder) / str(size), size=size, tensors=20) for size in sizes]
        for job in jobs:
            job.folder.mkdir()
        _round(jobs, 0, tries=1)  # writes to every page once
        measured = [_round(jobs, number, tries) for number in range(rounds)]
        found = [
            *_ratios(measured, [job.nbytes for job in jobs]),
            *_fixed_costs(Path(folder), 1 if settings.quick else 50),
        ]
    print_bars(f"Saves and loads beside raw loops, medians of {rounds} rounds", found, settings.console)
    return found


def _round(jobs: Sequence[Work], number: int, tries: int) -> Round:
    taken: Round = {}

    def measure(job: Work, pairs: Iterator[tuple[str, Ways]]) -> None:
        chosen = [*pairs]
        for operation, ways in Random(number).sample(chosen, len(chosen)):
            for name, fastest in _fastest(ways, job.folder / "new", tries).items():
                taken.setdefault((operation, name), {})[job.nbytes] = fastest

    for job in jobs:
        measure(job, _saves(job))
        ours, raw = job.folder / "ours", job.folder / "raw"
        for folder, save in ((ours, saving()), (raw, raw_saving(hashes=True))):
            folder.mkdir()
            save(job, folder)
        os.sync()  # or the system, with so much to write, slows down whoever comes next
        measure(job, _loads(job, ours, raw))
        for folder in (ours, raw):
            shutil.rmtree(folder)
    return taken


Ways = dict[str, Callable[[Path], object]]
"""Functions that do the same by "ours" and by the "raw" loop; a save writes to the folder that it is given."""


def _saves(job: Work) -> Iterator[tuple[str, Ways]]:
    for operation, checked in ((SAVE, True), (SAVE_UNHASHED, False)):
        ways = {"ours": saving(checksums=checked), "raw": raw_saving(hashes=checked)}
        yield operation, {name: partial(save, job) for name, save in ways.items()}


def _loads(job: Work, ours: Path, raw: Path) -> Iterator[tuple[str, Ways]]:
    checks: dict[str, Verify] = {LOAD: "whole", LOAD_UNCHECKED: None}
    for operation, verify in checks.items():
        load = loading("ours", verify)[OURS_LOAD, "ours"]
        raw_load = raw_loading(hashes=verify is not None)
        yield operation, {"ours": partial(_load, load, job, ours), "raw": partial(_load, raw_load, job, raw)}
    yield VERIFY, {"ours": lambda _: st.verify(ours, report=lambda _: None), "raw": lambda _: raw_hashing(job, raw)}


def _load(load: Load, job: Work, folder: Path, _: Path) -> object:
    return load(job, folder)


def _fastest(ways: Ways, folder: Path, tries: int) -> dict[str, Taken]:
    """Return the least cost of each way; both run in each try, so that both see the same minutes of the machine."""
    taken: dict[str, list[Taken]] = {name: [] for name in ways}
    for trial in range(tries):
        for name in [*ways][:: (1, -1)[trial % 2]]:
            costs = []
            # A virtual machine may have given free memory back to its host, and a save takes pages of the sizes that
            # suit its writes. So each way runs twice in a row: the second time it gets the pages that it freed itself.
            for _ in range(2):
                folder.mkdir()
                costs.append(_taken(partial(ways[name], folder)))
                shutil.rmtree(folder)
            taken[name].append(costs[-1])
    return {
        name: Taken(min(one.clock for one in trials), min(one.processor for one in trials))
        for name, trials in taken.items()
    }


def _taken(action: Callable[[], object]) -> Taken:
    gc.collect()  # what the action before left isn't this one's to clear away
    clock, processor = time.perf_counter(), time.process_time()
    action()
    return Taken(time.perf_counter() - clock, time.process_time() - processor)


def _ratios(measured: Sequence[Round], nbytes: Sequence[int]) -> Iterator[Bar]:
    """Yield for each operation the costs of the larger size; the figure is the ratio of slopes, the cost of a byte."""
    least, most = nbytes
    for operation, limits in BARS.items():
        for (unit, cost_of), bar in zip(COSTS.items(), limits, strict=True):
            ours, raw = (
                [{size: cost_of(one) for size, one in costs[operation, name].items()} for costs in measured]
                for name in ("ours", "raw")
            )
            pairs = [*zip(ours, raw, strict=True)]
            slopes = median((own[most] - own[least]) / (other[most] - other[least]) for own, other in pairs)
            whole = median(own[most] / other[most] for own, other in pairs)
            taken, its = median(one[most] for one in ours), median(one[most] for one in raw)
            yield Bar(f"{operation}, {unit}", RAW[operation], taken, its, slopes, bar, note=f"{whole:.3g} in all")


def _fixed_costs(folder: Path, count: int) -> Iterator[Bar]:
    """Yield the milliseconds of a save and of a load of one small tensor."""
    tree = {"w": st.ShardedTensor.from_rank_offsets("w", torch.ones(4, 4))}
    options = st.SaveOptions(durable=False)
    saves = [_taken(partial(st.save, tree, folder / f"small-{number}", options=options)) for number in range(count)]
    loads = [_taken(partial(st.load, tree, folder / f"small-{number}")) for number in range(count)]
    for operation, costs in (("save of one small tensor", saves), ("load of one small tensor", loads)):
        milliseconds = 1000 * median(one.clock for one in costs)
        yield Bar(operation, "", milliseconds, None, milliseconds, FIXED_MILLISECONDS, "ms")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and return the exit status."""
    return run(bars, arguments, "benchmarks.limit", __doc__)


if __name__ == "__main__":
    sys.exit(main())
