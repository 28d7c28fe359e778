"""The laws of resharding plans, beside a reference that walks over every element; layouts may be irregular."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardtree.core.layouts import select_rows
from shardtree.layouts import Mesh, PartitionSpec, ShardColumns
from shardtree.plans import ReshardPlan, Transfers, plan_reshard, with_relays
from shardtree.testing import check_filled, check_reshard_plan, shard_elements
from tests.core.trees.samples import assert_caught
from tests.live.reshard_layouts import Case, mesh_layout, reshards

Planner = Callable[[Case], ReshardPlan]


def plan_of(case: Case) -> ReshardPlan:
    return plan_reshard(case.source, case.target, shortest_cut=case.shortest_cut, cast=True)


def changed(plan: ReshardPlan, **columns: np.ndarray) -> ReshardPlan:
    return replace(plan, transfers=replace(plan.transfers, **columns))


def kept_rows(plan: ReshardPlan, rows: np.ndarray) -> ReshardPlan:
    return changed(plan, **{each.name: getattr(plan.transfers, each.name)[rows] for each in fields(Transfers)})


# Every element once, and no more bytes than must be


def fills_with_the_fewest_bytes(planner: Planner, case: Case) -> None:
    check_reshard_plan(planner(case))


@pytest.mark.slow
@given(reshards())
def test_every_element_is_written_once_and_the_fewest_bytes_move(case: Case) -> None:
    fills_with_the_fewest_bytes(plan_of, case)


def forget_own(case: Case) -> ReshardPlan:
    """Plan as if nobody had anything of its own: it comes from other ranks, whose shards these then are."""
    away = 1 + int(max(case.source.rank.max(initial=0), case.target.rank.max(initial=0)))
    plan = plan_of(case._replace(source=replace(case.source, rank=case.source.rank + away)))
    return replace(changed(plan, from_rank=plan.transfers.from_rank % away), source=case.source)


def elements_beside(case: Case) -> ReshardPlan:
    plan = plan_of(case)
    return changed(plan, source_element=plan.transfers.source_element + 1)


FAULTS: dict[str, Planner] = {
    "a lost box": lambda case: kept_rows(plan_of(case), np.arange(1, max(1, len(plan_of(case).transfers)))),
    "a rank that gets what it has": forget_own,
    "elements beside those that are meant": elements_beside,
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_the_law_of_filling_catches(fault: str) -> None:
    assert_caught(fills_with_the_fewest_bytes, FAULTS[fault], reshards())


# What check finds


def finds_what_walking_finds(check: Callable[[ReshardPlan], Any], plan: ReshardPlan) -> None:
    try:
        check_filled(plan)
    except AssertionError:
        assert check(plan), "something is wrong, and the check says nothing"
    else:
        assert not check(plan), f"nothing is wrong, and the check says {check(plan)[0]}"


@st.composite
def broken_plans(draw: st.DrawFn) -> ReshardPlan:
    """Return plans of which a number was changed, or a row lost or doubled; some of them are still right."""
    plan = plan_of(draw(reshards()))
    if not len(plan.transfers):
        return plan
    plan = with_relays(plan, shortest_cut=1) if draw(st.booleans()) else plan
    row = draw(st.integers(0, len(plan.transfers) - 1))
    name = draw(st.sampled_from([*(each.name for each in fields(Transfers)), "lost", "doubled"]))
    if name in ("lost", "doubled"):
        rows = np.arange(len(plan.transfers))
        return kept_rows(plan, np.delete(rows, row) if name == "lost" else np.insert(rows, row, row))
    column = getattr(plan.transfers, name).copy()
    column[(row, *(draw(st.integers(0, size - 1)) for size in column.shape[1:]))] += draw(st.sampled_from([-1, 1, 2]))
    return changed(plan, **{name: column})


@pytest.mark.slow
@given(broken_plans())
def test_check_finds_what_walking_over_every_element_finds(plan: ReshardPlan) -> None:
    finds_what_walking_finds(ReshardPlan.check, plan)


def rows_to_columns() -> ReshardPlan:
    rows, columns = PartitionSpec("tp"), PartitionSpec(None, "tp")
    return plan_reshard(mesh_layout(Mesh(tp=2), rows, (6, 6)), mesh_layout(Mesh(tp=2), columns, (6, 6)))


def passed_on() -> ReshardPlan:
    one, others = mesh_layout(Mesh(), PartitionSpec(), (6, 6)), Mesh(dp=2).on_ranks([1, 2])
    return with_relays(plan_reshard(one, mesh_layout(others, PartitionSpec(), (6, 6))), shortest_cut=1)


@pytest.mark.parametrize("name", [each.name for each in fields(Transfers)])
@pytest.mark.parametrize("make", [rows_to_columns, passed_on])
def test_check_finds_each_number_that_is_changed(make: Callable[[], ReshardPlan], name: str) -> None:
    plan = make()
    column = getattr(plan.transfers, name)
    for place in np.ndindex(column.shape):
        for more in (-1, 1):
            if (name, column[place], more) == ("hop", 1, 1):
                continue  # later is as good
            other = column.copy()
            other[place] += more
            assert changed(plan, **{name: other}).check(), f"{name} {place}, {more:+}"


def test_the_law_of_checks_catches_one_that_counts_elements_only() -> None:
    def counts(plan: ReshardPlan) -> list[str]:
        return ["wrong"] if plan.transfers.shape.prod(axis=1).sum() != plan.target.elements.sum() else []

    assert_caught(finds_what_walking_finds, counts, broken_plans())


# Level loads


def holder_sets(source: ShardColumns) -> dict[tuple[str, tuple[int, ...]], frozenset[int]]:
    """Return, for each element, the ranks that have a shard at the place where the main replica has it."""
    holders, mains = defaultdict(set), {}
    for row, rank in enumerate(source.rank.tolist()):
        place = (
            source.keys[int(source.key[row])],
            *source.offset[row],
            *source.shape[row],
            source.start[row],
            source.stop[row],
        )
        holders[place].add(rank)
        if source.main[row]:
            mains[place] = row
    return {
        (place[0], element): frozenset(holders[place])
        for place, row in mains.items()
        for element in shard_elements(source, row)
    }


def held(columns: ShardColumns) -> Iterator[tuple[int, str, tuple[int, ...]]]:
    for row, rank in enumerate(columns.rank.tolist()):
        yield from ((rank, columns.keys[int(columns.key[row])], one) for one in shard_elements(columns, row))


def least_load(plan: ReshardPlan) -> float:
    """Return what the rank that sends most sends, if bytes could be dealt at will.

    It is the most, over all groups of ranks, that nobody else can send, divided by their number.
    """
    holders, sizes = holder_sets(plan.source), {}
    for key, kind in zip(plan.target.keys, plan.target.kinds, strict=True):
        sizes[key] = kind.dtype.itemsize
    only: Counter[frozenset[int]] = Counter()
    for _, key, element in set(held(plan.target)) - set(held(plan.source)):
        only[holders[key, element]] += sizes[key]
    ranks = sorted(frozenset().union(*only))
    groups = (frozenset(group) for count in range(1, len(ranks) + 1) for group in combinations(ranks, count))
    return max((sum(n for own, n in only.items() if own <= group) / len(group) for group in groups), default=0)


def loads_are_level(planner: Planner, case: Case) -> None:
    """The law: no rank sends more than it must, but for one box, or a row or the shortest part of one that is cut."""
    plan = planner(case)
    moves = plan.transfers.from_rank != plan.transfers.to_rank
    nbytes, rows = plan.transfers.nbytes[moves], plan.transfers.shape[moves].max(axis=1)
    whole = nbytes[nbytes < 2 * case.shortest_cut].max(initial=0)
    more = max(
        int(whole), int((nbytes // rows).max(initial=0)), case.shortest_cut if whole < nbytes.max(initial=0) else 0
    )
    most, least = max(plan.sent.values(), default=0), least_load(plan)
    assert most <= least + more, f"a rank sends {most} bytes, {least} would do, and {more} more may be"


@pytest.mark.slow
@given(reshards())
def test_no_rank_sends_more_than_it_must_but_for_a_box(case: Case) -> None:
    loads_are_level(plan_of, case)


def first_holder_sends(case: Case) -> ReshardPlan:
    """Plan as if there were no replicas."""
    plan = plan_of(case._replace(source=select_rows(case.source, np.flatnonzero(case.source.main))))
    return replace(plan, source=case.source)


def test_the_law_of_loads_catches_main_replicas_that_send_all() -> None:
    assert_caught(loads_are_level, first_holder_sends, reshards(odd=False))


# The same plan on every rank


def order_makes_no_difference(planner: Planner, case: Case, seed: int) -> None:
    one = planner(case)
    shuffle = np.random.default_rng(seed).permutation
    source, target = (select_rows(side, shuffle(len(side))) for side in (case.source, case.target))
    assert boxes(one) == boxes(planner(case._replace(source=source, target=target)))


def boxes(plan: ReshardPlan) -> list[Any]:
    every = plan.transfers
    columns = (every.hop, every.from_rank, every.to_rank, every.key, every.offset, every.shape)
    return sorted(zip(*(column.tolist() for column in columns), strict=True))


@pytest.mark.slow
@given(reshards(), st.integers(0, 99))
def test_the_order_of_shards_makes_no_difference(case: Case, seed: int) -> None:
    order_makes_no_difference(plan_of, case, seed)


def test_the_order_of_those_who_want_parts_of_one_place_makes_no_difference() -> None:
    source = mesh_layout(Mesh(dp=3), PartitionSpec(), (8, 6))
    target = mesh_layout(Mesh(tp=4).on_ranks(range(3, 7)), PartitionSpec("tp"), (8, 6))
    for seed in range(8):
        order_makes_no_difference(plan_of, Case(source, target, 1), seed)


def test_the_law_of_order_catches_the_first_row_that_sends_all() -> None:
    def first_row(case: Case) -> ReshardPlan:
        _, first = np.unique(np.column_stack([case.source.key, case.source.offset]), axis=0, return_index=True)
        main = np.zeros(len(case.source), dtype=np.bool_)
        main[first] = True
        return plan_of(case._replace(source=select_rows(replace(case.source, main=main), np.flatnonzero(main))))

    assert_caught(order_makes_no_difference, first_row, reshards(odd=False), st.integers(0, 99))


@pytest.mark.slow
@given(reshards())
def test_transfers_are_in_order(case: Case) -> None:
    every = plan_of(case).transfers
    rows = zip(*(column.tolist() for column in (every.hop, every.to_rank, every.target, every.offset)), strict=True)
    listed = list(rows)
    assert listed == sorted(listed)


# There and back


def comes_back(invert: Callable[[ReshardPlan], ReshardPlan], case: Case) -> None:
    plan = plan_of(case)
    back = invert(plan)
    check_reshard_plan(back)
    assert back.source.rank.tolist() == plan.target.rank.tolist()
    before = [np.array([hash(one) for one in shard_elements(plan.source, row)]) for row in range(len(plan.source))]
    after = [np.zeros(size, dtype=np.int64) for size in plan.target.elements.tolist()]
    again = [np.zeros(size, dtype=np.int64) for size in plan.source.elements.tolist()]
    run(plan, before, after)
    run(back, after, again)
    assert all(map(np.array_equal, before, again))


def run(plan: ReshardPlan, sources: list[np.ndarray], targets: list[np.ndarray]) -> None:
    every = plan.transfers
    for row in range(len(every)):
        places = np.indices(every.shape[row]).reshape(every.shape.shape[1], -1)
        data = (targets if every.hop[row] else sources)[every.source[row]]
        taken = data[every.source_element[row] + every.source_stride[row] @ places]
        targets[every.target[row]][every.target_element[row] + every.target_stride[row] @ places] = taken


def both_ways(case: Case) -> bool:
    return case.source.keys == case.target.keys


@pytest.mark.slow
@given(reshards(odd=False).filter(both_ways))
def test_the_inverse_brings_everything_back(case: Case) -> None:
    comes_back(ReshardPlan.inverse, case)


def test_the_law_of_inverses_catches_the_plan_itself() -> None:
    assert_caught(comes_back, lambda plan: plan, reshards(odd=False).filter(both_ways))
