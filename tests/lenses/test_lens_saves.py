"""Saved at one number of tensor-parallel ranks, loaded at another, through `save` and `load`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

import shardtree as st
from shardtree.errors import IntegrityError
from shardtree.lenses import (
    Lens,
    as_factory,
    attention_qkv,
    by_pattern,
    compose,
    factories_by_pattern,
    gate_and_up,
    padded_axis,
    rearranged,
    rotary_halves,
    stacked_layers,
    tied,
    transposed,
    unstacked_layers,
)
from shardtree.storage import MemoryStorage
from shardtree.testing import first_difference

Cut = Callable[[torch.Tensor, int, int], torch.Tensor]  # whole, rank, ranks -> what the rank holds


def rows(whole: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    return whole.chunk(ranks)[rank]


def both(whole: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    gate, up = whole.chunk(2)
    return torch.cat([rows(gate, rank, ranks), rows(up, rank, ranks)])


def all_three(whole: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    return torch.cat([rows(part, rank, ranks) for part in whole.split([16, 8, 8])])


def by_group(whole: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    q, k, v = (part.chunk(4) for part in whole.split([16, 8, 8]))
    return rows(torch.cat([torch.cat(group) for group in zip(q, k, v, strict=True)]), rank, ranks)


def padded(whole: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    """To a multiple of 6 times the ranks: of 4 ranks the last holds nothing but padding."""
    length = -(-len(whole) // (6 * ranks)) * 6 * ranks
    return rows(torch.cat([whole, whole.new_zeros(length - len(whole), whole.shape[1])]), rank, ranks)


def gated_experts(whole: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    """Experts one behind the other along the columns; each cut into gate and up of the rank's own."""
    return torch.cat([both(expert, rank, ranks).T for expert in whole], 1)


@dataclass(frozen=True)
class Layer:
    """A tensor of a model: how it is cut, where its rows lie, and the lens, which knows the number of ranks."""

    shape: tuple[int, ...]
    cut: Cut
    lens: Callable[[int], Lens]
    axis: int = 0
    key: str = "layers.3.mlp.w.weight"


QKV = {"heads": 8, "head_size": 2, "query_groups": 4}
APART: dict[str, Any] = {"part": "w", "names": ("q", "k", "v")}
_ROTARY: dict[str, Any] = {
    "**.v.**": None,
    "**": rotary_halves(head_size=2),
}


def _experts(ranks: int) -> Lens:
    held = rearranged("h (t e two f) -> e (two t f) h", t=ranks, e=3, two=2)
    return compose(held, unstacked_layers("mlp"))


LAYERS = {
    "gate_and_up, transposed, stacked": Layer(
        (16, 3),
        both,
        lambda ranks: compose(
            gate_and_up(tensor_parallel=ranks, part="w", names=("gate", "up")),
            transposed(),
            stacked_layers("layers", 1, first=-3),
        ),
    ),
    "interleaved, rotary": Layer(
        (32, 3), by_group, lambda ranks: compose(attention_qkv(**QKV, **APART), by_pattern(_ROTARY))
    ),
    "rank by rank": Layer(
        (32, 3),
        all_three,
        lambda ranks: attention_qkv(**QKV, held="concatenated", tensor_parallel=ranks, stored="interleaved"),
    ),
    "padded": Layer((17, 3), padded, lambda ranks: padded_axis(17)),
    "experts": Layer((3, 8, 2), gated_experts, _experts, 1, "mlp.fc1"),
}


