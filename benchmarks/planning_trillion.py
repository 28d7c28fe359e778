"""What one of 16,384 ranks does before it writes its part of a trillion parameters, and what the ranks tell each other.

2,000 tensors, a 16th of them on each pipeline stage, so that a rank holds 125: FSDP, where each rank has its own piece
of every matrix, and ZeRO-1, where 128 ranks hold each piece of a parameter. Both with layouts exchanged and with a
layout that every rank computes by itself. A pickle is what travels; it is received once from each rank. Seconds are
the processor's.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Iterator
from functools import partial
from math import prod
from typing import Any

import numpy as np
import torch

from shardtree.checkpoint._consistency import describe, known_layout
from shardtree.checkpoint._packed import PackedColumns, pack_columns, unpack_columns, without_long_table
from shardtree.layouts import (
    Mesh,
    PartitionSpec,
    ShardColumns,
    TensorKind,
    mesh_columns,
    mesh_shard,
    rank_leaf,
    select_rows,
    shard_columns,
)
from shardtree.plans import level_writes
from shardtree.strategies.index import RankFiles

from ._bars import Bar, Settings
from .planning_chunks import peak_bytes
from .planning_ranks import shared_out

SHAPES = ((49152, 16384), (16384, 16384), (57344, 16384), (16384,))
"""Of attention, its projection, the feed-forward part and a norm, by turns: 1.007e12 elements in 2,000 tensors."""
LAYOUTS = {"FSDP": PartitionSpec("dp", "tp"), "ZeRO-1": PartitionSpec(None, "tp")}


def trillion_bars(settings: Settings) -> list[Bar]:
    """Return what one rank takes for each step, and the bytes that each rank tells; none of it has a bar."""
    mesh, tensors = (Mesh(pp=2, dp=4, tp=2), 40) if settings.quick else (Mesh(pp=16, dp=128, tp=8), 2000)
    return [bar for name, spec in LAYOUTS.items() for bar in _layout_bars(name, mesh, *model(mesh, tensors, spec))]


def model(mesh: Mesh, tensors: int, spec: PartitionSpec) -> tuple[dict[str, TensorKind], dict[str, PartitionSpec]]:
    """Return the tensors, by key, and how each is cut: matrices by the spec, norms not at all."""
    kinds, specs = {}, {}
    for number in range(tensors):
        shape, key = SHAPES[number % len(SHAPES)], f"decoder.layers.{number // 4:04}.{number % 4}.weight"
        kinds[key] = TensorKind(torch.bfloat16, shape, 0)
        at = {"pp": number * mesh.shape["pp"] // tensors}
        specs[key] = PartitionSpec(*(spec.entries if len(shape) > 1 else ()), at=at)
    return kinds, specs


def _layout_bars(name: str, mesh: Mesh, kinds: dict[str, TensorKind], specs: dict[str, PartitionSpec]) -> Iterator[Bar]:
    rank, ranks = mesh.size // 2, mesh.size
    elements = sum(prod(kind.global_shape) for kind in kinds.values())
    parts = ((key, mesh_shard(kind.global_shape, mesh, specs[key], rank)) for key, kind in kinds.items())
    own: Any = [rank_leaf(key, None, torch.bfloat16, part) for key, part in parts if part]
    compute = partial(mesh_columns, kinds, mesh, specs)
    layout = compute()
    written = np.flatnonzero(level_writes(layout, ranks))
    if np.bincount(layout.key[written], layout.elements[written], len(kinds)).sum() != elements:
        raise ValueError(f"{name}: not every element is written once")
    match = partial(known_layout, "save", layout, own, rank, ranks)
    known = match()
    yield from _steps(
        f"{name}, known",
        {
            f"compute all {len(layout):,} shards": compute,
            "match one's own": match,
            "check and share out": partial(shared_out, [layout], ranks),
        },
    )
    yield _said(f"{name}, known", "a rank says", pickle.dumps(describe(own, (), rank, known=known, ranks=ranks)), ranks)
    told = _descriptions(layout, ranks)
    described = unpack_columns(told)
    yield from _steps(
        f"{name}, exchanged",
        {
            f"describe one's own {len(own)} shards": partial(shard_columns, own, rank),
            "read what the ranks say": partial(unpack_columns, told),
            "join, check and share out": partial(shared_out, described, ranks),
        },
    )
    yield _said(f"{name}, exchanged", "a rank says", pickle.dumps(without_long_table(told[rank], ranks)), ranks)
    tables = {part.digest: part.table or b"" for part in told}
    size = sum(map(len, tables.values()))
    note = f"{len(tables)} in all: {size / 1e6:,.2f} MB"
    yield Bar(f"{name}, exchanged: a table", "", size / len(tables) / 1e3, None, float("nan"), None, "kB", note)
    yield _said(name, "a rank says in the commit", _commit(layout, written, rank), ranks)


def _steps(name: str, steps: dict[str, Callable[[], Any]]) -> Iterator[Bar]:
    for what, job in steps.items():
        begin = time.process_time()
        job()
        seconds = time.process_time() - begin
        peak = peak_bytes(job)
        yield Bar(f"{name}: {what}", "", seconds, None, float("nan"), None)
        yield Bar(f"{name}: {what}", "", peak / 1e6, None, float("nan"), None, "MB", "the most at the same time")


def _said(name: str, what: str, packed: bytes, ranks: int) -> Bar:
    told = f"from all {ranks:,}: {len(packed) * ranks / 1e6:,.1f} MB"
    return Bar(f"{name}: {what}", "", len(packed) / 1e3, None, float("nan"), None, "kB", told)


def _descriptions(layout: ShardColumns, ranks: int) -> list[PackedColumns]:
    """Return what each rank says of its own shards, with its table of keys, which equal ranks need only once."""
    order = np.argsort(layout.rank, kind="stable")
    rows = np.split(order, np.searchsorted(layout.rank[order], np.arange(1, ranks)))
    return [pack_columns(_own(select_rows(layout, each)), rank) for rank, each in enumerate(rows)]


def _own(columns: ShardColumns) -> ShardColumns:
    """Return columns without the keys that they have no row of, as a rank makes them of its own shards."""
    held, key = np.unique(columns.key, return_inverse=True)
    named = [(columns.keys[number], columns.kinds[number]) for number in held.tolist()]
    keys, kinds = zip(*named, strict=True)
    arrays = (columns.offset, columns.shape, columns.start, columns.stop, columns.rank, columns.main)
    return ShardColumns(keys, kinds, key, *arrays)


def _commit(layout: ShardColumns, written: Any, rank: int) -> bytes:
    """Return what a rank tells in the commit, but the hashes of its files' blocks: 8 bytes for each 256 KiB."""
    held = _own(select_rows(layout, written[layout.rank[written] == rank]))
    none = np.zeros(len(held), dtype=np.int64)
    name = f"save-0123456789abcdef/{rank:05}-of-{layout.rank.max() + 1:05}.safetensors"
    return pickle.dumps(RankFiles((name,), (1,), (None,), held, none, none, ()))
