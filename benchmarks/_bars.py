"""Bars: figures of ours beside somebody else's in one run, and the most that each may be."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True, slots=True)
class Bar:
    """One figure, and whether it is low enough.

    Attributes:
        operation: what was done, such as "save 2 GB, 1 process".
        beside: what else was measured in the same run; empty where the bar is a number by itself.
        ours: our time or size, in `unit`.
        other: that of `beside`, in the same unit; None where there is nothing beside it, or it failed.
        figure: what is compared: most often ours / other, as a median of the rounds' ratios.
        most: the bar, None where a figure is only told.
        unit: of `ours` and `other`.
        note: why `other` is missing, or on what terms it took part.
    """

    operation: str
    beside: str
    ours: float
    other: float | None
    figure: float
    most: float | None
    unit: str = "s"
    note: str = ""

    @property
    def passed(self) -> bool | None:
        """Whether the figure is low enough; None where nothing is asked or nothing could be measured."""
        return None if self.most is None or self.figure != self.figure else self.figure <= self.most


@dataclass(frozen=True, slots=True)
class Settings:
    """What every benchmark is told.

    Attributes:
        folder: on the storage to measure; None for the system's temporary one.
        quick: whether everything is small and tried once, so that tests can run it; such figures mean nothing.
        console: where tables go.
    """

    folder: Path | None
    quick: bool
    console: Console


Benchmark = Callable[[Settings], Sequence[Bar]]


def settings_of(options: argparse.Namespace) -> Settings:
    # Plain text where nobody watches; wide enough for every column.
    return Settings(options.dir, options.quick, Console(width=None if sys.stdout.isatty() else 130))


def parser(name: str, description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options that all benchmarks have."""
    made = argparse.ArgumentParser(prog=f"python -m {name}", description=description)
    made.add_argument("--dir", type=Path, help="a folder on the storage to measure; the system's temporary one")
    made.add_argument("--quick", action="store_true", help="everything small and tried once, to see that it works")
    made.add_argument("--json", type=Path, help="a file for the numbers")
    made.add_argument("--strict", action="store_true", help="exit with 1 if a bar is missed")
    return made


def finish(bars: Sequence[Bar], options: argparse.Namespace) -> int:
    """Write the numbers where they are asked for, and return the exit status."""
    if options.json:
        options.json.write_text(json.dumps([asdict(bar) for bar in bars], indent=1))
    return int(options.strict and any(bar.passed is False for bar in bars))


def run(benchmark: Benchmark, arguments: Sequence[str] | None, name: str, description: str | None) -> int:
    """Run one benchmark by its command."""
    options = parser(name, description).parse_args(arguments)
    return finish(benchmark(settings_of(options)), options)


def print_bars(title: str, bars: Iterable[Bar], console: Console) -> None:
    """Print a table, a line for each bar."""
    drawn = Table(title=title, title_justify="left")
    for heading in ("operation", "beside", "ours", "it", "figure", "bar", ""):
        drawn.add_column(heading, justify="left" if heading in ("operation", "beside", "") else "right")
    before = None
    for bar in bars:
        drawn.add_row("" if bar.operation == before else bar.operation, *_cells(bar))
        before = bar.operation
    console.print(drawn)


def _cells(bar: Bar) -> tuple[str, ...]:
    verdict = {None: "", True: "[green]pass[/]", False: "[red]fail[/]"}[bar.passed]
    other = "" if bar.other is None else _number(bar.other, bar.unit)
    most = "" if bar.most is None else f"{bar.most:.3g}"
    figure = "" if bar.figure != bar.figure else f"{bar.figure:.3g}"
    return bar.beside, _number(bar.ours, bar.unit), other, figure, most, " ".join(filter(None, (verdict, bar.note)))


def _number(value: float, unit: str) -> str:
    return f"{value:.3g} {unit}"
