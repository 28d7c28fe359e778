"""Optimizers' states: saved in one layout and loaded in another they are what they were, each under its parameter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from hypothesis import find, given, settings
from hypothesis import strategies as st

import shardtree
from shardtree.mapping import ShardedTensor
from shardtree.optim import optim_state_to_sharding_state, per_parameter, sharding_state_to_optim_state
from shardtree.optim._per_parameter import first_element
from shardtree.testing import (
    OptimizerState,
    check_optimizer_roundtrip,
    check_pure,
    even_optimizer_layout,
    layouts,
    optimizer_layouts,
    optimizer_states,
    rank_optimizer,
    shapes,
)
from shardtree.trees import map_shards

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

SAMPLE = OptimizerState(
    {"v": torch.zeros(12, 2), "w": torch.zeros(12, 2)},
    {"v": 0, "w": 0},
    {"v": {"exp_avg": torch.arange(24.0).view(12, 2)}, "w": {"exp_avg": -torch.arange(24.0).view(12, 2)}},
    {"v": {"step": torch.tensor(3.0)}, "w": {"step": torch.tensor(4.0)}},
    {"v": {"count": (5,)}, "w": {"count": (None,)}},
    ({"lr": 0.1, "params": ["w"]}, {"lr": 0.2, "betas": (0.9, 0.95), "params": ["v"]}),
)
FOUR, THREE = (even_optimizer_layout(SAMPLE, ranks) for ranks in (4, 3))


# -- round trips


@pytest.mark.slow
@given(st.data())
def test_what_is_loaded_in_another_layout_is_what_was_saved(data: st.DataObject) -> None:
    state = data.draw(optimizer_states())
    saved, loaded = data.draw(optimizer_layouts(state)), data.draw(optimizer_layouts(state))
    check_optimizer_roundtrip(state, saved, loaded)


@pytest.mark.slow
@given(st.data())
def test_by_names_too(data: st.DataObject) -> None:
    state = data.draw(optimizer_states())
    saved, loaded = data.draw(optimizer_layouts(state)), data.draw(optimizer_layouts(state))
    check_optimizer_roundtrip(state, saved, loaded, by_name=True, back=filled_groups(state))


def filled_groups(state: OptimizerState) -> Callable[..., Any]:
    """Give groups that have no parameters on a rank what they should have: by names nothing tells."""

    def back(loaded: Any) -> Any:
        found = sharding_state_to_optim_state(loaded)
        pairs = zip(found["param_groups"], state.groups, strict=True)
        groups = [one if one["params"] else {**full, "params": []} for one, full in pairs]
        return {**found, "param_groups": groups}

    return back


def by_order(state_dict: Any, params: Any, **options: Any) -> Any:
    """Bind states to parameters by their places."""
    names = sorted(params, key=lambda name: params[name].key)
    return optim_state_to_sharding_state(state_dict, dict(zip(params, (params[n] for n in names), strict=True)))


def every_step_is_main(state_dict: Any, params: Any) -> Any:
    def main(leaf: Any) -> Any:
        return replace(leaf, replica_id=0) if getattr(leaf, "global_shape", None) == () else leaf

    return map_shards(main, optim_state_to_sharding_state(state_dict, params))


def other_groups(loaded: Any) -> Any:
    found = sharding_state_to_optim_state(loaded)
    first, second = found["param_groups"]
    return {**found, "param_groups": [{**second, "params": first["params"]}, {**first, "params": second["params"]}]}


def swapped_states(loaded: Any) -> Any:
    """Of two parameters of one shape."""
    found = sharding_state_to_optim_state(loaded)
    return {**found, "state": dict(zip(found["state"], reversed(found["state"].values()), strict=True))}


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ({"back": other_groups}, r"different tree\['param_groups'\]\[0\]\['lr'\]"),
        ({"back": swapped_states}, r"different tree\['state'\]\[0\]\['exp_avg'\]"),
        ({"convert": every_step_is_main}, "held by more than one main replica"),
    ],
)
def test_the_law_catches(fault: dict[str, Any], message: str) -> None:
    check_optimizer_roundtrip(SAMPLE, FOUR, THREE)
    with pytest.raises(AssertionError, match=message):
        check_optimizer_roundtrip(SAMPLE, FOUR, THREE, **fault)


def test_the_law_catches_states_bound_by_order_where_the_order_changes() -> None:
    """Saved by the order of groups, loaded by the alphabet: the shapes fit, the parameters don't."""
    calls = iter([optim_state_to_sharding_state] * 4 + [by_order] * 3)
    with pytest.raises(AssertionError, match=r"different tree\['state'\]"):
        check_optimizer_roundtrip(SAMPLE, FOUR, THREE, convert=lambda *args: next(calls)(*args))


