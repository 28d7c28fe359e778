"""Moving: plans carried out step by step between ranks give what `reshard` gives in memory."""

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
from shardtree.live import Route, long_pieces_apart, make_buffers, move
from shardtree.mapping import ShardedTensor
from shardtree.plans import ReshardPlan, plan_reshard, with_relays
from shardtree.testing import first_difference, random_bits, rank_tree, state_layouts
from tests.plans.recast import recast_states

# What torch says, once, when it makes a tensor of half-precision complex numbers.
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

EXAMPLES = settings.default.max_examples if settings.default else 100

Buffers = Mapping[int, torch.Tensor]
Fault = Callable[[torch.Tensor], torch.Tensor]


def as_sent(sent: torch.Tensor) -> torch.Tensor:
    return sent


def executed(
    trees: Mapping[int, Any],
    targets: Mapping[int, Any],
    plan: ReshardPlan,
    bound: int,
    *,
    is_direct: bool = False,
    delivered: Fault = as_sent,
    passes_on: bool = True,
) -> list[torch.Tensor]:
    """Return the target shards' data, after ranks carried out a plan in steps of so many bytes."""
    schedule = plan.schedule(max_bytes_in_flight=bound)
    schedule = long_pieces_apart(schedule, 8) if is_direct else schedule
    sources = dict(enumerate(one.data for _, tree in sorted(trees.items()) for one in tensor_shards(tree)))
    wanted = [one for _, tree in sorted(targets.items()) for one in tensor_shards(tree)]
    filled = {row: random_bits(one.data_shape, one.dtype, 99) for row, one in enumerate(wanted)}

    def own(held: Mapping[int, torch.Tensor], ranks: Any, rank: int) -> dict[int, torch.Tensor]:
        return {row: held[row] for row in np.flatnonzero(ranks == rank).tolist()}

    def on_rank(world: shardtree.World) -> int:
        ends = own(sources, plan.source.rank, world.rank), own(filled, plan.target.rank, world.rank)
        got: list[int] = []

        def exchange(outgoing: Buffers, incoming: Buffers) -> None:
            sizes = [len(each) for each in (*outgoing.values(), *incoming.values())]
            assert sum(sizes) <= bound
            got.extend(map(len, incoming.values()))
            world.exchange({peer: delivered(sent) for peer, sent in outgoing.items()}, incoming)
            if not passes_on:
                for each in ends[1].values():
                    each.zero_()

        route = Route(plan, schedule, world.rank, *ends, make_buffers(schedule, world.rank, "cpu"), is_direct)
        failure = move(route, exchange)
        if failure is not None:
            raise failure
        return sum(got)

    moved = sum(shardtree.simulate(max(plan.ranks, default=0) + 1, on_rank))
    assert moved == plan.bytes_moved
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
        found = executed(trees, targets, each, bound, **options)
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
    check_executed(*ends, bound=data.draw(st.sampled_from([32, 40, 10**6])), is_direct=data.draw(st.booleans()))


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


def rotated(sent: torch.Tensor) -> torch.Tensor:
    """Deliver messages whose bytes are one off."""
    return sent.roll(1)


def backwards(sent: torch.Tensor) -> torch.Tensor:
    """Deliver the bytes of a message in another order."""
    return sent.flip(0)


@pytest.mark.parametrize("is_direct", [False, True])
@pytest.mark.parametrize(
    "fault",
    [{"delivered": rotated}, {"delivered": backwards}, {"passes_on": False}],
    ids=lambda fault: str([*fault]),
)
def test_the_law_catches(fault: dict[str, Any], is_direct: bool) -> None:
    ends = replicated()
    check_executed(*ends, bound=48, is_direct=is_direct)
    with pytest.raises(AssertionError, match=r"target shard \d+: \d+ of"):
        check_executed(*ends, bound=48, is_direct=is_direct, **fault)


Messages = list[dict[int, torch.Tensor]]


def small(dtype: torch.dtype = torch.bfloat16) -> tuple[ReshardPlan, torch.Tensor]:
    """Return the plan by which rank 1 gets a tensor of three elements from rank 0, and that tensor."""
    whole = {"w": ShardedTensor.from_rank_offsets("w", torch.arange(3, dtype=torch.bfloat16))}
    return plan_reshard({0: whole}, {1: shardtree.cast(whole, dtype)}, cast=True), whole["w"].data


