"""Round trips through every two formats: what both hold comes out of the second as it went into the first.

The formats are those that the dispatch table can save, so a new one is tested by being registered. What a format can't
hold it says itself, with UnsupportedValue; anything else that it raises fails the law.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as some

import shardtree as st
from shardtree.errors import UnsupportedValue
from shardtree.storage import MemoryStorage
from shardtree.strategies import StrategyAction, default_strategies
from shardtree.testing import (
    GlobalState,
    Layout,
    even_layout,
    global_states,
    outline,
    random_bits,
    rank_tree,
    refilled,
    state_layouts,
)
from shardtree.testing._bits import check_same
from shardtree.trees import leaves_with_paths
from tests.faults.sampling import EXHAUSTIVE, sample

Format = tuple[str, int]
Layouts = dict[str, Layout]

FORMATS: list[Format] = [
    (backend, version) for action, backend, version in default_strategies if action is StrategyAction.SAVE_SHARDED
]
PAIRS = list(product(FORMATS, repeat=2))
SOME_PAIRS = [pytest.param(pair, marks=() if pair in sample(PAIRS, 12) else EXHAUSTIVE) for pair in PAIRS]
RANKS = 3, 2
BALLAST = {"ballast": torch.arange(6.0)}  # a checkpoint needs a tensor

# What torch says, once, when it makes a tensor of half-precision complex numbers.
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


def pair_name(pair: tuple[Format, Format]) -> str:
    return " to ".join(f"{backend}-{version}" for backend, version in pair)


# -- a state in a format


def tree_of(state: GlobalState, layout: Layouts, rank: int) -> dict[str, Any]:
    """Return what a rank saves: shards, objects where there are any, and the common state where there is one."""
    tree = rank_tree(state, layout, rank) if state.tensors else {}
    shards = {name: tree[name] for name in ("model", "objects") if name in tree}
    return shards | ({"common": dict(state.common)} if state.common else {})


def save_in(name: Format, trees: list[dict[str, Any]], place: Any) -> None:
    st.simulate(
        len(trees),
        lambda world: st.save(
            trees[world.rank], place, name, world=world, options=st.SaveOptions(durable=False, stale_after=0.0)
        ),
    )


def load_from(place: Any, targets: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return st.simulate(len(targets), lambda world: st.load(targets[world.rank], place, world=world))


def holds(name: Format, state: GlobalState, layout: Layouts) -> bool:
    """Ask a format whether it holds a state in a layout; other errors than a refusal are raised."""
    try:
        save_in(name, [tree_of(state, layout, rank) for rank in range(ranks_of(layout))], MemoryStorage())
    except UnsupportedValue:
        return False
    return True


def ranks_of(layout: Layouts) -> int:
    return next(iter(layout.values())).ranks


def held_by(pairs: list[tuple[Format, Layouts]], state: GlobalState) -> GlobalState:
    """Return the part of a state that each of the formats holds in its layout, asked piece by piece.

    A common value without leaves, an empty list for example, is left out: formats of tensors alone drop it.
    """

    def both(piece: GlobalState) -> bool:
        return all(holds(name, piece, {"ballast": even_layout((6,), 1)}) for name, _ in pairs)

    def tensor_held(key: str) -> bool:
        piece = GlobalState({key: state.tensors[key]}, {}, {})
        return all(holds(name, piece, {key: layout[key]}) for name, layout in pairs)

    def object_held(key: str) -> bool:
        return both(GlobalState(BALLAST, {key: state.objects[key]}, {}))

    def value_held(key: str) -> bool:
        value = state.common[key]
        return bool(leaves_with_paths(value)) and both(GlobalState(BALLAST, {}, {key: value}))

    return GlobalState(
        {key: whole for key, whole in state.tensors.items() if tensor_held(key)},
        {key: cells for key, cells in state.objects.items() if object_held(key)},
        {key: value for key, value in state.common.items() if value_held(key)},
    )


def plain_dicts(value: Any) -> Any:
    """Return a value with dicts in place of OrderedDicts, wherever lists and dicts lead to."""
    if type(value) in (dict, OrderedDict):
        return {key: plain_dicts(child) for key, child in value.items()}
    return [plain_dicts(child) for child in value] if type(value) is list else value


# -- the law


def check_pair(pair: tuple[Format, Format], state: GlobalState, first: Layouts, second: Layouts, load: Any) -> None:
    """Raise unless a state goes through two formats, on other ranks each time, as it is."""
    one, two = MemoryStorage(), MemoryStorage()
    save_in(pair[0], [tree_of(state, first, rank) for rank in range(ranks_of(first))], one)
    trees = [tree_of(state, second, rank) for rank in range(ranks_of(second))]
    targets = [st.without_data({name: tree[name] for name in tree if name != "common"}) for tree in trees]
    loaded = load(one, targets)
    save_in(pair[1], [passed_on(*each) for each in zip(targets, loaded, strict=True)], two)
    check_whole(state, two, taken_apart=any(backend == "dcp" for backend, _ in pair))


def passed_on(target: dict[str, Any], loaded: dict[str, Any]) -> dict[str, Any]:
    """Return the tree that saves what was loaded in the target's layout."""
    pairs = zip(target.get("objects", []), loaded.get("objects", []), strict=True)
    objects = [replace(leaf, data=data) for leaf, data in pairs]
    common = {name: loaded[name] for name in ("common",) if name in loaded}
    return refilled(target, loaded) | ({"objects": objects} if objects else {}) | common