# -- one main replica


def firsts(shape: tuple[int, ...], prepended: int, layout: Any) -> dict[tuple[int, ...], int]:
    """Return how many main replicas each place along prepended axes has."""
    found: dict[tuple[int, ...], int] = {}
    for piece in layout.pieces:
        flat = None if piece.flat is None else slice(*piece.flat)
        box = piece.shape[prepended:]
        replica, grid = piece.replica, layout.grid
        shard = ShardedTensor(
            "w", None, torch.float32, box, shape, piece.offset, grid, replica, prepended, flattened_range=flat
        )
        leaf = per_parameter(shard, "step", torch.tensor(1.0))
        place = piece.offset[:prepended]
        found[place] = found.get(place, 0) + shardtree.is_main_replica(leaf.replica_id)
    return found


@given(st.data())
def test_exactly_one_main_replica_of_each_parameter(data: st.DataObject) -> None:
    shape = data.draw(shapes().filter(lambda shape: 0 not in shape))
    layout = data.draw(layouts(shape, 5))
    assert set(firsts(shape, layout.prepended, layout).values()) == {1}


@pytest.mark.slow
def test_exactly_one_main_replica_catches_offsets_alone() -> None:
    """Two shards begin at 0 where one of them is empty; flat ranges begin where their boxes do."""

    def is_zero(layout: Any) -> bool:
        mains = [piece for piece in layout.pieces if piece.replica in (0, (0, 0)) and not any(piece.offset)]
        return len(mains) != 1

    find(layouts((4,), 2), is_zero, settings=settings(max_examples=500))


def test_a_tensor_without_elements_has_a_first_shard() -> None:
    def at(offset: tuple[int, ...], size: tuple[int, ...]) -> int:
        return first_element(ShardedTensor("w", None, torch.float32, size, (0, 4), offset, None))

    assert [at((0, 0), (0, 4)), at((0, 0), (0, 0)), at((0, 2), (0, 2))] == [0, 1, 1]


def test_padding_of_a_tensor_without_elements_has_one_first_shard() -> None:
    def at(offset: tuple[int, ...], flat: slice | None = None) -> int:
        place = (offset, None, 0, 0, True, flat)
        return first_element(ShardedTensor("w", None, torch.float32, (2, 2), (3, 0), *place))

    assert at((0, 0)) == 0
    assert at((2, 0)) > 0
    assert [at((0, 0), slice(*each)) > 0 for each in ((0, 1), (1, 1), (1, 4))] == [False, True, True]


# -- purity


@pytest.mark.slow
@given(st.data())
def test_no_argument_is_changed_and_tensors_are_shared(data: st.DataObject) -> None:
    state = data.draw(optimizer_states())
    layout = data.draw(optimizer_layouts(state))
    state_dict, params, names = rank_optimizer(state, layout, 0)
    tree = check_pure(optim_state_to_sharding_state, state_dict, params)
    for number, own in tree["state"].items():
        for key, leaf in own.items():
            assert leaf.data is state_dict["state"][number][key]
    named = check_pure(shardtree.optim.optim_state_by_name, state_dict, names)
    back = check_pure(shardtree.optim.optim_state_by_id, named, names)
    assert not shardtree.diff(back, state_dict)


def test_no_argument_is_changed_catches_megatrons_way() -> None:
    def in_place(state_dict: Any, params: Any) -> Any:
        state_dict.update(optim_state_to_sharding_state(state_dict, params))
        return state_dict

    with pytest.raises(AssertionError, match="in_place changed its argument 0"):
        check_pure(in_place, *rank_optimizer(SAMPLE, FOUR, 0)[:2])


