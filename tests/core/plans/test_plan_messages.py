"""What the errors of plans say, and what plans print, to the letter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import shardtree as st
from shardtree import Mesh, PartitionSpec, ShardedTensor
from shardtree.core.plans import find_unexpected
from shardtree.errors import ShapeError, TreeError
from shardtree.layouts import TensorKind
from shardtree.live.resharding import copy_transfers
from shardtree.live.resharding._in_memory import take_source, take_target
from shardtree.plans import (
    Explanation,
    FailedCheck,
    Gap,
    Mismatch,
    RankReads,
    ReadCost,
    Refusal,
    Transfers,
    Undecided,
    Unexpected,
    plan_reshard,
    with_relays,
)
from tests.core.layouts.test_layout_messages import FULL, part
from tests.core.trees.messages import read_messages, said
from tests.live.reshard_layouts import mesh_layout

ROWS, COLUMNS = PartitionSpec("tp"), PartitionSpec(None, "tp")
ONE = [{"w": ShardedTensor.from_rank_offsets("w", FULL)}]


def rows_to_columns(ranks: int = 2, shape: tuple[int, int] = (4, 4)) -> st.ReshardPlan:
    return plan_reshard(mesh_layout(Mesh(tp=ranks), ROWS, shape), mesh_layout(Mesh(tp=ranks), COLUMNS, shape))


def changed(row: int, repeat: int = 1, **values: Any) -> str:
    """Return what a plan says of itself when one of its transfers was changed in some columns."""
    plan = rows_to_columns()
    columns = {field.name: getattr(plan.transfers, field.name).copy() for field in fields(plan.transfers)}
    for name, value in values.items():
        columns[name][row] = value
    wrong = replace(
        plan, transfers=Transfers(**{name: np.repeat(each, repeat, axis=0) for name, each in columns.items()})
    )
    return "\n".join(map(str, wrong.check()))


def copied(memories: tuple[dict[int, torch.Tensor], dict[int, torch.Tensor]]) -> None:
    plan = rows_to_columns()
    copy_transfers(plan, np.arange(len(plan.transfers)), *memories)


def blocks() -> dict[int, torch.Tensor]:
    return {0: torch.zeros(2, 4), 1: torch.zeros(2, 4)}


def strips() -> dict[int, torch.Tensor]:
    return {0: torch.zeros(4, 2), 1: torch.zeros(4, 2)}


def kind(*shape: int, dtype: torch.dtype = torch.float32) -> TensorKind:
    return TensorKind(dtype, shape, 0)


COST = ReadCost(bytes_wanted=1500, bytes_read=3000, pieces=1200, files=2)

CALLS: dict[str, Callable[[], Any]] = {
    "reshard: not a target": lambda: take_target(FULL),
    "reshard: no data": lambda: take_source({"a": [part(0, 1).without_data()], "b": part(0, 1, "v").without_data()}),
    "reshard: hidden": lambda: take_source({"a": {part(0, 1)}}),
    "reshard: a hidden target": lambda: take_target({"a": {part(0, 1)}}),
    "reshard: no targets": lambda: st.reshard(ONE, []),
    "reshard: no sources": lambda: st.reshard({}, ONE),
    "reshard: nothing fits": lambda: st.reshard(ONE, [{"w": [part(0, 1, "v")]}]),
    "reshard: a value in the way": lambda: st.reshard([{**ONE[0], "a": 1}], [{"a": part(0, 1)}]),
    "plan: keys": lambda: plan_reshard([[part(0, 1, "weight")]], [[part(0, 1, "wieght"), part(0, 1, "bias")]]),
    "plan: kinds": lambda: plan_reshard(ONE, [[ShardedTensor.from_rank_offsets("w", FULL[:2])]]),
    "plan: dtypes": lambda: plan_reshard(ONE, [[ShardedTensor.from_rank_offsets("w", FULL.half())]]),
    "plan: dtypes that cannot be converted": lambda: plan_reshard(
        ONE, [[ShardedTensor.from_rank_offsets("w", FULL.int())]], cast=True
    ),
    "reshard: an integer that does not fit": lambda: st.reshard(
        [[ShardedTensor.from_rank_offsets("w", torch.tensor([7, 300]))]],
        [[ShardedTensor.from_rank_offsets("w", torch.zeros(2, dtype=torch.uint8))]],
        cast=True,
    ),
    "plan: mains overlap": lambda: plan_reshard([[part(0, 2)], [part(0, 2)], [part(1, 2)], [part(0, 1, "v")] * 2], ONE),
    "plan: a gap": lambda: plan_reshard([[part(0, 4)], [part(2, 4)]], [[part(0, 2)], [part(1, 2)]]),
    "plan: too large": lambda: rows_to_columns(2, (2**33, 2**31)),
    "plan: a tensor by another name": lambda: plan_reshard([[part(0, 1, "weight")]], [[part(0, 1, "weight")]]).explain(
        "wieght"
    ),
    "copy: no memory": lambda: copied(({0: torch.zeros(2, 4)}, strips())),
    "copy: other memory": lambda: copied((blocks(), {**strips(), 1: torch.zeros(3, 2)})),
    "copy: another dtype": lambda: copied((blocks() | {1: torch.zeros(2, 4, dtype=torch.int32)}, strips())),
    "copy: lazy targets": lambda: copied((blocks(), {row: torch._neg_view(data) for row, data in strips().items()})),
    "copy: sparse": lambda: copied((blocks() | {1: torch.zeros(2, 4).to_sparse()}, strips())),
}

PRINTED: dict[str, Callable[[], Any]] = {
    "a plan": lambda: rows_to_columns(3, (3000, 3)),
    "a plan of nothing": lambda: plan_reshard(ONE, ONE),
    "a schedule": lambda: rows_to_columns(3, (6, 6)).schedule(max_bytes_in_flight=16),
    "a schedule of nothing": lambda: plan_reshard(ONE, ONE).schedule(),
    "a long schedule": lambda: rows_to_columns(2, (40, 40)).schedule(max_bytes_in_flight=40),
    "where a tensor comes from": lambda: with_relays(plan_reshard([ONE[0], [], []], [[], *(ONE[0], ONE[0])])).explain(
        "w"
    ),
    "an explanation of a load that does not": lambda: Explanation(
        tuple(f"key.{number}" for number in range(12)),
        (
            Unexpected("wieght", "weight"),
            Unexpected("rng", is_object=True),
            Mismatch("w", kind(4, 6), kind(4, 8, dtype=torch.int8)),
            Gap("v", (2, 0), 6, 12),
            Refusal("u", "is stored in another way"),
        ),
        (RankReads(0, 1000, 2, COST), RankReads(1, 1, 0, COST)),
    ),
    "an explanation of checks that fail": lambda: Explanation(
        (),
        (
            *find_unexpected(["module.w", "module.b"], ["w", "b"]),
            FailedCheck((0, 1), TreeError, "join: it does not fit\n  found a list"),
            FailedCheck((1,), ShapeError, "load: no"),
        ),
        (RankReads(0, 1, 0, COST), RankReads(1, 1, 0, COST)),
    ),
    "an explanation of what is not certain": lambda: Explanation(
        (),
        (),
        (RankReads(0, 1, 0, COST),),
        undecided=(Undecided("w", "whether it fits"),),
        omitted=(Unexpected("v", path="tree['v']"),),
        left_out=("tree['optimizer']",),
    ),
    "an explanation without costs": lambda: Explanation(
        ("w",), (), (RankReads(0, 1, 0, COST), RankReads(1, 1, 0, None))
    ),
    "transfers of no shards": lambda: changed(0, source=5, repeat=2),
    "transfers of other tensors": lambda: changed(0, key=1),
    "transfers without elements": lambda: changed(0, shape=(0, 2)),
    "transfers from another rank": lambda: changed(1, from_rank=7),
    "transfers to another rank": lambda: changed(1, to_rank=7),
    "transfers of other sizes": lambda: changed(1, nbytes=7),
    "transfers from elsewhere": lambda: changed(1, source_element=7),
    "transfers to elsewhere": lambda: changed(1, target_stride=(7, 7)),
    "transfers beyond": lambda: changed(1, offset=(3, 3)),
    "transfers doubled": lambda: changed(0, repeat=6),
    "many transfers doubled and too small": lambda: changed(0, repeat=30, nbytes=7),
    "transfers before their time": lambda: changed(1, hop=1),
}


def printed(call: Callable[[], Any]) -> str:
    """Return what stands on the lines of a text, their ends left out."""
    return "\n".join(line.rstrip() for line in str(call()).splitlines() if line.strip())


SAID = read_messages(Path(__file__).with_name("messages.txt"))


@pytest.mark.parametrize("name", CALLS)
def test_errors_say_what_is_wrong_and_what_to_do(name: str) -> None:
    assert said(CALLS[name]) == SAID[name]


@pytest.mark.parametrize("name", PRINTED)
def test_plans_print_what_they_know(name: str) -> None:
    assert printed(PRINTED[name]) == SAID[name]


def test_every_text_has_its_call() -> None:
    assert [*CALLS, *PRINTED] == list(SAID)
