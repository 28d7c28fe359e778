"""A model of experts over thousands of ranks, as columns.

Matrices of dense layers are cut by TP and FSDP, experts lie on one of the FSDP ranks each (EP) and are cut by TP,
layers lie on pipeline stages, and HSDP has copies of all that. Shapes are small: agreement doesn't depend on them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from shardtree.layouts import Mesh, PartitionSpec, ShardColumns, TensorKind, mesh_columns, select_rows
from shardtree.mapping import ShardedObject, ShardedTensor

DTYPE = torch.bfloat16
LAYERS = 64
MESHES = {
    8: Mesh(pp=2, hsdp=1, fsdp=2, tp=2),
    64: Mesh(pp=4, hsdp=2, fsdp=2, tp=4),
    256: Mesh(pp=8, hsdp=2, fsdp=4, tp=4),
    1024: Mesh(pp=16, hsdp=2, fsdp=4, tp=8),
    4096: Mesh(pp=16, hsdp=4, fsdp=8, tp=8),
}
DENSE = {
    "attention.qkv.weight": ((1536, 512), PartitionSpec("tp", "fsdp")),
    "attention.proj.weight": ((512, 512), PartitionSpec("fsdp", "tp")),
    "mlp.up.weight": ((2048, 512), PartitionSpec("tp", "fsdp")),
    "mlp.down.weight": ((512, 2048), PartitionSpec("fsdp", "tp")),
    "router.weight": ((256, 512), PartitionSpec("fsdp")),
    "router.bias": ((256,), PartitionSpec()),
    "norm.weight": ((512,), PartitionSpec("fsdp")),
    "mlp.norm.weight": ((512,), PartitionSpec("fsdp")),
}
EXPERT = {
    "gate.weight": ((128, 512), PartitionSpec("tp")),
    "up.weight": ((128, 512), PartitionSpec("tp")),
    "down.weight": ((512, 128), PartitionSpec(None, "tp")),
}


@dataclass(frozen=True, slots=True)
class Case:
    """What is saved or loaded, and how.

    Attributes:
        ranks: how many there are, one of `MESHES`.
        tensors: about how many the model has.
        known: whether ranks compute the layout by themselves, instead of exchanging it.
        flat: whether the copies of HSDP are cut into uneven flat ranges instead, as nothing regular is.
    """

    ranks: int
    tensors: int
    known: bool = False
    flat: bool = False

    @property
    def how(self) -> str:
        """How ranks get to know each other's shards."""
        return "layout=" if self.known else "flat ranges exchanged" if self.flat else "grids exchanged"

    def __str__(self) -> str:
        return f"{self.ranks:,} ranks x {self.tensors:,} tensors, {self.how}"


def layout(case: Case) -> ShardColumns:
    """Return all ranks' shards: by rank, of one rank by key."""
    mesh = MESHES[case.ranks]
    kinds: dict[str, TensorKind] = {}
    specs: dict[str, PartitionSpec] = {}
    for key, shape, spec in _tensors(case.tensors, mesh):
        kinds[key], specs[key] = TensorKind(DTYPE, shape, 0), spec
    columns = mesh_columns(kinds, mesh, specs)
    ordered = select_rows(columns, np.argsort(columns.rank, kind="stable"))
    return _flat(ordered) if case.flat else ordered


def _tensors(count: int, mesh: Mesh) -> Iterator[tuple[str, tuple[int, ...], PartitionSpec]]:
    experts = max(1, (count // LAYERS - len(DENSE)) // len(EXPERT))
    for layer in range(LAYERS):
        stage = layer * mesh.shape["pp"] // LAYERS
        for name, (shape, spec) in DENSE.items():
            yield f"decoder.layers.{layer}.{name}", shape, PartitionSpec(*spec.entries, at={"pp": stage})
        for expert in range(experts):
            at = {"pp": stage, "fsdp": expert * mesh.shape["fsdp"] // experts}
            for name, (shape, spec) in EXPERT.items():
                yield f"decoder.layers.{layer}.mlp.experts.{expert}.{name}", shape, PartitionSpec(*spec.entries, at=at)


def _flat(columns: ShardColumns) -> ShardColumns:
    """Return each box in as many uneven flat ranges as ranks hold it."""
    boxes = np.column_stack([columns.key, columns.offset, columns.shape])
    order = np.lexsort((columns.rank, *boxes.T[::-1]))
    first = np.ones(order.size, dtype=np.bool_)
    first[1:] = (np.diff(boxes[order], axis=0) != 0).any(axis=1)
    begin = np.flatnonzero(first)
    rng = np.random.default_rng(0)
    start, stop = np.zeros(order.size, dtype=np.int64), np.zeros(order.size, dtype=np.int64)
    sizes = columns.elements[order]
    for one, end in pairwise([*begin.tolist(), order.size]):
        cuts = np.sort(rng.integers(1, sizes[one], end - one - 1))
        start[order[one:end]], stop[order[one:end]] = [0, *cuts], [*cuts, sizes[one]]
    return replace(columns, start=start, stop=stop, main=np.ones(order.size, dtype=np.bool_))


def shards_of(columns: ShardColumns) -> list[ShardedTensor]:
    """Return one rank's shards, a row each; their memory is never touched but by a save that writes."""
    names = ("key", "offset", "shape", "start", "stop", "main")
    rows = zip(*(getattr(columns, name).tolist() for name in names), strict=True)
    return [_shard(columns, *row) for row in rows]


def _shard(
    columns: ShardColumns, number: int, offset: list[int], shape: list[int], start: int, stop: int, main: bool
) -> ShardedTensor:
    kind = columns.kinds[number]
    skip = len(shape) - len(kind.global_shape)
    local = tuple(shape[skip:])
    data = torch.empty(local if start < 0 else (stop - start,), dtype=DTYPE)
    return ShardedTensor(
        columns.keys[number],
        data,
        DTYPE,
        local,
        kind.global_shape,
        tuple(offset[skip:]),
        tuple(whole // part for whole, part in zip(kind.global_shape, local, strict=True)),
        0 if main else 1,
        flattened_range=None if start < 0 else slice(start, stop),
    )


def own_columns(columns: ShardColumns) -> ShardColumns:
    """Return columns without the keys that they have no row of, as a rank makes them of its own shards."""
    held, key = np.unique(columns.key, return_inverse=True)
    keys = tuple(columns.keys[number] for number in held.tolist())
    kinds = tuple(columns.kinds[number] for number in held.tolist())
    return replace(columns, keys=keys, kinds=kinds, key=key)


def by_rank(columns: ShardColumns, ranks: int) -> Iterator[ShardColumns]:
    """Yield each rank's rows of columns that are ordered by rank."""
    ends = np.searchsorted(columns.rank, np.arange(ranks + 1)).tolist()
    for begin, end in pairwise(ends):
        yield own_columns(select_rows(columns, np.arange(begin, end)))


def rng_state(rank: int, ranks: int) -> ShardedObject:
    """Return the one object that each rank has beside its tensors."""
    return ShardedObject("rng", rank, (ranks,), (rank,))


def tree_of(columns: ShardColumns, ranks: int) -> dict[str, Any]:
    """Return what rank 0 saves and loads, given its rows."""
    return {shard.key: shard for shard in shards_of(columns)} | {"rng": rng_state(0, ranks), "step": 7}