def tree(layer: Layer, rank: int, ranks: int, *, states: int, state: int = 0) -> dict[str, Any]:
    """Return the parameter, a moment of it, and a moment of which each data-parallel rank has a flat range."""
    whole = torch.arange(float(torch.Size(layer.shape).numel())).reshape(layer.shape)
    held = layer.cut(whole, rank, ranks)
    shard = st.ShardedTensor.from_rank_offsets(layer.key, held, (layer.axis, rank, ranks), replica_id=state)
    weight = as_factory(shard, layer.lens(ranks))
    moment = replace(weight, key=f"optimizer.state.exp_avg.{layer.key}", data=3 * held.double())
    flat = (2 * held).reshape(-1)
    cuts = [len(flat) * number // states for number in range(states + 1)]
    taken = slice(*cuts[state : state + 2])
    part = replace(
        weight, key=f"optimizer.state.exp_avg_sq.{layer.key}", data=flat[taken], flattened_range=taken, replica_id=0
    )
    return {"weight": weight, "exp_avg": moment, "exp_avg_sq": part}


def empty(leaf: Any) -> Any:
    return replace(leaf, data=torch.zeros_like(leaf.data)) if isinstance(leaf, st.ShardedTensorFactory) else leaf


def check_other_ranks(layer: Layer, save_ranks: int, load_ranks: int) -> None:
    """Raise unless each rank gets the rows of its own, of the parameter and of both states."""
    storage = MemoryStorage()

    def save(world: st.World) -> None:
        state, rank = divmod(world.rank, save_ranks)
        st.save(tree(layer, rank, save_ranks, states=2, state=state), storage, world=world)

    def load(world: st.World) -> None:
        state, rank = divmod(world.rank, load_ranks)
        target = tree(layer, rank, load_ranks, states=3, state=state)
        loaded = st.load(st.map_shards(empty, target), storage, world=world)
        for name, factory in target.items():
            wrong = first_difference(loaded[name], factory.data)
            assert wrong is None, f"rank {world.rank} has another {name!r}: {wrong}"

    st.simulate(2 * save_ranks, save)
    st.simulate(3 * load_ranks, load)


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize(("save_ranks", "load_ranks"), [(2, 4), (4, 1), (1, 2)])
def test_each_rank_gets_its_rows_at_another_number_of_ranks(name: str, save_ranks: int, load_ranks: int) -> None:
    check_other_ranks(LAYERS[name], save_ranks, load_ranks)


def test_the_law_catches_a_lens_that_does_not_know_the_ranks() -> None:
    layer = LAYERS["rank by rank"]
    blind = replace(layer, lens=lambda ranks: layer.lens(1))
    check_other_ranks(blind, 2, 2)
    with pytest.raises((AssertionError, st.errors.RemoteError), match="has another 'weight'"):
        check_other_ranks(blind, 2, 4)


def test_tied_weights_are_stored_once_and_loaded_on_both_pipeline_stages() -> None:
    table, storage = torch.arange(12.0).reshape(6, 2), MemoryStorage()
    table[5] = 0
    padding = padded_axis(5)
    lenses = {"embedding.**": padding, "output.**": compose(padding, tied("output", "embedding"))}

    def stage(world: st.World, data: torch.Tensor) -> dict[str, Any]:
        """The first stage holds the embedding, the last one the output layer; two tensor-parallel ranks each."""
        last, rank = divmod(world.rank, 2)
        key = "output.weight" if last else "embedding.weight"
        shard = st.ShardedTensor.from_rank_offsets(key, data.chunk(2)[rank], (0, rank, 2))
        return factories_by_pattern({key: shard}, lenses, absent=lenses)

    st.simulate(4, lambda world: st.save(stage(world, table), storage, world=world))
    assert {key: shard.global_shape for key, shard in st.load_tensors_metadata(storage).items()} == {
        "embedding.weight": (5, 2)
    }
    loaded = st.simulate(4, lambda world: st.load(stage(world, table.new_zeros(6, 2)), storage, world=world))
    for rank, found in enumerate(loaded):
        assert torch.equal(*found.values(), table.chunk(2)[rank % 2])


def test_tied_weights_on_one_rank_may_be_one_tensor() -> None:
    table, storage = torch.arange(12.0).reshape(6, 2), MemoryStorage()
    shards = {key: st.ShardedTensor.from_rank_offsets(f"{key}.weight", table) for key in ("embedding", "output")}
    model = factories_by_pattern(shards, {"output.**": tied("output", "embedding")})
    st.save(model, storage)
    loaded = st.load(st.map_data(torch.zeros_like, model), storage)
    assert torch.equal(loaded["embedding"], table)
    assert torch.equal(loaded["output"], table)


def test_a_tied_tensor_without_the_other_one_is_refused() -> None:
    shard = st.ShardedTensor.from_rank_offsets("output.weight", torch.zeros(2))
    with pytest.raises(IntegrityError, match=r"'embedding.weight'.* no main replica"):
        st.save({"w": as_factory(shard, tied("output", "embedding"))}, MemoryStorage())
