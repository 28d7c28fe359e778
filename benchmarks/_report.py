"""From seconds to ratios and bars, and how they are printed."""

from __future__ import annotations

from dataclasses import dataclass
from math import nan
from statistics import median

from rich.console import Console
from rich.table import Table

from . import _peers
from ._bars import Bar
from ._contenders import (
    DCP,
    DCP_BEST,
    HASH,
    LOAD,
    LOAD_COLUMNS,
    LOAD_NEW,
    OURS,
    OURS_UNCHECKED,
    RAW,
    SAFETENSORS,
    SAVE,
    TORCH,
    TORCH_MAPPED,
)
from ._rounds import Seconds

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
    **dict.fromkeys(_peers.NAMES, _NO_SLOWER),
}

CHECKSUMS_BAR = 1.1
"""With checksums, in times of the same without, or of raw's time and the hash's where no core is left for it."""


OPERATIONS = (SAVE, LOAD, LOAD_NEW, LOAD_COLUMNS)
NAMES = (RAW, OURS_UNCHECKED, OURS, SAFETENSORS, TORCH, TORCH_MAPPED, DCP, DCP_BEST, *_peers.NAMES)


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
            note=_peers.TERMS.get(row.name, "") if row.operation == SAVE else "",
        )
        for row in table
        if row.bar is not None
    ]
    for name, why in _peers.missing(processes).items():
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
