"""Packing: plans executed step by step over buffers, as an executor does, give what `reshard` gives in memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import shardtree
from shardtree.layouts import Mesh, PartitionSpec, shard, tensor_shards
from shardtree.live import copy_doubled, copy_own, incoming_bytes, outgoing_bytes, pack_into, packed, unpack
from shardtree.mapping import ShardedTensor
from shardtree.plans import ReshardPlan, Schedule, plan_reshard, with_relays
from shardtree.testing import first_difference, random_bits, rank_tree, state_layouts
from tests.plans.recast import recast_states

# What torch says, once, when it makes a tensor of half-precision complex numbers.
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

EXAMPLES = settings.default.max_examples if settings.default else 100

Buffers = dict[int, torch.Tensor]


def deliver(sent: Mapping[int, Buffers], rank: int, sizes: Mapping[int, int]) -> Buffers:
    """Return what reaches a rank in a step."""
    return {peer: sent[peer][rank].clone() for peer in sizes}


def executed(
    trees: Mapping[int, Any],
    targets: Mapping[int, Any],
    plan: ReshardPlan,
    schedule: Schedule,
    pack: Callable[..., Buffers] = packed,
    delivered: Callable[..., Buffers] = deliver,
) -> list[torch.Tensor]:
    """Return the target shards' data, after each step of a schedule was executed for all ranks."""
    sources = dict(enumerate(one.data for _, tree in sorted(trees.items()) for one in tensor_shards(tree)))
    wanted = [one for _, tree in sorted(targets.items()) for one in tensor_shards(tree)]
    filled = {row: random_bits(one.data_shape, one.dtype, 99) for row, one in enumerate(wanted)}

    def own(held: Mapping[int, torch.Tensor], ranks: Any, rank: int) -> dict[int, torch.Tensor]:
        return {row: held[row] for row in np.flatnonzero(ranks == rank).tolist()}

    held = {rank: (own(sources, plan.source.rank, rank), own(filled, plan.target.rank, rank)) for rank in plan.ranks}
    for rank, ends in held.items():
        copy_own(plan, rank, *ends)
    for step in range(schedule.steps):
        sent = {rank: pack(plan, schedule, step, rank, *ends) for rank, ends in held.items()}
        for rank, (_, into) in held.items():
            sizes = incoming_bytes(plan, schedule, step, rank)
            unpack(plan, schedule, step, rank, into, delivered(sent, rank, sizes))
    for rank, (_, into) in held.items():
        copy_doubled(plan, rank, into)
    return list(filled.values())


def check_executed(trees: Mapping[int, Any], targets: Mapping[int, Any], bound: int, **options: Any) -> None:
    """Raise unless executing a plan, and its relay, gives what resharding in memory gives."""
    expected = [
        one.data
        for _, tree in sorted(shardtree.reshard(trees, targets, cast=True).items())
        for one in tensor_shards(tree)
    ]
    plan = plan_reshard(trees, targets, cast=True)
    for each in (plan, with_relays(plan, shortest_cut=1)):
        found = executed(trees, targets, each, each.schedule(max_bytes_in_flight=bound), **options)
        for row, (left, right) in enumerate(zip(found, expected, strict=True)):
            differ = first_difference(left, right)
            assert differ is None, f"target shard {row}: {differ}"


