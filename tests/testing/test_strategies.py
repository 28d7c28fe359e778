"""The kit's strategies: what they draw is what they say, and shrinks to what a person can read."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st
from hypothesis.vendor.pretty import pretty

from shardtree.mapping import ShardedTensor, ShardedTensorFactory, is_main_replica
from shardtree.testing import (
    LENS_CASES,
    ShardedTrees,
    assemble,
    check_factory,
    check_layout,
    even_layout,
    factories,
    first_difference,
    flat_layouts,
    global_states,
    irregular_layouts,
    layouts,
    lens_factories,
    regular_layouts,
    replicas,
    sharded_trees,
)
from shardtree.trees import leaves_with_paths

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

KINDS = {"regular": regular_layouts, "irregular": irregular_layouts, "flat": flat_layouts, "any": layouts}
SHAPES = st.sampled_from([(), (0,), (4, 6), (3, 5, 2), (2, 0, 3)])


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_layouts_tile_their_tensor(kind: str, data: st.DataObject) -> None:
    shape, ranks = data.draw(SHAPES), data.draw(st.integers(1, 5))
    layout = data.draw(KINDS[kind](shape, ranks))
    assert (layout.global_shape, layout.ranks) == (shape, ranks)
    check_layout(layout)


@given(data=st.data())
def test_each_kind_is_of_its_kind(data: st.DataObject) -> None:
    shape, ranks = data.draw(SHAPES), data.draw(st.integers(1, 5))
    regular, irregular, flat = (data.draw(KINDS[kind](shape, ranks)) for kind in ("regular", "irregular", "flat"))
    assert regular.grid is not None and math.prod(regular.grid) == len(regular.pieces)
    assert irregular.grid is None
    assert all(piece.flat is not None for piece in flat.pieces)
    for layout in (regular, irregular, flat):
        assert layout.prepended == 0 and all(is_main_replica(piece.replica) for piece in layout.pieces)


@given(data=st.data())
def test_replicas_are_copies_on_other_ranks(data: st.DataObject) -> None:
    layout = data.draw(SHAPES.flatmap(lambda shape: regular_layouts(shape, 4)))
    copied = data.draw(replicas(layout))
    check_layout(copied)
    assert copied.pieces[: len(layout.pieces)] == layout.pieces
    held = [(piece.rank, piece.offset) for piece in copied.pieces]
    assert len(held) == len(set(held)) or 0 in layout.global_shape


SHRUNK: dict[str, tuple[st.SearchStrategy[Any], Any, str]] = {
    "a regular layout over ranks": (
        regular_layouts((4,), 3),
        lambda layout: len({piece.rank for piece in layout.pieces}) > 1,
        "Layout(ranks=3, global_shape=(4,), pieces=(Piece(0, (0,), (2,)), Piece(1, (2,), (2,))), grid=(2,))",
    ),
    "a flat layout": (
        flat_layouts((4, 6), 2),
        lambda layout: any(piece.flat[0] for piece in layout.pieces),
        "Layout(ranks=2, global_shape=(4, 6), pieces=(Piece(0, (0, 0), (4, 6), flat=(0, 1)), "
        "Piece(0, (0, 0), (4, 6), flat=(1, 24))), grid=(1, 1))",
    ),
    "replicas": (
        replicas(even_layout((4,), 2, 0)),
        lambda layout: len(layout.pieces) > 2,
        "Layout(ranks=2, global_shape=(4,), pieces=(Piece(0, (0,), (2,)), Piece(1, (2,), (2,)), "
        "Piece(0, (2,), (2,), replica=1)), grid=(2,))",
    ),
    "trees whose tensor is cut": (
        sharded_trees(),
        lambda drawn: any(len(tree.get("model", {}).get("a", ())) > 1 for tree in drawn.trees),
        "",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SHRUNK)
def test_it_shrinks_to_a_small_example_that_shows_itself(name: str) -> None:
    strategy, condition, expected = SHRUNK[name]
    phases = (Phase.generate, Phase.shrink)  # to explain takes longer than both
    found = find(strategy, condition, settings=settings(max_examples=500, database=None, phases=phases))
    assert repr(found) == expected if expected else len(repr(found)) < 320, found  # a second tensor may stay
    assert pretty(found) == repr(found), "Hypothesis shows it otherwise"


@settings(max_examples=15)
@given(sharded_trees())
def test_sharded_trees_come_with_their_oracle(drawn: ShardedTrees) -> None:
    found = assemble(drawn.trees)
    assert found.keys() == drawn.state.tensors.keys()
    assert all(first_difference(found[key], whole) is None for key, whole in drawn.state.tensors.items())
    wanted, asked = (
        [leaf.without_data() for _, leaf in leaves_with_paths(list(trees)) if isinstance(leaf, ShardedTensor)]
        for trees in (drawn.trees, drawn.targets)
    )
    assert wanted == asked and len(wanted) == sum(len(layout.pieces) for layout in drawn.layout.values())


@pytest.mark.slow
def test_sharded_trees_of_a_state_of_ones_own() -> None:
    state = global_states(max_tensors=1)
    assert len(find(sharded_trees(ranks=3, state=state), lambda drawn: True).trees) == 3


@settings(max_examples=40)
@given(factories())
def test_every_drawn_factory_is_a_lens(factory: ShardedTensorFactory) -> None:
    check_factory(factory)


@pytest.mark.slow
@pytest.mark.parametrize("name", LENS_CASES)
@settings(max_examples=2)
@given(data=st.data())
def test_every_ready_lens_is_drawn(name: str, data: st.DataObject) -> None:
    """Of each one there are factories, and they build from the flat ranges of an optimizer too."""
    factory = data.draw(lens_factories(name))
    volume = factory.data.numel()
    start, stop = sorted(data.draw(st.tuples(*[st.integers(0, volume)] * 2)))
    check_factory(factory, flat=[slice(start, stop)])
