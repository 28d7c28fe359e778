"""Resharding: ``python -m benchmarks.reshard --size 2GB --rounds 5``.

In memory: trees of 8 ranks from one layout into another beside the plain copy of the same bytes, into memory that was
written before, into new memory, and into new memory in huge pages. Plans: a million pairs of chunks, planned,
checked and scheduled. Live: between processes, beside what torch's DTensor can do. In each round everybody has a turn,
in another order; a round before them warms up every buffer, and checks what was moved. Ratios are medians of the
rounds' ratios. Processor seconds are those of all threads, which others on the machine change least.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
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
from shardtree.live import run_processes
from shardtree.shell.storage import empty_tensor
from shardtree.world import World

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
    console = Console(width=None if sys.stdout.isatty() else 150)
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


# Between processes of this machine, over gloo, beside torch's DTensor if it can.

PEER, OWN = "DTensor.redistribute", "redistribute"
OURS: dict[str, dict[str, Any]] = {
    OWN: {},
    "verified": {"verify": True},
    "with 256 MiB in flight": {"max_bytes_in_flight": 256 * 2**20},
}


@dataclass(frozen=True)
class _Case:
    """From one layout into another; the placements are DTensor's words for the same, on the same mesh."""

    name: str
    source: tuple[Mesh, PartitionSpec]
    target: tuple[Mesh, PartitionSpec]
    placements: tuple[str, str] | None = None
    relay: bool = False

    @property
    def ranks(self) -> int:
        return max(self.source[0].ranks + self.target[0].ranks) + 1


_FOUR, _SQUARE = Mesh(x=4), Mesh(x=2, y=2)
_TRAINERS, _ENGINES = Mesh(dp=2, tp=2), Mesh(engine=2, tp=1).on_ranks([4, 5])
CASES = [
    _Case("rows to columns", (_FOUR, PartitionSpec("x")), (_FOUR, PartitionSpec(None, "x")), ("0", "1")),
    _Case("rows to copies", (_FOUR, PartitionSpec("x")), (_FOUR, PartitionSpec()), ("0", "r")),
    _Case(
        "2 x 2, axes exchanged", (_SQUARE, PartitionSpec("x", "y")), (_SQUARE, PartitionSpec("y", "x")), ("01", "10")
    ),
    _Case("trainers to 2 engines", (_TRAINERS, PartitionSpec("tp")), (_ENGINES, PartitionSpec())),
    _Case("the same, relayed", (_TRAINERS, PartitionSpec("tp")), (_ENGINES, PartitionSpec()), relay=True),
]


def _live(options: argparse.Namespace, console: Console) -> None:
    """Print what resharding between processes takes: seconds of the slowest rank, and memory beside what was there."""
    drawn = Table(
        title=f"between processes: {options.size / 1e9:.3g} GB in {options.tensors} tensors, medians of rounds"
    )
    ratio_headings = ("times DTensor's time", "times our time", "times its processor seconds")
    headings = ("case", "by", "seconds", "moved GB/s", "MB at the peak", *ratio_headings)
    for heading in headings:
        drawn.add_column(heading, justify="left" if heading in ("case", "by") else "right")
    for case in CASES:
        plan = _plan_of(case, options.size, options.tensors)
        ranks = run_processes(
            case.ranks, partial(_rank, case=case, size=options.size, tensors=options.tensors, rounds=options.rounds)
        )
        for name in ranks[0]:
            seconds = [max(each) for each in zip(*(rank[name][0] for rank in ranks), strict=True)]
            peak = max(rank[name][2] for rank in ranks)
            speed = f"{plan.bytes_moved / median(seconds) / 1e9:.2f}"
            ratios = [_ratio_of_ranks(ranks, name, one, max, 0) if one in ranks[0] else "" for one in (PEER, OWN)]
            ratios.append(_ratio_of_ranks(ranks, name, OWN, sum, 1))
            drawn.add_row(case.name, name, f"{median(seconds):.3f}", speed, f"{peak / 1e6:.0f}", *ratios)
    console.print(drawn)


