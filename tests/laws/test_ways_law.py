"""The law of one engine: whatever way tensors take into another layout, bits are the same, and bytes are the plan's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as draws

import shardtree as st
from shardtree.layouts import shard
from shardtree.plans import with_relays
from shardtree.storage import MemoryStorage, ReadReport
from shardtree.testing import (
    GlobalState,
    check_reshard,
    even_layout,
    outline,
    random_bits,
    rank_tree,
    state_layouts,
    target_tree,
)
from tests.plans.recast import recast_states

# What torch says, once, when it makes a tensor of half-precision complex numbers.
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

EXAMPLES = settings.default.max_examples if settings.default else 100

Trees = Sequence[Any]
Way = Callable[[Trees, Trees], tuple[Trees, Any, Any]]
"""From each rank's tree and target to what each gets, the bytes that went between ranks, and those of the plan."""


def through_memory(trees: Trees, targets: Trees) -> tuple[Trees, Any, Any]:
    check_reshard(trees, targets, reshard=partial(st.reshard, cast=True))
    return st.reshard(trees, targets, cast=True), None, None


def between_ranks(trees: Trees, targets: Trees, *, relay: bool = False, bound: int = 2**20) -> tuple[Trees, Any, Any]:
    links: Counter[tuple[int, int]] = Counter()

    def on_rank(world: st.World) -> Any:
        def exchange(outgoing: Mapping[int, torch.Tensor], incoming: Mapping[int, torch.Tensor]) -> None:
            links.update({(world.rank, to): data.numel() for to, data in outgoing.items()})
            world.exchange(outgoing, incoming)

        tree, target = ((side[world.rank : world.rank + 1] or [None])[0] for side in (trees, targets))
        redistribute = partial(st.redistribute, relay=relay, max_bytes_in_flight=bound, transport=exchange)
        return redistribute(tree, target, cast=True, world=world)

    got = st.simulate(max(len(trees), len(targets)), on_rank)
    plan = st.plan_reshard(list(trees), list(targets), cast=True)
    least = plan.lower_bound
    plan = with_relays(plan) if relay else plan
    return got[: len(targets)], (dict(links), plan.bytes_moved), (plan.links, least)


def through_files(
    trees: Trees, targets: Trees, *, later: bool = False, exchange: Any = "never"
) -> tuple[Trees, Any, Any]:
    folder = MemoryStorage()

    def save(world: st.World) -> None:
        request = st.save(trees[world.rank], folder, world=world, async_sharded_save=later)
        if request is not None:
            request.execute_sync()

    reports: dict[int, ReadReport] = {}

    def load(world: st.World) -> Any:
        options = st.LoadOptions(exchange=exchange, verify=None, report=partial(reports.__setitem__, world.rank))
        return st.load(targets[world.rank], folder, world=world, cast=True, options=options)

    st.simulate(len(trees), save)
    foretold = st.explain_ranks(targets, folder, cast=True, options=st.LoadOptions(exchange=exchange, verify=None))
    assert foretold.ok is not False  # None where only values tell
    got = st.simulate(len(targets), load)
    went = [(one.bytes_sent, one.bytes_received) for _, one in sorted(reports.items())]
    return got, went, [(one.sent, one.received) for one in foretold.reads]


WAYS: dict[str, Way] = {
    "memory to memory": through_memory,
    "ranks to ranks": between_ranks,
    "in small steps": partial(between_ranks, bound=40),
    "ranks that pass on": partial(between_ranks, relay=True),
    "memory to file to memory": through_files,
    "saved in the background": partial(through_files, later=True),
    "ranks that read for each other": partial(through_files, exchange="always"),
}


def check_way(way: Way, trees: Trees, targets: Trees) -> None:
    """Raise unless every rank gets what a reshard in memory gives, and the bytes that move are those of the plan."""
    got, went, planned = way(trees, targets)
    for rank, (left, right) in enumerate(zip(got, st.reshard(trees, targets, cast=True), strict=True)):
        assert outline(st.unbox(left)) == outline(st.unbox(right)), f"rank {rank}: found {left!r}, expected {right!r}"
    assert went == planned, f"{went} bytes went, and the plan says {planned}"


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@settings(max_examples=EXAMPLES // 2)
@given(data=draws.data())
def test_every_way_gives_the_same_bits_by_the_bytes_of_the_plan(way: Way, data: draws.DataObject) -> None:
    """For any two layouts, tensors of every dtype, some of which are converted, objects and plain values."""
    held, wanted = data.draw(recast_states(), label="states")
    before, after = (data.draw(state_layouts(held, data.draw(draws.integers(1, 5)))) for _ in range(2))
    ranks = [next(iter(each.values())).ranks for each in (before, after)]
    trees = [rank_tree(held, before, rank) for rank in range(ranks[0])]
    check_way(way, trees, [target_tree(wanted, after, rank) for rank in range(ranks[1])])


STATE = GlobalState({"w": random_bits((4, 4), torch.float32, 1)}, {"rng": [1, 2]}, {"step": 3})
ENDS = (
    [rank_tree(STATE, {"w": even_layout((4, 4), 2, 0)}, rank) for rank in range(2)],
    [target_tree(STATE, {"w": even_layout((4, 4), 2, 1)}, rank) for rank in range(2)],
)
CAST_ENDS = (
    shard({"w": torch.arange(16.0).view(4, 4) + 0.1}, st.Mesh(dp=2), st.PartitionSpec("dp")),
    st.abstract({"w": torch.zeros(4, 4, dtype=torch.float64)}, st.Mesh(tp=2), st.PartitionSpec(None, "tp")),
)


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_every_way_gives_the_same_bits_of_rows_and_columns(way: Way) -> None:
    """The law on two cases, for the quick part of the suite."""
    check_way(way, *ENDS)
    check_way(way, *CAST_ENDS)


def losing_a_plain_value(way: Way, trees: Trees, targets: Trees) -> tuple[Trees, Any, Any]:
    got, *counts = way(trees, targets)
    return [{**tree, "common": {}} for tree in got], *counts


def exchanging_ranks(way: Way, trees: Trees, targets: Trees) -> tuple[Trees, Any, Any]:
    return way(trees, targets[::-1])


def by_way_of_bfloat16(way: Way, trees: Trees, targets: Trees) -> tuple[Trees, Any, Any]:
    return way([st.cast(tree, torch.bfloat16) for tree in trees], targets)


def sending_twice(way: Way, trees: Trees, targets: Trees) -> tuple[Trees, Any, Any]:
    got, went, planned = way(trees, targets)
    return got, [went, went], planned


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("fault", [losing_a_plain_value, exchanging_ranks, by_way_of_bfloat16, sending_twice])
def test_the_law_catches(way: Way, fault: Callable[..., Any]) -> None:
    ends = CAST_ENDS if fault is by_way_of_bfloat16 else ENDS
    with pytest.raises(AssertionError, match=r"rank 0: found|bytes went"):
        check_way(partial(fault, way), *ends)
