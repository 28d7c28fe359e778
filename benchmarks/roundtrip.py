"""Saving and loading beside raw system calls and peers: ``python -m benchmarks.roundtrip --size 2GB --tensors 100``.

Nobody waits for the medium (shardtree's ``durable=False``, DCP's ``sync_files=False``). Files go to a temporary folder
on a disk, so that they are in the page cache when they are loaded; see docs/performance.md for what is measured.
"""

from __future__ import annotations

import argparse
import gc
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import nan
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from rich.console import Console
from rich.table import Table

from ._contenders import (
    DCP,
    DCP_BEST,
    HASH,
    LOAD,
    LOAD_COLUMNS,
    LOAD_NEW,
    OURS,
    OURS_UNCHECKED,
    PEER_NAMES,
    PEER_TERMS,
    PLUG,
    RAW,
    SAFETENSORS,
    SAVE,
    TORCH,
    TORCH_MAPPED,
    Contender,
    Tensors,
    Work,
    contenders,
    everybody,
    missing_peers,
    work,
)
from ._measuring import Bar, Settings, finish, parser, print_bars, settings_of

Seconds = dict[tuple[str, str], list[float]]
"""Of each round, by operation and row."""


def measure(
    ranks: int,
    folder: Path,
    *,
    size: int,
    tensors: int,
    rounds: int,
    tries: int,
    threads: int,
    everybody: Callable[[int], tuple[Contender, ...]] = contenders,
    make: Callable[..., Work] = work,
) -> tuple[int, Seconds]:
    """Return the bytes saved and the seconds that each operation took.

    Args:
        ranks: how many processes take part.
        folder: an existing folder, which is left empty.
        size: of all tensors together, in bytes.
        tensors: how many there are.
        rounds: that count; one before them warms everything up and checks what was loaded.
        tries: in a row, of which the fastest counts; more where it stands alone, fewer of what takes long.
        threads: that torch may use in each process.
        everybody: who takes part with that many processes.
        make: makes a rank's work of the rank, `ranks`, `folder`, `size` and `tensors`.
    """
    run = partial(
        _run,
        ranks=ranks,
        folder=folder,
        size=size,
        tensors=tensors,
        rounds=rounds,
        tries=tries,
        threads=threads,
        everybody=everybody,
        make=make,
    )
    if ranks == 1:
        return run(0)
    results = processes.get_context("spawn").SimpleQueue()
    processes.spawn(_process, (run, ranks, folder, results), nprocs=ranks)
    measured: tuple[int, Seconds] = results.get()
    return measured


def _process(rank: int, run: Callable[[int], Any], ranks: int, folder: Path, results: Any) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=ranks)
    measured = run(rank)
    if rank == 0:
        results.put(measured)
    dist.destroy_process_group()


def _run(
    rank: int,
    *,
    ranks: int,
    folder: Path,
    size: int,
    tensors: int,
    rounds: int,
    tries: int,
    threads: int,
    everybody: Callable[[int], tuple[Contender, ...]],
    make: Callable[..., Work],
) -> tuple[int, Seconds]:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    mine = make(rank, ranks, folder, size=size, tensors=tensors)
    taking_part = everybody(ranks)
    _round(mine, taking_part, check=True, tries=1)
    seconds: Seconds = {}
    for number in range(rounds):
        for place, value in _round(mine, _shuffled(taking_part, number), check=False, tries=tries).items():
            seconds.setdefault(place, []).append(value)
    torch.set_num_threads(before)
    return mine.nbytes, seconds


def _shuffled(everybody: tuple[Contender, ...], number: int) -> tuple[Contender, ...]:
    """Return everybody in an order that every rank knows, so that nobody always follows the same other one."""
    return tuple(Random(number).sample(everybody, len(everybody)))


