"""What benchmarks measure with: bars, actions that take turns, the peak of a new process's memory, and curves.

A bar is a figure of ours beside somebody else's in one run, and the most that it may be.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from html import escape
from math import ceil, floor, log10
from multiprocessing import get_context
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
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


Seconds = dict[str, list[float]]
"""Of each round, by action."""


def in_turns(actions: Mapping[str, Callable[[], Any]], *, rounds: int, tries: int) -> Seconds:
    """Return how long each action takes; what it returns is let go of outside of the timed part."""
    seconds: Seconds = {name: [] for name in actions}
    for number in range(rounds):
        for name in Random(number).sample([*actions], len(actions)):
            gc.collect()  # what the action before left isn't this one's to clear away
            seconds[name].append(min(_timed(actions[name]) for _ in range(tries)))
    return seconds


def _timed(action: Callable[[], Any]) -> float:
    start = time.perf_counter()
    result = action()
    taken = time.perf_counter() - start
    del result
    return taken


def ratio(seconds: Seconds, ours: str, other: str) -> float:
    """Return the median of the rounds' ratios."""
    return median(one / two for one, two in zip(seconds[ours], seconds[other], strict=True))


Action = Callable[[], int]
"""Does what is measured, and returns how many bytes of its result are no extra."""

Prepare = Callable[[int, int], Action]
"""From a rank and the number of ranks; what it makes is there before anything is measured."""


@dataclass(frozen=True, slots=True)
class Peak:
    """Bytes beyond those that were there before and those of the result.

    Attributes:
        own: of the process's own memory.
        mapped: with the pages of mapped files.
        samples: how often the memory was looked at.
    """

    own: int
    mapped: int
    samples: int


def peak(prepare: Prepare, folder: Path, ranks: int = 1) -> Peak:
    """Return the largest peak of some ranks, each in a new process.

    Args:
        prepare: a function that a new process can import, or a `partial` of one.
        folder: an existing one, where ranks meet.
        ranks: how many there are.
    """
    # Each process is forked from one that has imported everything and done nothing.
    context = get_context("forkserver")
    context.set_forkserver_preload(["torch", "shardtree._later", __name__])
    lines = [context.Pipe() for _ in range(ranks)]
    meeting = folder / f"meeting-{time.monotonic_ns()}"
    started = [
        context.Process(target=_child, args=(dict(os.environ), prepare, rank, ranks, meeting, line[1]))
        for rank, line in enumerate(lines)
    ]
    for process, (_, its) in zip(started, lines, strict=True):
        process.start()
        its.close()  # so that a process that fails ends its line
    peaks = _watched([line[0] for line in lines], [process.pid or 0 for process in started])
    for process in started:
        process.join()
    meeting.unlink(missing_ok=True)
    return max(peaks, key=lambda one: one.own)


def _child(environment: dict[str, str], prepare: Prepare, rank: int, ranks: int, meeting: Path, line: Any) -> None:
    os.environ |= environment  # the server of forks may be older than what is set now
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))
    if ranks > 1:
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=ranks)
    action = prepare(rank, ranks)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what was freed before can't be taken again unseen
    line.send("ready")
    line.recv()
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("self")
    result = action()
    after = _status("self")
    line.send((before["VmRSS"], after["VmHWM"], result))
    if ranks > 1:
        dist.barrier()
        dist.destroy_process_group()


def _watched(lines: list[Any], pids: list[int]) -> list[Peak]:
    """Let all ranks go at once, and look at them until each is done."""
    for line in lines:
        line.recv()
    before = [_own(pid) for pid in pids]
    most, samples = list(before), 0
    for line in lines:
        line.send("go")
    done = False
    while not done:
        done = all(line.poll() for line in lines)
        most = [max(most[number], _own(pid)) for number, pid in enumerate(pids)]
        samples += 1
        time.sleep(0.0005)
    told = [line.recv() for line in lines]
    return [
        Peak(high - low - result, mapped - start - result, samples)
        for high, low, (start, mapped, result) in zip(most, before, told, strict=True)
    ]


def resident() -> int:
    """Return how many bytes of this process are in memory now, pages of mapped files included."""
    return _status("self")["VmRSS"]


def resident_peak() -> int:
    """Return the most bytes of this process that were in memory since its peak was cleared."""
    return _status("self")["VmHWM"]


def _own(pid: int) -> int:
    status = _status(str(pid))
    return status.get("RssAnon", 0) + status.get("RssShmem", 0)  # neither where it has just ended


