"""Schedules: each element moves once and in time, no rank has too much in flight, and none waits without need."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardtree.layouts import Mesh, PartitionSpec
from shardtree.live.resharding._schedule import fill, schedule_transfers
from shardtree.plans import ReshardPlan, Schedule, Transfers, peak_bytes, plan_reshard, with_relays
from shardtree.testing import check_schedule
from tests.live.reshard_layouts import mesh_layout, reshards


@st.composite
def plans(draw: st.DrawFn) -> ReshardPlan:
    """Plans between layouts of every kind, with relays and casts or without."""
    case = draw(reshards(odd=False))
    plan = plan_reshard(case.source, case.target, shortest_cut=case.shortest_cut, cast=True)
    return with_relays(plan, shortest_cut=draw(st.sampled_from([1, 10**6]))) if draw(st.booleans()) else plan


@pytest.mark.slow
@given(plan=plans(), room=st.integers(16, 300))
def test_each_element_moves_once_in_time_and_no_rank_has_too_much_or_waits(plan: ReshardPlan, room: int) -> None:
    check_schedule(plan, plan.schedule(max_bytes_in_flight=room))


def exchange(ranks: int = 3) -> ReshardPlan:
    mesh = Mesh(tp=ranks)
    specs = PartitionSpec("tp"), PartitionSpec(None, "tp")
    return plan_reshard(*(mesh_layout(mesh, spec, (12, 12)) for spec in specs))


def broadcast() -> ReshardPlan:
    meshes = Mesh(), Mesh(dp=3).on_ranks([1, 2, 3])
    return with_relays(plan_reshard(*(mesh_layout(mesh, PartitionSpec(), (8, 8)) for mesh in meshes)), shortest_cut=1)


def with_rows(schedule: Schedule, rows: Any) -> Schedule:
    names = [name for name in Schedule.__slots__ if name != "max_bytes_in_flight"]
    return replace(schedule, **{name: getattr(schedule, name)[rows] for name in names})


def one_piece_lost(schedule: Schedule) -> Schedule:
    return with_rows(schedule, slice(1, None))


def all_at_once(schedule: Schedule) -> Schedule:
    return replace(schedule, step=schedule.step * 0)


def one_piece_a_step(schedule: Schedule) -> Schedule:
    return replace(schedule, step=np.arange(len(schedule)))


def passed_on_too_early(schedule: Schedule) -> Schedule:
    last = int(schedule.step[-1])
    first = np.where(schedule.from_rank == 0, schedule.step + last + 1, schedule.step)
    order = np.argsort(first, kind="stable")
    return replace(with_rows(schedule, order), step=first[order])


@pytest.mark.parametrize(
    ("plan", "room", "fault", "message"),
    [
        (exchange, 48, one_piece_lost, "a piece is|end at"),
        (exchange, 48, all_at_once, "in flight in step 0"),
        (exchange, 10**6, one_piece_a_step, "and wait"),
        (broadcast, 10**6, passed_on_too_early, "and wait|is -1"),
    ],
)
def test_the_law_of_schedules_catches(
    plan: Callable[[], ReshardPlan], room: int, fault: Callable[[Schedule], Schedule], message: str
) -> None:
    made = plan()
    schedule = made.schedule(max_bytes_in_flight=room)
    check_schedule(made, schedule)
    with pytest.raises(AssertionError, match=message):
        check_schedule(made, fault(schedule))


def traffic(one: Any, other: Any, elements: Any, item: Any) -> tuple[Transfers, Any]:
    """Return transfers of so many elements between ranks, as if each were a shard of its own."""
    row = np.arange(len(one))
    flat, ones = np.zeros((len(one), 1), dtype=np.int64), np.ones((len(one), 1), dtype=np.int64)
    columns = (row * 0, row, row, one, other, row * 0, flat, elements[:, None], elements * item, row * 0, ones)
    return Transfers(*columns, row * 0, ones), item


def steps_and_least(transfers: Transfers, item: Any, room: int) -> tuple[int, int]:
    ranks = int(max(transfers.from_rank.max(), transfers.to_rank.max())) + 1
    load = np.zeros(ranks, dtype=np.int64)
    np.add.at(load, np.concatenate([transfers.from_rank, transfers.to_rank]), np.tile(transfers.nbytes, 2))
    schedule = schedule_transfers(transfers, item, max_bytes_in_flight=room)
    used = np.zeros((schedule.steps, ranks), dtype=np.int64)
    np.add.at(used, (np.tile(schedule.step, 2), np.concatenate([schedule.from_rank, schedule.to_rank])),
              np.tile(schedule.nbytes, 2))  # fmt: skip
    assert used.max() <= room and schedule.nbytes.sum() == transfers.nbytes.sum()
    return schedule.steps, -(-int(load.max()) // room)


@pytest.mark.slow
def test_random_traffic_takes_about_as_few_steps_as_any_schedule_could() -> None:
    random, extra, ratios = np.random.default_rng(0), [], []
    for _ in range(200):
        ranks, count = int(random.integers(2, 20)), int(random.integers(1, 200))
        one = random.integers(0, ranks, count)
        other = (one + random.integers(1, ranks, count)) % ranks
        most = int(random.choice([50, 500, 5000]))
        transfers, item = traffic(one, other, random.integers(1, most, count), random.choice([1, 2, 4], count))
        steps, least = steps_and_least(transfers, item, int(random.integers(most, 20 * most)))
        extra.append(steps - least)
        ratios.append(steps / least)
    assert max(extra) <= 2 and np.mean(ratios) < 1.05, (max(extra), np.mean(ratios))


def all_to_all(ranks: int, elements: int, item: int, shift: int = 0) -> tuple[Transfers, Any]:
    """Return what each rank has for each other, or for each of another group."""
    one, other = (at.ravel() for at in np.indices((ranks, ranks)))
    moves = one != other + shift
    return traffic(one[moves], (other + shift)[moves], np.full(moves.sum(), elements), np.full(moves.sum(), item))


@pytest.mark.parametrize("ranks", [2, 3, 5, 8, 16])
@pytest.mark.parametrize("room", [100, 1000, 4000])
@pytest.mark.parametrize("apart", [False, True])
def test_all_to_all_takes_as_few_steps_as_any_schedule_could(ranks: int, room: int, apart: bool) -> None:
    steps, least = steps_and_least(*all_to_all(ranks, 500, 2, ranks * apart), room)
    assert steps == least


@pytest.mark.slow
@pytest.mark.parametrize("room", [2**28 + 5, 2**31 + 1, 2**36 - 3])
def test_bounds_hold_for_ranks_that_move_terabytes(room: int) -> None:
    """The bound times what a rank moves is more than an int64 holds."""
    random = np.random.default_rng(2)
    one, other = np.array([0, 1, 2, 0, 3, 1]), np.array([1, 2, 0, 3, 1, 0])
    for _ in range(5):
        transfers, item = traffic(one, other, random.integers(2**20, 60 * room, 6), np.ones(6, dtype=np.int64))
        steps, least = steps_and_least(transfers, item, room)
        assert steps <= least + 2


def loop(amount: Any, one: Any, other: Any, room: Any, item: Any) -> list[int]:
    room, taken = room.copy(), []
    for size, left, right, unit in zip(amount, one, other, item, strict=True):
        least = min(room[left], room[right])
        taken.append(int(size if size <= least else least // unit * unit))
        room[left] -= taken[-1]
        room[right] -= taken[-1]
    return taken


def check_fill(filled: Callable[..., Any]) -> None:
    random = np.random.default_rng(1)
    for _ in range(500):
        ranks, count = int(random.integers(2, 8)), int(random.integers(1, 25))
        one, item = random.integers(0, ranks, count), random.choice([1, 2, 4, 8], count)
        other = (one + random.integers(1, ranks, count)) % ranks
        case = item * random.integers(0, 12, count), one, other, random.integers(0, 60, ranks), item
        assert filled(*case).tolist() == loop(*case)


def test_what_is_taken_in_a_step_is_what_a_loop_over_pairs_takes() -> None:
    check_fill(fill)


def backwards(*case: Any) -> Any:
    amount, one, other, room, item = case
    return fill(amount[::-1], one[::-1], other[::-1], room, item[::-1])[::-1]


def test_the_comparison_with_a_loop_catches() -> None:
    with pytest.raises(AssertionError):
        check_fill(backwards)


def test_large_elements_beside_small_ones_are_not_cut() -> None:
    transfers, item = traffic(np.zeros(3, int), np.ones(3, int), np.array([7, 5, 3]), np.array([1, 16, 2]))
    schedule = schedule_transfers(transfers, item, max_bytes_in_flight=35)
    assert (schedule.nbytes == (schedule.stop - schedule.start) * item[schedule.transfer]).all()
    assert schedule.nbytes.sum() == transfers.nbytes.sum()


@pytest.mark.slow
@given(plan=plans(), room=st.integers(16, 300))
def test_peak_bytes_are_shards_and_the_buffers_of_the_fullest_step(plan: ReshardPlan, room: int) -> None:
    schedule = plan.schedule(max_bytes_in_flight=room)
    check_peak(plan, schedule, peak_bytes(plan, schedule))


def check_peak(plan: ReshardPlan, schedule: Schedule, peak: dict[int, int]) -> None:
    for rank in plan.ranks:
        shards = sum(
            int((each.elements * each.item_size[each.key])[each.rank == rank].sum())
            for each in (plan.source, plan.target)
        )
        here = (schedule.from_rank == rank) | (schedule.to_rank == rank)
        buffers = [int(schedule.nbytes[here & (schedule.step == step)].sum()) for step in range(schedule.steps)]
        assert peak[rank] == shards + max(buffers, default=0), f"rank {rank}"


@pytest.mark.parametrize("lost", [0, 2])
def test_the_law_of_peaks_catches_a_rank_whose_buffers_are_forgotten(lost: int) -> None:
    plan = exchange()
    schedule = plan.schedule(max_bytes_in_flight=48)
    with pytest.raises(AssertionError, match=f"rank {lost}"):
        check_peak(plan, schedule, peak_bytes(plan, schedule) | {lost: 96})