def _round(mine: Work, everybody: tuple[Contender, ...], *, check: bool, tries: int) -> dict[tuple[str, str], float]:
    """Return the seconds of one round, each the fastest of some tries.

    A contender's files are removed before the next one begins: nobody overwrites, and only one contender's pages are
    waiting to reach the disk, too few for the system to slow down whoever writes.
    """
    seconds = {}
    for one in everybody:
        folder = mine.folder / "files"
        seconds[SAVE, one.name] = _saved(mine, one, folder, tries)
        for place, load in one.loads.items():
            if check:
                _clear(mine)
            seconds[place], loaded = _loaded(mine, partial(load, mine, folder), one.tidy_up, tries)
            if check:
                _check(mine, place, loaded)
            del loaded
        _on_rank_zero(mine, partial(shutil.rmtree, folder))
    return seconds


# A virtual machine gives free memory back to its host after a second or two, and getting a page again is up to ten
# times slower than writing to it, which would drown every difference between contenders. So everything is tried in a
# row, each save right after the files of the one before are gone, whose pages it gets, until the three fastest agree;
# the fastest counts.


def _saved(mine: Work, one: Contender, folder: Path, tries: int) -> float:
    """Return the seconds of the fastest save; the files of the last one stay."""
    seconds: list[float] = []
    while _goes_on(mine, seconds, tries):
        _on_rank_zero(mine, partial(shutil.rmtree, folder, ignore_errors=True))
        _on_rank_zero(mine, folder.mkdir)
        seconds.append(_timed(mine, partial(one.save, mine, folder))[0])
    return min(seconds)


def _loaded(mine: Work, load: Callable[[], Tensors], tidy_up: Callable[[], None], tries: int) -> tuple[float, Tensors]:
    """Return the seconds of the fastest load, and what the last one gave."""
    seconds: list[float] = []
    loaded: Tensors = {}
    while _goes_on(mine, seconds, tries):
        loaded = {}  # frees what the try before made
        tidy_up()
        taken, loaded = _timed(mine, load)
        seconds.append(taken)
    return min(seconds), loaded


_LONG = 5.0
"""Seconds of a try that isn't repeated: whether memory was cold is a small part of that."""

_MOST = 20.0
"""Seconds of all tries together after which there are no more."""

_ALIKE = 1.05
"""The most that the third fastest try of those in a row may take of the fastest one's time."""


def is_enough(seconds: Sequence[float], tries: int) -> bool:
    """Return whether nothing is tried again: the fastest ones agree in what they found, or it takes too long.

    Args:
        seconds: of the tries so far.
        tries: the least of what is quick; four times as many are the most. One is no reason to look for another.

    Examples:
        >>> is_enough([0.31, 0.30, 1.2, 0.3], 3), is_enough([0.30, 0.31, 1.2], 3), is_enough([5.5], 3)
        (True, False, True)
    """
    if not seconds or (len(seconds) < tries and min(seconds) < _LONG):
        return False
    fastest = sorted(seconds)[:3]
    differ = tries > 1 and fastest[-1] > _ALIKE * fastest[0]
    return not differ or fastest[0] >= _LONG or len(seconds) >= 4 * tries or sum(seconds) >= _MOST


def _goes_on(mine: Work, seconds: list[float], tries: int) -> bool:
    """Return whether there is another try, the same on all ranks."""
    wanted = torch.tensor(not is_enough(seconds, tries))
    if mine.ranks > 1:
        dist.broadcast(wanted, 0)
    return bool(wanted)


def _timed(mine: Work, action: Callable[[], Any]) -> tuple[float, Any]:
    """Return how long the slowest rank took, and this rank's result."""
    gc.collect()  # so that nobody pays for what the one before has left
    _meet(mine)
    start = time.perf_counter()
    result = action()
    _meet(mine)
    return time.perf_counter() - start, result


def _meet(mine: Work) -> None:
    if mine.ranks > 1:
        dist.barrier()


