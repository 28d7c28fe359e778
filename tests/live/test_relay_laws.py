"""Relays: what several ranks want leaves the sources once, and every rank gets what it got."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardtree.layouts import Mesh, PartitionSpec, TensorKind, mesh_columns
from shardtree.plans import ReshardPlan, Transfers, plan_reshard, with_relays
from shardtree.testing import check_relayed, check_schedule
from tests.live.reshard_layouts import mesh_layout, reshards


@st.composite
def plans(draw: st.DrawFn) -> ReshardPlan:
    """Plans between layouts of every kind, on the same ranks or between two groups; often there are replicas."""
    case = draw(reshards(odd=False))
    return plan_reshard(case.source, case.target, shortest_cut=case.shortest_cut, cast=True)


@pytest.mark.slow
@given(plan=plans(), shortest=st.sampled_from([1, 16, 4096]))
def test_what_several_want_leaves_the_sources_once_and_all_get_what_they_got(plan: ReshardPlan, shortest: int) -> None:
    passed_on = with_relays(plan, shortest_cut=shortest)
    check_relayed(plan, passed_on, shortest_cut=shortest)
    assert passed_on.check() == ()
    check_schedule(passed_on, passed_on.schedule(max_bytes_in_flight=64))


@pytest.mark.slow
@given(plan=plans())
def test_a_plan_with_relays_has_nothing_more_to_pass_on(plan: ReshardPlan) -> None:
    check_nothing_to_pass_on(with_relays(plan, shortest_cut=1))


def check_nothing_to_pass_on(plan: ReshardPlan) -> None:
    again = with_relays(plan, shortest_cut=1).transfers
    assert len(again) == len(plan.transfers), "something was passed on"
    assert all((getattr(again, name) == getattr(plan.transfers, name)).all() for name in Transfers.__slots__)


def test_the_law_catches_relays_of_a_plan_without() -> None:
    with pytest.raises(AssertionError, match="something was passed on"):
        check_nothing_to_pass_on(broadcast())


def engines() -> ReshardPlan:
    """Trainers of TP4 by DP4 give weights to four engines of TP4."""
    spec = PartitionSpec("tp")
    trainers, others = Mesh(dp=4, tp=4), Mesh(engine=4, tp=4).on_ranks(range(16, 32))
    return plan_reshard(mesh_layout(trainers, spec), mesh_layout(others, spec))


def test_weights_leave_trainers_once_for_four_engines() -> None:
    size, plan, trainers = 48 * 48 * 4, engines(), range(16)
    assert (plan.bytes_moved, plan.leaving(trainers)) == (4 * size, 4 * size)
    assert max(plan.sent.values()) == max(plan.received.values()) == size // 4
    passed_on = with_relays(plan, shortest_cut=1)
    check_relayed(plan, passed_on)
    assert (passed_on.bytes_moved, passed_on.leaving(trainers)) == (4 * size, size)
    assert {passed_on.sent[rank] for rank in trainers} == {size // 16}
    assert {passed_on.received[rank] for rank in range(16, 32)} == {size // 4}
    # Of its quarter each engine's rank gets a quarter from the trainers, and passes that on to three others.
    assert {passed_on.sent[rank] for rank in range(16, 32)} == {3 * size // 16}


def many_for_several(ranks: int, engines: int, parts: int) -> ReshardPlan:
    """Ranks that have columns give them to engines, each of which is cut into rows over so many ranks."""
    kinds = {f"w{number}": TensorKind(torch.bfloat16, (420, 24), 0) for number in range(40)}
    sources = mesh_columns(kinds, Mesh(tp=ranks), dict.fromkeys(kinds, PartitionSpec(None, "tp")))
    mesh = Mesh(engine=engines, tp=parts).on_ranks(range(ranks, ranks + engines * parts))
    return with_relays(plan_reshard(sources, mesh_columns(kinds, mesh, dict.fromkeys(kinds, PartitionSpec("tp")))))


@pytest.mark.parametrize(("ranks", "engines", "parts"), [(1, 8, 1), (6, 5, 7), (8, 2, 8), (4, 4, 1)])
def test_what_comes_is_passed_on_before_all_of_it_is_there(ranks: int, engines: int, parts: int) -> None:
    passed_on = many_for_several(ranks, engines, parts)
    load = max(passed_on.sent[rank] + passed_on.received[rank] for rank in passed_on.ranks)
    schedule = passed_on.schedule(max_bytes_in_flight=load // 20)
    assert schedule.steps <= 21 * 1.2
    waiting = replace(passed_on.transfers, hop=passed_on.transfers.hop * 2)  # as if it weren't known what is passed on
    later = replace(passed_on, transfers=waiting).schedule(max_bytes_in_flight=load // 20)
    assert later.steps >= schedule.steps


def split_off_one(plan: ReshardPlan) -> Transfers:
    """Return a plan's transfers, what is passed on to the last rank coming from a source again."""
    every = plan.transfers
    first = int(np.flatnonzero(every.hop == 0)[0])
    row = int(np.flatnonzero(every.hop == 1)[-1])
    names = ("hop", "source", "from_rank", "source_element", "source_stride")
    changed = {name: getattr(every, name).copy() for name in names}
    for column in changed.values():
        column[row] = column[first]
    return replace(every, **changed)


