"""The demo's verdict: a state equals itself, and every planted difference is found."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch

from shardtree.cli._layout import BY_HIDDEN
from shardtree.cli._ranks import Embeddings
from shardtree.cli._state import compare, held_elements, training_state
from shardtree.cli._verdict import Finding, verdict
from shardtree.cli._weights import SMALL, find_source, weights_of
from shardtree.mapping import ShardedTensor
from shardtree.trees import map_shards

WEIGHTS = weights_of(find_source(small=True))
RANKS = 2
STATES = [training_state(WEIGHTS, BY_HIDDEN, rank, RANKS, head_size=SMALL.head_size) for rank in range(RANKS)]
ELEMENTS = held_elements(training_state(WEIGHTS, BY_HIDDEN, 0, 1, head_size=SMALL.head_size))
SAME = Embeddings(torch.ones(2, 3), torch.ones(2, 3))


def as_loaded(state: Any) -> Any:
    return map_shards(lambda leaf: leaf.data.clone() if isinstance(leaf, ShardedTensor) else leaf, state)


def findings(change: Callable[[Any], None]) -> tuple[Finding, ...]:
    loaded = [as_loaded(state) for state in STATES]
    change(loaded[1])
    return verdict(ELEMENTS, [compare(*pair) for pair in zip(loaded, STATES, strict=True)], SAME)


def test_what_was_loaded_right_holds() -> None:
    assert all(finding.holds for finding in findings(lambda loaded: None))


def test_each_group_has_the_elements_of_the_weights() -> None:
    count = sum(weight.numel() for weight in WEIGHTS.values())
    assert {"weights": count, "exp_avg": count, "exp_avg_sq": count} == ELEMENTS


def flip_a_bit(loaded: Any) -> None:
    loaded["model"]["pooler.dense.weight"].view(torch.int32)[3, 4] ^= 1


def flip_a_replica_s_bit(loaded: Any) -> None:
    loaded["model"]["pooler.dense.bias"].view(torch.int32)[3] ^= 1


def swap_moments(loaded: Any) -> None:
    loaded["optimizer"]["exp_avg"], loaded["optimizer"]["exp_avg_sq"] = (
        loaded["optimizer"]["exp_avg_sq"],
        loaded["optimizer"]["exp_avg"],
    )


def lose_a_tensor(loaded: Any) -> None:
    del loaded["model"]["pooler.dense.weight"]


def change_a_dtype(loaded: Any) -> None:
    loaded["model"]["pooler.dense.weight"] = loaded["model"]["pooler.dense.weight"].double()


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
    assert wrong.details == ("pooler.dense.bias",)
    [wrong] = [finding for finding in findings(change_the_step) if not finding.holds]
    assert wrong.details == ("tree['step']",)


@pytest.mark.parametrize("embeddings", [None, Embeddings(torch.zeros(1), -torch.zeros(1))])
def test_an_output_that_differs_in_a_bit_is_found(embeddings: Embeddings | None) -> None:
    assert [finding.holds for finding in verdict(dict.fromkeys(ELEMENTS, 0), [], embeddings)].count(False) == 1


def test_a_rank_that_compared_nothing_is_found() -> None:
    comparison = compare(as_loaded(STATES[0]), STATES[0])
    assert not all(finding.holds for finding in verdict(ELEMENTS, [comparison], SAME))
