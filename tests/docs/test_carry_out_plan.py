"""docs/scripts/carry_out_plan.py: a plan carried out, and what came proved, by a program that has torch alone."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
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
from shardtree.fingerprints import bytes_total
from shardtree.live._redistribute import own_rows
from shardtree.plans import with_relays
from shardtree.testing import random_bits
from tests.live.test_redistribute import Case, cases
from tests.quick_python.command import quick_python

SCRIPT = Path(__file__).parents[2] / "docs" / "scripts" / "carry_out_plan.py"
NAMES = runpy.run_path(str(SCRIPT))
EXAMPLES = settings.default.max_examples if settings.default else 100

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


def test_it_is_short_enough_to_be_copied() -> None:
    assert len(SCRIPT.read_text().splitlines()) <= 150


@given(st.integers(0, 3_000_000), st.integers(0, 99))
@settings(max_examples=10)
def test_its_sum_is_that_of_the_library(size: int, seed: int) -> None:
    data = random_bits((size,), torch.uint8, seed)
    assert NAMES["total"](data) == bytes_total(data)


def by_key(tree: Any, columns: shardtree.layouts.ShardColumns, rank: int) -> dict[str, list[torch.Tensor]]:
    """Return a rank's tensors as the file takes them: in the order of the plan."""
    found: dict[str, list[torch.Tensor]] = {}
    shards = shardtree.layouts.tensor_shards(tree)
    for _, shard in sorted(zip(own_rows("own", columns, shards, rank), shards, strict=True), key=itemgetter(0)):
        data = torch.empty(shard.data_shape, dtype=shard.dtype) if shard.data is None else shard.data
        found.setdefault(shard.key, []).append(data)
    return found


def carried_out(case: Case, made: ReshardPlan) -> tuple[dict[int, dict[str, list[torch.Tensor]]], list[str]]:
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
            lambda rank, nbytes: world.recv(rank),
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


def keep(messages: dict[int, torch.Tensor], rows: Iterator[int], rank: int, data: torch.Tensor) -> None:
    messages[next(rows)] = data.clone()


ENGINE = """
import sys

class Refused:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "shardtree":
            raise ImportError("this program doesn't install shardtree")

sys.path[:0] = {paths!r}
sys.meta_path.insert(0, Refused())
try:
    import shardtree
except ImportError:
    pass
else:
    raise SystemExit("shardtree is there")

import json, runpy, torch
engine = runpy.run_path({script!r})
given = torch.load("given.pt", weights_only=True)
plan = engine["read_plan"](given["plan"])
targets = {{"up": torch.zeros(6, 4, dtype=torch.bfloat16), "down": torch.zeros(8, 3, dtype=torch.bfloat16)}}
came = iter(given["messages"])
_, got = engine["carry_out"](plan, 3, {{}}, targets, None, lambda rank, nbytes: next(came))
torch.save(targets, "targets.pt")
print(json.dumps(engine["differing"](plan, given["sums"], got)))
"""


@pytest.mark.parametrize("lost", [False, True])
def test_a_program_without_shardtree_receives_and_proves(lost: bool, tmp_path: Path) -> None:
    whole = {"up": torch.randn(12, 4), "down": torch.randn(8, 6)}
    source = shardtree.shard(whole, Mesh(tp=2), {"up": P(None, "tp"), "down": P("tp")})
    halves = {key: tensor.bfloat16() for key, tensor in whole.items()}
    target = shardtree.shard(halves, Mesh(tp=2).on_ranks([2, 3]), {"up": P("tp"), "down": P(None, "tp")})
    plan = plan_reshard(source, {2: target[0], 3: target[1]}, cast=True)
    text = plan.to_json()
    moved = json.loads(text)["transfers"]
    sent: dict[int, int] = {}
    messages: dict[int, torch.Tensor] = {}
    for rank, tree in enumerate(source):  # the trainers
        rows = [row for row, giver in enumerate(moved["from_rank"]) if giver == rank]
        put = partial(keep, messages, iter(rows))
        sent |= NAMES["carry_out"](NAMES["read_plan"](text), rank, by_key(tree, plan.source, rank), {}, put, None)[0]
    mine = [data for row, data in sorted(messages.items()) if moved["to_rank"][row] == 3]
    if lost:
        mine[1][7] ^= 64
    torch.save({"plan": text, "messages": mine, "sums": sent}, tmp_path / "given.pt")
    package = Path(shardtree.__file__).parents[1]
    paths = [path for path in sys.path if path and Path(path).resolve() not in (package, Path.cwd())]
    code = ENGINE.format(paths=paths, script=str(SCRIPT))
    run = subprocess.run(
        [*quick_python(), "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    differing = json.loads(run.stdout)
    got = torch.load(tmp_path / "targets.pt", weights_only=True)
    if lost:
        assert len(differing) == 1 and "→ rank 3" in differing[0]
    else:
        assert differing == []
    assert all(torch.equal(got[key], target[1][key].data) for key in got) == (not lost)
