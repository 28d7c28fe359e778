"""docs/scripts/carry_out_plan.py: a plan carried out, and what came proved, by a program that has torch alone."""

from __future__ import annotations

import re
import runpy
from collections.abc import Callable
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import shardtree
from shardtree import Mesh, ReshardPlan, plan_reshard, reshard, simulate
from shardtree import PartitionSpec as P
from shardtree.core.fingerprints import bytes_total
from shardtree.live._redistribute import own_rows
from shardtree.plans import with_relays
from shardtree.testing import GlobalState, random_bits
from tests.live.test_redistribute import Case, cases

SCRIPT = Path(__file__).parents[2] / "docs" / "scripts" / "carry_out_plan.py"
NAMES = runpy.run_path(str(SCRIPT))
EXAMPLES = settings.default.max_examples if settings.default else 100

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


def test_it_is_short_enough_to_be_copied_and_needs_torch_alone() -> None:
    assert len(SCRIPT.read_text().splitlines()) <= 150
    assert re.findall(r"^ *(?:import|from) +(.*)$", SCRIPT.read_text(), re.MULTILINE) == ["json", "torch"]


@given(st.integers(0, 3_000_000), st.integers(0, 99))
@settings(max_examples=10)
def test_its_sum_is_that_of_the_library(size: int, seed: int) -> None:
    data = random_bits((size,), torch.uint8, seed)
    assert NAMES["total"](data) == bytes_total(data)


def by_key(tree: Any, columns: shardtree.layouts.ShardColumns, rank: int) -> dict[str, list[torch.Tensor]]:
    """Return a rank's tensors as the file takes them: in the order of the plan."""
    found: dict[str, list[torch.Tensor]] = {}
    shards = shardtree.core.layouts.tensor_shards(tree)
    for _, shard in sorted(zip(own_rows("own", columns, shards, rank), shards, strict=True), key=itemgetter(0)):
        data = torch.empty(shard.data_shape, dtype=shard.dtype) if shard.data is None else shard.data
        found.setdefault(shard.key, []).append(data)
    return found


def unchanged(rank: int, message: torch.Tensor) -> torch.Tensor:
    return message


def carried_out(
    case: Case, made: ReshardPlan, on_the_way: Callable[[int, torch.Tensor], torch.Tensor] = unchanged
) -> tuple[dict[int, dict[str, list[torch.Tensor]]], list[str]]:
    """Return what a plan's text brings to each rank, and what differs."""
    plan, ranks = NAMES["read_plan"](made.to_json()), sorted({*case.sources, *case.targets})
    targets = {rank: by_key(shardtree.without_data(tree), made.target, rank) for rank, tree in case.targets.items()}

    def on_rank(world: shardtree.World) -> Any:
        return NAMES["carry_out"](
            plan,
            world.rank,
            by_key(case.sources.get(world.rank, {}), made.source, world.rank),
            targets.get(world.rank, {}),
            lambda rank, data: world.send(data.clone(), rank),
            lambda rank, nbytes: on_the_way(world.rank, world.recv(rank)),
        )

    sums = simulate(ranks[-1] + 1, on_rank)
    sent, got = ({row: number for each in sums for row, number in each[side].items()} for side in (0, 1))
    return targets, NAMES["differing"](plan, sent, got)


@pytest.mark.slow
@settings(max_examples=EXAMPLES // 2)
@given(cases(), st.booleans())
def test_it_does_what_the_library_does(case: Case, relay: bool) -> None:
    plan = plan_reshard(case.sources, case.targets, cast=True)
    targets, differing = carried_out(case, with_relays(plan) if relay else plan)
    expected = reshard(case.sources, case.targets, cast=True)
    assert differing == []
    for rank, tensors in targets.items():
        for key, wanted in by_key(expected[rank], plan.target, rank).items():
            for one, other in zip(tensors[key], wanted, strict=True):
                assert one.dtype == other.dtype and torch.equal(bits(one), bits(other))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def test_a_bit_that_is_lost_on_the_way_is_told_by_its_message() -> None:
    whole = {"up": torch.randn(12, 4), "down": torch.randn(8, 6)}
    source, target = (
        shardtree.shard(whole, Mesh(tp=2), {"up": up, "down": down})
        for up, down in ((P(None, "tp"), P("tp")), (P("tp"), P(None, "tp")))
    )
    case = Case(GlobalState({}, {}, {}), dict(enumerate(source)), {2: target[0], 3: target[1]}, 0)
    plan, lost = plan_reshard(case.sources, case.targets), list[torch.Tensor]()

    def flip(rank: int, message: torch.Tensor) -> torch.Tensor:
        if rank == 3 and not lost:
            message[7] ^= 64
            lost.append(message)
        return message

    assert carried_out(case, plan)[1] == []
    (line,) = carried_out(case, plan, on_the_way=flip)[1]
    assert "→ rank 3" in line
