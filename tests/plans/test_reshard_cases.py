"""Plans of small layouts, line by line: who gets which box from whom, which ranks pass it on, and in which step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import shardtree as st
from shardtree import Mesh, PartitionSpec, ShardedTensor
from shardtree.plans import ReshardPlan, peak_bytes, plan_reshard, with_relays
from shardtree.testing import check_reshard_plan
from tests.plans.reshard_layouts import mesh_layout
from tests.trees.messages import read_messages

WHOLE = (6, 4)


def box(rows: tuple[int, int], columns: tuple[int, int] = (0, 4), key: str = "w", copy: int = 0) -> ShardedTensor:
    """Return a box of a tensor; the first copy is the main one."""
    shape, offset = (rows[1] - rows[0], columns[1] - columns[0]), (rows[0], columns[0])
    return ShardedTensor(key, None, torch.float32, shape, WHOLE, offset, axis_fragmentations=None, replica_id=copy)


def flat(start: int, stop: int, copy: int = 0) -> ShardedTensor:
    """Return a flat range of a tensor."""
    whole = box((0, 6))
    return replace(whole, flattened_range=slice(start, stop), replica_id=copy)


ALL = box((0, 6))
COPY = box((0, 6), copy=1)
TOP, MIDDLE, BOTTOM = box((0, 2)), box((2, 4)), box((4, 6))

CASES: dict[str, tuple[Any, Any]] = {
    "rows to columns": ([[TOP], [MIDDLE], [BOTTOM]], [[box((0, 6), (0, 2))], [box((0, 6), (2, 4), copy=0)], []]),
    "one to many": ([[ALL], [], [], []], [[], [ALL], [COPY], [COPY]]),
    "one to many in parts": ([[ALL], [], []], [[], [box((0, 4)), box((5, 6))], [box((2, 6), copy=1)]]),
    "many have it, one wants it": ([[ALL], [COPY], [COPY], []], [[], [], [], [ALL]]),
    "two sets have it": (
        [[box((0, 4))], [box((0, 4), copy=1), BOTTOM], [box((4, 6), copy=1)], [], []],
        [[], [], [], [box((0, 5))], [box((3, 6), copy=1)]],
    ),
    "a copy at hand is kept": ([[TOP], [MIDDLE, box((0, 2), copy=1)], [BOTTOM]], [[], [box((0, 5))], [box((5, 6))]]),
    "boxes of a rank overlap": ([[ALL], []], [[], [box((0, 4)), box((2, 6), copy=1), box((1, 5), (1, 3), copy=2)]]),
    "equal boxes of a rank": ([[TOP], [box((2, 6))]], [[ALL, COPY], [COPY, box((3, 4), copy=3)]]),
    "what overlaps is wanted by several": (
        [[ALL], [], []],
        [[], [box((0, 4)), box((2, 6), copy=1)], [box((1, 5), copy=2), box((2, 4), copy=3)]],
    ),
    "flat ranges to boxes": ([[flat(0, 9)], [flat(9, 17)], [flat(17, 24)]], [[box((0, 3))], [box((3, 6))], []]),
    "boxes to flat ranges": ([[box((0, 3))], [box((3, 6))]], [[flat(0, 7)], [flat(7, 24)]]),
    "flat ranges to flat ranges": ([[flat(0, 10)], [flat(10, 24)]], [[flat(0, 5)], [flat(5, 15)], [flat(15, 24)]]),
    "two tensors": (
        [[TOP, box((0, 6), key="v")], [box((2, 6)), box((0, 6), key="v", copy=1)]],
        [[box((0, 6), key="v")], [ALL, box((1, 3), key="v", copy=1)], [box((0, 6), key="v", copy=2)]],
    ),
    "nothing moves": ([[TOP], [box((2, 6))]], [[TOP], [box((3, 5))]]),
    "nothing is wanted": ([[ALL]], [[], []]),
    "boxes without elements": ([[ALL]], [[box((2, 2))], [box((0, 6), (1, 1)), TOP]]),
}


def plan_of(name: str, shortest_cut: int = 8) -> ReshardPlan:
    return plan_reshard(*CASES[name], shortest_cut=shortest_cut)


def told(plan: ReshardPlan) -> Iterator[str]:
    """Yield all that a plan knows of itself."""
    yield str(plan)
    for key in plan.target.keys:
        yield str(plan.explain(key))
    schedule = plan.schedule(max_bytes_in_flight=48)
    yield str(schedule)
    yield f"at most {peak_bytes(plan, schedule)}"


def lines(name: str) -> str:
    """Return a plan, and where there is a difference its relayed one, without empty lines."""
    plan = plan_of(name)
    passed_on = with_relays(plan, shortest_cut=8)
    texts, others = list(told(plan)), list(told(passed_on))
    text = "\n".join([*texts, *([] if texts == others else ["relayed:", *others])])
    return "\n".join(line.rstrip() for line in text.splitlines() if line.strip())


SAID = read_messages(Path(__file__).with_name("reshard_cases.txt"))


@pytest.mark.parametrize("name", CASES)
def test_a_plan_moves_this_from_here_to_there(name: str) -> None:
    assert lines(name) == SAID[name]


@pytest.mark.parametrize("name", CASES)
def test_each_case_keeps_the_laws_of_plans(name: str) -> None:
    for shortest_cut in (1, 8, 64):
        plan = plan_of(name, shortest_cut)
        check_reshard_plan(plan)
        assert not with_relays(plan, shortest_cut=shortest_cut).check()


def test_a_problem_holds_the_box_that_it_is_about() -> None:
    plan, nothing = plan_of("nothing moves"), plan_of("nothing is wanted").transfers
    wrong = replace(plan, transfers=replace(plan.transfers, nbytes=plan.transfers.nbytes + 1)).check()
    assert [problem.box for problem in wrong] == [(slice(0, 2), slice(0, 4)), (slice(3, 5), slice(0, 4))]
    assert [problem.ranks for problem in wrong] == [(0,), (1,)]
    (unfilled, *_) = replace(plan_of("boxes to flat ranges"), transfers=nothing).check()
    assert (unfilled.box, unfilled.flat) == ((slice(0, 6), slice(0, 4)), slice(0, 7))


def test_every_plan_has_its_text() -> None:
    assert list(CASES) == list(SAID)


def test_what_leaves_a_group_of_ranks_goes_to_others() -> None:
    plan = plan_reshard(
        mesh_layout(Mesh(tp=4), PartitionSpec("tp")), mesh_layout(Mesh(tp=4), PartitionSpec(None, "tp"))
    )
    each = plan.bytes_moved // 12
    assert [plan.leaving(ranks) for ranks in ([], [0], [0, 1], [1, 0, 1], [0, 1, 2], range(4), [7])] == [
        0,
        3 * each,
        4 * each,
        4 * each,
        3 * each,
        0,
        0,
    ]
    assert sum(plan.sent.values()) == plan.bytes_moved == sum(plan.received.values()) == sum(plan.links.values())
    assert plan.bytes_kept == sum(plan.kept.values())
    assert st.plan_reshard(plan.source, plan.source).links == {}
