"""explain_ranks says what ranks read for each other, send and receive, before a byte moves."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import ReferenceType, ref

import numpy as np
import pytest
import torch

import shardtree as st
from shardtree.live import _reading as _exchange
from shardtree.live.resharding._exchange import plan_exchange, plan_reads
from shardtree.storage import MemoryStorage

ALWAYS = st.LoadOptions(exchange="always", verify=None)


class Targets(Sequence[Any]):
    """Targets of ranks that are made when they are asked for."""

    def __init__(self, ranks: int, target: Callable[[int], Any]) -> None:
        self.ranks, self.target = ranks, target

    def __len__(self) -> int:
        return self.ranks

    def __getitem__(self, rank: Any) -> Any:
        if rank >= self.ranks:
            raise IndexError
        return self.target(rank)


def check_none_is_kept(explain: Callable[..., Any], exchange: str) -> None:
    gc.collect()
    gc.freeze()  # else the collections that count what is kept look through all that other tests left
    folder, made, at_once = MemoryStorage(), list[ReferenceType[torch.Tensor]](), list[int]()
    st.save({"w": st.ShardedTensor.from_rank_offsets("w", torch.ones(16, dtype=torch.float64))}, folder)

    def target(rank: int) -> Any:
        rows = torch.zeros(2)
        made.append(ref(rows))
        gc.collect()
        at_once.append(sum(one() is not None for one in made))
        return {"w": st.ShardedTensor.from_rank_offsets("w", rows, (0, rank, 8))}

    found = explain(Targets(8, target), folder, cast=True, options=st.LoadOptions(exchange=exchange))
    assert found.ok and [one.cost.bytes_wanted for one in found.reads] == [16] * 8
    assert max(at_once) <= 3


@pytest.mark.parametrize("exchange", ["always", "never"])
def test_targets_that_are_made_when_they_are_asked_for_are_not_kept(exchange: str) -> None:
    check_none_is_kept(st.explain_ranks, exchange)


def test_the_check_sees_targets_that_are_kept() -> None:
    with pytest.raises(AssertionError):
        check_none_is_kept(lambda made, *others, **options: st.explain_ranks(list(made), *others, **options), "never")


def replica_of(keys: Sequence[str], rank: int) -> Any:
    return {key: st.ShardedTensor(key, None, torch.int8, (2,), (2,), (0,), None, rank) for key in keys}


def peak_bytes(explain: Callable[..., Any], keys: Sequence[str], folder: MemoryStorage, ranks: int) -> int:
    """Return how much memory an explanation takes at once."""
    explain(
        Targets(2, partial(replica_of, keys[:1])), folder, options=ALWAYS
    )  # what is imported, and parsed once, counts for none
    tracemalloc.start()
    try:
        found = explain(Targets(ranks, partial(replica_of, keys)), folder, options=ALWAYS)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert found.ok and found.cost is not None and found.cost.bytes_read == 2 * len(keys)
    return peak


def check_replicas_take_no_memory(explain: Callable[..., Any]) -> None:
    keys, folder = [f"layers.{number}.weight" for number in range(100)], MemoryStorage()
    one = torch.zeros(2, dtype=torch.int8)
    st.save({key: st.ShardedTensor.from_rank_offsets(key, one) for key in keys}, folder)
    few, many = (peak_bytes(explain, keys, folder, ranks) for ranks in (4, 16))
    assert many <= 1.5 * few


@pytest.mark.slow
def test_memory_does_not_grow_with_the_replicas() -> None:
    check_replicas_take_no_memory(st.explain_ranks)


@pytest.mark.slow
def test_the_check_sees_columns_of_every_rank() -> None:
    def described(columns: Any, ranks: int, **options: Any) -> Any:
        parts = [replace(columns, rank=np.full_like(columns.rank, rank)) for rank in range(ranks)]
        plan_exchange(st.layouts.join_columns(parts), ranks)
        return plan_reads(columns, ranks, **options)

    def explain(*arguments: Any, **options: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_exchange, "plan_reads", described)
            return st.explain_ranks(*arguments, **options)

    with pytest.raises(AssertionError):
        check_replicas_take_no_memory(explain)


def test_what_converted_shards_disagree_about_is_said_of_their_ranks() -> None:
    """They may, if they are padded; a load fails, too."""
    folder = MemoryStorage()
    st.save({"w": st.ShardedTensor.from_rank_offsets("w", torch.ones(4))}, folder)
    targets = [
        {"w": st.ShardedTensor("w", None, torch.float64, (size,), (size,), (0,), None, allow_shape_mismatch=True)}
        for size in (4, 4, 6)
    ]
    found = st.explain_ranks(targets, folder, validate_access_integrity=False, cast=True, options=ALWAYS)
    (problem,) = found.failed
    assert "'w' (ranks 0-2): (4,) float32 on ranks 0, 1, (6,) float32 on rank 2" in problem.text
