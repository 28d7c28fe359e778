"""The live part of ``benchmarks.reshard``: processes of this machine, over gloo, beside torch's DTensor if it can."""

from __future__ import annotations

import argparse
import ctypes
import gc
import time
from collections.abc import Callable
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
from shardtree.fingerprints import bytes_total
from shardtree.layouts import Mesh, PartitionSpec
from shardtree.world import World, run_processes

PEER = "DTensor.redistribute"
OURS: dict[str, dict[str, Any]] = {
    "redistribute": {},
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


def live(options: argparse.Namespace, console: Console) -> None:
    """Print what resharding between processes takes: seconds of the slowest rank, and memory beside what was there."""
    drawn = Table(
        title=f"between processes: {options.size / 1e9:.3g} GB in {options.tensors} tensors, medians of rounds"
    )
    headings = ("case", "by", "seconds", "moved GB/s", "MB at the peak", "times DTensor's time", "times our time")
    for heading in headings:
        drawn.add_column(heading, justify="left" if heading in ("case", "by") else "right")
    for case in CASES:
        plan = _plan(case, options.size, options.tensors)
        ranks = run_processes(
            case.ranks, partial(_rank, case=case, size=options.size, tensors=options.tensors, rounds=options.rounds)
        )
        for name in ranks[0]:
            seconds = [max(each) for each in zip(*(rank[name][0] for rank in ranks), strict=True)]
            peak = max(rank[name][1] for rank in ranks)
            speed = f"{plan.bytes_moved / median(seconds) / 1e9:.2f}"
            ratios = [_ratio(ranks, name, other) if other in ranks[0] else "" for other in (PEER, "redistribute")]
            drawn.add_row(case.name, name, f"{median(seconds):.3f}", speed, f"{peak / 1e6:.0f}", *ratios)
    console.print(drawn)


def _ratio(ranks: list[Any], name: str, other: str) -> str:
    """Return the median of rounds' ratios, of the slowest rank each."""
    ours, theirs = (
        [max(each) for each in zip(*(rank[one][0] for rank in ranks), strict=True)] for one in (name, other)
    )
    return f"{median(one / two for one, two in zip(ours, theirs, strict=True)):.2f}"


def _shape(size: int, tensors: int) -> tuple[int, int]:
    return max(1, size // tensors // 4 // 1024 // 8) * 8, 1024


def _plan(case: _Case, size: int, tensors: int) -> st.ReshardPlan:
    whole = {f"layers.{number}": torch.empty(_shape(size, tensors), device="meta") for number in range(tensors)}
    plan = st.plan_reshard(st.layout_of(whole, *case.source), st.layout_of(whole, *case.target))
    return st.plans.with_relays(plan) if case.relay else plan


def _rank(world: World, case: _Case, size: int, tensors: int, rounds: int) -> dict[str, tuple[list[float], int]]:
    """Return the seconds of each round and the peak memory by contender, on one rank."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    shape = _shape(size, tensors)
    whole = {f"layers.{number}": torch.rand(shape, generator=generator) for number in range(tensors)}
    plan = _plan(case, size, tensors)
    jobs = {name: _ours(world, case, whole, plan, options) for name, options in OURS.items()}
    for _ in range(-(-(2**32) // size)):  # until the loop of the sums is compiled, which takes so many bytes
        for tensor in whole.values():
            bytes_total(tensor.view(-1).view(torch.uint8))
    if case.placements is not None:
        jobs[PEER] = _peer(case, whole)
    expected = _own(whole, case.target, world.rank)
    del whole
    _check(world.rank, jobs, expected)
    peaks = {name: _peak(world, job) for name, job in jobs.items()}
    seconds: dict[str, list[float]] = {name: [] for name in jobs}
    for number in range(rounds):
        for name in Random(number).sample(list(jobs), len(jobs)):
            world.barrier()
            start = time.perf_counter()
            made = jobs[name]()
            seconds[name].append(time.perf_counter() - start)
            del made
    return {name: (seconds[name], peaks[name]) for name in jobs}


def _own(whole: Any, layout: tuple[Mesh, PartitionSpec], rank: int) -> Any:
    """Return a rank's tree with memory of its own; None where it isn't on the mesh."""
    return st.map_data(torch.clone, st.shard_at(whole, *layout, rank)) if rank in layout[0].ranks else None


def _ours(world: World, case: _Case, whole: Any, plan: st.ReshardPlan, options: dict[str, Any]) -> Callable[[], Any]:
    source = _own(whole, case.source, world.rank)
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


def _check(rank: int, jobs: dict[str, Callable[[], Any]], expected: Any) -> None:
    for name, job in jobs.items():
        found = job()
        for key, shard in (expected or {}).items():
            if not torch.equal(found[key], shard.data):
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
