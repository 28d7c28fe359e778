"""Asynchronous saves: what test_async_save says of equal results and of failures."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import shardtree as st
from tests.megatron_cases.worlds import RANKS, assert_same, in_every_format, loaded, on_ranks, saved, whole
from tests.options import save_keywords


def tree(rank: int) -> dict[str, Any]:
    return {
        "sd_a": whole("keyA", torch.arange(8.0).reshape(2, 4), replica_id=rank),
        "sd_b": whole("keyB", torch.arange(105.0).reshape(3, 5, 7), replica_id=RANKS - rank - 1),
    }


@pytest.mark.slow
@in_every_format
@pytest.mark.parametrize("persistent", [True, False], ids=["persistent", "each its own"])
@pytest.mark.parametrize("abort", [True, False], ids=["abort", "close"])
def test_an_async_save_is_the_same_as_a_sync_one(backend: Any, persistent: bool, abort: bool) -> None:
    folder = st.storage.MemoryStorage()

    def on_rank(world: st.World) -> None:
        queue = st.AsyncCallsQueue(persistent)
        request = st.save(tree(world.rank), folder, backend, async_sharded_save=True, world=world)
        queue.schedule_async_request(request)
        queue.maybe_finalize_async_calls(blocking=True)
        queue.close(abort=abort)

    st.simulate(RANKS, on_rank)
    targets = on_ranks(lambda rank: st.without_data(tree(rank)))
    for found, expected in zip(loaded(targets, folder), loaded(targets, saved(on_ranks(tree), backend)), strict=True):
        assert_same(found, expected)


class BrokenDisk(OSError):
    pass


def broken(size: int) -> None:
    raise BrokenDisk("critical failure")


@in_every_format
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_a_writer_that_fails_on_one_rank_is_an_error_on_all_that_names_it_and_commits_nothing(
    backend: Any, is_async: bool
) -> None:
    folder = st.storage.MemoryStorage()

    def on_rank(world: st.World) -> bool:
        own = {f"key{i}": whole(f"key{i}_rank{world.rank}", torch.ones(2, 4)) for i in range(4)}
        options = {"progress": broken} if world.rank == 2 else {}
        queue = st.AsyncCallsQueue()

        def save() -> None:
            request = st.save(
                own, folder, backend, async_sharded_save=is_async, world=world, **save_keywords(**options)
            )
            queue.schedule_async_request(request)
            queue.maybe_finalize_async_calls(blocking=True)

        with pytest.raises(st.errors.RemoteError, match="rank 2: BrokenDisk: critical failure"):
            save()
        queue.close()
        return True

    assert all(st.simulate(RANKS, on_rank)) and not st.is_checkpoint(folder)
