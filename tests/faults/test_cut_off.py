"""A rank that is cut off after it wrote: what rank 0 then commits is whole, since that rank leaves its files alone."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import shardtree as st
from shardtree.errors import CheckpointingException, WorldError
from shardtree.strategies import AsyncRequest
from shardtree.world import World, simulate
from tests.shell.world.passing_on import PassingOn

VERSIONS = {"safetensors": 1, "torch_dist": 1, "dcp": 1, "zarr": 3, "huggingface": 1}
MOMENTS = ["gather", "broadcast"]
ROWS = torch.arange(12.0).reshape(4, 3)


class CutOff(PassingOn):
    """A rank that is interrupted where all have written, or while rank 0 commits."""

    def __init__(self, inner: World, moment: str) -> None:
        super().__init__(inner)
        self.moment, self.armed = moment, False

    def told(self, call: str, value: Any = None) -> Any:
        assert call in ("all_gather", "broadcast"), f"a save calls no {call}"
        if self.armed and call == self.moment:
            raise KeyboardInterrupt
        return value

    def gather(self, value: Any, brief: Any, root: int = 0) -> list[Any]:
        found = self.inner.gather(value, brief, root)
        if self.armed and self.moment == "gather":
            raise KeyboardInterrupt
        return found


def leaving_it(request: AsyncRequest[Any]) -> None:
    request.execute_sync()


def save_cut_off(folder: Path, backend: str, moment: str, run: Callable[[AsyncRequest[Any]], None]) -> list[str]:
    """Save on two ranks, of which the second is cut off and deals with that before the first commits; its notes."""
    dealt_with = threading.Event()
    notes: list[str] = []

    def requested(world: World) -> AsyncRequest[Any]:
        place = (0, world.rank, world.size)
        tree = {"w": st.ShardedTensor.from_rank_offsets("w", ROWS.chunk(2)[world.rank].clone(), place)}
        request = st.save(tree, folder, (backend, VERSIONS[backend]), world=world, async_sharded_save=True)
        assert request is not None
        return request

    def on_rank(world: World) -> None:
        if world.rank == 1:
            cut_off = CutOff(world, moment)
            request = requested(cut_off)
            cut_off.armed = True
            try:
                run(request)
            except KeyboardInterrupt as error:
                notes.extend(getattr(error, "__notes__", ()))
            finally:
                dealt_with.set()
            return
        request = requested(world)

        def index(written: Any) -> Any:
            assert dealt_with.wait(60)
            return request.index(written)

        replace(request, index=index).execute_sync()

    with pytest.raises(WorldError, match="rank 1: returned"):  # nobody listens when rank 0 says that it has committed
        simulate(2, on_rank)
    return notes


def check_whole(folder: Path) -> None:
    target = st.ShardedTensor.from_rank_offsets("w", torch.zeros(4, 3))
    assert torch.equal(st.load({"w": target}, folder)["w"], ROWS)


@pytest.mark.parametrize("backend", VERSIONS)
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_rank_that_is_cut_off_takes_nothing_of_what_is_committed(backend: str, moment: str, tmp_path: Path) -> None:
    notes = save_cut_off(tmp_path, backend, moment, leaving_it)
    check_whole(tmp_path)
    assert any("the files of this rank stay" in note for note in notes)


def tidying_up(request: AsyncRequest[Any]) -> None:
    """The planted fault: whatever has happened, a rank that fails removes what it wrote."""
    try:
        request.execute_sync()
    finally:
        request.abandon()


@pytest.mark.parametrize("backend", ["torch_dist", "zarr"])
def test_the_check_catches_a_rank_that_tidies_up(backend: str, tmp_path: Path) -> None:
    save_cut_off(tmp_path, backend, "broadcast", tidying_up)
    with pytest.raises(CheckpointingException):
        check_whole(tmp_path)


def cannot_commit(request: AsyncRequest[Any]) -> AsyncRequest[Any]:
    def fail(written: Any) -> Any:
        raise OSError(28, "No space left on device")

    return replace(request, index=fail)


def cannot_tell(request: AsyncRequest[Any]) -> AsyncRequest[Any]:
    def write() -> Any:
        request.async_fn()
        return lambda: None  # which nothing can pickle

    return replace(request, async_fn=write)


@pytest.mark.parametrize("failing", [cannot_commit, cannot_tell])
def test_ranks_that_hear_of_a_failure_remove_what_they_wrote(
    failing: Callable[[AsyncRequest[Any]], AsyncRequest[Any]], tmp_path: Path
) -> None:
    def on_rank(world: World) -> None:
        place = (0, world.rank, world.size)
        tree = {"w": st.ShardedTensor.from_rank_offsets("w", ROWS.chunk(2)[world.rank].clone(), place)}
        request = st.save(tree, tmp_path, ("torch_dist", 1), world=world, async_sharded_save=True)
        assert request is not None
        with pytest.raises((OSError, CheckpointingException)):
            failing(request).execute_sync()

    simulate(2, on_rank)
    assert list(tmp_path.iterdir()) == []