def _on_rank_zero(mine: Work, action: Callable[[], Any]) -> None:
    _meet(mine)
    if mine.rank == 0:
        action()
    _meet(mine)


def _clear(mine: Work) -> None:
    for tensor in (*mine.targets.values(), *mine.columns.values()):
        tensor.zero_()


def _check(mine: Work, place: tuple[str, str], loaded: Tensors) -> None:
    expected = _expected_columns(mine) if place[0] == LOAD_COLUMNS else mine.rows
    for name, tensor in loaded.items():
        if not torch.equal(tensor, expected[name]):
            raise ValueError(f"{place}: {name!r} was loaded wrong")


def _expected_columns(mine: Work) -> Tensors:
    expected = {}
    for name, tensor in mine.rows.items():
        parts = [torch.empty_like(tensor) for _ in range(mine.ranks)]
        dist.all_gather(parts, tensor)
        expected[name] = torch.cat(parts).chunk(mine.ranks, 1)[mine.rank]
    return expected


# Where shardtree must be, in times of the other's time, without checksums: nobody else notices a flipped bit in what it
# loads, DCP and torch.load neither.
_THAN_DCP = {SAVE: 1 / 1.5, LOAD: 1 / 2.5, LOAD_NEW: 1 / 2.5, LOAD_COLUMNS: 1 / 3}
_NO_SLOWER = {SAVE: 1.0, LOAD: 1.0, LOAD_NEW: 1.0}
BARS = {
    RAW: {SAVE: 1.1, LOAD: 1.1, LOAD_COLUMNS: 1.5},
    SAFETENSORS: {SAVE: 1.05, LOAD: 1.05, LOAD_NEW: 1.05},
    DCP: _THAN_DCP,
    DCP_BEST: _THAN_DCP,
    TORCH: _NO_SLOWER,
    TORCH_MAPPED: {LOAD: 1.0, LOAD_NEW: 1.0},
    **dict.fromkeys(PEER_NAMES, _NO_SLOWER),
}

CHECKSUMS_BAR = 1.1
"""With checksums, in times of the same without, or of raw's time and the hash's where no core is left for it."""


