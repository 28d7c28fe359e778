"""Plans: ``python -m benchmarks.planning``.

A load from a million chunks: its time, its memory, and how both grow. Then saves and loads of 512 ranks, 1,000 tensors,
beside DCP's planners on the same layout. No file is read or written, and no rank is more than its layout.

Beside DCP both begin with leaves that know their place, and end with what each rank writes or reads. Ours: the columns
of each rank; all ranks' columns joined, checked and shared out, once, since every rank computes the same of the same;
for the load the columns of each rank, and the plan on the index, with all checks. DCP's: the local plan of each rank,
the global plan, each rank's finished plan; for the load the local plans. Neither counts what travels between ranks. The
collector is off for both, of which DCP gains most. Seconds are the processor's. Loads are planned for every 16th rank,
one by turns with the other, and count 16 times: all have as much to do.
"""

from __future__ import annotations

import sys
import time
import tracemalloc
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import LoadPlan as DcpLoadPlan
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from shardtree.core.ambient import collector_paused
from shardtree.core.geometry import Column
from shardtree.core.layouts import join_agreed, raise_problems, select_rows
from shardtree.core.plans import LoadPlan, StoredChunks, level_writes, plan_load
from shardtree.layouts import (
    Mesh,
    PartitionSpec,
    RankShard,
    ShardColumns,
    TensorKind,
    mesh_shards,
    shard_columns,
    sharding_problems,
)
from shardtree.meshes import rank_leaf
from shardtree.shell.table.index import Index, build_index, plan_shards
from shardtree.storage import StoredFile

from ._measuring import Bar, Settings, print_bars, run

MILLION = 1_000_000
ITEM = 4
TRIES = 3


@dataclass(frozen=True, slots=True)
class Case:
    """Stored tensors that are all cut alike, and which part of each a rank wants.

    Attributes:
        name: what it is called in the table.
        chunks_of_key: about how many chunks a tensor has; None for all of them in one tensor.
        cut: makes the chunks of one tensor, as offsets and shapes.
        parts: the rank wants one of so many parts of the columns.
    """

    name: str
    chunks_of_key: int | None
    cut: Callable[[int], tuple[Column, Column]]
    parts: int


def grid(chunks: int, *, uneven: bool = False) -> tuple[Column, Column]:
    """Return a square grid of about so many cells, equal ones or not."""
    side = max(1, round(chunks**0.5))
    sizes = np.random.default_rng(0).integers(1, 33, side) if uneven else np.full(side, 16)
    sizes[-1] += -sizes.sum() % 8  # so that columns come in eight equal parts
    begin = np.cumsum(sizes) - sizes
    row, column = np.divmod(np.arange(side * side), side)
    return np.stack([begin[row], begin[column]], axis=1), np.stack([sizes[row], sizes[column]], axis=1)


def bricks(chunks: int) -> tuple[Column, Column]:
    """Return rows of boxes that are cut at other places in each row: no grid."""
    side, rng = max(1, round(chunks**0.5)), np.random.default_rng(0)
    inner = (np.sort(rng.choice(np.arange(1, side * 16), side - 1, replace=False)) for _ in range(side))
    edges = np.stack([np.concatenate([[0], cuts, [side * 16]]) for cuts in inner])
    row = np.repeat(np.arange(side), side) * 16
    offset = np.stack([row, edges[:, :-1].reshape(-1)], axis=1)
    return offset, np.stack([np.full(row.size, 16), np.diff(edges, axis=1).reshape(-1)], axis=1)


CASES = (
    Case("1 tensor, a grid, all of it", None, grid, 1),
    Case("1 tensor, an uneven grid, all of it", None, partial(grid, uneven=True), 1),
    Case("1 tensor, irregular, all of it", None, bricks, 1),
    Case("1 tensor, irregular, an 8th of its columns", None, bricks, 8),
    Case("tensors of 1,024 chunks, a grid, an 8th", 1024, grid, 8),
    Case("tensors of 1,024 chunks, irregular, an 8th", 1024, bricks, 8),
    Case("tensors of 4 chunks, a half", 4, grid, 2),
    Case("tensors of 1 chunk, an 8th", 1, grid, 8),
)


def chunk_bars(settings: Settings) -> list[Bar]:
    """Return a bar for the time, the memory and the growth of each case."""
    most = 4096 if settings.quick else MILLION
    return [bar for case in CASES for bar in _case_bars(case, most)]


