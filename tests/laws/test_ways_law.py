"""The law of one engine: whatever way tensors take into another layout, bits are the same, and bytes are the plan's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as draws

import shardtree as st
from shardtree.layouts import shard
from shardtree.strategies import StrategyAction, default_strategies
from shardtree.testing import (
    GlobalState,
    check_ways,
    even_layout,
    random_bits,
    rank_tree,
    state_layouts,
    target_tree,
)
from shardtree.testing._ways import Way, own_ways
from tests.live.recast import recast_states

# What torch says, once, when it makes a tensor of half-precision complex numbers.
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

EXAMPLES = settings.default.max_examples if settings.default else 100

Ends = tuple[Sequence[Any], Sequence[Any]]
WAYS = own_ways()
FORMATS = [(name, version) for action, name, version in default_strategies if action is StrategyAction.SAVE_SHARDED]


@pytest.mark.slow
@settings(max_examples=EXAMPLES // 2)
@given(data=draws.data())
def test_every_way_gives_the_same_bits_by_the_bytes_of_the_plan(data: draws.DataObject) -> None:
    """For any two layouts, tensors of every dtype, some of which are converted, objects and plain values."""
    held, wanted = data.draw(recast_states(), label="states")
    before, after = (data.draw(state_layouts(held, data.draw(draws.integers(1, 5)))) for _ in range(2))
    ranks = [next(iter(each.values())).ranks for each in (before, after)]
    trees = [rank_tree(held, before, rank) for rank in range(ranks[0])]
    check_ways(trees, [target_tree(wanted, after, rank) for rank in range(ranks[1])])


STATE = GlobalState({"w": random_bits((4, 4), torch.float32, 1)}, {"rng": [1, 2]}, {"step": 3})
ENDS = (
    [rank_tree(STATE, {"w": even_layout((4, 4), 2, 0)}, rank) for rank in range(2)],
    [target_tree(STATE, {"w": even_layout((4, 4), 2, 1)}, rank) for rank in range(2)],
)
CAST_ENDS = (
    shard({"w": torch.arange(16.0).view(4, 4) + 0.1}, st.Mesh(dp=2), st.PartitionSpec("dp")),
    st.abstract({"w": torch.zeros(4, 4, dtype=torch.float64)}, st.Mesh(tp=2), st.PartitionSpec(None, "tp")),
)


@pytest.mark.parametrize("ends", [ENDS, CAST_ENDS], ids=["kept", "cast"])
def test_every_way_gives_the_same_bits_of_rows_and_columns(ends: Ends) -> None:
    """The law on two cases, for the quick part of the suite."""
    check_ways(*ends)


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "version"), FORMATS)
def test_so_it_is_through_files_of_any_format(backend: str, version: int) -> None:
    check_ways(*CAST_ENDS, backend=backend, version=version)


def losing_a_plain_value(way: Way, trees: Sequence[Any], targets: Sequence[Any]) -> tuple[Sequence[Any], Any, Any]:
    got, *counts = way(trees, targets)
    return [{**tree, "common": {}} for tree in got], *counts


def exchanging_ranks(way: Way, trees: Sequence[Any], targets: Sequence[Any]) -> tuple[Sequence[Any], Any, Any]:
    return way(trees, targets[::-1])


def by_way_of_bfloat16(way: Way, trees: Sequence[Any], targets: Sequence[Any]) -> tuple[Sequence[Any], Any, Any]:
    return way([st.cast(tree, torch.bfloat16) for tree in trees], targets)


def sending_twice(way: Way, trees: Sequence[Any], targets: Sequence[Any]) -> tuple[Sequence[Any], Any, Any]:
    got, went, planned = way(trees, targets)
    return got, [went, went], planned


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("fault", [losing_a_plain_value, exchanging_ranks, by_way_of_bfloat16, sending_twice])
def test_the_law_catches(way: str, fault: Callable[..., Any]) -> None:
    ends = CAST_ENDS if fault is by_way_of_bfloat16 else ENDS
    with pytest.raises(AssertionError, match=r"faulty: (rank 0 gets other values|.* bytes moved)"):
        check_ways(*ends, ways={"faulty": partial(fault, WAYS[way])})


def test_the_law_catches_a_row_that_reads_other_values() -> None:
    row = (StrategyAction.LOAD_SHARDED, "zarr", 3)

    def negated(checkpoint: Any, shards: Any) -> st.storage.ReadReport:
        report: st.storage.ReadReport = default_strategies[row](checkpoint, shards)
        for leaf in shards:
            leaf.data.neg_()
        return report

    with pytest.raises(AssertionError, match="memory to file to memory: rank 0 gets other values"):
        check_ways(*CAST_ENDS, backend="zarr", version=3, strategies=default_strategies | {row: negated})
