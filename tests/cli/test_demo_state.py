"""The demo's state: its layouts cut every weight, and each planted difference is found."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch

import shardtree as st
from shardtree.cli._demo_state import (
    LOADED_AS,
    SAVED_AS,
    SMALL,
    Finding,
    Sizes,
    Source,
    compare_state,
    elements_of,
    find_source,
    findings_of,
    meta_weights,
    training_state,
    weights_of,
)
from shardtree.layouts import SpecFunction

LAYOUTS = {"saved": SAVED_AS, "loaded": LOADED_AS}
SOURCES = {"made up": Source("", Sizes()), "small": Source("", SMALL), "found": find_source(small=False)}
WEIGHTS = weights_of(SOURCES["small"])
STATES = [training_state(WEIGHTS, LOADED_AS, rank, 2) for rank in range(2)]
ELEMENTS = elements_of(training_state(WEIGHTS, LOADED_AS, 0, 1))


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
def test_weights_are_the_same_each_time_and_as_their_meta_tensors_say(source: Source) -> None:
    first, second, meta = weights_of(source), weights_of(source), meta_weights(source)
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())
    assert {name: (tensor.shape, tensor.dtype) for name, tensor in first.items()} == {
        name: (tensor.shape, tensor.dtype) for name, tensor in meta.items()
    }


def test_made_up_weights_are_named_and_shaped_as_pretrained_ones() -> None:
    pretrained, made_up = (meta_weights(SOURCES[name]) for name in ("found", "made up"))
    assert all(tensor.shape == pretrained[name].shape for name, tensor in made_up.items())


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 5, 70])  # 70: more than some axes are long
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_the_ranks_shards_tile_the_state(layout: SpecFunction, ranks: int) -> None:
    weights = meta_weights(SOURCES["small"])
    assert st.coverage([training_state(weights, layout, rank, ranks) for rank in range(ranks)]).is_complete


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_the_layouts_are_for_pretrained_weights_too(layout: SpecFunction) -> None:
    weights = meta_weights(SOURCES["found"])
    assert set(training_state(weights, layout, 1, 3)["model"]) == set(weights)


@pytest.mark.slow
@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
def test_every_matrix_is_cut_along_its_other_axis(source: Source) -> None:
    matrices = {
        name: whole for name, whole in meta_weights(source).items() if whole.is_floating_point() and whole.dim() == 2
    }

    def axis(layout: SpecFunction, name: str) -> int | None:
        shard = training_state(matrices, layout, 1, 2)["model"][name]
        return next((axis for axis, start in enumerate(shard.global_offset) if start), None)

    both = {(axis(SAVED_AS, name), axis(LOADED_AS, name)) for name in matrices}
    assert {(0, 1), (1, 0)} <= both <= {(0, 1), (1, 0), (None, 1)}


def as_loaded(state: Any) -> Any:
    return st.map_shards(lambda leaf: leaf.data.clone() if isinstance(leaf, st.ShardedTensor) else leaf, state)


def findings(change: Callable[[Any], None]) -> tuple[Finding, ...]:
    loaded = [as_loaded(state) for state in STATES]
    change(loaded[1])
    return findings_of(ELEMENTS, [compare_state(*pair) for pair in zip(loaded, STATES, strict=True)])


def test_what_was_loaded_right_holds() -> None:
    assert all(finding.holds for finding in findings(lambda loaded: None))


def test_each_group_has_the_elements_of_the_weights() -> None:
    count = sum(weight.numel() for weight in WEIGHTS.values())
    assert {"weights": count, "exp_avg": count, "exp_avg_sq": count} == ELEMENTS


MATRIX, REPLICA = "encoder.layer.1.intermediate.dense.weight", "encoder.layer.1.intermediate.dense.bias"


def flip_a_bit(loaded: Any) -> None:
    loaded["model"][MATRIX].view(torch.int32)[3, 4] ^= 1


def flip_a_replica_s_bit(loaded: Any) -> None:
    loaded["model"][REPLICA].view(torch.int32)[3] ^= 1


def swap_moments(loaded: Any) -> None:
    loaded["optimizer"]["exp_avg"], loaded["optimizer"]["exp_avg_sq"] = (
        loaded["optimizer"]["exp_avg_sq"],
        loaded["optimizer"]["exp_avg"],
    )


def lose_a_tensor(loaded: Any) -> None:
    del loaded["model"][MATRIX]


def change_a_dtype(loaded: Any) -> None:
    loaded["model"][MATRIX] = loaded["model"][MATRIX].double()


def change_the_step(loaded: Any) -> None:
    loaded["step"] = 2


def gain_a_value(loaded: Any) -> None:
    loaded["epoch"] = 2


@pytest.mark.parametrize(
    "change",
    [flip_a_bit, flip_a_replica_s_bit, swap_moments, lose_a_tensor, change_a_dtype, change_the_step, gain_a_value],
)
def test_a_planted_difference_is_found(change: Callable[[Any], None]) -> None:
    before = deepcopy(WEIGHTS)
    assert not all(finding.holds for finding in findings(change))
    assert all(torch.equal(before[name], WEIGHTS[name]) for name in WEIGHTS)


def test_a_difference_is_named() -> None:
    [wrong] = [finding for finding in findings(flip_a_replica_s_bit) if not finding.holds]
    assert wrong.details == (REPLICA,)
    [wrong] = [finding for finding in findings(change_the_step) if not finding.holds]
    assert wrong.details == ("tree['step']",)


def test_a_rank_that_compared_nothing_is_found() -> None:
    comparison = compare_state(as_loaded(STATES[0]), STATES[0])
    assert not all(finding.holds for finding in findings_of(ELEMENTS, [comparison]))
