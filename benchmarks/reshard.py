"""Resharding: ``python -m benchmarks.reshard --size 2GB --rounds 5``.

In memory: trees of 8 ranks from one layout into another beside the plain copy of the same bytes, into memory that was
written before, into new memory, and into new memory in huge pages. Plans: a million pairs of chunks, planned,
checked and scheduled. Live: between processes, beside what torch's DTensor can do. In each round everybody has a turn,
in another order; a round before them warms up every buffer, and checks what was moved. Ratios are medians of the
rounds' ratios. Processor seconds are those of all threads, which others on the machine change least.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from random import Random
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import shardtree as st
from shardtree.errors import plural
from shardtree.layouts import Mesh, PartitionSpec, abstract, mesh_columns, shard
from shardtree.layouts import TensorKind as Kind
from shardtree.storage import empty_tensor

from .roundtrip import _bytes

Trees = list[dict[str, Any]]
Job = Callable[[], object]
Seconds = dict[str, list[tuple[float, float]]]
"""Of each round: by the clock, and on processors."""

COPY = "plain copy"
ROWS, TENSORS_ON_RANKS = PartitionSpec("rank"), Mesh(rank=8)
LAYOUTS = {
    "8 ranks' rows to 4 ranks'": (Mesh(rank=4), ROWS),
    "8 ranks' rows to 6 ranks'": (Mesh(rank=6), ROWS),
    "rows to columns": (Mesh(rank=8), PartitionSpec(None, "rank")),
    "rows to rows and columns": (Mesh(dp=4, tp=2), PartitionSpec("dp", "tp")),
}


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark and print a table for each part; returns 0."""
    options = _parser().parse_args(arguments)
    console = Console(width=None if sys.stdout.isatty() else 110)
    usual = torch.get_num_threads()
    for part in options.parts:
        for threads in options.threads if part == "memory" else [usual]:
            torch.set_num_threads(threads)
            PARTS[part](options, console)
    torch.set_num_threads(usual)
    return 0


def _in_memory(options: argparse.Namespace, console: Console) -> None:
    whole = _whole(options.size, options.tensors)
    nbytes = sum(tensor.nbytes for tensor in whole.values())
    source = [st.map_data(torch.clone, tree) for tree in shard(whole, TENSORS_ON_RANKS, ROWS)]
    threads = plural(torch.get_num_threads(), "thread")
    what = f"{nbytes / 1e9:.3g} GB in {options.tensors} tensors, {threads}, medians of {options.rounds} rounds"
    room = torch.zeros(nbytes + 64 * 8 * len(whole), dtype=torch.uint8)
    kinds: dict[str, Callable[[], Empty]] = {
        "into memory that was written before": partial(_kept, room),
        "into new memory": lambda: torch.empty,
        "into new memory in huge pages": lambda: empty_tensor,
    }
    for title, memory in kinds.items():
        jobs: dict[str, Job] = {COPY: partial(_copied, whole, memory)}
        for name, (mesh, spec) in LAYOUTS.items():
            jobs[name] = partial(_resharded, source, abstract(whole, mesh, spec), memory)
        for name, (mesh, spec) in LAYOUTS.items():
            _check(name, jobs[name](), shard(whole, mesh, spec))
        console.print(_table(f"{title}: {what}", _measured(jobs, options.rounds), COPY, nbytes))


