"""Ranks that hold the same share the work: what test_fully_parallel says of saves, loads, objects and exchanges."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
import torch

import shardtree as st
from tests.megatron_cases.worlds import RANKS, assert_same, data_of, in_every_format, loaded, on_ranks, places, saved
from tests.megatron_cases.worlds import whole as make


def tree(rank: int) -> dict[str, Any]:
    place = places(2, 1)[rank]
    along = (0, place.tp, place.tp_size)
    return {
        "tp_1": make("tp_1", torch.ones(10), along, replica_id=place.dp),
        "tp_2": make("tp_2", torch.ones(10), along, replica_id=place.dp),
        "cut": make("cut", torch.ones(20), (0, rank, RANKS)),
        **{key: make(key, torch.ones(size), replica_id=rank) for key, size in (("C", 100), ("D", 1000), ("E", 100))},
    }


def writers(trees: list[Any]) -> dict[str, list[int]]:
    """Return the ranks that write a key's shards."""
    columns = st.layouts.tree_columns(trees)
    found = defaultdict(list)
    for row in st.plans.level_writes(columns, len(trees)).nonzero()[0]:
        found[columns.keys[columns.key[row]]].append(int(columns.rank[row]))
    return {key: sorted(ranks) for key, ranks in found.items()}


def test_of_replicas_one_is_written_and_those_of_any_group_share_the_world_where_theirs_may_keep_to_one_group() -> None:
    found = writers(on_ranks(tree))
    assert found["cut"] == list(range(RANKS))
    assert [len(found[key]) for key in ("tp_1", "tp_2", "C", "D", "E")] == [2, 2, 1, 1, 1]
    replicated = [rank for key, ranks in found.items() if key != "cut" for rank in ranks]
    assert len(replicated) == len(set(replicated)), "seven shards, eight ranks: each writes at most one of them"


PLACEMENTS: dict[str, dict[str, list[int]]] = {
    "one rank each, and all": {"a": [0], "b": [1], "c": list(range(8))},
    "one rank that isn't the first": {"a": [2]},
    "many sets": {
        "a": [0],
        "b": list(range(8)),
        "c": [0, 2, 4],
        "d": [1, 0, 7],
        "e": [1, 5],
        "f": [1, 0, 5],
        "g": [7],
    },
}


def placed(placement: dict[str, list[int]], rank: int) -> dict[str, Any]:
    return {
        key: make(key, torch.full((1,), float(ord(key))), replica_id=ranks.index(rank))
        for key, ranks in placement.items()
        if rank in ranks
    }


# Ranks 0 and 7 must write a and g, which leaves 1 and 5 for d, e and f.
@pytest.mark.parametrize(("placement", "busiest"), [*zip(PLACEMENTS.values(), (1, 1, 2), strict=True)], ids=PLACEMENTS)
def test_a_tensor_is_written_by_one_of_its_holders_and_the_least_busy(
    placement: dict[str, list[int]], busiest: int
) -> None:
    found = writers(on_ranks(lambda rank: placed(placement, rank)))
    assert found.keys() == placement.keys()
    for key, (rank,) in found.items():
        assert rank in placement[key]
    counts = [sum(ranks == [rank] for ranks in found.values()) for rank in range(RANKS)]
    assert max(counts) == busiest


@pytest.mark.slow
@in_every_format
@pytest.mark.parametrize("exchange", ["never", "always"])
@pytest.mark.parametrize("placement", PLACEMENTS.values(), ids=PLACEMENTS)
def test_each_holder_loads_it_whoever_wrote_it(backend: Any, exchange: Any, placement: dict[str, list[int]]) -> None:
    trees = on_ranks(lambda rank: placed(placement, rank))
    folder = saved(trees, backend)
    for result, own in zip(loaded(trees, folder, exchange=exchange), trees, strict=True):
        assert_same(result, data_of(own))


KEPT = {"one shared": (1, False), "two shared": (2, False), "one shared, one of each rank's own": (1, True)}


@pytest.mark.parametrize(("shared", "own"), KEPT.values(), ids=KEPT)
def test_what_all_ranks_need_is_read_once_and_passed_on(shared: int, own: bool) -> None:
    def wanted(rank: int) -> dict[str, Any]:
        found = {f"all_{n}": make(f"all_{n}", torch.full((4,), float(n)), replica_id=rank) for n in range(shared)}
        return found | ({"own": make("own", torch.full((4,), float(rank)), (0, rank, RANKS))} if own else {})

    folder, reports = saved(on_ranks(wanted)), []
    options = {"exchange": "always", "verify": None, "report": reports.append}
    for rank, result in enumerate(loaded(on_ranks(wanted), folder, **options)):
        assert_same(result, data_of(wanted(rank)))
    assert sum(report.bytes_read for report in reports) == 16 * shared + 16 * RANKS * own


@in_every_format
@pytest.mark.parametrize("exchange", ["never", "always"])
def test_objects_whose_main_replica_is_on_any_rank_load_on_all(backend: Any, exchange: Any) -> None:
    def objects(rank: int) -> dict[str, Any]:
        return {
            f"Obj_{n}": st.ShardedObject(f"Obj_{n}", [n], (1,), (0,), replica_id=abs(rank - n)) for n in range(RANKS)
        }

    folder = saved(on_ranks(objects), backend)
    for result in loaded(on_ranks(objects), folder, exchange=exchange):
        assert_same(result, {f"Obj_{n}": [n] for n in range(RANKS)})
