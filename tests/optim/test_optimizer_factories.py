"""Optimizers' states of parameters with factories: moments go through them, numbers are stored once for each key."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some

import shardtree as st
from shardtree.errors import ShapeError
from shardtree.lenses import as_factory, gate_and_up, padded_axis
from shardtree.testing import check_held_once, glu
from shardtree.testing._law_factory import stacked

NAMES = ("gate", "up")
WEIGHT, MOMENT = -torch.arange(48.0).view(24, 2), torch.arange(48.0).view(24, 2)  # gate rows, then up rows
VOLUME = 48

Make = Callable[[int, int, torch.Tensor], st.ShardedTensorFactory]


def held(whole: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    """A tensor-parallel rank's [gate; up]."""
    return torch.cat([half.chunk(ranks)[rank] for half in whole.chunk(2)])


def named(rank: int, ranks: int, data: torch.Tensor) -> st.ShardedTensorFactory:
    shard = st.ShardedTensor.from_rank_offsets("fc1.w", data, (0, rank, ranks))
    return as_factory(shard, gate_and_up(tensor_parallel=ranks, part="fc1", names=NAMES))


def in_one(rank: int, ranks: int, data: torch.Tensor) -> st.ShardedTensorFactory:
    return as_factory(
        st.ShardedTensor.from_rank_offsets("fc1.w", data, (0, rank, ranks)), gate_and_up(tensor_parallel=ranks)
    )


def of_the_kit(rank: int, ranks: int, data: torch.Tensor) -> st.ShardedTensorFactory:
    return glu("fc1.w", data, rank, ranks)


def flat(factory: st.ShardedTensorFactory, part: slice) -> st.ShardedTensorFactory:
    return replace(factory, data=factory.data.reshape(-1)[part], flattened_range=part)


def states(moment: torch.Tensor) -> dict[str, Any]:
    own = {"exp_avg": moment, "step": torch.tensor(3.0), "count": 7}
    return {"state": {0: own}, "param_groups": [{"lr": 0.1, "params": [0]}]}


def check_factory_states(
    make: Make,
    saved: list[tuple[int, int, slice | None]],
    loaded: list[tuple[int, int, slice | None]],
    convert: Callable[..., Any] = st.optim.optim_state_to_sharding_state,
) -> None:
    """Saved on some ranks and loaded on others: each has its own elements, and all have the numbers.

    Args:
        make: a factory of a tensor-parallel rank's tensor.
        saved: for each rank its place, of how many, and which range of its flattened tensor it has.
        loaded: likewise.
        convert: as `optim_state_to_sharding_state`.
    """
    storage = st.storage.MemoryStorage()

    def data(whole: torch.Tensor, place: tuple[int, int, slice | None]) -> torch.Tensor:
        mine = held(whole, *place[:2])
        return mine if place[2] is None else mine.reshape(-1)[place[2]]

    def tree(place: tuple[int, int, slice | None]) -> Any:
        factory = make(place[0], place[1], held(WEIGHT, *place[:2]))
        return convert(states(data(MOMENT, place)), {0: factory if place[2] is None else flat(factory, place[2])})

    trees = [tree(place) for place in saved]
    check_held_once([st.apply_factories(each) for each in trees])
    st.simulate(len(saved), lambda world: st.save({"o": trees[world.rank]}, storage, world=world))
    found = st.simulate(len(loaded), lambda world: st.load({"o": tree(loaded[world.rank])}, storage, world=world))
    for place, each in zip(loaded, found, strict=True):
        state = each["o"]["state"][0]
        assert torch.equal(state["exp_avg"], data(MOMENT, place)), f"moment at {place}"
        assert (state["step"].item(), tuple(state["step"].shape), state["count"]) == (3.0, (), 7)


def boxes(ranks: int) -> list[tuple[int, int, slice | None]]:
    return [(rank, ranks, None) for rank in range(ranks)]


@pytest.mark.parametrize("make", [named, in_one, of_the_kit])
@pytest.mark.parametrize(("save_ranks", "load_ranks"), [(4, 3), (1, 2), (6, 1)])
def test_states_come_back_on_other_ranks(make: Make, save_ranks: int, load_ranks: int) -> None:
    check_factory_states(make, boxes(save_ranks), boxes(load_ranks))


