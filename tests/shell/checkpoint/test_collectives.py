"""How often ranks wait for each other in a save and a load: a small number, whatever is saved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import shardtree as st
from shardtree.shell.world import agree
from shardtree.storage import MemoryStorage
from shardtree.world import World, simulate
from tests.shell.world.passing_on import PassingOn

RANKS = 3


class CountingWorld(PassingOn):
    """A rank of another world, which counts its collectives."""

    count = 0

    def told(self, call: str, value: Any = None) -> Any:
        assert call not in ("send", "recv"), "a save or load of few tensors sends nothing to one rank"
        self.count += 1
        return value


def tree(world: World, tensors: int) -> dict[str, Any]:
    place = (0, world.rank, world.size)
    shards = {f"w{n}": st.ShardedTensor.from_rank_offsets(f"w{n}", torch.full((2,), n), place) for n in range(tensors)}
    return {**shards, "rng": st.ShardedObject("rng", 1, (1,), (0,), world.rank), "step": 7}


def collectives(call: Callable[[World], Any]) -> set[int]:
    """Return how many collectives a call took on each rank."""

    def run(world: World) -> int:
        counting = CountingWorld(world)
        call(counting)
        return counting.count

    return set(simulate(RANKS, run))


def check_counts(save: Callable[..., Any], load: Callable[..., Any], backend: str, most: tuple[int, int]) -> None:
    for tensors in (1, 20):
        saving, loading = counts(save, load, backend, tensors)
        assert (saving <= most[0], loading <= most[1]) == (True, True), (saving, loading)


def counts(save: Callable[..., Any], load: Callable[..., Any], backend: str, tensors: int) -> tuple[int, int]:
    storage = MemoryStorage()
    (saving,) = collectives(lambda world: save(tree(world, tensors), storage, (backend, 1), world=world))
    (loading,) = collectives(lambda world: load(tree(world, tensors), storage, world=world))
    return saving, loading


# The fifth is a broadcast: of what one rank has parsed of `.metadata`.
MOST = [("safetensors", (4, 4)), ("dcp", (4, 5))]


@pytest.mark.parametrize(("backend", "most"), MOST)
def test_a_save_and_a_load_take_few_collectives(backend: str, most: tuple[int, int]) -> None:
    check_counts(st.save, st.load, backend, most)


def asking_twice(*arguments: Any, world: World) -> Any:
    """The planted fault: a load with one more agreement."""
    agree(world, "look around", lambda: None)
    return st.load(*arguments, world=world)


def test_the_count_catches_one_more_collective() -> None:
    with pytest.raises(AssertionError, match=r"\(4, 5\)"):
        check_counts(st.save, asking_twice, *MOST[0])
