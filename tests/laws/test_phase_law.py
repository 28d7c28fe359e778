"""Whatever fails on one rank, in any phase of a save or load, fails on every rank, and names that rank."""

from __future__ import annotations

import ast
import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import shardtree
from shardtree.errors import RemoteError
from shardtree.mapping import ShardedObject, ShardedTensor
from shardtree.storage import MemoryStorage
from shardtree.testing import Call, WatchedStorage
from shardtree.world import World, _phases, agree, gather, on_rank_zero, simulate

PACKAGE = Path(shardtree.__file__).parent
RANKS = 3


def phases_in(source: str) -> Iterator[str]:
    """Yield the names of the phases that a module runs."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in {"agree", "gather", "on_rank_zero"}:
            name = node.args[1]
            assert isinstance(name, ast.Constant), f"line {node.lineno}: write a phase's name as a literal"
            yield str(name.value)


PHASES = sorted(
    {
        phase
        for folder in ("checkpoint", "strategies/safetensors", "strategies")
        for path in (PACKAGE / folder).glob("*.py")
        for phase in phases_in(path.read_text())
    }
)


def tree(world: World, value: float = 1.0) -> dict[str, Any]:
    shard = ShardedTensor.from_rank_offsets("w", torch.full((2, 3), value), (0, world.rank, world.size))
    copied = ShardedTensor.from_rank_offsets("norm", torch.full((3,), value), replica_id=world.rank)
    return {"w": shard, "norm": copied, "rng": ShardedObject("rng", value, (1,), (0,), world.rank), "step": 7}


def scenarios(storage: MemoryStorage) -> dict[str, Callable[[World], Any]]:
    """Return what ranks do together, so that between them each phase is met."""
    shardtree.simulate(RANKS, lambda world: shardtree.save(tree(world), storage, world=world))
    return {
        "save": lambda world: shardtree.save(tree(world, 2.0), storage, world=world, overwrite=True),
        "save what differs": lambda world: shardtree.save(
            {**tree(world, 2.0), "step": world.rank}, storage, world=world, overwrite=True
        ),
        "load": lambda world: shardtree.load(tree(world), storage, world=world, strict="return_all", exchange="always"),
        "load plain": lambda world: shardtree.load_plain_tensors(storage, world=world),
        "remove": lambda world: shardtree.remove_sharded_tensors(storage, "norm", world=world),
    }


SCENARIOS = ["save", "save what differs", "load", "load plain", "remove"]
RUNNERS = {inspect.unwrap(function).__code__ for function in (agree, gather, on_rank_zero, _phases._tell)}


def is_world(frame: FrameType) -> bool:
    """Return whether a frame is the world's own code, or what type checks wrap around it."""
    wrapped = frame.f_code.co_filename.startswith("<@beartype(shardtree.world")
    return wrapped or frame.f_globals.get("__name__", "").startswith("shardtree.world")


Where = Callable[[str, int], None]


@contextmanager
def at_each_phase(visit: Where) -> Iterator[None]:
    """Call `visit(phase, rank)` inside of each phase on each rank, where what the phase runs begins.

    What it raises is raised there, as running out of memory would be.
    """

    def trace(frame: FrameType, event: str, _: Any) -> None:
        caller = frame.f_back
        if event != "call" or caller is None or caller.f_code not in RUNNERS:
            return
        if not is_world(frame):
            visit(caller.f_locals["phase"], int(threading.current_thread().name.split()[1]))

    threading.settrace(trace)
    try:
        yield
    finally:
        threading.settrace(None)  # type: ignore[arg-type]


class OutOfMemory(Exception):
    pass


def outcomes(scenario: Callable[[World], Any]) -> list[BaseException | None]:
    """Return what each rank raised."""

    def run(world: World) -> BaseException | None:
        try:
            scenario(world)
        except Exception as error:
            return error
        return None

    return simulate(RANKS, run, timeout=20.0)


def seen_phases(name: str) -> dict[str, set[int]]:
    """Return the phases of a scenario, and the ranks on which each runs."""
    seen: dict[str, set[int]] = {}
    scenario = scenarios(MemoryStorage())[name]
    with at_each_phase(lambda phase, rank: seen.setdefault(phase, set()).add(rank)):
        outcomes(scenario)
    return seen


SEEN = {name: seen_phases(name) for name in SCENARIOS}
CASES = [(name, phase) for name, phases in SEEN.items() for phase in sorted(phases)]


def test_every_phase_of_the_source_is_met() -> None:
    assert sorted({phase for _, phase in CASES}) == PHASES


def check_every_rank_hears(errors: list[BaseException | None], phase: str, culprit: int) -> None:
    for rank, error in enumerate(errors):
        assert isinstance(error, RemoteError), f"rank {rank}: {error!r}"
        assert error.phase == phase
        assert error.failures[culprit].startswith("OutOfMemory")
        assert isinstance(error.__cause__, OutOfMemory) == (rank == culprit)
        # Beside it may stand what others found wrong by themselves, never what they merely heard.
        assert not any("OutOfMemory" in text for other, text in error.failures.items() if other != culprit)


