"""States saved as flat ranges of buffers and loaded with other ranks: flat again, in boxes, and from boxes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import shardtree
from shardtree.buffers import buffer_slices, flat_shards, flat_targets
from shardtree.mapping import ShardedTensor
from shardtree.storage import MemoryStorage
from shardtree.testing import first_difference
from shardtree.world import World, simulate
from tests.buffers.zero_states import STATES, Layout, Model, check_loaded_flat, same, saved_flat
from tests.trees.samples import assert_caught

MEGATRON = {"align": 64, "bucket_align": 128, "bucket_size": 100}


@st.composite
def models(draw: st.DrawFn) -> Model:
    """Return a strategy for models: parameters that are cut, evenly or not, gated, replicated, scalar or empty."""
    drawn = draw(st.lists(st.lists(st.sampled_from([1, 2, 3, 5, 7, 0]), max_size=3).map(tuple), max_size=3))
    shapes = {f"p{number}": shape for number, shape in enumerate(drawn)}
    axes = {name: draw(st.none() | st.integers(0, len(shape) - 1)) if shape else None for name, shape in shapes.items()}
    gated = {"gated": (12, draw(st.integers(1, 3)))} if draw(st.booleans()) or not shapes else {}
    return Model({**shapes, **gated}, {**axes, **dict.fromkeys(gated, 0)}, next(iter(gated), None))


@st.composite
def layouts(draw: st.DrawFn, model: Model) -> Layout:
    options = {
        "bucket_size": draw(st.none() | st.integers(1, 30)),
        "align": draw(st.sampled_from([1, 4])),
        "bucket_align": draw(st.sampled_from([1, 3])),
        "order": draw(st.permutations(list(model.shapes))),
    }
    return Layout(draw(st.integers(1, 6)), draw(st.integers(1, 3)), options)


@st.composite
def journeys(draw: st.DrawFn) -> tuple[Model, Layout, Layout]:
    model = draw(models())
    return model, draw(layouts(model)), draw(layouts(model))


def check_journey(functions: dict[str, Callable[..., Any]], journey: tuple[Model, Layout, Layout]) -> None:
    model, before, after = journey
    check_loaded_flat(model, after, saved_flat(model, before, **functions), **functions)


@pytest.mark.slow
@settings(max_examples=15)
@given(journeys())
def test_what_is_saved_by_some_ranks_is_loaded_by_others(journey: tuple[Model, Layout, Layout]) -> None:
    check_journey({}, journey)


def of_the_last_rank(plan: Any, rank: int, tree: Any, **options: Any) -> Any:
    """Place each range at the front of its slice, as if nothing lay before it."""
    slices = buffer_slices(plan, rank, tree, **options)
    starts = [min((p.taken.start for p in plan.ranges(rank) if p.bucket == n), default=0) for n in range(len(slices))]
    return [part.roll(-start) for part, start in zip(slices, starts, strict=True)]


def reversed_data(plan: Any, rank: int, slices: Any, parameters: Any, **options: Any) -> Any:
    return flat_shards(plan, rank, [part.flip(0) for part in slices], parameters, **options)


@pytest.mark.slow
@pytest.mark.parametrize("broken", [{"buffer_slices": of_the_last_rank}, {"flat_shards": reversed_data}])
def test_the_law_catches(broken: dict[str, Callable[..., Any]]) -> None:
    assert_caught(check_journey, broken, journeys())


MODEL = Model(
    {"embedding": (13, 8), "norm": (8,), "fc1": (24, 8), "fc2": (8, 12), "scale": (), "unused": (0, 8)},
    {"embedding": 0, "norm": None, "fc1": 0, "fc2": 1, "scale": None, "unused": None},
    gated="fc1",
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"),
    [
        (Layout(8, 1, MEGATRON), Layout(3, 1, MEGATRON)),
        (Layout(8, 2, MEGATRON), Layout(3, 3, {"order": reversed(MODEL.shapes)})),
        (Layout(3, 2), Layout(8, 1, MEGATRON)),
        (Layout(30, 1), Layout(1, 1)),
        (Layout(1, 1), Layout(30, 1)),
    ],
    ids=lambda layout: f"dp{layout.data_parallel}-tp{layout.tensor_parallel}",
)
def test_a_state_of_8_data_parallel_ranks_is_loaded_by_3(before: Layout, after: Layout) -> None:
    before, after = (
        replace(each, options={**each.options, "order": list(each.options.get("order", MODEL.shapes))})
        for each in (before, after)
    )
    check_loaded_flat(MODEL, after, saved_flat(MODEL, before))


def whole_target(state: str) -> dict[str, ShardedTensor]:
    return {
        name: ShardedTensor.from_rank_offsets(
            f"optimizer.state.{state}.{name}", torch.empty(shape, dtype=torch.float32, device="meta")
        )
        for name, shape in MODEL.shapes.items()
    }


def test_flat_ranges_are_loaded_as_boxes() -> None:
    place = saved_flat(MODEL, Layout(8, 2, MEGATRON))
    loaded = shardtree.load({state: whole_target(state) for state in STATES}, place)
    for state in STATES:
        for name, tensor in loaded[state].items():
            assert first_difference(tensor, MODEL.whole(state, name)) is None, (state, name)


def test_boxes_are_loaded_as_flat_ranges() -> None:
    place = MemoryStorage()
    boxes = {
        state: {
            name: ShardedTensor.from_rank_offsets(f"optimizer.state.{state}.{name}", MODEL.whole(state, name))
            for name in MODEL.shapes
        }
        for state in STATES
    }
    shardtree.save(boxes, place)
    layout = Layout(3, 2, MEGATRON)

    def load_rank(world: World) -> Any:
        data, tensor = layout.place(world.rank)
        plan, parameters = layout.plan(MODEL, world.rank), MODEL.parameters(tensor, 2)
        targets = {
            state: flat_targets(plan, data, parameters, prefix=f"optimizer.state.{state}", replica_id=same)
            for state in STATES
        }
        loaded = shardtree.load(targets, place, world=world)
        return {state: buffer_slices(plan, data, loaded.get(state, {})) for state in STATES}

    for rank, found in enumerate(simulate(layout.ranks, load_rank)):
        for state in STATES:
            for part, expected in zip(found[state], layout.slices(MODEL, state)[rank], strict=True):
                assert first_difference(part, expected) is None


def test_a_donated_slice_is_filled_where_it_is() -> None:
    plain = Model({"w": (5, 4), "b": (7,)}, {"w": 0, "b": None})
    place, layout = saved_flat(plain, Layout(4, 1)), Layout(3, 1, {"align": 4})

    def load_rank(world: World) -> Any:
        plan, parameters = layout.plan(plain, world.rank), plain.parameters(0, 1)
        own = {state: [torch.zeros(length) for length in plan.slice_lengths] for state in STATES}
        tree = {
            state: flat_shards(plan, world.rank, own[state], parameters, prefix=f"optimizer.state.{state}")
            for state in STATES
        }
        shardtree.load(tree, place, donate=True, world=world)
        return own

    for rank, found in enumerate(simulate(3, load_rank)):
        for state in STATES:
            [expected] = layout.slices(plain, state)[rank]
            assert first_difference(found[state][0], expected) is None