def _ratio_of_ranks(ranks: list[Any], name: str, other: str, together: Callable[[Any], float], clock: int) -> str:
    """Return the median of rounds' ratios: of the slowest rank by the clock, of all ranks' sum on processors."""
    ours, theirs = (
        [together(each) for each in zip(*(rank[one][clock] for rank in ranks), strict=True)] for one in (name, other)
    )
    return f"{median(one / two for one, two in zip(ours, theirs, strict=True)):.2f}"


def _shape(size: int, tensors: int) -> tuple[int, int]:
    return max(1, size // tensors // 4 // 1024 // 8) * 8, 1024


def _plan_of(case: _Case, size: int, tensors: int) -> st.ReshardPlan:
    whole = {f"layers.{number}": torch.empty(_shape(size, tensors), device="meta") for number in range(tensors)}
    plan = st.plan_reshard(st.layout_of(whole, *case.source), st.layout_of(whole, *case.target))
    return st.plans.with_relays(plan) if case.relay else plan


Taken = tuple[list[float], list[float], int]


def _rank(world: World, case: _Case, size: int, tensors: int, rounds: int) -> dict[str, Taken]:
    """Return the seconds of each round, by the clock and on processors, and the peak memory by contender, on a rank."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    shape = _shape(size, tensors)
    whole = {f"layers.{number}": torch.rand(shape, generator=generator) for number in range(tensors)}
    plan = _plan_of(case, size, tensors)
    jobs = {name: _ours(world, case, whole, plan, options) for name, options in OURS.items()}
    if case.placements is not None:
        jobs[PEER] = _peer(case, whole)
    expected = _own_part(whole, case.target, world.rank)
    del whole
    _check_made(world.rank, jobs, expected)
    peaks = {name: _peak(world, job) for name, job in jobs.items()}
    found: dict[str, Taken] = {name: ([], [], peaks[name]) for name in jobs}
    for number in range(rounds):
        for name in Random(number).sample(list(jobs), len(jobs)):
            world.barrier()
            begin, worked = time.perf_counter(), time.process_time()
            made = jobs[name]()
            found[name][0].append(time.perf_counter() - begin)
            found[name][1].append(time.process_time() - worked)
            del made
    return found


def _own_part(whole: Any, layout: tuple[Mesh, PartitionSpec], rank: int) -> Any:
    """Return a rank's tree with memory of its own; None where it isn't on the mesh."""
    return st.map_data(torch.clone, st.shard_at(whole, *layout, rank)) if rank in layout[0].ranks else None


def _ours(world: World, case: _Case, whole: Any, plan: st.ReshardPlan, options: dict[str, Any]) -> Callable[[], Any]:
    source = _own_part(whole, case.source, world.rank)
    holds = world.rank in case.target[0].ranks
    target = st.abstract_at(whole, *case.target, world.rank) if holds else None

    def run() -> dict[str, torch.Tensor]:
        got = st.redistribute(source, target, plan=plan, world=world, **options)
        return {} if got is None else {key: shard.data for key, shard in got.items()}

    return run


def _peer(case: _Case, whole: Any) -> Callable[[], Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    assert case.placements is not None
    mesh = init_device_mesh("cpu", tuple(case.source[0].shape.values()))
    before, after = ([Replicate() if one == "r" else Shard(int(one)) for one in word] for word in case.placements)
    held: dict[str, DTensor] = {key: distribute_tensor(tensor, mesh, before) for key, tensor in whole.items()}

    def run() -> dict[str, torch.Tensor]:
        return {key: one.redistribute(placements=after).to_local() for key, one in held.items()}

    return run


def _check_made(rank: int, jobs: dict[str, Callable[[], Any]], expected: Any) -> None:
    for name, job in jobs.items():
        found = job()
        for key, one in (expected or {}).items():
            if not torch.equal(found[key], one.data):
                raise ValueError(f"{name}: {key!r} of rank {rank} is wrong")


def _peak(world: World, job: Callable[[], Any]) -> int:
    """Return the bytes of memory that a run takes at its peak, beside what was there before."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    world.barrier()
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    made = job()
    peak = _status("VmHWM") - before
    del made
    return peak


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


PARTS: dict[str, Callable[[argparse.Namespace, Console], None]] = {
    "memory": _in_memory,
    "plan": _plans,
    "live": _live,
}


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
