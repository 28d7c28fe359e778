"""The demo: save a training state from several processes, load it in another layout, and show that nothing changed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, MutableSequence, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing import RawArray
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import torch
from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn
from rich.table import Table
from rich.text import Text

from ..checkpoint import is_checkpoint, load, save
from ..errors import AlreadyACheckpoint, error_text
from ..layouts import tensor_shards, tree_columns
from ..plans import level_writes
from ..storage import ReadReport
from ..strategies import LoadOptions, SaveOptions
from ..world import World, run_processes
from ._demo_state import (
    LOADED_AS,
    SAVED_AS,
    Comparison,
    Finding,
    Source,
    bytes_of,
    compare_state,
    elements_of,
    find_source,
    findings_of,
    meta_weights,
    training_state,
    weights_of,
)
from ._output import rate, size
from ._picture import rank_label, show_layouts

_DRAWN = "embeddings.word_embeddings.weight"
_MOST_BARS = 8  # more ranks share one

T = TypeVar("T")
State = dict[str, Any]
States = Sequence[State]


def run_demo(*, ranks: int, load_ranks: int, keep: Path | None, small: bool) -> bool:
    """Print the demo, and return whether everything that was loaded is what was saved.

    1. Say what every rank will hold, in both layouts: pure, without data or processes.
    2. Save from one set of processes.
    3. Load in another, each of which compares what it got with what it should have.
    4. Draw one matrix in both layouts, and print what was found.

    Args:
        ranks: how many processes save.
        load_ranks: how many load.
        keep: the checkpoint's folder; None for one that is removed in the end.
        small: whether to take a tiny encoder of made-up weights.

    Raises:
        AlreadyACheckpoint: there is one in the folder to keep.
        CheckpointingException: a save or load failed.
    """
    began, console, source = time.monotonic(), Console(highlight=False), find_source(small=small)
    weights = meta_weights(source)
    whole = training_state(weights, SAVED_AS, 0, 1)
    before = [training_state(weights, SAVED_AS, rank, ranks) for rank in range(ranks)]
    after = [training_state(weights, LOADED_AS, rank, load_ranks) for rank in range(load_ranks)]
    with _folder(keep) as folder:
        _show_facts(console, source, whole, folder)
        what = f"Save from {_processes(ranks)}, cut by attention heads, MLP units and vocabulary rows"
        # A partial of a module's function: each process gets it pickled.
        save_each = partial(save_rank, source=source, folder=folder)
        saved = _run(console, what, save_each, _bytes_by_writer(before), then="committing")
        _show_saved(console, saved, _files(folder))
        what = f"Load in {_processes(load_ranks)}, each matrix cut along its other axis"
        load_each = partial(load_rank, source=source, folder=folder)
        loaded = _run(console, what, load_each, [bytes_of(state) for state in after], then="checking")
        _show_loaded(console, loaded)
    _show_heading(console, f"One matrix: {_DRAWN}, {' by '.join(f'{n:,}' for n in weights[_DRAWN].shape)}")
    show_layouts(console, *([state["model"][_DRAWN] for state in states] for states in (before, after)))
    findings = findings_of(elements_of(whole), [report.comparison for report in loaded])
    _show_heading(console, "Is what was loaded what was saved?")
    _show_findings(console, findings)
    kept = f" The checkpoint is kept: shardtree.open_checkpoint({str(keep)!r})" if keep else ""
    console.print(f"\nDone in {time.monotonic() - began:.0f} s.{kept}", soft_wrap=True)
    return all(finding.holds for finding in findings)


@contextmanager
def _folder(keep: Path | None) -> Iterator[str]:
    if keep is not None:
        if is_checkpoint(keep):  # before any process starts; their save would refuse it, too
            what = f"demo: {str(keep)!r} already holds a checkpoint"
            raise AlreadyACheckpoint(error_text(what, fix="Name another folder."))
        yield str(keep)
        return
    with TemporaryDirectory(prefix="shardtree-demo-") as folder:
        yield folder


def _processes(count: int) -> str:
    return "1 process" if count == 1 else f"{count} processes"


def _bytes_by_writer(states: States) -> list[int]:
    """Return how many bytes each rank will write: the plan, too, is a pure function of the layout."""
    columns = tree_columns(states)
    chosen = level_writes(columns, len(states))
    sizes = columns.elements * columns.item_size[columns.key]
    return [int(sizes[chosen & (columns.rank == rank)].sum()) for rank in range(len(states))]


def _files(folder: str) -> dict[str, int]:
    """Return the length in bytes of each file of the one checkpoint in a folder."""
    return {path.name: path.stat().st_size for path in sorted(Path(folder).rglob("*")) if path.is_file()}


# What each process does.

Counts = MutableSequence[int]
"""Bytes that each rank wrote or read so far, by rank, in memory that processes share; -1 before it starts."""


@dataclass(frozen=True, slots=True)
class Saved:
    """What one rank saved.

    Attributes:
        held: bytes of its tensors.
        written: bytes that it wrote of them, and of its file's header.
        began: seconds on the machine's monotonic clock.
        ended: likewise.
    """

    held: int
    written: int
    began: float
    ended: float


@dataclass(frozen=True, slots=True)
class Loaded:
    """What one rank loaded.

    Attributes:
        held: bytes of its tensors.
        read: what `load` reported.
        began: seconds on the machine's monotonic clock.
        ended: likewise.
        comparison: with what it should be.
    """

    held: int
    read: ReadReport
    began: float
    ended: float
    comparison: Comparison


def save_rank(world: World, source: Source, folder: str, counts: Counts) -> Saved:
    """Save one rank's shards."""
    torch.set_num_threads(1)  # the ranks share the machine's cores
    state = training_state(weights_of(source), SAVED_AS, world.rank, world.size)
    began = _start(world, counts)
    save(state, folder, world=world, options=SaveOptions(progress=partial(_count, counts, world.rank)))
    return Saved(bytes_of(state), counts[world.rank], began, time.monotonic())


