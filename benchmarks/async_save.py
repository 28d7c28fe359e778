"""How long an asynchronous save keeps its caller: ``python -m benchmarks.async_save --size 500MB``.

Beside one copy of the same bytes into warm memory, and the asynchronous saves of DCP and Megatron-Core. Everybody waits
for the medium (Megatron-Core always does), and commits each save before the next one begins. Two things block: the
call, and what the caller does to commit once all is written. A step that changes every tensor in place comes right
after the call: where a fork writes, the system copies each page then.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
import warnings
from pathlib import Path
from random import Random
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from rich.console import Console
from rich.table import Table

from ._async_contenders import COPY, OURS_UNCOPIED, Save, everybody
from ._work import Work, work
from .roundtrip import _bytes


class Taken(NamedTuple):
    """What one save took, in seconds."""

    call: float
    step: float
    commit: float
    total: float


class Measured(NamedTuple):
    """What was measured of everybody, a value for each round, and why some couldn't be measured."""

    seconds: dict[str, list[Taken]]
    errors: dict[str, str]
    nbytes: int


def _run(rank: int, ranks: int, folder: Path, options: argparse.Namespace, results: Any) -> None:
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=ranks)
    torch.set_num_threads(max(1, torch.get_num_threads() // ranks))
    mine = work(rank, ranks, folder, size=options.size, tensors=options.tensors)
    found = _measured(mine, everybody(options.only), options.rounds)
    if rank == 0:
        results.put(tuple(found))
    dist.barrier()
    dist.destroy_process_group()


def _measured(mine: Work, contenders: dict[str, Save], rounds: int) -> Measured:
    found = Measured({name: [] for name in contenders}, {}, mine.nbytes)
    for number in range(-1, rounds):
        for name in Random(number).sample(list(contenders), len(contenders)):
            if name in found.errors:
                continue
            taken, error = _tried(mine, contenders[name], changes=name != OURS_UNCOPIED)
            if error:
                found.errors[name] = error
            elif number >= 0:  # what comes before warms up
                found.seconds[name].append(taken)
    return found


def _tried(mine: Work, save: Save, *, changes: bool) -> tuple[Taken, str]:
    """Return what a save took of the slowest rank, and what the first rank says where it failed."""
    taken, error = Taken(0, 0, 0, 0), ""
    try:
        taken = _timed(mine, save, mine.folder / "files", changes=changes)
    except Exception as failure:
        error = f"{type(failure).__name__}: {failure}"[:100]
    told: list[tuple[Taken, str]] = [(taken, error)] * mine.ranks
    dist.all_gather_object(told, (taken, error))
    return Taken(*map(max, zip(*(each for each, _ in told), strict=True))), next((why for _, why in told if why), "")


def _timed(mine: Work, save: Save, folder: Path, *, changes: bool) -> Taken:
    dist.barrier()
    if mine.rank == 0:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
    dist.barrier()
    start = time.perf_counter()
    wait, commit = save(mine, folder)
    called = time.perf_counter()
    if changes:
        for tensor in mine.rows.values():
            tensor.neg_()
    stepped = time.perf_counter()
    wait()
    dist.barrier()
    written = time.perf_counter()
    commit()
    end = time.perf_counter()
    return Taken(called - start, stepped - called, end - written, end - start)


def table(ranks: int, found: Measured) -> Table:
    """Return what was measured, a row for each contender, with the ratio to the copy in the same round."""
    title = f"{ranks} process{'es' * (ranks > 1)}, {found.nbytes / 1e9:.3g} GB; everybody waits for the medium"
    drawn = Table(title=title, title_justify="left")
    for heading in ("by", "call, seconds", "times one copy", "step after it", "commit", "until committed"):
        drawn.add_column(heading, justify="left" if heading == "by" else "right")
    copies = found.seconds[COPY]
    for name, taken in found.seconds.items():
        if name in found.errors:
            drawn.add_row(name, found.errors[name])
            continue
        ratio = median(each.call / copy.call for each, copy in zip(taken, copies, strict=True))
        call, step, commit, total = (f"{median(values):.3f}" for values in zip(*taken, strict=True))
        saves = ("", "") if name == COPY else (commit, total)
        drawn.add_row(name, call, f"{ratio:.2f}", "" if name == OURS_UNCOPIED else step, *saves)
    return drawn


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark and print a table for each number of processes; returns 0."""
    options = _parser().parse_args(arguments)
    console = Console(width=None if sys.stdout.isatty() else 130)
    for ranks in options.processes:
        with tempfile.TemporaryDirectory(dir=options.dir, prefix="shardtree-benchmark-") as folder:
            results = processes.get_context("spawn").SimpleQueue()
            processes.spawn(_run, (ranks, Path(folder), options, results), nprocs=ranks)
            console.print(table(ranks, Measured(*results.get())))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.async_save", description=__doc__)
    parser.add_argument("--size", type=_bytes, default=_bytes("500MB"), help="of all tensors together, such as 1GB")
    parser.add_argument("--tensors", type=int, default=50, help="how many there are")
    parser.add_argument("--rounds", type=int, default=5, help="that count; one more warms up")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2], help="one table for each number")
    parser.add_argument("--only", nargs="*", default=[], help="contenders, beside the copy; all of them by default")
    parser.add_argument("--dir", type=Path, help="a folder on the storage to measure; the system's temporary one")
    return parser


if __name__ == "__main__":
    sys.exit(main())
