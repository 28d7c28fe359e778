"""A plan as JSON: read back it is the same plan, and what isn't a plan is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from hypothesis import given

from shardtree.errors import MetadataError
from shardtree.layouts import Mesh, PartitionSpec, ShardColumns
from shardtree.plans import ReshardPlan, plan_reshard, with_relays
from tests.live.reshard_layouts import Case, mesh_layout, reshards

PLAN = plan_reshard(mesh_layout(Mesh(dp=2), PartitionSpec("dp")), mesh_layout(Mesh(tp=3), PartitionSpec(None, "tp")))


@pytest.mark.slow
@given(reshards())
def test_a_plan_that_is_written_and_read_is_the_same(case: Case) -> None:
    plan = with_relays(plan_reshard(case.source, case.target, shortest_cut=case.shortest_cut, cast=True))
    again = ReshardPlan.from_json(plan.to_json())
    pairs = [(plan.source, again.source), (plan.target, again.target), (plan.transfers, again.transfers)]
    for before, after in pairs:
        for one in fields(before):
            np.testing.assert_equal(getattr(after, one.name), getattr(before, one.name), one.name)
    assert (again.names, str(again)) == (dict(plan.names), str(plan))


def test_a_plan_has_types_that_every_reader_knows() -> None:
    document = json.loads(PLAN.to_json())
    assert (document["format"], document["version"]) == ("shardtree.ReshardPlan", 1)
    assert document["source"]["tensors"] == [{"key": "w", "dtype": "float32", "shape": [48, 48], "prepend_axis_num": 0}]


CHANGES: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "another version": (lambda document: document.update(version=2), "found 'shardtree.ReshardPlan' of version 2"),
    "no transfers": (lambda document: document.pop("transfers"), "KeyError: 'transfers'"),
    "a fraction": (lambda document: document["transfers"].update(source=[0.5] * 6), "'source' has float64 values"),
    "a lost row": (lambda document: document["transfers"]["hop"].pop(), "different lengths"),
    "a shard of no tensor": (lambda document: document["source"]["shards"].update(key=[0, 1]), "is not listed"),
    "no such dtype": (lambda document: document["source"]["tensors"][0].update(dtype="nn"), "no dtype 'nn'"),
    "a box elsewhere": (
        lambda document: document["transfers"].update(offset=[[40, 40]] * 6),
        "does not fill its target",
    ),
    "no such shard": (lambda document: document["transfers"].update(source=[9] * 6), "shards that do not exist"),
    "twice": (lambda document: document["target"]["tensors"].append(document["target"]["tensors"][0]), "twice"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_what_is_not_a_plan_is_refused(what: str) -> None:
    document = json.loads(PLAN.to_json())
    change, message = CHANGES[what]
    change(document)
    with pytest.raises(MetadataError, match=message):
        ReshardPlan.from_json(json.dumps(document))


@pytest.mark.parametrize("text", ["", "[]", "{}", "7", "[" * 100_000])
def test_what_is_not_a_document_is_refused(text: str) -> None:
    with pytest.raises(MetadataError, match=r"the text is not a readable plan"):
        ReshardPlan.from_json(text)


def test_an_empty_plan_is_read_too() -> None:
    nothing = mesh_layout(Mesh(dp=1), PartitionSpec())
    assert isinstance(ReshardPlan.from_json(plan_reshard(nothing, [[]]).to_json()).target, ShardColumns)
