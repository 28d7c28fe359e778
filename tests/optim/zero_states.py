"""A model's optimizer states as ranks of any tensor- and data-parallel layout hold them: slices, shards and targets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from shardtree.buffers import BufferPlan, buffer_slices, flat_shards, flat_targets, plan_buffers
from shardtree.checkpoint import load, save
from shardtree.layouts import Mesh, PartitionSpec, shard_at
from shardtree.lenses import as_factory, gate_and_up
from shardtree.mapping import ShardedTensor
from shardtree.storage import MemoryStorage
from shardtree.testing import first_difference, packed_slices, random_bits
from shardtree.world import World, simulate

STATES = ("fp32_param", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Model:
    """Whole parameters by name, each cut along an axis by tensor-parallel ranks or not at all.

    `gated` is held as [gate; up] of each rank, and stored as all of gate above all of up.
    """

    shapes: Mapping[str, tuple[int, ...]]
    axes: Mapping[str, int | None]
    gated: str | None = None

    def whole(self, state: str, name: str) -> torch.Tensor:
        """Return a state of a parameter, or the bfloat16 parameter itself."""
        dtype = torch.bfloat16 if state == "param" else torch.float32
        return random_bits(self.shapes[name], dtype, seed=hash_text(state + name))

    def held(self, state: str, tensor: int, ranks: int) -> dict[str, ShardedTensor]:
        """Return what a tensor-parallel rank holds of a state, as the model holds it, without data-parallel ranks."""
        held: dict[str, ShardedTensor] = {}
        for name in self.shapes:
            whole, axis = self.whole(state, name), self.axes[name]
            if name == self.gated:
                rows = torch.cat([half.chunk(ranks)[tensor] for half in bits_of(whole).chunk(2)])
                held[name] = ShardedTensor.from_rank_offsets(name, rows.view(whole.dtype), (0, tensor, ranks))
            else:
                spec = PartitionSpec() if axis is None else PartitionSpec(*(None,) * axis, "tp")
                held[name] = shard_at({name: whole}, Mesh(tp=ranks), spec, tensor)[name]
        return held

    def parameters(self, tensor: int, ranks: int) -> dict[str, Any]:
        """Return the sharded parameters of a tensor-parallel rank, the gated one as a factory."""
        held = dict(self.held("param", tensor, ranks))
        if self.gated is not None:
            held[self.gated] = as_factory(held[self.gated], gate_and_up(tensor_parallel=ranks))
        return held


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view as integers, which keep their bits when they are joined."""
    return tensor.view(torch.int32 if tensor.itemsize == 4 else torch.int16)


def hash_text(text: str) -> int:
    return sum(place * ord(one) for place, one in enumerate(text, 1))


@dataclass(frozen=True)
class Layout:
    """How many ranks there are, and how the buffer is made."""

    data_parallel: int
    tensor_parallel: int
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def ranks(self) -> int:
        return self.data_parallel * self.tensor_parallel

    def place(self, rank: int) -> tuple[int, int]:
        """Return the data-parallel and the tensor-parallel rank."""
        return divmod(rank, self.tensor_parallel)

    def plan(self, model: Model, rank: int) -> BufferPlan:
        held = model.held("param", self.place(rank)[1], self.tensor_parallel)
        return plan_buffers(held, data_parallel=self.data_parallel, **self.options)

    def slices(self, model: Model, state: str) -> dict[int, list[torch.Tensor]]:
        """Return what each rank's slices of a state must hold, packed element by element."""
        found: dict[int, list[torch.Tensor]] = {}
        for tensor in range(self.tensor_parallel):
            held = model.held(state, tensor, self.tensor_parallel)
            packed = packed_slices(self.plan(model, tensor), {name: shard.data for name, shard in held.items()})
            found |= {data * self.tensor_parallel + tensor: own for data, own in enumerate(packed)}
        return found


def same(replica: Any) -> Any:
    return replica


def saved_flat(model: Model, layout: Layout, **changed: Callable[..., Any]) -> MemoryStorage:
    """Return a checkpoint of all states, saved by all ranks of a layout from their slices."""
    place = MemoryStorage()
    shards = changed.get("flat_shards", flat_shards)
    given = {state: layout.slices(model, state) for state in STATES}

    def save_rank(world: World) -> None:
        data, tensor = layout.place(world.rank)
        plan, parameters = layout.plan(model, world.rank), model.parameters(tensor, layout.tensor_parallel)
        tree = {
            state: shards(
                plan,
                data,
                given[state][world.rank],
                parameters,
                prefix=f"optimizer.state.{state}",
                replica_id=same,
            )
            for state in STATES
        }
        save({**tree, "step": 7}, place, world=world)

    simulate(layout.ranks, save_rank)
    return place


def check_loaded_flat(model: Model, layout: Layout, place: MemoryStorage, **changed: Callable[..., Any]) -> None:
    """Raise unless all ranks of a layout load their slices of all states, bit for bit, padding zero."""
    slices = changed.get("buffer_slices", buffer_slices)

    def load_rank(world: World) -> dict[str, list[torch.Tensor]]:
        data, tensor = layout.place(world.rank)
        plan, parameters = layout.plan(model, world.rank), model.parameters(tensor, layout.tensor_parallel)
        targets = {
            state: flat_targets(plan, data, parameters, prefix=f"optimizer.state.{state}", replica_id=same)
            for state in STATES
        }
        loaded = load(targets, place, world=world)
        return {state: slices(plan, data, loaded.get(state, {})) for state in STATES}

    given = {state: layout.slices(model, state) for state in STATES}
    for rank, found in enumerate(simulate(layout.ranks, load_rank)):
        for state in STATES:
            for bucket, expected in enumerate(given[state][rank]):
                differ = first_difference(found[state][bucket], expected)
                assert differ is None, f"rank {rank}, {state}, bucket {bucket}: {differ}"