def load_rank(world: World, source: Source, folder: str, counts: Counts) -> Loaded:
    """Load one rank's shards of the other layout, and compare them with what they should be."""
    torch.set_num_threads(1)
    target, reports = training_state(meta_weights(source), LOADED_AS, world.rank, world.size), list[ReadReport]()
    options = LoadOptions(progress=partial(_count, counts, world.rank), report=reports.append)
    began = _start(world, counts)
    # Into meta tensors, so that nothing of what is expected is there before the load.
    tree = load(target, folder, world=world, options=options)
    ended = time.monotonic()
    expected = training_state(weights_of(source), LOADED_AS, world.rank, world.size)
    return Loaded(bytes_of(target), reports[0], began, ended, compare_state(tree, expected))


def _start(world: World, counts: Counts) -> float:
    """Return when all ranks have made their states ready: what comes before isn't the save's or load's time."""
    counts[world.rank] = 0
    world.barrier()
    return time.monotonic()


def _count(counts: Counts, rank: int, nbytes: int) -> None:
    counts[rank] += nbytes


def _run(console: Console, what: str, task: Callable[..., T], expected: Sequence[int], *, then: str) -> list[T]:
    """Return what each process returns; bars show how many of the expected bytes each has moved."""
    _show_heading(console, what)
    counts = RawArray("q", [-1] * len(expected))  # without a lock: each rank writes its own number only
    with _bars(console, expected, then=then) as show:
        results = run_processes(len(expected), partial(task, counts=counts), meanwhile=lambda: show(counts))
        show(counts)
    return results


