"""From seconds to ratios and bars, and how they are printed."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from statistics import median

from rich.console import Console
from rich.table import Table

from ._contenders import (
    DCP,
    DCP_BEST,
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

# Where shardtree must be, in times of the other's time, with verify=None: nobody else notices a flipped bit in what it
# loads, DCP and torch.load neither.
BARS = {
    RAW: {SAVE: 1.3, LOAD: 1.3},
    SAFETENSORS: {SAVE: 1.05, LOAD: 1.05, LOAD_NEW: 1.05},
    DCP: {SAVE: 1.0, LOAD: 1.0, LOAD_NEW: 1.0, LOAD_COLUMNS: 1.0},
    DCP_BEST: {SAVE: 1.0, LOAD: 1.0, LOAD_NEW: 1.0, LOAD_COLUMNS: 1.0},
    TORCH: {SAVE: 1.0, LOAD: 1.0, LOAD_NEW: 1.0},
    TORCH_MAPPED: {LOAD: 1.0, LOAD_NEW: 1.0},
}


OPERATIONS = (SAVE, LOAD, LOAD_NEW, LOAD_COLUMNS)
NAMES = (RAW, OURS_UNCHECKED, OURS, SAFETENSORS, TORCH, TORCH_MAPPED, DCP, DCP_BEST)


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table.

    Attributes:
        processes: how many took part.
        operation: what was done.
        name: by whom.
        seconds: the median over the rounds.
        speed: in GB/s, of all processes together.
        unchecked: shardtree's time with verify=None, in times of this one's: the median of the rounds' ratios.
        checked: likewise, with verify="whole".
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
    places = sorted(seconds, key=lambda place: (OPERATIONS.index(place[0]), NAMES.index(place[1])))
    return [_row(processes, nbytes, seconds, *place) for place in places]


def _row(processes: int, nbytes: int, seconds: Seconds, operation: str, name: str) -> Row:
    own = seconds[operation, name]
    checked = _ratio(seconds[operation, OURS], own)
    # A save always hashes.
    unchecked = _ratio(seconds.get((operation, OURS_UNCHECKED), seconds[operation, OURS]), own)
    bar = BARS.get(name, {}).get(operation)
    passed = None if bar is None else unchecked <= bar
    typical = median(own)
    return Row(processes, operation, name, typical, nbytes / typical / 1e9, unchecked, checked, bar, passed)


def _ratio(ours: list[float], other: list[float]) -> float:
    """Return the median of the rounds' ratios: what slows a whole round down doesn't count."""
    return median(one / two for one, two in zip(ours, other, strict=True))


def print_rows(title: str, table: list[Row], console: Console) -> None:
    drawn = Table(title=title, title_justify="left")
    for heading in ("operation", "by", "seconds", "GB/s", "verify=None / it", "verify=whole / it", "bar", ""):
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


def as_json(table: list[Row]) -> list[dict[str, object]]:
    return [asdict(row) for row in table]
