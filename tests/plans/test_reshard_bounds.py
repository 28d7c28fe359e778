"""What resharding moves between well-known layouts: in units of the tensor's size, to the byte."""

from __future__ import annotations

import pytest

import shardtree as st
from shardtree import Mesh, PartitionSpec
from tests.plans.reshard_layouts import mesh_layout

SIZE = 48 * 48 * 4
ROWS, COLUMNS = PartitionSpec("tp"), PartitionSpec(None, "tp")
TP8, TP4_DP2, DP2_TP4 = Mesh(tp=8), Mesh(tp=4, dp=2), Mesh(dp=2, tp=4)
TRAINERS, ENGINES = Mesh(dp=4, tp=4), Mesh(engine=4, tp=4).on_ranks(range(16, 32))

# name: source, target; moved in all, most that a rank gets, most that a rank sends
BOUNDS = {
    "FSDP8 rows to TP8 columns": (TP8, ROWS, TP8, COLUMNS, 7 / 8, 7 / 64, 7 / 64),
    "TP4 x DP2 to TP8 rows": (TP4_DP2, ROWS, TP8, ROWS, 0, 0, 0),
    "TP8 to TP4 x DP2 rows": (TP8, ROWS, TP4_DP2, ROWS, 1, 1 / 8, 1 / 8),
    "DP2 x TP4 to TP8 rows": (DP2_TP4, ROWS, TP8, ROWS, 3 / 4, 1 / 8, 1 / 8),
    "TP8 to DP2 x TP4 rows": (TP8, ROWS, DP2_TP4, ROWS, 7 / 4, 1 / 4, 1 / 4),
    "HSDP 2 x 4 to TP8 columns": (Mesh(dp=2, tp=4), ROWS, TP8, COLUMNS, 3 / 4, 3 / 32, 3 / 32),
    "FSDP8 to FSDP6": (TP8, ROWS, Mesh(tp=6), ROWS, 3 / 4, 1 / 6, 1 / 8),
    "4 trainers of TP4 to 4 engines of TP4": (TRAINERS, ROWS, ENGINES, ROWS, 4, 1 / 4, 1 / 4),
    "4 x 2, axes exchanged": (
        *(Mesh(a=4, b=2), PartitionSpec("a", "b")),
        *(Mesh(a=4, b=2), PartitionSpec("b", "a")),
        *(3 / 4, 1 / 8, 1 / 8),
    ),
}


@pytest.mark.parametrize("name", BOUNDS)
def test_bounds_are_met(name: str) -> None:
    mesh, spec, other_mesh, other_spec, *bounds = BOUNDS[name]
    plan = st.plan_reshard(mesh_layout(mesh, spec), mesh_layout(other_mesh, other_spec))
    found = [plan.bytes_moved, max(plan.received.values()), max(plan.sent.values())]
    assert found == [bound * SIZE for bound in bounds]
    assert plan.bytes_moved == plan.lower_bound and plan.check() == ()


def test_links_are_level_where_replicas_are() -> None:
    plan = st.plan_reshard(mesh_layout(TRAINERS, ROWS), mesh_layout(ENGINES, ROWS))
    assert set(plan.links.values()) == {SIZE / 4} and len(plan.links) == 16
