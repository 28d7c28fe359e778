"""The demo: save a training state from several processes, load it in another layout, and show that nothing changed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing import RawArray
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

from rich.console import Console

from ..layouts import join_columns, shard_columns
from ..plans import level_writes
from ..world import run_processes
from ._bars import bars
from ._layout import BY_HIDDEN, BY_UNITS
from ._output import size
from ._ranks import Embeddings, Loaded, load_rank, save_rank
from ._show import show_facts, show_findings, show_heading, show_layouts, show_loaded, show_saved, show_similarities
from ._state import held_bytes, held_elements, meta, shards_of, training_state
from ._verdict import verdict
from ._weights import Source, find_source, weights_of

_DRAWN = "embeddings.word_embeddings.weight"

T = TypeVar("T")
State = dict[str, Any]
States = Sequence[State]


def run_demo(*, ranks: int, load_ranks: int, keep: Path | None, small: bool) -> bool:
    """Print the demo, and return whether everything that was loaded is what was saved.

    Args:
        ranks: how many processes save.
        load_ranks: how many load.
        keep: the checkpoint's folder; None for one that is removed in the end.
        small: whether to take a tiny encoder of made-up weights.

    Raises:
        CheckpointingException: a save or load failed.
    """
    began, console, source = time.monotonic(), Console(highlight=False), find_source(small=small)
    weights = meta(weights_of(source))
    # What every rank holds, without data: a pure function of the layout, which needs no process.
    [whole], before, after = (
        [training_state(weights, layout, rank, count, head_size=source.shape.head_size) for rank in range(count)]
        for layout, count in ((BY_UNITS, 1), (BY_UNITS, ranks), (BY_HIDDEN, load_ranks))
    )
    with _folder(keep) as folder:
        _introduce(console, source, whole, folder)
        _save(console, source, folder, before)
        loaded, embeddings = _load(console, source, folder, after)
    _draw(console, before, after)
    passed = _judge(console, held_elements(whole), loaded, embeddings, pretrained=source.folder is not None)
    kept = f" The checkpoint is kept: shardtree.open_checkpoint({str(keep)!r})" if keep else ""
    console.print(f"\nDone in {time.monotonic() - began:.0f} s.{kept}", soft_wrap=True)
    return passed


def _introduce(console: Console, source: Source, whole: State, folder: str) -> None:
    model, shards = shards_of(whole["model"]), shards_of(whole)
    show_heading(console, "shardtree: a training state, saved in one layout and loaded in another")
    facts = {
        "weights": f"{source.title}: {len(model)} tensors, {held_elements(model)['weights']:,} elements",
        "state": f"weights, exp_avg and exp_avg_sq: {len(shards)} tensors, {size(held_bytes(shards))}",
        "folder": folder,
    }
    show_facts(console, facts)


def _save(console: Console, source: Source, folder: str, states: States) -> None:
    what = f"Save from {_processes(len(states))}, cut by attention heads, MLP units and vocabulary rows"
    task = partial(save_rank, source=source, folder=folder)
    saved = _run(console, what, task, _bytes_by_writer(states), then="committing")
    show_saved(console, saved, _files(folder))


def _load(console: Console, source: Source, folder: str, states: States) -> tuple[list[Loaded], Embeddings | None]:
    what = f"Load in {_processes(len(states))}, each matrix cut along its other axis"
    task = partial(load_rank, source=source, folder=folder)
    results = _run(console, what, task, [held_bytes(state) for state in states], then="checking")
    loaded = [report for report, _ in results]
    show_loaded(console, loaded)
    return loaded, results[0][1]


def _run(console: Console, what: str, task: Callable[..., T], expected: Sequence[int], *, then: str) -> list[T]:
    """Return what each process returns; bars show how many of the expected bytes each has moved."""
    show_heading(console, what)
    counts = RawArray("q", [-1] * len(expected))
    with bars(console, expected, then=then) as show:
        results = run_processes(len(expected), partial(task, counts=counts), meanwhile=lambda: show(counts))
        show(counts)
    return results


def _draw(console: Console, before: States, after: States) -> None:
    layouts = [[state["model"][_DRAWN] for state in states] for states in (before, after)]
    rows, columns = layouts[0][0].global_shape
    show_heading(console, f"One matrix: {_DRAWN}, {rows:,} by {columns:,}")
    show_layouts(console, *layouts)


def _judge(
    console: Console,
    elements: Mapping[str, int],
    loaded: Sequence[Loaded],
    embeddings: Embeddings | None,
    *,
    pretrained: bool,
) -> bool:
    findings = verdict(elements, [report.comparison for report in loaded], embeddings)
    show_heading(console, "Is what was loaded what was saved?")
    show_findings(console, findings)
    if embeddings is not None and pretrained:
        console.print()
        show_similarities(console, embeddings)
    return all(finding.holds for finding in findings)


def _bytes_by_writer(states: States) -> list[int]:
    """Return how many bytes each rank will write: the plan, too, is a pure function of the layout."""
    columns = join_columns([shard_columns(shards_of(state), rank) for rank, state in enumerate(states)])
    chosen = level_writes(columns, len(states))
    sizes = columns.elements * columns.item_size[columns.key]
    return [int(sizes[chosen & (columns.rank == rank)].sum()) for rank in range(len(states))]


@contextmanager
def _folder(keep: Path | None) -> Iterator[str]:
    if keep is not None:
        yield str(keep)
        return
    with TemporaryDirectory(prefix="shardtree-demo-") as folder:
        yield folder


def _files(folder: str) -> dict[str, int]:
    """Return the length in bytes of each file of the one checkpoint in a folder."""
    return {path.name: path.stat().st_size for path in sorted(Path(folder).rglob("*")) if path.is_file()}


def _processes(count: int) -> str:
    return "1 process" if count == 1 else f"{count} processes"