def _case_bars(case: Case, most: int) -> Iterator[Bar]:
    seconds, peaks = zip(*(_measured(*request(case, count)) for count in (most // 4, most // 2, most)), strict=True)
    told = "; ".join(f"{count:,}: {taken:.3f} s" for count, taken in zip((most // 4, most // 2), seconds, strict=False))
    name = f"plan a load of {most:,} chunks: {case.name}"
    yield Bar(name, "", seconds[-1], None, seconds[-1], 1.0, note=told)
    growth = seconds[-1] / seconds[0] / 4
    yield Bar(name, "4 x a quarter's", seconds[-1], 4 * seconds[0], growth, 2.0, note="linear growth is 1")
    yield Bar(name, "", peaks[-1] / 1e9, None, peaks[-1] / 1e9, 1.0, "GB", "allocated at the same time")
    growth = peaks[-1] / peaks[0] / 4
    yield Bar(name, "4 x a quarter's", peaks[-1] / 1e6, 4 * peaks[0] / 1e6, growth, 1.25, "MB", "linear growth is 1")


def request(case: Case, chunks: int) -> tuple[ShardColumns, StoredChunks]:
    """Return what a rank wants, a shard of each tensor, and about so many stored chunks."""
    offset, shape = case.cut(case.chunks_of_key or chunks)
    tensors = max(1, chunks // len(offset))
    whole = (offset + shape).max(axis=0)
    key, none = np.repeat(np.arange(tensors), len(offset)), np.full(tensors * len(offset), -1)
    size = np.tile(shape.prod(axis=1), tensors) * ITEM
    stored = StoredChunks(
        key=key,
        offset=np.tile(offset, (tensors, 1)),
        shape=np.tile(shape, (tensors, 1)),
        start=none,
        stop=none,
        file=np.arange(key.size) * 16 // key.size,
        byte=np.cumsum(size) - size,
    )
    return _part(tensors, whole, case.parts), stored


def _part(tensors: int, whole: Column, parts: int) -> ShardColumns:
    """Return the middle one of equal parts of each tensor's columns."""
    columns = int(whole[1]) // parts
    kind, none = TensorKind(torch.float32, tuple(whole.tolist()), 0), np.full(tensors, -1)
    return ShardColumns(
        keys=tuple(f"layers.{number:07}.weight" for number in range(tensors)),
        kinds=(kind,) * tensors,
        key=np.arange(tensors),
        offset=np.tile([0, parts // 2 * columns], (tensors, 1)),
        shape=np.tile([int(whole[0]), columns], (tensors, 1)),
        start=none,
        stop=none,
        rank=np.zeros(tensors, dtype=np.int64),
        main=np.ones(tensors, dtype=np.bool_),
    )


def _measured(wanted: ShardColumns, stored: StoredChunks) -> tuple[float, int]:
    """Return the seconds of the fastest of a few plans, and the most bytes that one has at the same time."""
    _check(wanted, plan_load(wanted, stored))
    seconds = min(_seconds(partial(plan_load, wanted, stored)) for _ in range(TRIES))
    return seconds, peak_bytes(partial(plan_load, wanted, stored))


def _check(wanted: ShardColumns, plan: LoadPlan) -> None:
    if plan.covered.tolist() != wanted.elements.tolist() or plan.bytes_read != int(wanted.elements.sum()) * ITEM:
        raise ValueError(f"the plan reads {plan.bytes_read} bytes, not those that are wanted, each once")


def _seconds(job: Callable[[], object]) -> float:
    begin = time.perf_counter()
    job()
    return time.perf_counter() - begin


def peak_bytes(job: Callable[[], object]) -> int:
    """Return the most bytes that a job has allocated at the same time."""
    tracemalloc.start()
    try:
        job()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


Tree = dict[str, Any]


class PlacedTensor(torch.Tensor):
    """A tensor that answers DCP as a DTensor does, and knows its place: it needn't be computed from a mesh."""

    whole: torch.Size
    box: ChunkStorageMetadata
    properties: TensorProperties

    def size(self, *_: Any) -> Any:
        """Return the global shape, as a DTensor does."""
        return self.whole

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        data = TensorWriteData(chunk=self.box, properties=self.properties, size=self.whole)
        return [WriteItem(index=MetadataIndex(fqn, self.box.offsets), type=WriteItemType.SHARD, tensor_data=data)]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [self.box]


def placed_tensor(
    whole: tuple[int, ...], offset: tuple[int, ...], shape: tuple[int, ...], dtype: torch.dtype
) -> PlacedTensor:
    """Return a tensor that says that it is a box of a larger one."""
    made: PlacedTensor = torch.empty(0, dtype=dtype).as_subclass(PlacedTensor)
    made.whole = torch.Size(whole)
    made.box = ChunkStorageMetadata(torch.Size(offset), torch.Size(shape))
    made.properties = TensorProperties(dtype)
    return made


def save_planner(tree: Tree, rank: int, *, caching: bool = False) -> DefaultSavePlanner:
    """Return a rank's planner, as a save sets it up; with plans kept by rank, since here all ranks share a process."""
    planner = DefaultSavePlanner(enable_plan_caching=caching)
    planner.set_up_planner(tree, None, rank == 0)
    planner._cached_plans_key = f"rank {rank}"
    return planner


def global_save_plan(planner: DefaultSavePlanner, plans: Sequence[SavePlan]) -> tuple[list[SavePlan], Metadata]:
    """Return what the coordinator tells the ranks, and the metadata that is stored."""
    return planner.create_global_plan(list(plans))


def finished(planners: Iterable[DefaultSavePlanner], plans: Iterable[SavePlan]) -> list[SavePlan]:
    """Return each rank's final plan."""
    return [planner.finish_plan(plan) for planner, plan in zip(planners, plans, strict=True)]


def load_plan(tree: Tree, metadata: Metadata, rank: int) -> DcpLoadPlan:
    """Return what a rank reads. The global plan is the list of these: there DCP has nothing to do."""
    planner = DefaultLoadPlanner()
    planner.set_up_planner(tree, metadata, rank == 0)
    local = planner.create_local_plan()
    return planner.finish_plan(planner.create_global_plan([local])[0])


def forget_plans() -> None:
    """Remove all plans that planners keep for the next save."""
    for kept in ("_cached_save_plan", "_cached_final_save_plan", "_cached_all_plans", "_cached_global_plan"):
        getattr(SavePlanner, kept).clear()
    SavePlanner._cached_metadata.clear()


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


PARTS = {
    "One rank's request from many stored chunks": chunk_bars,
    "All ranks' plans beside DCP's planners": rank_bars,
}


def bars(settings: Settings) -> list[Bar]:
    """Measure, print a table for each part, and return its bars."""
    found = []
    for title, part in PARTS.items():
        rows = part(settings)
        print_bars(title, rows, settings.console)
        found += rows
    return found


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark and return the exit status."""
    return run(bars, arguments, "benchmarks.planning", __doc__)


if __name__ == "__main__":
    sys.exit(main())
