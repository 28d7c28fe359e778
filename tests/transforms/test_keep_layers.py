"""keep_layers: numbered anew with their states, objects and factories, on whole tensors and on shards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some

import shardtree as st
from shardtree.errors import TreeError
from shardtree.testing import check_commutes, check_pure
from shardtree.transforms import keep_layers
from shardtree.trees import flat, nested
from tests.transforms.flat_trees import Tree, whole
from tests.transforms.flat_trees import flat as by_key

STATES = "optimizer.state.exp_avg."


def model(layers: int = 4) -> Tree:
    """Return a flat tree whose tensors hold their layer's number, with states, an object and a factory."""
    tree: Tree = by_key(whole("embed", torch.ones(2)), whole("h.w", torch.ones(2)))
    for n in range(layers):
        shards = [whole(f"h.{n}.up.w", torch.full((2,), n)), whole(f"{STATES}h.{n}.up.w", torch.full((2,), -n))]
        lens = st.lenses.transposed()
        factory = st.lenses.as_factory(whole(f"h.{n}.down.w", torch.full((2, 3), n)), lens)
        extra = st.ShardedObject(f"h.{n}._extra_state", n, (1,), (0,))
        group = st.ShardedObject(f"optimizer.param_group.h.{n}.up.w", n, (1,), (0,))
        tree |= by_key(*shards, factory) | {extra.unique_key: extra, group.unique_key: group}
    return tree


MODEL = model()
NUMBERS = some.lists(some.integers(0, 3), max_size=6)
Keep = Callable[[Tree, str, Sequence[int]], Tree]


def keeping_all_is_the_identity(keep: Keep) -> None:
    kept = keep(MODEL, "h", range(4))
    assert list(kept.items()) == list(MODEL.items())


def keeps_compose(keep: Keep, numbers: list[int], places: list[int]) -> None:
    places = [place for place in places if place < len(numbers)]
    twice = keep(keep(MODEL, "h", numbers), "h", places)
    assert twice == keep(MODEL, "h", [numbers[place] for place in places])


def without_new_numbers(tree: Tree, prefix: str, layers: Sequence[int]) -> Tree:
    dropped = [f".{n}." for n in range(4) if n not in layers]
    return {entry: leaf for entry, leaf in tree.items() if not any(part in entry for part in dropped)}


def states_stay(tree: Tree, prefix: str, layers: Sequence[int]) -> Tree:
    states = {entry: leaf for entry, leaf in tree.items() if entry.startswith("optimizer")}
    return keep_layers({entry: leaf for entry, leaf in tree.items() if entry not in states}, prefix, layers) | states


def test_keeping_all_layers_is_the_identity() -> None:
    keeping_all_is_the_identity(partial(check_pure, keep_layers))


def test_the_identity_catches_layers_in_another_order() -> None:
    with pytest.raises(AssertionError):
        keeping_all_is_the_identity(lambda tree, prefix, layers: keep_layers(tree, prefix, [0, 2, 1, 3]))


@given(NUMBERS, NUMBERS)
def test_a_keep_after_a_keep_is_the_keep_of_both(numbers: list[int], places: list[int]) -> None:
    if numbers:
        keeps_compose(keep_layers, numbers, places)


def test_the_law_of_keeps_catches_layers_without_new_numbers() -> None:
    with pytest.raises((AssertionError, TreeError)):
        keeps_compose(without_new_numbers, [3, 1, 1], [0, 2])


def is_whole(tree: Tree) -> None:
    """Raise unless each layer has all that a layer has, with the number of one and the same old layer."""
    layers = nested({leaf.key: leaf for leaf in tree.values()})["h"]
    states = nested({leaf.key: leaf for leaf in tree.values()})["optimizer"]
    for n in (name for name in layers if name != "w"):
        old = int(layers[n]["up"]["w"].data[0])
        assert states["state"]["exp_avg"]["h"][n]["up"]["w"].data.tolist() == [-old, -old], f"moments of layer {n}"
        assert states["param_group"]["h"][n]["up"]["w"].data == layers[n]["_extra_state"].data == old
        [built] = (leaf for leaf in layers[n]["down"]["w"].build().values() if isinstance(leaf, st.ShardedTensor))
        assert built.key == f"h.{n}.down.w" and built.data[0, 0] == old
    assert states["state"]["exp_avg"]["h"].keys() == layers.keys() - {"w"}, "moments of other layers"


def test_states_objects_and_factories_go_with_their_layer() -> None:
    is_whole(keep_layers(MODEL, "h", [3, 0, 0]))


def test_the_law_of_layers_catches_moments_that_stay() -> None:
    with pytest.raises(AssertionError, match="moments of layer 1"):
        is_whole(states_stay(MODEL, "h", [3, 0]))


STATE = {f"{front}h.{n}.w": torch.full((6, 4), 10.0 * n) for front in ("", STATES) for n in range(3)}


@pytest.mark.slow
def test_on_shards_it_is_what_it_is_on_the_whole() -> None:
    check_commutes(st.bind(keep_layers, "h", [2, 0]), STATE, rtol=0, atol=0)


def test_commuting_catches_what_is_kept_by_a_rank_s_own_rows() -> None:
    def by_rows(tree: Tree) -> Tree:
        return keep_layers(tree, "h", [0 if tree["h.0.w"].global_offset[0] else 2, 1])

    with pytest.raises(AssertionError, match=r"'h\.0\.w'.*elements differ"):
        check_commutes(by_rows, STATE, rtol=0, atol=0)


def test_a_pipeline_s_ranks_lack_layers_of_other_stages() -> None:
    stages = [{key: leaf for key, leaf in MODEL.items() if f"h.{n}." in key} for n in range(4)]
    kept = [keep_layers(stage, "h", [3, 1], absent=range(4)) for stage in stages]
    assert [len(stage) for stage in kept] == [0, 5, 0, 5]
    assert kept[1] | kept[3] == {
        key: leaf for key, leaf in keep_layers(MODEL, "h", [3, 1]).items() if "h.w" not in key and "embed" not in key
    }


def test_what_precedes_the_key_in_an_entry_stays() -> None:
    tree = {"model": {"h": {str(n): {"w": whole(f"h.{n}.w", torch.full((2,), n))} for n in range(3)}}, "step": 3}
    kept = nested(keep_layers(flat(tree), "h", [0, 2]))
    assert {n: (layer["w"].key, layer["w"].data[0].item()) for n, layer in kept["model"]["h"].items()} == {
        "0": ("h.0.w", 0),
        "1": ("h.1.w", 2),
    }


def test_stars_and_tensors_of_a_layer_without_names() -> None:
    tree = by_key(*(whole(f"h.{n}.experts.{e}.w", torch.full((2,), e)) for n in range(2) for e in range(3)))
    assert list(keep_layers(tree, "h.*.experts", [2])) == ["h.0.experts.0.w", "h.1.experts.0.w"]
    assert list(keep_layers(by_key(whole("a.0", torch.ones(1)), whole("a.1", torch.ones(1))), "a", [1])) == ["a.0"]
