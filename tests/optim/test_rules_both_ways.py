"""Rules get one kind of value both ways: what is saved in one layout loads in another, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some

import shardtree as st
from shardtree.errors import CheckpointingException
from shardtree.layouts import Mesh
from shardtree.optim import (
    OptimizerRule,
    OptimizerState,
    along,
    block_scales,
    on_mesh,
    one_per_parameter,
    one_per_shard,
    reduced_axis,
    square_preconditioners,
)
from shardtree.testing import cut, irregular_layouts, regular_layouts, shapes
from tests.core.trees.samples import assert_caught

FRESH: dict[str, Any] = {"state": {}, "param_groups": [{"params": [0]}]}
Axes = tuple[int | None, ...]
Local = Callable[[st.ShardedTensor], Any]


def saved(shards: list[st.ShardedTensor], local: Local, rules: Any) -> st.storage.MemoryStorage:
    """A checkpoint of each shard's state, as if each were on a rank of its own."""
    storage = st.storage.MemoryStorage()
    states = [{**FRESH, "state": {0: {"k": local(shard)}}} for shard in shards]
    pairs = zip(shards, states, strict=True)
    trees = [st.optim.optim_state_to_sharding_state(state, {0: shard}, rules=rules) for shard, state in pairs]
    st.save([tree["state"] for tree in trees], storage)
    return storage


def loaded(shards: list[st.ShardedTensor], storage: Any, rules: Any) -> list[Any]:
    metadata = st.load_sharded_metadata(storage)
    find = st.optim.abstract_optim_state_from_metadata
    trees = [find(FRESH, {0: shard}, metadata, rules=rules)["state"] for shard in shards]
    return [tree[0]["k"] for tree in st.load(trees, storage)]


def comes_back(
    rule: OptimizerRule, before: list[st.ShardedTensor], after: list[st.ShardedTensor], local: Local
) -> None:
    storage = saved(before, local, {"k": rule})
    for shard, found in zip(after, loaded(after, storage, {"k": rule}), strict=True):
        assert not st.diff(found, local(shard)), shard
    (stored,) = st.load_sharded_metadata(storage).values()
    for shard in before:
        there, back = (rule(shard, "k", OptimizerState.of(one)) for one in (local(shard), stored))
        assert there.without_data() == back.without_data()


# -- axes cut as the parameter's


def local_of(whole: torch.Tensor, axes: Axes) -> Local:
    def local(shard: st.ShardedTensor) -> torch.Tensor:
        part, front = whole, shard.prepend_axis_num
        for at, axis in enumerate(axes):
            if axis is not None:
                part = part.narrow(at, shard.global_offset[front + axis], shard.local_shape[axis])
        return part.clone()

    return local


@some.composite
def layouts_and_axes(draw: some.DrawFn) -> tuple[list[list[st.ShardedTensor]], Axes]:
    shape = draw(shapes(sizes=(2, 3, 4), max_axes=3).filter(bool))
    followed = draw(some.lists(some.integers(0, len(shape) - 1), unique=True, max_size=3))
    axes = draw(some.permutations([*followed, *draw(some.lists(some.none(), max_size=2))]))
    kinds = (regular_layouts(shape, 3) | irregular_layouts(shape, 3)).filter(lambda layout: not layout.prepended)
    sides = [draw(kinds) for _ in range(2)]
    cuts = [[one for rank in range(side.ranks) for one in cut(side, "w", torch.zeros(shape), rank)] for side in sides]
    return cuts, tuple(axes)


def follows(make: Callable[..., OptimizerRule], drawn: tuple[list[list[st.ShardedTensor]], Axes]) -> None:
    (before, after), axes = drawn
    shape = before[0].global_shape
    sizes = [5 if axis is None else shape[axis] for axis in axes]
    whole = torch.arange(float(prod(sizes))).view(sizes)
    comes_back(make(*axes, where_cut="equal"), before, after, local_of(whole, axes))


@given(layouts_and_axes())
def test_a_state_along_axes_of_its_parameter_comes_back_in_another_layout(drawn: Any) -> None:
    follows(along, drawn)


def test_the_law_catches_a_rule_that_takes_the_size_of_a_cut_axis_from_the_state() -> None:
    def naive(*axes: int | None, where_cut: Any) -> OptimizerRule:
        def rule(param: Any, state_key: str, state: OptimizerState) -> Any:
            good = along(*axes, where_cut=where_cut)(param, state_key, state)
            shape = state.sizes  # this rank's where it is saved, the whole one's where it is loaded
            return st.ShardedTensor(
                good.key, state.data, good.dtype, shape, good.global_shape, good.global_offset, None
            )

        return rule

    assert_caught(follows, naive, layouts_and_axes())


