"""Plans of 512 ranks for a save and a load of 1,000 tensors, beside DCP's planners on the same layout.

Both begin with leaves that know their place, and end with what each rank writes or reads. Ours: the columns of each
rank; all ranks' columns joined, checked and shared out, once, since every rank computes the same of the same; for the
load the columns of each rank, and the plan on the index, with all checks. DCP's: the local plan of each rank, the
global plan, each rank's finished plan; for the load the local plans. Neither counts what travels between ranks.

The collector is off for both, of which DCP gains most. Seconds are the processor's. Loads are planned for every 16th
rank, one by turns with the other, and count 16 times: all have as much to do.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch

from shardtree._ambient import collector_paused
from shardtree.layouts import (
    Mesh,
    PartitionSpec,
    RankShard,
    ShardColumns,
    join_agreed,
    mesh_shards,
    raise_problems,
    rank_leaf,
    select_rows,
    shard_columns,
    sharding_problems,
)
from shardtree.plans import level_writes
from shardtree.storage import StoredFile
from shardtree.strategies.index import Index, build_index, plan_shards

from ._bars import Bar, Settings
from .planning_dcp import Tree, finished, forget_plans, global_save_plan, load_plan, placed_tensor, save_planner

T = TypeVar("T")
DTYPE = torch.bfloat16
PEER = "DCP's planners"


@dataclass(frozen=True, slots=True)
class Job:
    """How many ranks plan what.

    Attributes:
        saved: the mesh that saves.
        loaded: the mesh that loads.
        tensors: how many there are; one in eight is held by every rank, the others are cut for all of them.
        every: of the ranks that load, so many are skipped to the next.
    """

    saved: Mesh
    loaded: Mesh
    tensors: int
    every: int


class Clock:
    """Processor seconds of one step after the other, added up by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def timed(self, name: str, job: Callable[..., T], *arguments: Any) -> T:
        """Return what a job returns, once its seconds are added."""
        begin = time.process_time()
        value = job(*arguments)
        self.seconds[name] = self.seconds.get(name, 0.0) + time.process_time() - begin
        return value


def rank_bars(settings: Settings) -> list[Bar]:
    """Return the bar for save and load together, and what each of them took."""
    big = Job(Mesh(dp=64, tp=8), Mesh(dp=128, tp=4), 1000, 16)
    job = Job(Mesh(dp=4, tp=4), Mesh(dp=8, tp=2), 16, 4) if settings.quick else big
    with collector_paused():
        ours, theirs = Clock(), Clock()
        stored = _save(ours, job)
        metadata = _save_by_dcp(theirs, job)
        _loads(ours, theirs, job, stored, metadata)
    for clock in (ours, theirs):
        for name in [name for name in clock.seconds if name.startswith("load")]:
            clock.seconds[name] *= job.every
    return list(_bars(job, ours.seconds, theirs.seconds))


def leaves(job: Job, mesh: Mesh, make: Callable[[str, RankShard], T]) -> Iterator[list[T]]:
    """Yield what each rank holds, one rank at a time."""
    weight, norm = (8192, 8192), (8192,)
    cut = mesh_shards(weight, mesh, PartitionSpec("dp", "tp")), mesh_shards(norm, mesh, PartitionSpec())
    for rank in range(mesh.size):
        yield [make(f"layers.{number:04}.weight", cut[number % 8 == 7][rank]) for number in range(job.tensors)]


def shard_of(key: str, part: RankShard) -> Any:
    return rank_leaf(key, None, DTYPE, part)


def dcp_leaf(key: str, part: RankShard) -> tuple[str, Any]:
    (box,) = part.boxes
    return key, placed_tensor(part.global_shape, box.offset, box.shape, DTYPE)


def _save(clock: Clock, job: Job) -> Index:
    parts = [
        clock.timed("save: each rank", shard_columns, shards, rank)
        for rank, shards in enumerate(leaves(job, job.saved, shard_of))
    ]
    columns, writes = clock.timed("save: together", shared_out, parts, job.saved.size)
    return stored_index(select_rows(columns, np.flatnonzero(writes)), job.saved.size)