def _whole(size: int, tensors: int) -> dict[str, torch.Tensor]:
    columns = 4096 if size // tensors >= 2 * 4096 * 48 else 48
    rows = max(1, size // tensors // 2 // columns // 24) * 24
    generator = torch.Generator().manual_seed(0)
    drawn = (torch.randint(-(2**15), 2**15, (rows, columns), generator=generator) for _ in range(tensors))
    return {f"layers.{number}": one.to(torch.int16).view(torch.bfloat16) for number, one in enumerate(drawn)}


Empty = Callable[..., torch.Tensor]


def _kept(room: torch.Tensor) -> Empty:
    """Return a function that makes tensors in memory that there is, one behind the other."""
    used = 0

    def empty(shape: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        nonlocal used
        first, used = used, used + -(-torch.Size(shape).numel() * dtype.itemsize // 64) * 64
        return room[first : first + torch.Size(shape).numel() * dtype.itemsize].view(dtype).view(shape)

    return empty


def _copied(whole: dict[str, torch.Tensor], memory: Callable[[], Empty]) -> list[torch.Tensor]:
    empty = memory()
    return [empty(one.shape, dtype=one.dtype, device=one.device).copy_(one) for one in whole.values()]


def _resharded(source: Trees, targets: Trees, memory: Callable[[], Empty]) -> Trees:
    found: Trees = st.reshard(source, targets, empty=memory())
    return found


def _check(name: str, found: Any, expected: Trees) -> None:
    for rank, (left, right) in enumerate(zip(found, expected, strict=True)):
        for key, one in right.items():
            if not torch.equal(left[key].data.view(torch.int16), one.data.view(torch.int16)):
                raise ValueError(f"{name}: {key!r} of rank {rank} is wrong")


def _plans(options: argparse.Namespace, console: Console) -> None:
    parts = 64
    tensors = max(1, options.pairs // parts**2)
    kinds = {f"layers.{number}": Kind(torch.bfloat16, (8192, 8192), 0) for number in range(tensors)}
    mesh = Mesh(rank=parts)
    rows, columns = (
        mesh_columns(kinds, mesh, dict.fromkeys(kinds, spec)) for spec in (ROWS, PartitionSpec(None, "rank"))
    )
    plan = st.plan_reshard(rows, columns)
    jobs: dict[str, Job] = {
        f"plan of {len(plan.transfers):,} pairs of chunks": partial(st.plan_reshard, rows, columns),
        "what it says": partial(str, plan),
        "its check": plan.check,
        "its schedule": plan.schedule,
    }
    title = f"{tensors} tensors from {parts} ranks' rows to their columns, medians of {options.rounds} rounds"
    console.print(_table(title, _measured(jobs, options.rounds)))


def _live(options: argparse.Namespace, console: Console) -> None:
    from ._live import live

    live(options, console)


PARTS: dict[str, Callable[[argparse.Namespace, Console], None]] = {
    "memory": _in_memory,
    "plan": _plans,
    "live": _live,
}


def _measured(jobs: dict[str, Job], rounds: int) -> Seconds:
    seconds: Seconds = {name: [] for name in jobs}
    for number in range(-1, rounds):
        for name, taken in _round(jobs, number):
            if number >= 0:
                seconds[name].append(taken)
    return seconds


def _round(jobs: dict[str, Job], number: int) -> Iterator[tuple[str, tuple[float, float]]]:
    """Yield everybody's seconds, in an order that is another in each round."""
    for name in Random(number).sample(list(jobs), len(jobs)):
        start = time.perf_counter(), time.process_time()
        made = jobs[name]()
        taken = time.perf_counter() - start[0], time.process_time() - start[1]
        del made
        yield name, taken


def _table(title: str, seconds: Seconds, base: str | None = None, nbytes: int = 0) -> Table:
    """Return what was measured, with the ratio to the time of `base` in the same round."""
    drawn = Table(title=title, title_justify="left")
    more = ("GB/s", f"times the {base}'s", "times its processor s") if base else ()
    for heading in ("by", "seconds", "processor s", *more):
        drawn.add_column(heading, justify="left" if heading == "by" else "right")
    for name, taken in seconds.items():
        clock, processor = (median(each) for each in zip(*taken, strict=True))
        cells = [name, f"{clock:.3f}", f"{processor:.3f}"]
        if base:
            cells.append(f"{nbytes / clock / 1e9:.2f}")
            cells += [f"{_ratio(taken, seconds[base], kind):.2f}" for kind in (0, 1)]
        drawn.add_row(*cells)
    return drawn


def _ratio(taken: list[tuple[float, float]], base: list[tuple[float, float]], kind: int) -> float:
    """Return the median of the rounds' ratios: what slows a whole round down doesn't count."""
    return median(one[kind] / two[kind] for one, two in zip(taken, base, strict=True))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.reshard", description=__doc__)
    parser.add_argument("--size", type=_bytes, default=_bytes("2GB"), help="of all tensors together")
    parser.add_argument("--tensors", type=int, default=50, help="how many there are")
    parser.add_argument("--pairs", type=int, default=1_000_000, help="of chunks in the plan, about")
    parser.add_argument("--rounds", type=int, default=5, help="that count; one more warms up")
    usual = sorted({1, torch.get_num_threads()})
    parser.add_argument("--threads", type=int, nargs="+", default=usual, help="in memory; two tables for each number")
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS), help="which of them to run")
    return parser


if __name__ == "__main__":
    sys.exit(main())