@pytest.mark.slow
@settings(max_examples=EXAMPLES // 2)
@given(data=st.data())
def test_executing_a_schedule_is_resharding(data: st.DataObject) -> None:
    """Also where boxes are cut anywhere, where dtypes share a buffer or change on the way, and where ranks pass on."""
    ends = []
    for state in data.draw(recast_states(), label="states"):
        ranks, first = data.draw(st.integers(1, 4)), data.draw(st.sampled_from([0, 2, 9]))
        layout = data.draw(state_layouts(state, ranks))
        ends.append(
            {first + rank: rank_tree(state, layout, rank)["model"] for rank in range(ranks) if held(layout, rank)}
        )
    check_executed(*ends, bound=data.draw(st.sampled_from([32, 40, 10**6])))


def held(layout: Mapping[str, Any], rank: int) -> bool:
    return any(piece.rank == rank for each in layout.values() for piece in each.pieces)


def replicated() -> tuple[dict[int, Any], dict[int, Any]]:
    """Return trees by rows on two ranks, and targets of which two ranks each want the same columns."""
    whole = {"w": random_bits((4, 6), torch.float32, 1), "b": random_bits((5,), torch.int8, 2)}
    rows, columns = (
        {"w": PartitionSpec("dp"), "b": PartitionSpec()},
        {"w": PartitionSpec(None, "tp"), "b": PartitionSpec()},
    )
    given, wanted = Mesh(dp=2), Mesh(dp=2, tp=2).on_ranks(range(2, 6))
    return (
        dict(zip(given.ranks, shard(whole, given, rows), strict=True)),
        dict(zip(wanted.ranks, shard(whole, wanted, columns), strict=True)),
    )


def rotated(sent: Mapping[int, Buffers], rank: int, sizes: Mapping[int, int]) -> Buffers:
    """Deliver buffers whose bytes are one off."""
    return {peer: sent[peer][rank].roll(1) for peer in sizes}


def backwards(sent: Mapping[int, Buffers], rank: int, sizes: Mapping[int, int]) -> Buffers:
    """Deliver the pieces of a buffer in another order."""
    return {peer: sent[peer][rank].flip(0) for peer in sizes}


def without_passing_on(
    plan: ReshardPlan, schedule: Schedule, step: int, rank: int, sources: Any, targets: Any
) -> Buffers:
    """Pass on what was there before anything had come."""
    return packed(plan, schedule, step, rank, sources, {row: torch.zeros_like(one) for row, one in targets.items()})


@pytest.mark.parametrize(
    "fault",
    [{"delivered": rotated}, {"delivered": backwards}, {"pack": without_passing_on}],
    ids=lambda fault: str([*fault]),
)
def test_the_law_catches(fault: dict[str, Any]) -> None:
    ends = replicated()
    check_executed(*ends, bound=48)
    with pytest.raises(AssertionError, match=r"target shard \d+: \d+ of"):
        check_executed(*ends, bound=48, **fault)


def test_buffers_are_as_long_as_is_said_and_no_longer_than_allowed() -> None:
    trees, targets = replicated()
    plan = with_relays(plan_reshard(trees, targets), shortest_cut=1)
    schedule = plan.schedule(max_bytes_in_flight=40)
    moved = 0
    for step in range(schedule.steps):
        out = {rank: outgoing_bytes(plan, schedule, step, rank) for rank in plan.ranks}
        for rank in plan.ranks:
            got = incoming_bytes(plan, schedule, step, rank)
            assert got == {peer: sizes[rank] for peer, sizes in out.items() if rank in sizes}
            assert sum(got.values()) + sum(out[rank].values()) <= 40
            moved += sum(got.values())
    assert moved == plan.bytes_moved


def small() -> tuple[ReshardPlan, Schedule, dict[int, torch.Tensor], dict[int, torch.Tensor]]:
    """Return the plan by which rank 1 gets a tensor of three elements from rank 0, in one step."""
    whole = {"w": ShardedTensor.from_rank_offsets("w", torch.arange(3, dtype=torch.int16))}
    plan = plan_reshard({0: whole}, {1: whole})
    return plan, plan.schedule(), {0: whole["w"].data}, {0: torch.zeros(3, dtype=torch.int16)}


def test_packing_into_buffers_that_are_kept() -> None:
    plan, schedule, sources, targets = small()
    buffer = torch.zeros(6, dtype=torch.uint8)
    pack_into(plan, schedule, 0, 0, sources, {}, {1: buffer})
    assert torch.equal(buffer, packed(plan, schedule, 0, 0, sources, {})[1])
    unpack(plan, schedule, 0, 1, targets, {0: buffer})
    assert targets[0].tolist() == [0, 1, 2]


def test_what_is_cast_is_converted_straight_into_the_buffer() -> None:
    """Also piece by piece, in buffers of a few elements."""
    whole = {"w": ShardedTensor.from_rank_offsets("w", torch.arange(6, dtype=torch.float32).view(2, 3).T)}
    plan = plan_reshard({0: whole}, {1: shardtree.cast(whole, torch.float16)}, cast=True)
    schedule = plan.schedule(max_bytes_in_flight=4)
    assert (plan.bytes_moved, schedule.steps) == (12, 3)
    buffer = packed(plan, schedule, 1, 0, {0: whole["w"].data}, {})[1]
    assert buffer.view(torch.float16).tolist() == [1, 4]


def test_targets_are_written_through_their_strides() -> None:
    plan, schedule, sources, _ = small()
    room = torch.zeros(6, dtype=torch.int16)
    unpack(plan, schedule, 0, 1, {0: room[1::2]}, {0: packed(plan, schedule, 0, 0, sources, {})[1]})
    assert room.tolist() == [0, 0, 0, 1, 0, 2]


def test_what_does_not_fit_is_an_error() -> None:
    plan, schedule, sources, targets = small()
    buffers = {0: packed(plan, schedule, 0, 0, sources, {})[1]}
    with pytest.raises(shardtree.errors.KeyMismatch, match=r"no memory for 'w' at .0,. of rank 0"):
        packed(plan, schedule, 0, 0, {}, {})
    with pytest.raises(shardtree.errors.ShapeError, match="not the data of 'w'"):
        packed(plan, schedule, 0, 0, {0: torch.zeros(4, dtype=torch.int16)}, {})
    with pytest.raises(
        shardtree.errors.ShapeError, match=r"found .3,. torch.float32, expected 3 elements of torch.int16"
    ):
        unpack(plan, schedule, 0, 1, {0: torch.zeros(3)}, buffers)
    with pytest.raises(shardtree.errors.KeyMismatch, match="no buffer for ranks\n  0"):
        unpack(plan, schedule, 0, 1, targets, {})
    with pytest.raises(shardtree.errors.ShapeError, match=r"rank 0: found .5,. torch.uint8, expected .6,."):
        unpack(plan, schedule, 0, 1, targets, {0: buffers[0][:5]})
    with pytest.raises(shardtree.errors.ShapeError, match=r"rank 1: found .6,. torch.int8"):
        pack_into(plan, schedule, 0, 0, sources, {}, {1: torch.zeros(6, dtype=torch.int8)})


def test_a_target_that_cannot_be_written_is_an_error() -> None:
    whole = {"w": ShardedTensor.from_rank_offsets("w", torch.ones(2, dtype=torch.complex64))}
    plan = plan_reshard({0: whole}, {0: whole})
    with pytest.raises(shardtree.errors.ShapeError, match="conjugated or negated lazily"):
        copy_own(plan, 0, {0: whole["w"].data}, {0: whole["w"].data.clone().conj()})