OPERATIONS = (SAVE, LOAD, LOAD_NEW, LOAD_COLUMNS)
NAMES = (RAW, OURS_UNCHECKED, OURS, PLUG, SAFETENSORS, TORCH, TORCH_MAPPED, DCP, DCP_BEST, *PEER_NAMES)


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table.

    Attributes:
        processes: how many took part.
        operation: what was done.
        name: by whom.
        seconds: the median over the rounds.
        speed: in GB/s, of all processes together.
        unchecked: shardtree's time without checksums, in times of this one's: the median of the rounds' ratios.
        checked: likewise, with them, as by default.
        bar: the most that a ratio may be, None where there is no bar.
        passed: whether `unchecked` is.
    """

    processes: int
    operation: str
    name: str
    seconds: float
    speed: float
    unchecked: float
    checked: float
    bar: float | None
    passed: bool | None


def rows(processes: int, nbytes: int, seconds: Seconds) -> list[Row]:
    """Return the table of one run, by operation."""
    shown = [place for place in seconds if place[0] != HASH]
    places = sorted(shown, key=lambda place: (OPERATIONS.index(place[0]), NAMES.index(place[1])))
    return [_row(processes, nbytes, seconds, *place) for place in places]


def _row(processes: int, nbytes: int, seconds: Seconds, operation: str, name: str) -> Row:
    own = seconds[operation, name]
    checked = _ratio(seconds[operation, OURS], own)
    unchecked = _ratio(seconds[operation, OURS_UNCHECKED], own)
    bar = BARS.get(name, {}).get(operation)
    passed = None if bar is None else unchecked <= bar
    typical = median(own)
    return Row(processes, operation, name, typical, nbytes / typical / 1e9, unchecked, checked, bar, passed)


def _ratio(ours: list[float], other: list[float]) -> float:
    """Return the median of the rounds' ratios: what slows a whole round down doesn't count."""
    return median(one / two for one, two in zip(ours, other, strict=True))


def print_rows(title: str, table: list[Row], console: Console) -> None:
    drawn = Table(title=title, title_justify="left")
    for heading in ("operation", "by", "seconds", "GB/s", "no checksums / it", "ours / it", "bar", ""):
        drawn.add_column(heading, justify="left" if heading in ("operation", "by", "") else "right")
    before = None
    for row in table:
        if before not in (None, row.operation):
            drawn.add_section()
        drawn.add_row(*_cells(row, first=row.operation != before))
        before = row.operation
    console.print(drawn)


def _cells(row: Row, *, first: bool) -> tuple[str, ...]:
    ratios = [f"{ratio:.2f}" for ratio in (row.unchecked, row.checked)]
    bar = "" if row.bar is None else f"{row.bar:.2f}"
    verdict = {None: "", True: "[green]pass[/]", False: "[red]fail[/]"}[row.passed]
    return row.operation if first else "", row.name, f"{row.seconds:.3f}", f"{row.speed:.2f}", *ratios, bar, verdict


def bars_of(size: str, processes: int, seconds: Seconds) -> list[Bar]:
    """Return what is asked of one run: beside everybody, and with checksums beside without."""
    job = f"{size}, {processes} process{'es' * (processes > 1)}"
    table = rows(processes, 1, seconds)
    found = [
        Bar(
            f"{row.operation} {job}",
            row.name,
            median(seconds[row.operation, OURS_UNCHECKED]),
            row.seconds,
            row.unchecked,
            row.bar,
            note=PEER_TERMS.get(row.name, "") if row.operation == SAVE else "",
        )
        for row in table
        if row.bar is not None
    ]
    for name in PEER_NAMES if (why := missing_peers(processes)) else ():
        ours = median(seconds[SAVE, OURS_UNCHECKED])
        found.append(Bar(f"{SAVE} {job}", name, ours, None, nan, _NO_SLOWER[SAVE], note=why))
    return [*found, *(bar for operation in OPERATIONS for bar in _checksum_bars(operation, job, processes, seconds))]


def _checksum_bars(operation: str, job: str, processes: int, seconds: Seconds) -> list[Bar]:
    """Return what checksums cost; a load in one process is told beside both, since its threads leave no core idle."""
    if (operation, RAW) not in seconds:
        return []
    checked, alone, raw = (seconds[operation, name] for name in (OURS, OURS_UNCHECKED, RAW))
    both = [one + two for one, two in zip(raw, seconds[HASH, RAW], strict=True)]
    beside = {"the same without": (alone, processes == 1), "raw, and the hash alone": (both, processes > 1)}
    return [
        Bar(
            f"{operation} {job}, checksums on",
            name,
            median(checked),
            median(other),
            _ratio(checked, other),
            CHECKSUMS_BAR if asked and operation in (SAVE, LOAD, LOAD_NEW) else None,
        )
        for name, (other, asked) in beside.items()
    ]


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
    asked = parser("benchmarks.roundtrip", __doc__)
    asked.add_argument("--size", type=_bytes, default=_bytes("2GB"), help="of all tensors together, such as 2GB")
    asked.add_argument("--tensors", type=int, default=100, help="how many there are")
    asked.add_argument("--rounds", type=int, default=5, help="that count; one more warms up")
    asked.add_argument("--tries", type=int, default=4, help="in a row at least; the fastest counts")
    asked.add_argument(
        "--by", nargs="*", help="who takes part beside raw calls, such as safetensors; everybody if left out"
    )
    asked.add_argument("--processes", type=int, nargs="+", default=[1, 2], help="one table for each number")
    return asked


def _bytes(text: str) -> int:
    for unit, factor in _UNITS.items():
        if text.upper().endswith(unit):
            return int(float(text[: -len(unit)]) * factor)
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
