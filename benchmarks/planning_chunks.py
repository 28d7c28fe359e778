"""One rank's plan of a load from a million stored chunks: its time, its memory, and how both grow."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from shardtree.geometry import Column
from shardtree.layouts import ShardColumns, TensorKind
from shardtree.plans import LoadPlan, StoredChunks, plan_load

from ._bars import Bar, Settings

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