def test_the_page_s_rule_of_ones_own_loads_on_other_ranks() -> None:
    def doubled(param: st.ShardedTensor, state_key: str, state: OptimizerState) -> st.ShardedTensor:
        rows, first, shape = param.global_shape[0], param.global_offset[0], (param.local_shape[0], 2)
        key = f"optimizer.state.{state_key}.{param.key}"
        return st.ShardedTensor(key, state.data, state.dtype, shape, (rows, 2), (first, 0), None, param.replica_id)

    whole = torch.arange(24.0).view(12, 2)
    comes_back(doubled, of_ranks(2), of_ranks(3), local_of(whole, (0, None)))
    comes_back(along(0, None), of_ranks(3), of_ranks(2), local_of(whole, (0, None)))


BY_FUNCTION: dict[str, tuple[OptimizerRule, Local, int]] = {
    "rows": (reduced_axis(-1), lambda shard: torch.arange(12.0)[shard.global_slice()[0], None], 3),
    "columns": (reduced_axis(0, where_cut="equal"), lambda shard: torch.arange(6.0)[None], 3),
    "columns of each": (
        reduced_axis(-2, where_cut="own"),
        lambda shard: torch.arange(6.0) + shard.global_offset[0],
        2,
    ),
    "columns of each, kept": (
        reduced_axis(-2, where_cut="own"),
        lambda shard: torch.arange(6.0)[None] + shard.global_offset[0],
        2,
    ),
    "blocks": (block_scales(3), lambda shard: torch.arange(12.0)[shard.global_slice()[0]].repeat_interleave(2), 3),
    "codes": (one_per_parameter, lambda shard: torch.arange(5.0), 3),
    "seeds": (one_per_shard, lambda shard: torch.tensor([float(shard.global_offset[0])]), 2),
}
"""A rule, the state of each shard, and on how many ranks it is loaded that 2 have saved."""


@pytest.mark.parametrize("name", BY_FUNCTION)
def test_states_of_other_shapes_come_back(name: str) -> None:
    rule, local, ranks = BY_FUNCTION[name]
    comes_back(rule, of_ranks(2), of_ranks(ranks), local)


def test_a_rule_that_asks_for_a_shape_fails_where_it_saves_not_where_it_loads() -> None:
    whole = [st.ShardedTensor.from_rank_offsets("w", torch.zeros(4, 6))]
    with pytest.raises(AttributeError, match="shape"):
        saved(whole, lambda shard: torch.zeros(4, 2), {"k": lambda param, key, state: state.shape})


# -- Shampoo and SOAP


def shampoo(param: torch.Tensor) -> dict[str, Any]:
    """The states of Shampoo as implementations for torch name them, after a step on all of a parameter."""
    state: dict[str, Any] = {"step": 1, "momentum_buffer": param.clone()}
    for axis, size in enumerate(param.shape):
        flat = param.movedim(axis, 0).reshape(size, -1)
        state[f"precond_{axis}"] = flat @ flat.T
        state[f"inv_precond_{axis}"] = torch.linalg.pinv(flat @ flat.T + torch.eye(size))
    return state


def soap(param: torch.Tensor) -> dict[str, Any]:
    """Those of SOAP, which preconditions no axis of more than 8, and in a first step has no bases."""
    flats = [param.movedim(axis, 0).reshape(size, -1) for axis, size in enumerate(param.shape)]
    grams = [[] if flat.shape[0] > 8 else flat @ flat.T for flat in flats]
    bases = [[] if isinstance(gram, list) else torch.linalg.eigh(gram)[1] for gram in grams]
    moments = {"exp_avg": param.clone(), "exp_avg_sq": param.square()}
    return {"step": 2, **moments, "GG": grams, "Q": bases, "shampoo_beta": 0.95, "Q_before": None}


