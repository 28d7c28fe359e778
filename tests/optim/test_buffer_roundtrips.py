"""States saved as flat ranges of buffers and loaded with other ranks: flat again, in boxes, and from boxes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardtree.buffers import buffer_slices, flat_shards
from tests.core.trees.samples import assert_caught
from tests.optim.zero_states import Layout, Model, check_loaded_flat, saved_flat


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