def shared_out(parts: Sequence[ShardColumns], ranks: int) -> tuple[ShardColumns, Any]:
    """Return all ranks' shards once they are checked, and which of them are written."""
    raise_problems(sharding_problems(parts))
    columns = join_agreed(parts)
    return columns, level_writes(columns, ranks)


def stored_index(written: ShardColumns, ranks: int) -> Index:
    """Return the index of a checkpoint in which each rank wrote a file."""
    size = written.elements * written.item_size[written.key]
    order = np.lexsort((written.key, written.rank))
    end = np.zeros(len(written), dtype=np.int64)
    end[order] = np.cumsum(size[order])
    files = [StoredFile(f"{rank:05}", int(size.sum())) for rank in range(ranks)]
    return build_index(written, written.rank, end - size, files=files)


def _save_by_dcp(clock: Clock, job: Job) -> Any:
    metadata = _one_save_by_dcp(clock, job, "save", caching=False)
    for name in ("first save that is kept", "save again"):
        _one_save_by_dcp(clock, job, name, caching=True)
    forget_plans()
    return metadata


def _one_save_by_dcp(clock: Clock, job: Job, name: str, *, caching: bool) -> Any:
    planners, plans = [], []
    for rank, pairs in enumerate(leaves(job, job.saved, dcp_leaf)):
        planner = clock.timed(f"{name}: each rank", partial(save_planner, caching=caching), dict(pairs), rank)
        plans.append(clock.timed(f"{name}: each rank", planner.create_local_plan))
        planners.append(planner)
        planner.state_dict = {}  # what isn't used any more makes room for the next rank's
    plans, metadata = clock.timed(f"{name}: together", global_save_plan, planners[0], plans)
    clock.timed(f"{name}: finish", finished, planners, plans)
    return metadata


def _loads(ours: Clock, theirs: Clock, job: Job, index: Index, metadata: Any) -> None:
    pairs = zip(leaves(job, job.loaded, shard_of), leaves(job, job.loaded, dcp_leaf), strict=True)
    for rank, (shards, named) in enumerate(pairs):
        if rank % job.every:
            continue
        tree: Tree = dict(named)
        columns = ours.timed("load: columns", shard_columns, shards, rank)
        plan = ours.timed("load: plan", plan_shards, index, shards, columns)
        items = theirs.timed("load: plan", load_plan, tree, metadata, rank).items
        pieces = plan.runs.file.size + plan.strided.file.size
        if plan.covered.tolist() != columns.elements.tolist() or not 0 < pieces <= len(items):
            raise ValueError(f"rank {rank}: {pieces} pieces beside DCP's {len(items)}, or not all that is wanted")


def _bars(job: Job, ours: dict[str, float], theirs: dict[str, float]) -> Iterator[Bar]:
    title = f"{job.saved.size} ranks x {job.tensors:,} tensors"
    save, load = _sum(ours, "save:"), _sum(ours, "load:")
    their_save, their_load = _sum(theirs, "save:"), _sum(theirs, "load:")
    total, their_total = save + load, their_save + their_load
    sampled = f"1 round; loads of {job.saved.size // job.every} ranks, scaled"
    yield Bar(f"plan save and load, {title}", PEER, total, their_total, total / their_total, 0.02, note=sampled)
    yield Bar(f"plan a save, {title}", PEER, save, their_save, save / their_save, None)
    again = _sum(theirs, "save again:")
    yield Bar(f"plan a save, {title}", f"{PEER}, kept plans", save, again, save / again, None, note="its second save")
    yield Bar(f"plan a load, {title}", PEER, load, their_load, load / their_load, None, note=sampled)
    ranks = job.saved.size
    longest = ours["save: each rank"] / ranks + ours["save: together"]
    their_longest = theirs["save: each rank"] / ranks + theirs["save: together"]
    what = f"until a rank knows what it writes, {title}"
    yield Bar(what, PEER, longest, their_longest, longest / their_longest, None, note="all ranks at once")


def _sum(seconds: dict[str, float], prefix: str) -> float:
    return sum(taken for name, taken in seconds.items() if name.startswith(prefix))