def _status(pid: str) -> dict[str, int]:
    """Return a process's figures in bytes; none of one that has ended."""
    try:
        lines = [line.split() for line in Path(f"/proc/{pid}/status").read_text().splitlines()]
    except (FileNotFoundError, ProcessLookupError):
        return {}
    return {line[0].rstrip(":"): int(line[1]) * 1024 for line in lines if line[-1] == "kB"}


_WIDTH, _HEIGHT, _LEFT, _TOP, _BELOW, _GAP = 280, 190, 52, 34, 40, 26
_COLOURS = ("#007a59", "#0072b2", "#b84700", "#a64d79")
_STYLE = "text{font:12px system-ui,sans-serif;fill:#757d87}.title{font-weight:600}"


@dataclass(frozen=True, slots=True)
class Curve:
    """Points that belong together.

    Attributes:
        name: for the legend; curves of one name have one colour.
        points: as (x, y), all of them positive, by x.
    """

    name: str
    points: tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True)
class Panel:
    """Curves over one axis.

    Attributes:
        title: what is shown.
        x: what grows.
        y: the unit of what is measured.
        curves: to be drawn.
    """

    title: str
    x: str
    y: str
    curves: tuple[Curve, ...]


def plot(title: str, panels: Sequence[Panel], columns: int = 2) -> str:
    """Return panels as an SVG document, so many in a row, above their legend; the title is for readers of screens.

    Examples:
        >>> plot("growth", [Panel("seconds", "ranks", "s", (Curve("ours", ((1, 1), (10, 2))),))])[:38]
        '<svg xmlns="http://www.w3.org/2000/svg'
    """
    names = list(dict.fromkeys(curve.name for panel in panels for curve in panel.curves))
    colours = dict(zip(names, _COLOURS, strict=False))
    across, down = _LEFT + _WIDTH + _GAP, _TOP + _HEIGHT + _BELOW
    parts = [f"<style>{_STYLE}</style>"]
    for number, panel in enumerate(panels):
        row, column = divmod(number, columns)
        parts.append(f'<g transform="translate({column * across + _LEFT},{row * down + _TOP})">')
        parts += [*_panel(panel, colours), "</g>"]
    bottom = -(-len(panels) // columns) * down
    for place, (name, colour) in enumerate(colours.items()):
        x = _LEFT + place * 170
        parts.append(f'<rect x="{x}" y="{bottom}" width="14" height="4" fill="{colour}"/>')
        parts.append(f'<text x="{x + 20}" y="{bottom + 6}">{escape(name)}</text>')
    size = f'width="{columns * across}" height="{bottom + 20}" viewBox="0 0 {columns * across} {bottom + 20}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img"><title>{escape(title)}</title>'
    return f"{head}{''.join(parts)}</svg>\n"


def _panel(panel: Panel, colours: dict[str, str]) -> Iterator[str]:
    points = [point for curve in panel.curves for point in curve.points]
    xs, (low, high) = sorted({x for x, _ in points}), _decades([y for _, y in points])
    left, right = log10(xs[0]), max(log10(xs[-1]), log10(xs[0]) + 1e-9)
    yield f'<text class="title" x="0" y="-14">{escape(panel.title)}</text>'
    for power in range(low, high + 1):
        y = _HEIGHT * (high - power) / (high - low)
        yield f'<path d="M0 {y:.1f}H{_WIDTH}" stroke="#757d87" stroke-opacity=".35"/>'
        yield f'<text x="-6" y="{y + 4:.1f}" text-anchor="end">{10.0**power:g} {escape(panel.y)}</text>'
    for x in xs:
        across = _WIDTH * (log10(x) - left) / (right - left)
        yield f'<text x="{across:.1f}" y="{_HEIGHT + 16}" text-anchor="middle">{x:,.0f}</text>'
    yield f'<text x="{_WIDTH / 2}" y="{_HEIGHT + 30}" text-anchor="middle">{escape(panel.x)}</text>'
    for curve in panel.curves:
        points = [
            (_WIDTH * (log10(x) - left) / (right - left), _HEIGHT * (high - log10(y)) / (high - low))
            for x, y in curve.points
        ]
        line = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        yield f'<path d="M{line}" fill="none" stroke="{colours[curve.name]}" stroke-width="2"/>'
        for (x, y), (_, value) in zip(points, curve.points, strict=True):
            dot = f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colours[curve.name]}">'
            yield f"{dot}<title>{escape(curve.name)}: {value:.3g} {escape(panel.y)}</title></circle>"


def _decades(values: Sequence[float]) -> tuple[int, int]:
    """Return the powers of ten between which all values lie."""
    low, high = floor(log10(min(values))), ceil(log10(max(values)))
    return low, max(high, low + 1)