def of_ranks(ranks: int) -> list[st.ShardedTensor]:
    return [
        st.ShardedTensor.from_rank_offsets("w", torch.zeros(12 // ranks, 6), (0, rank, ranks)) for rank in range(ranks)
    ]


def pieces_of(state: dict[str, Any], shard: st.ShardedTensor, whole: torch.Tensor) -> dict[str, Any]:
    rows = slice(shard.global_offset[0], shard.global_offset[0] + shard.local_shape[0])
    is_moment = {name: isinstance(one, torch.Tensor) and one.shape == whole.shape for name, one in state.items()}
    return {name: one[rows].clone() if is_moment[name] else one for name, one in state.items()}


@pytest.mark.parametrize("optimizer", [shampoo, soap])
def test_preconditioners_of_whole_parameters_come_back_on_other_ranks(optimizer: Callable[..., Any]) -> None:
    weight = torch.arange(72.0).view(12, 6).sin()
    state, rules = optimizer(weight), square_preconditioners(where_cut="equal")

    def trees(ranks: int) -> list[Any]:
        states = [pieces_of(state, shard, weight) for shard in of_ranks(ranks)]
        return [{**FRESH, "state": {0: one}} for one in states]

    storage, convert = st.storage.MemoryStorage(), st.optim.optim_state_to_sharding_state
    shards, given_ = of_ranks(2), trees(2)
    st.simulate(
        2,
        lambda world: st.save(
            {"o": convert(given_[world.rank], {0: shards[world.rank]}, rules=rules)}, storage, world=world
        ),
    )
    metadata, others, expected = st.load_sharded_metadata(storage), of_ranks(3), trees(3)

    def load(world: st.World) -> Any:
        params = {0: others[world.rank]}
        target = st.optim.abstract_optim_state_from_metadata(FRESH, params, metadata, rules=rules)
        return st.optim.sharding_state_to_optim_state(st.load({"o": target}, storage, world=world)["o"])

    for found, wanted in zip(st.simulate(3, load), expected, strict=True):
        assert not st.diff(found["state"], wanted["state"])


def test_preconditioners_of_pieces_come_back_on_the_same_pieces_only() -> None:
    rule = square_preconditioners(where_cut="own")["precond_*"]
    before = of_ranks(2)
    grams = {id(shard): torch.eye(6) * (number + 1) for number, shard in enumerate(before)}
    comes_back(rule, before, before, lambda shard: grams[id(shard)])
    storage = saved(before, lambda shard: grams[id(shard)], {"k": rule})
    with pytest.raises(CheckpointingException):
        loaded(of_ranks(3), storage, {"k": rule})


def test_a_square_parameter_has_preconditioners_of_its_own_shape() -> None:
    """Without the rule they would be cut as the parameter is."""
    square = [st.ShardedTensor.from_rank_offsets("w", torch.zeros(3, 6), (0, rank, 2)) for rank in range(2)]
    gram = torch.arange(36.0).view(6, 6)
    comes_back(square_preconditioners(where_cut="equal")["GG"], square, square[:1], lambda shard: gram)


# -- on a mesh


@pytest.mark.parametrize("size", [8, 10])
def test_a_state_on_a_mesh_of_its_own_comes_back_on_another(size: int) -> None:
    """The parameter is whole on every rank; 10 isn't a multiple of 4, so that a save needs the whole shape."""
    whole = torch.arange(float(size * size)).view(size, size)

    def at(rank: int, ranks: int) -> tuple[st.ShardedTensor, torch.Tensor, OptimizerRule]:
        rows = -(-size // ranks)
        param = st.ShardedTensor.from_rank_offsets("w", torch.zeros(size, 3), replica_id=rank)
        rule = on_mesh(Mesh(dp=ranks), st.P("dp"), rank, shape=lambda param: (param.global_shape[0],) * 2)
        return param, whole[rank * rows : (rank + 1) * rows].clone(), rule

    storage = st.storage.MemoryStorage()

    def save(world: st.World) -> None:
        param, state, rule = at(world.rank, world.size)
        state_dict = {**FRESH, "state": {0: {"left": state}}}
        tree = st.optim.optim_state_to_sharding_state(state_dict, {0: param}, rules={"left": rule})
        st.save({"o": tree}, storage, world=world)

    def load(world: st.World) -> None:
        param, state, rule = at(world.rank, world.size)
        metadata = st.load_sharded_metadata(storage)
        target = st.optim.abstract_optim_state_from_metadata(FRESH, {0: param}, metadata, rules={"left": rule})
        assert torch.equal(st.load({"o": target}, storage, world=world)["o"]["state"][0]["left"], state)

    st.simulate(4, save)
    for ranks in (4, 2, 1):
        st.simulate(ranks, load)