# -- names and ids


@pytest.mark.slow
@given(st.data())
def test_ids_to_names_to_ids_is_the_identity(data: st.DataObject) -> None:
    state = data.draw(optimizer_states())
    state_dict, _, names = rank_optimizer(state, data.draw(optimizer_layouts(state)), 0)
    assert not shardtree.diff(
        shardtree.optim.optim_state_by_id(shardtree.optim.optim_state_by_name(state_dict, names), names), state_dict
    )


def test_names_to_ids_catches_states_by_order() -> None:
    named = {"state": {"b": {"n": 1}, "a": {"n": 2}}, "param_groups": [{"params": ["a", "b"]}]}
    by_order = dict(enumerate(named["state"].values()))
    assert shardtree.diff(shardtree.optim.optim_state_by_id(named, {0: "a", 1: "b"})["state"], by_order)


@pytest.mark.slow
@given(st.data())
def test_regrouping_is_undone(data: st.DataObject) -> None:
    """Groups in another order, and parameters within them: states stay with names, and back again it is the same."""
    state = data.draw(optimizer_states())
    state_dict, _, names = rank_optimizer(state, data.draw(optimizer_layouts(state)), 0)
    named = shardtree.optim.optim_state_by_name(state_dict, names)
    kept = [group for group in named["param_groups"] if group["params"]]
    named = {**named, "param_groups": kept}
    other = [
        {**group, "params": data.draw(st.permutations(group["params"]))} for group in data.draw(st.permutations(kept))
    ]
    moved = shardtree.optim.regroup_optim_state(named, [{"params": group["params"]} for group in other])
    assert not shardtree.diff(moved["param_groups"], other)
    assert moved["state"] is named["state"]
    assert not shardtree.diff(shardtree.optim.regroup_optim_state(moved, kept), named)


def test_regrouping_catches_groups_by_position() -> None:
    named = {"state": {}, "param_groups": [{"lr": 1, "params": ["a"]}, {"lr": 2, "params": ["b"]}]}
    other = [{"params": ["b"]}, {"params": ["a"]}]
    by_position = [{**group, **own} for group, own in zip(named["param_groups"], other, strict=True)]
    assert shardtree.diff(shardtree.optim.regroup_optim_state(named, other)["param_groups"], by_position)


@pytest.mark.slow
@given(st.data())
def test_a_fresh_optimizer_finds_its_states_by_metadata(data: st.DataObject) -> None:
    """From what is stored alone, the target is the one that the state itself would give, without data."""
    state = data.draw(optimizer_states())
    saved, loaded = data.draw(optimizer_layouts(state)), data.draw(optimizer_layouts(state))

    def convert(state_dict: Any, params: Any) -> Any:
        number = next(calls) - saved["w"].ranks
        if number < 0:
            return optim_state_to_sharding_state(state_dict, params)
        fresh = {"state": {}, "param_groups": [{**group, "lr": -1.0} for group in state_dict["param_groups"]]}
        find = partial(shardtree.optim.abstract_optim_state_from_metadata, missing="leave_out")
        arguments = (fresh, params, metadata())
        return find(*arguments) if number else check_pure(find, *arguments)

    @cache
    def metadata() -> Any:
        return shardtree.load_sharded_metadata(storage)

    calls, storage = iter(range(10**6)), shardtree.storage.MemoryStorage()
    check_optimizer_roundtrip(state, saved, loaded, convert=convert, directory=storage)


def test_the_metadata_law_catches_a_state_that_is_left_out() -> None:
    storage, calls = shardtree.storage.MemoryStorage(), iter(range(10**6))

    def convert(state_dict: Any, params: Any) -> Any:
        if next(calls) < 4:
            return optim_state_to_sharding_state(state_dict, params)
        metadata = shardtree.load_sharded_metadata(storage)
        return shardtree.optim.abstract_optim_state_from_metadata(state_dict, params, metadata, "step")

    with pytest.raises(AssertionError, match=r"missing tree\['state'\]\[0\]\['step'\]"):
        check_optimizer_roundtrip(SAMPLE, FOUR, THREE, convert=convert, directory=storage)
