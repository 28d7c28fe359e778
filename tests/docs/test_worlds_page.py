"""The worlds of MPI and Ray in docs/writing-a-backend.md, over libraries of the same calls whose ranks are threads."""

from __future__ import annotations

import asyncio
import runpy
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import shardtree as st
from shardtree.testing import check_world
from shardtree.world import World, simulate

SCRIPTS = Path(__file__).parents[2] / "docs" / "scripts"


def communicator(world: World) -> Any:
    """Return what mpi4py calls a communicator, as far as the page needs one."""
    return SimpleNamespace(
        rank=world.rank,
        size=world.size,
        allgather=world.all_gather,
        bcast=world.broadcast,
        barrier=world.barrier,
        alltoall=world.all_to_all,
        send=world.send,
        recv=lambda source: world.recv(source),
    )


@pytest.fixture
def mpi_world() -> Any:
    return runpy.run_path(str(SCRIPTS / "mpi_world.py"))["MPIWorld"]


def test_the_world_of_mpi_keeps_its_promises(mpi_world: Any) -> None:
    check_world(lambda function: simulate(3, lambda world: function(mpi_world(communicator(world)))))


def test_a_state_is_saved_and_loaded_in_it(mpi_world: Any, tmp_path: Path) -> None:
    def tree(rank: int, size: int, values: torch.Tensor) -> dict[str, Any]:
        return {"w": st.ShardedTensor.from_rank_offsets("w", values, (0, rank, size))}

    def save(world: World) -> None:
        rows = torch.arange(world.rank * 4.0, world.rank * 4.0 + 4)
        st.save(tree(world.rank, 3, rows), tmp_path / "step", world=mpi_world(communicator(world)))

    def load(world: World) -> list[float]:
        state = st.load(tree(world.rank, 2, torch.zeros(6)), tmp_path / "step", world=mpi_world(communicator(world)))
        return list(state["w"].tolist())

    simulate(3, save)
    assert simulate(2, load) == [[0.0, 1, 2, 3, 4, 5], [6.0, 7, 8, 9, 10, 11]]


class GetTimeoutError(Exception):
    """Ray's, by its name."""


class Actor:
    """An actor of threads: its coroutines run in one loop, and other calls in a thread each."""

    def __init__(self, ray: ThreadRay, made: Any) -> None:
        self.ray, self.made = ray, made

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=partial(self.ray.call, getattr(self.made, name)))


class ThreadRay:
    """What Ray calls ``ray``, as far as the page needs it."""

    exceptions = SimpleNamespace(GetTimeoutError=GetTimeoutError)

    def __init__(self) -> None:
        self.loop, self.pool = asyncio.new_event_loop(), ThreadPoolExecutor(16)
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()

    def remote(self, **_: Any) -> Callable[[type], Any]:
        return lambda kind: SimpleNamespace(remote=lambda *arguments: Actor(self, kind(*arguments)))

    def call(self, method: Callable[..., Any], *arguments: Any) -> Future[Any]:
        if asyncio.iscoroutinefunction(method):
            return asyncio.run_coroutine_threadsafe(method(*arguments), self.loop)
        return self.pool.submit(method, *arguments)

    def get(self, futures: Any, timeout: float | None = None) -> Any:
        if isinstance(futures, list):
            return [self.get(future) for future in futures]
        try:
            return futures.result(timeout)
        except TimeoutError as error:
            raise GetTimeoutError from error

    def close(self) -> None:
        async def cancel() -> None:
            """Cancel the calls that wait for ranks which never come."""
            waiting = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)

        self.pool.shutdown(wait=False)
        asyncio.run_coroutine_threadsafe(cancel(), self.loop).result()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()


@pytest.fixture
def ray_script(monkeypatch: pytest.MonkeyPatch) -> Any:
    ray = ThreadRay()
    monkeypatch.setitem(sys.modules, "ray", ray)
    yield SimpleNamespace(**runpy.run_path(str(SCRIPTS / "ray_world.py")), ray_of_threads=ray)
    ray.close()


def test_the_world_of_ray_keeps_its_promises(ray_script: Any) -> None:
    check_world(ray_script.run_on_actors)


def test_a_rank_that_waits_for_one_that_ended_is_told(ray_script: Any) -> None:
    table = ray_script.Table.remote()
    world = ray_script.RayWorld(table, 0, 2, timeout=0.05)
    with pytest.raises(st.errors.WorldError, match=r"rank 0 waited 0\.05 seconds"):
        world.barrier()