def one_transfer_lost(plan: ReshardPlan) -> Transfers:
    return Transfers(*(getattr(plan.transfers, name)[:-1] for name in Transfers.__slots__))


def broadcast(ranks: int = 4, shape: tuple[int, ...] = (12, 5)) -> ReshardPlan:
    others = Mesh(dp=ranks).on_ranks(range(1, ranks + 1))
    return plan_reshard(mesh_layout(Mesh(), PartitionSpec(), shape), mesh_layout(others, PartitionSpec(), shape))


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (split_off_one, "leaves the sources 2 times"),
        (one_transfer_lost, "bytes move"),
    ],
)
def test_the_law_of_relays_catches(fault: Callable[[ReshardPlan], Transfers], message: str) -> None:
    plan = broadcast()
    passed_on = with_relays(plan, shortest_cut=1)
    check_relayed(plan, passed_on)
    with pytest.raises(AssertionError, match=message):
        check_relayed(plan, replace(passed_on, transfers=fault(passed_on)))


def test_the_law_of_schedules_catches_what_is_passed_on_from_the_wrong_place() -> None:
    passed_on = with_relays(broadcast(), shortest_cut=1)
    begin = np.where(passed_on.transfers.hop == 1, 0, passed_on.transfers.source_element)
    wrong = replace(passed_on, transfers=replace(passed_on.transfers, source_element=begin))
    with pytest.raises(AssertionError, match="of target shard"):
        check_schedule(wrong, wrong.schedule(max_bytes_in_flight=10**6))


def test_uneven_parts_of_many_boxes_make_up_for_each_other() -> None:
    kinds = {f"w{number:02}": TensorKind(torch.float32, (7,), 0) for number in range(40)}
    one = mesh_columns(kinds, Mesh(tp=40), {key: PartitionSpec(at={"tp": n}) for n, key in enumerate(kinds)})
    others = mesh_columns(kinds, Mesh(dp=3).on_ranks(range(40, 43)), dict.fromkeys(kinds, PartitionSpec()))
    passed_on = with_relays(
        plan_reshard(one, others), shortest_cut=1
    )  # each box has a sender of its own, and 7 elements
    first = passed_on.transfers.hop == 0
    parts = np.bincount(passed_on.transfers.to_rank[first], passed_on.transfers.nbytes[first])[40:]
    assert parts.sum() == 40 * 28 and parts.max() - parts.min() <= 4


def test_small_tensors_are_not_cut() -> None:
    kinds = {f"norm{number}": TensorKind(torch.float32, (10,), 0) for number in range(8)}
    specs = dict.fromkeys(kinds, PartitionSpec())
    one, other = (mesh_columns(kinds, mesh, specs) for mesh in (Mesh(), Mesh(dp=4).on_ranks(range(1, 5))))
    passed_on = with_relays(plan_reshard(one, other))
    assert len(passed_on.transfers) == 8 * 4
    first = passed_on.transfers.hop == 0
    assert np.bincount(passed_on.transfers.to_rank[first]).tolist() == [0, 2, 2, 2, 2]


def test_a_rank_that_holds_it_already_takes_no_part() -> None:
    rows = mesh_layout(Mesh(dp=2, tp=2), PartitionSpec("tp"))
    plan = plan_reshard(rows, mesh_layout(Mesh(tp=2, dp=2), PartitionSpec("tp")))
    passed_on = with_relays(plan)
    assert all(
        (getattr(plan.transfers, name) == getattr(passed_on.transfers, name)).all() for name in ("hop", "source")
    )
