"""coverage: its counts beside counting element by element, and its table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardtree.layouts import Coverage, coverage
from shardtree.mapping import ShardedTensor, is_main_replica
from shardtree.testing import Layout, cut, layouts, shapes
from tests.core.trees.samples import assert_caught

LAYOUTS = shapes(max_axes=3).flatmap(lambda shape: layouts(shape, 3))
FATES = st.lists(st.sampled_from(["kept", "kept", "lost", "doubled", "demoted"]), min_size=8, max_size=8)


def trees(layout: Layout, fates: list[str]) -> list[list[ShardedTensor]]:
    """Return each rank's shards, some of which are lost, there twice, or not main."""
    whole, found = torch.zeros(layout.global_shape), []
    for rank in range(layout.ranks):
        own: list[ShardedTensor] = []
        for number, shard in enumerate(cut(layout, "w", whole, rank)):
            fate = fates[(rank + number) % len(fates)]
            copies = {"lost": [], "doubled": [shard, shard], "demoted": [replace(shard, replica_id=1)]}
            own += copies.get(fate, [shard])
        found.append(own)
    return found


def check_counts(count: Callable[[Any], Coverage], layout: Layout, fates: list[str]) -> None:
    ranks = trees(layout, fates)
    mains, held = torch.zeros(layout.global_shape), 0
    for shard in (shard for own in ranks for shard in own):
        number = torch.arange(mains.numel()).view(mains.shape)[shard.global_slice()].reshape(-1)
        number = number[shard.flattened_range or slice(None)]
        mains.view(-1)[number] += is_main_replica(shard.replica_id)
        held += number.numel()
    found = count(ranks)
    if not found.keys:
        assert not any(ranks)
        return
    counts = [int(column[0]) for column in (found.once, found.twice, found.missing)]
    assert counts == [int((mains == 1).sum()), int((mains > 1).sum()), int((mains == 0).sum())]
    assert found.is_complete == bool((mains == 1).all())
    if prod(layout.global_shape):
        assert np.isclose(found.copies[0], held / prod(layout.global_shape))


@given(LAYOUTS, FATES)
def test_elements_are_counted_once_twice_or_not(layout: Layout, fates: list[str]) -> None:
    check_counts(coverage, layout, fates)


def test_the_law_catches_replicas_that_count() -> None:
    def with_replicas(ranks: Any) -> Coverage:
        return coverage([[replace(shard, replica_id=0) for shard in own] for own in ranks])

    assert_caught(check_counts, with_replicas, LAYOUTS, FATES)