@pytest.mark.parametrize(("name", "phase"), CASES)
def test_a_rank_that_fails_in_a_phase_fails_every_rank(name: str, phase: str) -> None:
    scenario, culprit = scenarios(MemoryStorage())[name], max(SEEN[name][phase])

    def strike(at: str, rank: int) -> None:
        if (at, rank) == (phase, culprit):
            raise OutOfMemory

    with at_each_phase(strike):
        errors = outcomes(scenario)
    check_every_rank_hears(errors, phase, culprit)


def test_the_law_catches_work_outside_of_a_phase() -> None:
    def careless(world: World) -> None:
        if world.rank == 1:
            raise OutOfMemory
        world.barrier()

    with pytest.raises(AssertionError, match="rank 0"):
        check_every_rank_hears([None, OutOfMemory(), None], "save: write", 1)
    with pytest.raises((AssertionError, OutOfMemory, shardtree.WorldError)):
        check_every_rank_hears(outcomes(careless), "save: write", 1)


BAD_TREES: dict[str, tuple[str, Callable[[dict[str, Any]], Any]]] = {
    "no tree": ("save: prepare", lambda good: good["w"]),
    "no data": ("save: prepare", lambda good: {**good, "w": good["w"].without_data()}),
    "a value that can't be stored": ("save: describe shards", lambda good: {**good, "step": threading.Lock()}),
    "an object that can't be stored": (
        "save: plan",
        lambda good: {**good, "own": ShardedObject("own", threading.Lock(), (1,), (0,))},
    ),
}


@pytest.mark.parametrize("fault", BAD_TREES)
def test_a_bad_tree_on_one_rank_fails_the_save_on_all(fault: str) -> None:
    phase, spoil = BAD_TREES[fault]
    storage = MemoryStorage()

    def save(world: World) -> None:
        good = tree(world)
        shardtree.save(spoil(good) if world.rank == 1 else good, storage, world=world)

    for error in outcomes(save):
        assert isinstance(error, RemoteError)
        assert (error.phase, list(error.failures)) == (phase, [1])
    assert not shardtree.is_checkpoint(storage)


BAD_TARGETS: dict[str, tuple[str, Callable[[dict[str, Any]], Any]]] = {
    "no tree": ("load: prepare", lambda good: good["w"]),
    "a key that isn't stored": (
        "load: read",
        lambda good: {**good, "v": ShardedTensor.from_rank_offsets("v", torch.ones(1))},
    ),
    "an object that isn't stored": (
        "load: read objects",
        lambda good: {**good, "own": ShardedObject("own", None, (1,), (0,))},
    ),
    "another structure": ("load: join", lambda good: {**good, "step": [good["w"]], "w": None}),
}


@pytest.mark.parametrize("fault", BAD_TARGETS)
def test_a_bad_target_on_one_rank_fails_the_load_on_all(fault: str) -> None:
    phase, spoil = BAD_TARGETS[fault]
    storage = MemoryStorage()
    simulate(RANKS, lambda world: shardtree.save(tree(world), storage, world=world))

    def load(world: World) -> None:
        good = tree(world)
        shardtree.load(spoil(good) if world.rank == 1 else good, storage, world=world)

    for error in outcomes(load):
        assert isinstance(error, RemoteError)
        assert (error.phase, list(error.failures)) == (phase, [1])


@pytest.mark.parametrize(("method", "phase"), [("write", "save: write"), ("is_folder", "save: see the folder")])
def test_a_disk_that_fails_on_one_rank_fails_the_save_on_all(method: str, phase: str) -> None:
    storage = MemoryStorage()

    def full(call: Call) -> None:
        if call.method == method:
            raise shardtree.StorageError("no space left on device")

    def save(world: World) -> None:
        own = WatchedStorage(storage, before=full) if world.rank == 1 else storage
        shardtree.save(tree(world), own, world=world)

    for error in outcomes(save):
        assert isinstance(error, RemoteError)
        assert (error.phase, error.failures) == (phase, {1: "StorageError: no space left on device"})
    assert not shardtree.is_checkpoint(storage)


@pytest.mark.parametrize(
    ("option", "values"), [("exchange", ("never", "always")), ("strict", ("assume_ok_unexpected", "return_all"))]
)
def test_options_that_differ_between_ranks_are_an_error_on_all(option: str, values: tuple[str, str]) -> None:
    storage = MemoryStorage()
    simulate(RANKS, lambda world: shardtree.save(tree(world), storage, world=world))

    def load(world: World) -> None:
        shardtree.load(tree(world), storage, world=world, **{option: values[world.rank == 1]})

    for error in outcomes(load):
        assert isinstance(error, shardtree.WorldError)
        assert "rank 1: load: " in str(error)
