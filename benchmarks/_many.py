"""A model of experts over thousands of ranks, as columns.

Matrices of dense layers are cut by TP and FSDP, experts lie on one of the FSDP ranks each (EP) and are cut by TP,
layers lie on pipeline stages, and HSDP has copies of all that. Shapes are small: agreement doesn't depend on them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import islice, pairwise
from typing import Any, TypeVar, cast

import numpy as np
import torch

import shardtree as st
from shardtree.core.layouts import select_rows
from shardtree.core.plans import level_writes
from shardtree.layouts import (
    Mesh,
    PartitionSpec,
    ShardColumns,
    TensorKind,
    mesh_columns,
    object_columns,
    shard_columns,
)
from shardtree.mapping import ShardedObject, ShardedTensor
from shardtree.shell.checkpoint._consistency import LayoutDescription, brief
from shardtree.shell.checkpoint._packed import PackedColumns, pack_columns, without_long_table
from shardtree.shell.checkpoint.loading import ReadPlace
from shardtree.shell.table.index import RankFiles
from shardtree.shell.world._world import pack, unpack
from shardtree.world import World

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


T = TypeVar("T")
HEAD = 4096
"""Bytes of a file before its first shard."""


@dataclass(frozen=True, slots=True)
class Lap:
    """What rank 0 did until it met the others.

    Attributes:
        phase: where they met.
        seconds: of the processor, since they met before.
        said: bytes.
        heard: bytes, from all together.
    """

    phase: str
    seconds: float
    said: int
    heard: int


class Enough(Exception):
    """Raised where a measured call needn't go on."""


Voices = dict[str, Callable[[bytes], Iterable[bytes]]]
"""By phase, from what rank 0 says there to what each of the others says."""


class OneOfMany(World):
    """Rank 0 of many. The time in which the others' messages are made isn't counted.

    Attributes:
        laps: one for each time that ranks met.
        kept: by phase, what the others said; given to another world, it is said there again.
    """

    def __init__(self, ranks: int, voices: Voices, kept: dict[str, list[bytes]], last: str | None = None) -> None:
        """Begin the first lap.

        Args:
            ranks: how many there are.
            voices: what the others say.
            kept: what they said before.
            last: the phase after which `Enough` is raised; None to go on.
        """
        super().__init__(0, ranks, 600.0)
        self._voices, self.kept, self._last = voices, kept, last
        self.laps: list[Lap] = []
        self._begin = time.process_time()

    def all_gather(self, value: T) -> list[T]:
        """Return the value, and those of the others."""
        outcome: Any = value
        seconds = time.process_time() - self._begin
        if outcome.failure is not None:
            raise RuntimeError(outcome.failure.text)
        if outcome.phase in self._voices and outcome.phase not in self.kept:
            self.kept[outcome.phase] = list(self._voices[outcome.phase](outcome.data))
        # Where nothing is said for the others, they say the same: nothing, or that they agree.
        others = self.kept.get(outcome.phase, [outcome.data] * (self.size - 1))
        heard = len(outcome.data) + sum(map(len, others))
        self.laps.append(Lap(outcome.phase, seconds, len(outcome.data), heard))
        if outcome.phase == self._last:
            raise Enough
        self._begin = time.process_time()
        return [value, *(replace(outcome, data=packed) for packed in others)]

    def broadcast(self, value: T, root: int = 0) -> T:
        """Return the value, which only rank 0 has."""
        outcome: Any = value
        self.laps.append(Lap(outcome.phase, time.process_time() - self._begin, len(outcome.data), 0))
        self._begin = time.process_time()
        return value

    def barrier(self) -> None:
        """Raise: no save or load that is measured here does it, nor any of the following."""
        raise NotImplementedError

    def all_to_all(self, values: Sequence[T]) -> list[T]:
        """Raise."""
        raise NotImplementedError

    def send(self, value: Any, to: int) -> None:
        """Raise."""
        raise NotImplementedError

    def recv(self, source: int) -> Any:
        """Raise."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class ManyFiles(st.storage.MemoryStorage):
    """A folder in memory that has other ranks' files too, but for their bytes.

    Attributes:
        others: their lengths.
    """

    others: dict[str, int] = field(default_factory=dict)

    def length(self, name: str) -> int | None:
        """Return a file's length; None if there is none."""
        return self.others[name] if name in self.others else super(ManyFiles, self).length(name)


Packed = Sequence[PackedColumns]


def voices(case: Case, columns: ShardColumns, storage: ManyFiles) -> Voices:
    """Return what all ranks but the first say in a save to the storage, and in a load."""
    packed = cache(lambda: [pack_columns(held, rank) for rank, held in enumerate(by_rank(columns, case.ranks))])
    described = partial(_descriptions, case, packed)
    return {
        "save: describe shards": partial(described, lambda description: (description, None)),
        "load: describe target": partial(described, lambda description: ({}, description, ReadPlace("another", False))),
        "load: describe reads": lambda _: (pack("", _reads(part, case.ranks)) for part in packed()[1:]),
        "send tables": partial(_tables, packed),
        "save: write": partial(_written, case, columns, storage),
    }


def _descriptions(
    case: Case, packed: Callable[[], Packed], message: Callable[[LayoutDescription | None], Any], own: bytes
) -> Iterator[bytes]:
    mine = next(each for each in unpack("", own) if isinstance(each, LayoutDescription))
    for rank in range(1, case.ranks):
        objects = object_columns([rng_state(rank, case.ranks)], rank)
        held = replace(cast(PackedColumns, mine.columns), rank=rank) if case.known else packed()[rank]
        yield pack("", message(brief(LayoutDescription(held, objects, mine.common, mine.layout), case.ranks)))


def _reads(part: PackedColumns, ranks: int) -> Packed:
    """Return what a rank says that it reads in the dtype that is stored, and that it converts: nothing."""
    none = pack_columns(shard_columns([]), part.rank)
    return [without_long_table(each, ranks) for each in (part, none)]


def _tables(packed: Callable[[], Packed], own: bytes) -> Iterator[bytes]:
    said = {packed()[0].digest}
    for part in packed()[1:]:
        yield pack("", None if part.digest in said else part.table)
        said.add(part.digest)


def _written(case: Case, columns: ShardColumns, storage: ManyFiles, packed: bytes) -> Iterator[bytes]:
    (mine,) = unpack("", packed)
    written = select_rows(columns, np.flatnonzero(level_writes(columns, case.ranks)))
    for rank, held in islice(enumerate(by_rank(written, case.ranks)), 1, None):
        end = HEAD + np.cumsum(held.elements * held.item_size[held.key])
        name, length = mine.files[0].replace("/00000-", f"/{rank:05}-"), int(end.max(initial=HEAD))
        storage.others[name] = length
        begin = end - held.elements * held.item_size[held.key]
        yield pack("", [RankFiles((name,), (length,), (None,), held, np.zeros_like(begin), begin, ())])


def lengths_of(written: Sequence[bytes]) -> dict[str, int]:
    """Return the lengths of the files that others said that they wrote."""
    parts = (unpack("", packed)[0] for packed in written)
    return {name: length for part in parts for name, length in zip(part.files, part.lengths, strict=True)}