@contextmanager
def _bars(console: Console, expected: Sequence[int], *, then: str) -> Iterator[Callable[[Sequence[int]], None]]:
    """Yield a function that shows how far the ranks are, given their counts; bars are gone afterwards.

    Args:
        console: where they are drawn; nothing is where it isn't a terminal.
        expected: bytes by rank.
        then: what a rank does when it has counted all of them.
    """
    names = [f"rank {rank}" for rank in range(len(expected))]
    totals = list(expected)
    if len(totals) > _MOST_BARS:
        names, totals = [f"{len(totals)} ranks"], [sum(totals)]
    # Amounts as texts of ours: an unknown total is "starting", and a full bar isn't yet a commit.
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(24), TextColumn("{task.fields[amount]}"))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        tasks = [progress.add_task(name, total=None, amount="starting") for name in names]

        def show(counts: Sequence[int]) -> None:
            ones = list(counts) if len(tasks) == len(counts) else [sum(counts)]
            for task, count, total in zip(tasks, ones, totals, strict=True):
                if count >= 0:
                    amount = f"{size(count)} of {size(total)}" if count < total else f"{size(total)}, {then}"
                    progress.update(task, completed=min(count, total), total=total, amount=amount)

        yield show


# What is printed.


def _show_heading(console: Console, text: str) -> None:
    console.print()
    console.print(Text(text, style="bold"))


def _show_facts(console: Console, source: Source, whole: State, folder: str) -> None:
    """Print what is saved, and where to."""
    _show_heading(console, "shardtree: a training state, saved in one layout and loaded in another")
    model, shards = tensor_shards(whole["model"]), tensor_shards(whole)
    facts = {
        "weights": f"{source.title}: {len(model)} tensors, {elements_of(whole)['weights']:,} elements",
        "state": f"weights, exp_avg and exp_avg_sq: {len(shards)} tensors, {size(bytes_of(whole))}",
        "folder": folder,
    }
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    for name, fact in facts.items():
        table.add_row(Text(name), Text(fact))
    console.print(table)


def _show_saved(console: Console, saved: Sequence[Saved], files: dict[str, int]) -> None:
    """Print which rank wrote how much, to which file, and how fast all of them were.

    Args:
        console: where to.
        saved: by rank.
        files: length in bytes of each file, by name.
    """
    table = _table("rank", "holds", "wrote", "file")
    for rank, report in enumerate(saved):
        own = [name for name in files if name.startswith(f"{rank:05}-of-")]
        table.add_row(rank_label(rank), size(report.held), size(report.written), Text("\n".join(own), style="dim"))
    # Rank 0 writes what the ranks have in common: the index, the common state, and last metadata.json.
    others = {name: length for name, length in reversed(files.items()) if "-of-" not in name}
    table.add_row(rank_label(0), "", size(sum(others.values())), Text("\n".join(others), style="dim"))
    _add_total(table, saved, sum(files.values()))
    console.print(table)


def _show_loaded(console: Console, loaded: Sequence[Loaded]) -> None:
    """Print which rank read how much, from how many files, and how fast all of them were."""
    table = _table("rank", "holds", "read", "files")
    for rank, report in enumerate(loaded):
        table.add_row(rank_label(rank), size(report.held), size(report.read.bytes_read), f"{report.read.files}")
    _add_total(table, loaded, sum(report.read.bytes_read for report in loaded))
    console.print(table)


def _table(*names: str) -> Table:
    """Return an empty table; the columns in the middle hold numbers."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), show_edge=False)
    for name in names:
        table.add_column(name, justify="left" if name in (names[0], names[-1]) else "right", no_wrap=True)
    return table


def _add_total(table: Table, reports: Sequence[Saved | Loaded], moved: int) -> None:
    # Processes of one machine share its monotonic clock, so their times can be compared.
    seconds = max(report.ended for report in reports) - min(report.began for report in reports)
    speed = Text(f"{rate(moved, seconds)}, in {seconds:.2f} s", style="bold")
    table.add_section()
    table.add_row("all", size(sum(report.held for report in reports)), size(moved), speed)


def _show_findings(console: Console, findings: Sequence[Finding]) -> None:
    """Print what holds and what doesn't."""
    for finding in findings:
        mark = ("✓ ", "bold green") if finding.holds else ("✗ ", "bold red")
        console.print(Text.assemble(mark, finding.text))
        for detail in finding.details:
            console.print(Text(f"    {detail}", style="red"))