def sent_by(plan: ReshardPlan, data: torch.Tensor, *, is_direct: bool, bound: int = 32) -> Messages:
    """Return the messages that rank 0 sends, in each step, as they are given to the transport."""
    schedule, found = plan.schedule(max_bytes_in_flight=bound), []
    buffers = make_buffers(schedule, 0, "cpu")

    def keep(outgoing: Buffers, incoming: Buffers) -> None:
        found.append({peer: each if is_direct else each.clone() for peer, each in outgoing.items()})

    assert move(Route(plan, schedule, 0, {0: data}, {}, buffers, is_direct), keep) is None
    return found


def fill(plan: ReshardPlan, target: torch.Tensor, sent: torch.Tensor, *, is_direct: bool) -> list[int]:
    """Fill rank 1's target with a message, and return where the memory began that it was put into."""
    schedule, at = plan.schedule(), []

    def put(outgoing: Buffers, incoming: Buffers) -> None:
        incoming[0].copy_(sent)
        at.append(incoming[0].data_ptr())

    failure = move(Route(plan, schedule, 1, {}, {0: target}, make_buffers(schedule, 1, "cpu"), is_direct), put)
    if failure is not None:
        raise failure
    return at


def test_a_message_is_the_memory_itself_where_that_is_asked_for_and_consecutive() -> None:
    plan, data = small()
    ((sent,),) = ([each[1]] for each in sent_by(plan, data, is_direct=True))
    assert sent.data_ptr() == data.data_ptr()
    ((copied,),) = ([each[1]] for each in sent_by(plan, data, is_direct=False))
    assert copied.data_ptr() != data.data_ptr() and torch.equal(sent, copied)
    target, room = torch.zeros(3, dtype=torch.bfloat16), torch.zeros(6, dtype=torch.bfloat16)
    assert fill(plan, target, sent, is_direct=True) == [target.data_ptr()]
    assert fill(plan, room[1::2], sent, is_direct=True) != [room[1::2].data_ptr()]
    assert target.tolist() == [0, 1, 2] and room.tolist() == [0, 0, 0, 1, 0, 2]


def test_what_is_cast_is_converted_straight_into_the_buffer() -> None:
    """Also piece by piece, in buffers of a few elements, though memory may be sent itself."""
    whole = {"w": ShardedTensor.from_rank_offsets("w", torch.arange(6, dtype=torch.float32))}
    plan = plan_reshard({0: whole}, {1: shardtree.cast(whole, torch.float16)}, cast=True)
    sent = sent_by(plan, whole["w"].data, is_direct=True, bound=4)
    assert (plan.bytes_moved, len(sent)) == (12, 3)
    plan, data = small(torch.float16)  # of the same item size
    assert sent_by(plan, data, is_direct=True)[0][1].view(torch.float16).tolist() == [0, 1, 2]


def test_what_does_not_fit_is_an_error() -> None:
    plan, data = small()
    schedule = plan.schedule()
    buffers = make_buffers(schedule, 0, "cpu")

    def failure(rank: int, sources: Any, targets: Any) -> Exception | None:
        return move(Route(plan, schedule, rank, sources, targets, buffers), lambda outgoing, incoming: None)

    found = failure(0, {}, {}), failure(0, {0: data[:2]}, {}), failure(1, {}, {0: data.float()})
    kinds = [shardtree.errors.KeyMismatch, shardtree.errors.ShapeError, shardtree.errors.ShapeError]
    texts = [
        "no memory for 'w' at (0,) of rank 0",
        "not the data of 'w'",
        "found (3,) torch.float32",
    ]
    for error, kind, text in zip(found, kinds, texts, strict=True):
        assert type(error) is kind and text in str(error), error


def test_a_target_that_cannot_be_written_is_an_error() -> None:
    whole = {"w": ShardedTensor.from_rank_offsets("w", torch.ones(2, dtype=torch.complex64))}
    plan = plan_reshard({0: whole}, {0: whole})
    schedule, data = plan.schedule(), whole["w"].data
    route = Route(plan, schedule, 0, {0: data}, {0: data.clone().conj()}, make_buffers(schedule, 0, "cpu"))
    failure = move(route, lambda outgoing, incoming: None)
    assert isinstance(failure, shardtree.errors.ShapeError) and "conjugated or negated lazily" in str(failure)