def check_whole(state: GlobalState, place: Any, *, taken_apart: bool = False) -> None:
    check_same("tensors differ", st.load_plain_tensors(place), state.tensors)
    stored, expected = st.load_common_state_dict(place).get("common", {}), dict(state.common)
    if taken_apart:  # dicts by their keys, which says nothing of their type: docs/formats.md
        stored, expected = plain_dicts(stored), plain_dicts(expected)
    assert outline(stored) == outline(expected)
    cells = [
        st.ShardedObject(key, None, (len(values),), (n,))
        for key, values in state.objects.items()
        for n in range(len(values))
    ]
    found = st.load({"objects": cells}, place)["objects"] if cells else []
    assert outline(found) == outline([value for values in state.objects.values() for value in values])


PLAIN = {"plain": random_bits((4, 6), torch.float32, 1)}


@some.composite
def cases(draw: some.DrawFn, pair: tuple[Format, Format]) -> tuple[GlobalState, Layouts, Layouts]:
    """Return a state that both formats hold, and a layout for each of the two saves."""
    state = draw(global_states(max_tensors=2))
    first, second = (draw(state_layouts(state, count)) for count in RANKS)
    held = held_by([(pair[0], first), (pair[1], second)], state)
    held = held if held.tensors else replace(held, tensors=PLAIN)
    plain = {key: even_layout(tuple(whole.shape), 2) for key, whole in held.tensors.items() if key not in first}
    return held, *({key: (own | plain)[key] for key in held.tensors} for own in (first, second))


@pytest.mark.slow
@pytest.mark.parametrize("pair", SOME_PAIRS, ids=pair_name)
@settings(max_examples=5, phases=[Phase.generate])
@given(data=some.data())
def test_a_state_goes_through_two_formats_as_it_is(pair: tuple[Format, Format], data: some.DataObject) -> None:
    check_pair(pair, *data.draw(cases(pair)), load_from)


@pytest.mark.parametrize("name", [name for name in FORMATS if name[0] != "huggingface"], ids=str)
def test_every_format_but_that_of_models_holds_objects_and_common_values(name: Format) -> None:
    state = GlobalState(BALLAST, {"rng": [{"seed": 1}, 2]}, {"step": 3, "lr": [0.1, None], "args": {"name": "x"}})
    assert held_by([(name, {"ballast": even_layout((6,), 3, axis=0)})], state).objects == state.objects
    assert held_by([(name, {"ballast": even_layout((6,), 3, axis=0)})], state).common == state.common


@pytest.mark.parametrize(
    "change",
    [
        lambda leaf: leaf.flip(0) if isinstance(leaf, torch.Tensor) else leaf,
        lambda leaf: None if leaf == "seed" else leaf,
        lambda leaf: None if leaf == "x" else leaf,
    ],
    ids=["rows in another order", "a lost object", "a lost value"],
)
def test_the_law_catches(change: Any) -> None:
    def changed(place: Any, targets: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return st.map_shards(change, load_from(place, targets))

    native = ("safetensors", 1)
    state = GlobalState(PLAIN, {"rng": ["seed"]}, {"name": "x"})
    first, second = ({"plain": even_layout((4, 6), ranks, axis=0)} for ranks in (1, 2))
    check_pair((native, native), state, first, second, load_from)
    with pytest.raises(AssertionError):
        check_pair((native, native), state, first, second, changed)