@pytest.mark.slow
@given(some.data())
@pytest.mark.parametrize("make", [named, in_one, of_the_kit])
def test_states_of_flat_ranges_come_back_too(make: Make, data: some.DataObject) -> None:
    def ranges() -> list[tuple[int, int, slice | None]]:
        ranks = data.draw(some.sampled_from([1, 2, 3]))
        volume = VOLUME // ranks
        places = []
        for rank in range(ranks):
            cuts = sorted({0, volume, *data.draw(some.lists(some.integers(1, volume - 1), max_size=3 // ranks))})
            places += [(rank, ranks, slice(*pair)) for pair in pairwise(cuts)]
        return places

    check_factory_states(make, ranges(), ranges())


def test_the_law_catches_moments_that_are_cut_as_plain_rows() -> None:
    def plain(rank: int, ranks: int, data: torch.Tensor) -> Any:
        return st.ShardedTensor.from_rank_offsets("fc1.w", data, (0, rank, ranks))

    with pytest.raises(AssertionError, match="moment at"):
        check_factory_states(plain, boxes(4), boxes(3))


def test_the_law_catches_numbers_that_each_rank_calls_its_own() -> None:
    """Main wherever a factory's own replica is."""

    def everywhere(state_dict: Any, params: Any) -> Any:
        tree = st.optim.optim_state_to_sharding_state(state_dict, params)
        step = st.ShardedTensor.from_rank_offsets("optimizer.state.step.fc1.w", torch.tensor(3.0))
        return {**tree, "state": {0: {**tree["state"][0], "step": step}}}

    with pytest.raises(AssertionError, match="held by more than one main replica"):
        check_factory_states(in_one, boxes(4), boxes(3), everywhere)


def test_a_number_is_stored_for_each_key_and_loads_as_parameters_of_their_own() -> None:
    tree = st.optim.optim_state_to_sharding_state(states(MOMENT), {0: named(0, 1, WEIGHT)})
    storage = st.storage.MemoryStorage()
    st.save({"o": tree}, storage)
    assert {key for key in st.load_tensors_metadata(storage) if "step" in key} == {
        "optimizer.state.step.gate.w",
        "optimizer.state.step.up.w",
    }
    fresh = {"state": {}, "param_groups": [{"lr": 0.1, "params": [0, 1]}]}
    params = {n: st.ShardedTensor.from_rank_offsets(f"{name}.w", WEIGHT[:12]) for n, name in enumerate(NAMES)}
    asked = st.optim.abstract_optim_state_from_metadata(fresh, params, st.load_sharded_metadata(storage))
    found = st.load({"o": asked}, storage)["o"]["state"]
    assert [found[number]["exp_avg"][0, 0].item() for number in (0, 1)] == [0.0, 24.0]
    assert found[1]["step"].item() == 3.0
    assert found[1]["count"] == 7


def test_parameters_of_different_steps_are_not_one() -> None:
    storage = st.storage.MemoryStorage()
    params = {n: st.ShardedTensor.from_rank_offsets(f"{name}.w", WEIGHT[:12]) for n, name in enumerate(NAMES)}
    own = {n: {"step": torch.tensor(float(n))} for n in (0, 1)}
    st.save(
        {"o": st.optim.optim_state_to_sharding_state({"state": own, "param_groups": [{"params": [0, 1]}]}, params)},
        storage,
    )
    fresh = {"state": {0: {"step": torch.tensor(0.0)}}, "param_groups": [{"params": [0]}]}
    asked = st.optim.optim_state_to_sharding_state(fresh, {0: named(0, 1, WEIGHT)})
    with pytest.raises(ShapeError, match=r"the tensors stored for .* differ in a state"):
        st.load({"o": asked}, storage)


@pytest.mark.parametrize("make", [named, in_one, of_the_kit])
def test_a_fresh_optimizer_finds_them_by_metadata(make: Make) -> None:
    storage = st.storage.MemoryStorage()
    trees = [
        st.optim.optim_state_to_sharding_state(states(held(MOMENT, n, 2)), {0: make(n, 2, held(WEIGHT, n, 2))})
        for n in (0, 1)
    ]
    st.simulate(2, lambda world: st.save({"o": trees[world.rank]}, storage, world=world))
    fresh = {"state": {}, "param_groups": [{"lr": 0.0, "params": [0]}]}
    asked = st.optim.abstract_optim_state_from_metadata(
        fresh, {0: make(0, 1, WEIGHT)}, st.load_sharded_metadata(storage)
    )
    found = st.load({"o": asked}, storage)["o"]
    assert not st.diff(found, states(MOMENT))


def test_layers_in_one_tensor_have_a_number_each() -> None:
    """Along a prepended axis each place is a parameter of its own."""
    storage = st.storage.MemoryStorage()

    def tree(layer: int) -> Any:
        param = st.ShardedTensor.from_rank_offsets("l.w", torch.zeros(2), (0, layer, 3), prepend_axis_num=1)
        own = {"step": torch.tensor(float(layer)), "count": layer}
        return st.optim.optim_state_to_sharding_state(
            {"state": {0: own}, "param_groups": [{"params": [0]}]}, {0: param}
        )

    st.simulate(3, lambda world: st.save({"o": tree(world.rank)}, storage, world=world))
    assert st.load_tensors_metadata(storage)["optimizer.state.step.l.w"].global_shape == (3,)
    found = st.load({"o": tree(2)}, storage, validate_access_integrity=False)["o"]["state"][0]
    assert (found["step"].item(), found["count"]) == (2.0, 2)


def test_a_stack_that_one_rank_holds_has_one_number() -> None:
    factory = stacked("l.w", torch.zeros(3, 2))
    tree = st.optim.optim_state_to_sharding_state(states(torch.ones(3, 2)), {0: factory})
    built = st.apply_factories(tree)["state"][0]
    assert [shard.global_offset for shard in built["step"]] == [(0,), (1,), (2,)]
    storage = st.storage.MemoryStorage()
    st.save(tree, storage)
    assert st.load(tree, storage)["state"][0]["step"].item() == 3.0


def test_a_rank_that_has_nothing_of_a_parameter_asks_for_the_states_that_others_have() -> None:
    """The last of 3 ranks, of 4 rows that are padded to 6."""
    moments = {"exp_avg": torch.zeros(4, 3), "step": torch.tensor(3.0)}
    keys = {name: f"optimizer.state.{name}.w" for name in moments}
    stored = {keys[name]: st.ShardedTensor.from_rank_offsets(keys[name], state) for name, state in moments.items()}
    padding = as_factory(st.ShardedTensor.from_rank_offsets("w", torch.ones(2, 3), (0, 2, 3)), padded_axis(4))
    fresh = {"state": {}, "param_groups": [{"lr": 0.1, "params": [0]}]}
    tree = st.optim.abstract_optim_state_from_metadata(fresh, {0: padding}, stored)
    storage = st.storage.MemoryStorage()
    st.save(stored, storage)
    loaded = st.load(tree, storage, validate_access_integrity=False)["state"][0]
    assert not st.diff(loaded, {"exp_avg": torch.zeros(2, 3), "step": torch.tensor(3.0)})
