"""Moving: which memory is a message, what is converted where; that it is a reshard, test_redistribute.py says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

import shardtree
from shardtree.live import Route, make_buffers, move
from shardtree.mapping import ShardedTensor
from shardtree.plans import ReshardPlan, plan_reshard

# What torch says, once, when it makes a tensor of half-precision complex numbers.
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


Buffers = Mapping[int, torch.Tensor]


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
