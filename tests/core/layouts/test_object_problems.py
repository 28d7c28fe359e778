"""Whether objects fill their arrays, compared with counting the main replicas of every cell."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from math import prod

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shardtree.core.layouts import join_objects, object_problems
from shardtree.layouts import Problem, object_columns
from shardtree.mapping import ShardedObject, is_main_replica
from tests.core.trees.samples import assert_caught

Ranks = Sequence[Sequence[ShardedObject]]
Check = Callable[[Ranks], tuple[Problem, ...]]


@st.composite
def objects(draw: st.DrawFn) -> Ranks:
    """Return each rank's objects: arrays of up to three axes, of which cells are lost, doubled or demoted."""
    ranks: list[list[ShardedObject]] = [[] for _ in range(draw(st.integers(1, 4)))]
    for key in "ab"[: draw(st.integers(1, 2))]:
        shape = tuple(draw(st.lists(st.integers(1, 3), max_size=3)))
        for cell in product(*map(range, shape)):
            for replica in draw(st.sampled_from([(0,), (0,), (0,), (0, 1), (0, 0), (1,), ()])):
                rank = draw(st.integers(0, len(ranks) - 1))
                ranks[rank].append(ShardedObject(key, None, shape, cell, (0, replica)))
    return ranks


def problems_of(ranks: Ranks) -> tuple[Problem, ...]:
    return object_problems(join_objects([object_columns(items, rank) for rank, items in enumerate(ranks)]))


def cells_are_what_counting_finds(check: Check, ranks: Ranks) -> None:
    shapes = {item.key: item.global_shape for items in ranks for item in items}
    counts = {key: np.zeros(shape, dtype=np.int64) for key, shape in shapes.items()}
    for item in (item for items in ranks for item in items if is_main_replica(item.replica_id)):
        counts[item.key][item.global_offset] += 1
    told = {(key, doubled): np.zeros(shape, dtype=bool) for key, shape in shapes.items() for doubled in (False, True)}
    for problem in check(ranks):
        told[str(problem.key), "more than one" in problem.what][problem.box or ()] = True
    for key, count in counts.items():
        assert (told[key, False] == (count == 0)).all()
        assert (told[key, True] == (count > 1)).all()


@given(objects())
def test_problems_are_the_cells_that_counting_finds(ranks: Ranks) -> None:
    cells_are_what_counting_finds(problems_of, ranks)


def test_the_law_catches_a_check_that_only_counts_objects() -> None:
    def by_number(ranks: Ranks) -> tuple[Problem, ...]:
        mains = [item for items in ranks for item in items if is_main_replica(item.replica_id)]
        arrays = {(item.key, item.global_shape) for items in ranks for item in items}
        return () if len(mains) == sum(prod(shape) for _, shape in arrays) else problems_of(ranks)

    assert_caught(cells_are_what_counting_finds, by_number, objects())


def test_an_array_of_unknown_size_ends_with_its_last_object() -> None:
    known = [ShardedObject.empty_from_unique_key(f"rng/shard_1.{cell}_2") for cell in (0, 2)]
    assert [problem.box for problem in problems_of([known])] == [
        (slice(0, 1), slice(0, 3)),
        (slice(1, 2), slice(1, 2)),
    ]
