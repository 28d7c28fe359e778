"""Whatever fails on one rank, in any phase of a save or load, fails on every rank, and names that rank."""

from __future__ import annotations

import ast
import inspect
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import shardtree
from shardtree.core.layouts import tree_columns
from shardtree.errors import RemoteError
from shardtree.mapping import ShardedObject, ShardedTensor
from shardtree.shell.storage import is_folder
from shardtree.shell.world import _phases, agree, gather_on_rank_zero, on_rank_zero, share, step
from shardtree.storage import MemoryStorage, Storage
from shardtree.testing import Call, watched
from shardtree.world import World, one_process, simulate
from tests.formats.buckets import Job, layer_kinds, write
from tests.options import load_keywords, save_keywords

PACKAGE = Path(shardtree.__file__).parent
RANKS = 3
NAMES = {"agree", "gather", "gather_on_rank_zero", "on_one_rank", "on_rank_zero", "share"}
STEPS = {"step", "run"}


def phases_in(source: str) -> Iterator[str]:
    """Yield the names of the phases that a module runs."""
    for node in ast.walk(ast.parse(source)):
        function = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
        if isinstance(node, ast.Call) and function in NAMES | STEPS:
            name = node.args[function in NAMES]  # after the world
            literals = [name.body, name.orelse] if isinstance(name, ast.IfExp) else [name]
            for each in literals:
                assert isinstance(each, ast.Constant), f"line {node.lineno}: write a phase's name as a literal"
                yield str(each.value)


SOURCES = [
    path.read_text()
    for folder in (
        "shell/checkpoint",
        "shell/checkpoint/saving",
        "shell/checkpoint/loading",
        "shell/table/safetensors",
        "shell/table",
        "inspection",
        "live",
    )
    for path in (PACKAGE / folder).glob("*.py")
]


def tree(world: World, value: float = 1.0) -> dict[str, Any]:
    shard = ShardedTensor.from_rank_offsets("w", torch.full((2, 3), value), (0, world.rank, world.size))
    copied = ShardedTensor.from_rank_offsets("norm", torch.full((3,), value), replica_id=world.rank)
    return {"w": shard, "norm": copied, "rng": ShardedObject("rng", value, (1,), (0,), world.rank), "step": 7}


LONG = random.Random(0).randbytes(2**19).hex()
"""So long that ranks don't all send their tables."""
LAYOUT = tree_columns(simulate(RANKS, tree))


def state(world: World) -> dict[str, Any]:
    key = "optimizer.state.param.output_layer.weight"
    return {"w": ShardedTensor.from_rank_offsets(key, torch.zeros(8, 16), replica_id=world.rank)}


@cache
def bucketed() -> MemoryStorage:
    """Return a checkpoint whose metadata doesn't say where states are."""
    storage = MemoryStorage()
    write(Job(layer_kinds(16)), storage)
    return storage


def halved(target: dict[str, Any]) -> dict[str, Any]:
    """Return a target with tensors of half the width."""
    return target | {key: replace(target[key], data=None, dtype=torch.float16) for key in ("w", "norm")}


WHOLE = ShardedTensor.from_rank_offsets("w", torch.zeros(2 * RANKS, 3))


def losing_bits(world: World) -> Callable[..., None]:
    def exchange(outgoing: Any, incoming: Any) -> None:
        world.exchange(outgoing, incoming)
        for data in incoming.values():
            data.zero_()

    return exchange


def scenarios(storage: MemoryStorage) -> dict[str, Callable[[World], Any]]:
    """Return what ranks do together, so that between them each phase is met."""
    shardtree.simulate(RANKS, lambda world: shardtree.save(tree(world), storage, world=world))
    other, buckets = MemoryStorage(), bucketed()

    def saving(more: Callable[[World], dict[str, Any]] = lambda _: {}, **keywords: Any) -> Callable[[World], Any]:
        how = save_keywords(overwrite=True, **keywords)
        return lambda world: shardtree.save(tree(world, 2.0) | more(world), storage, world=world, **how)

    def loading(change: Callable[[Any], Any] = lambda target: target, **keywords: Any) -> Callable[[World], Any]:
        how = load_keywords(**keywords)
        return lambda world: shardtree.load(change(tree(world)), storage, world=world, **how)

    def moving(source: Callable[[World], Any], target: Any = None, **keywords: Any) -> Callable[[World], Any]:
        return lambda world: shardtree.redistribute(source(world), target, world=world, **keywords)

    return {
        "save": saving(),
        "save under a long name": saving(
            lambda world: {"long": ShardedTensor.from_rank_offsets(LONG, torch.zeros(2), replica_id=world.rank)}
        ),
        "save unchecked": saving(validate_access_integrity=False),
        "save and compare replicas": saving(check_replicas=True),
        "check replicas": lambda world: shardtree.check_replicas(
            {"w": tree(world)["w"], "norm": tree(world, float(world.rank))["norm"]}, world=world
        ),
        "check replicas of files": lambda world: shardtree.check_replicas(storage, world=world),
        "save and finalize": lambda world: (
            saving(async_sharded_save=True)(world).add_finalize_fn(lambda: None).execute_sync()
        ),
        "load unchecked": loading(validate_access_integrity=False),
        "save in another format": lambda world: shardtree.save(tree(world), other, ("dcp", 1), world=world),
        "save what differs": saving(lambda world: {"step": world.rank}),
        "load": loading(strict="return_all", exchange="always"),
        "load and convert": loading(halved, cast=True, exchange="always"),
        "load by a known layout": loading(exchange="always", layout=LAYOUT),
        "load plain": lambda world: shardtree.load_plain_tensors(storage, world=world),
        "load states out of buckets": lambda world: shardtree.load(state(world), buckets, world=world),
        "redistribute": lambda world: shardtree.redistribute(tree(world), tree(world), world=world),
        "redistribute what differs": moving(lambda world: {**tree(world), "step": world.rank}),
        "redistribute by a transport that loses bits": lambda world: moving(
            tree, {"w": WHOLE}, transport=losing_bits(world), verify=True
        )(world),
        "read what is there": lambda world: (
            shardtree.is_checkpoint(storage, world=world),
            shardtree.load_common_state_dict(storage, world=world),
        ),
        "remove": lambda world: shardtree.remove_sharded_tensors(storage, "norm", world=world),
        "fingerprint": lambda world: shardtree.fingerprint(tree(world), world=world),
        "reduce": lambda world: shardtree.trees.tree_norm(tree(world), world=world),
        "fingerprint of files": lambda world: shardtree.fingerprint(storage, world=world),
    }


RUNNERS = {
    inspect.unwrap(function).__code__
    for function in (agree, share, gather_on_rank_zero, on_rank_zero, _phases._run_and_broadcast)
}
ENTER = inspect.unwrap(step.__enter__).__code__


def is_world(frame: FrameType) -> bool:
    """Return whether a frame is the world's own code, or what type checks wrap around it."""
    wrapped = frame.f_code.co_filename.startswith("<@beartype(shardtree.shell.world")
    return wrapped or frame.f_globals.get("__name__", "").startswith("shardtree.shell.world")


Where = Callable[[str, int], None]


@contextmanager
def at_each_phase(visit: Where) -> Iterator[None]:
    """Call `visit(phase, rank)` inside of each phase on each rank, where what the phase runs begins.

    What it raises is raised there, as running out of memory would be.
    """

    def trace(frame: FrameType, event: str, _: Any) -> None:
        caller = frame.f_back
        if event != "call" or caller is None:
            return
        if frame.f_code is ENTER:
            while is_world(caller) and caller.f_back is not None:  # what type checks wrap around it
                caller = caller.f_back
            caller.f_trace = inside(frame.f_locals["self"].phase)
        elif caller.f_code in RUNNERS and not is_world(frame):
            visit(caller.f_locals["phase"], rank())

    def inside(phase: str) -> Callable[[FrameType, str, Any], None]:
        def first_line(frame: FrameType, event: str, _: Any) -> None:
            frame.f_trace = None
            visit(phase, rank())

        return first_line

    def rank() -> int:
        return int(threading.current_thread().name.split()[1])

    threading.settrace(trace)
    try:
        yield
    finally:
        threading.settrace(None)  # type: ignore[arg-type]


class OutOfMemory(Exception):
    pass


def outcomes(scenario: Callable[[World], Any]) -> list[BaseException | None]:
    """Return what each rank raised; None where it raised nothing, or was left to wait for one that had gone."""
    errors: dict[int, BaseException] = {}

    def run(world: World) -> None:
        try:
            scenario(world)
        except Exception as error:
            errors[world.rank] = error

    with suppress(shardtree.errors.WorldError):  # some wait for a rank that has gone
        simulate(RANKS, run, timeout=20.0)
    return [errors.get(rank) for rank in range(RANKS)]


@cache
def seen_phases(name: str) -> dict[str, set[int]]:
    """Return the phases of a scenario, and the ranks on which each runs."""
    seen: dict[str, set[int]] = {}
    scenario = scenarios(MemoryStorage())[name]
    with at_each_phase(lambda phase, rank: seen.setdefault(phase, set()).add(rank)):
        outcomes(scenario)
    return seen


SCENARIOS = list(scenarios(MemoryStorage()))


def check_every_phase_is_met(sources: list[str]) -> None:
    written = sorted({phase for source in sources for phase in phases_in(source)})
    assert sorted(set().union(*map(seen_phases, SCENARIOS))) == written


@pytest.mark.slow
def test_every_phase_of_the_source_is_met() -> None:
    check_every_phase_is_met(SOURCES)


def test_the_law_catches_a_phase_that_is_not_tried() -> None:
    with pytest.raises(AssertionError, match="save: something new"):
        check_every_phase_is_met([*SOURCES, "agree(world, 'save: something new', fn)"])
    with pytest.raises(AssertionError, match="write a phase's name as a literal"):
        check_every_phase_is_met([*SOURCES, "agree(world, name, fn)"])


def check_every_rank_hears(errors: list[BaseException | None], phase: str, culprit: int) -> None:
    for rank, error in enumerate(errors):
        assert isinstance(error, RemoteError), f"rank {rank}: {error!r}"
        assert error.phase == phase
        assert error.failures[culprit].startswith("OutOfMemory")
        assert isinstance(error.__cause__, OutOfMemory) == (rank == culprit)
        # Beside it may stand what others found wrong by themselves, never what they merely heard.
        assert not any("OutOfMemory" in text for other, text in error.failures.items() if other != culprit)


@pytest.mark.slow
@pytest.mark.parametrize("name", SCENARIOS)
def test_a_rank_that_fails_in_a_phase_fails_every_rank(name: str) -> None:
    for phase, ranks in sorted(seen_phases(name).items()):
        scenario, culprit = scenarios(MemoryStorage())[name], max(ranks)

        def strike(at: str, rank: int, phase: str = phase, culprit: int = culprit) -> None:
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
    with pytest.raises(AssertionError, match="rank 0: None"):
        check_every_rank_hears(outcomes(careless), "save: write", 1)


Act = Callable[..., Any]
SPOILT: dict[str, tuple[str, Callable[[dict[str, Any]], Any]]] = {
    "save: no tree": ("save: prepare", lambda good: good["w"]),
    "save: no data": ("save: prepare", lambda good: {**good, "w": good["w"].without_data()}),
    "save: a value that cannot be stored": ("save: describe shards", lambda good: {**good, "step": threading.Lock()}),
    "save: an object that cannot be stored": (
        "save: plan",
        lambda good: {**good, "own": ShardedObject("own", threading.Lock(), (1,), (0,))},
    ),
    "load: no tree": ("load: prepare", lambda good: good["w"]),
    "load: a key that is not stored": (
        "load: check the target",
        lambda good: {**good, "v": ShardedTensor.from_rank_offsets("v", torch.ones(1))},
    ),
    "load: an object that is not stored": (
        "load: check the target",
        lambda good: {**good, "own": ShardedObject("own", None, (1,), (0,))},
    ),
    "load: another structure": ("load: common state", lambda good: {**good, "step": [good["w"]], "w": None}),
}
"""What is done to one rank's tree, and the phase in which all hear of it."""


def stored_for(fault: str) -> MemoryStorage:
    storage = MemoryStorage()
    if fault.startswith("load"):
        simulate(RANKS, lambda world: shardtree.save(tree(world), storage, world=world))
    return storage


def check_all_name(errors: list[BaseException | None], phase: str, culprit: int) -> None:
    for rank, error in enumerate(errors):
        assert isinstance(error, RemoteError), f"rank {rank}: {error!r}"
        assert (error.phase, list(error.failures)) == (phase, [culprit])


def check_spoilt(act: Act, fault: str) -> None:
    phase, spoil = SPOILT[fault]
    storage = stored_for(fault)

    def run(world: World) -> None:
        good = tree(world)
        act(spoil(good) if world.rank == 1 else good, storage, world=world)

    check_all_name(outcomes(run), phase, 1)
    assert fault.startswith("load") or not storage.names(), "the folder that rank 0 has made meanwhile"


@pytest.mark.parametrize("fault", SPOILT)
def test_a_bad_tree_on_one_rank_fails_the_save_or_load_on_all(fault: str) -> None:
    check_spoilt(getattr(shardtree, fault[:4]), fault)


def trying_alone(tree: Any, storage: Storage, *, world: World) -> None:
    """The planted fault: a save that tries by itself first, where the others don't hear of what fails."""
    shardtree.save(tree, MemoryStorage(), validate_access_integrity=False, world=one_process())
    shardtree.save(tree, storage, world=world)


@pytest.mark.parametrize("fault", [fault for fault in SPOILT if fault.startswith("save")])
def test_the_law_catches_who_fails_alone(fault: str) -> None:
    storage = MemoryStorage()
    assert outcomes(lambda world: trying_alone(tree(world), storage, world=world)) == [None] * RANKS
    with pytest.raises(AssertionError, match="rank 0: None"):
        check_spoilt(trying_alone, fault)


DISKS = [("write", "save: write"), ("is_folder", "save: see the folder")]


def check_bad_disk(save: Act, method: str, phase: str) -> None:
    storage = MemoryStorage()

    def full(call: Call) -> None:
        if call.method == method:
            raise shardtree.errors.StorageError("no space left on device")

    def save_on_it(world: World) -> None:
        own = watched(storage, before=full) if world.rank == 1 else storage
        save(tree(world), own, world=world)

    errors = outcomes(save_on_it)
    check_all_name(errors, phase, 1)
    for error in errors:
        assert isinstance(error, RemoteError)
        assert error.failures == {1: "StorageError: no space left on device"}
    assert not shardtree.is_checkpoint(storage)


@pytest.mark.parametrize(("method", "phase"), DISKS)
def test_a_disk_that_fails_on_one_rank_fails_the_save_on_all(method: str, phase: str) -> None:
    check_bad_disk(shardtree.save, method, phase)


def probing(tree: Any, storage: Storage, *, world: World) -> None:
    """The planted fault: a save that tries the disk, where the others don't hear of what fails."""
    is_folder(storage)
    storage.write(f"probe-{world.rank}", [memoryview(b"")], durable=False)
    shardtree.save(tree, storage, world=world)


@pytest.mark.parametrize(("method", "phase"), DISKS)
def test_the_law_catches_a_disk_that_is_tried_alone(method: str, phase: str) -> None:
    with pytest.raises(AssertionError, match="rank 0: None"):
        check_bad_disk(probing, method, phase)


OPTIONS = [("exchange", ("never", "always")), ("strict", ("assume_ok_unexpected", "return_all"))]


def check_options_that_differ(load: Callable[..., Any], option: str, values: tuple[str, str]) -> None:
    storage = MemoryStorage()
    simulate(RANKS, lambda world: shardtree.save(tree(world), storage, world=world))

    def load_otherwise(world: World) -> None:
        load(tree(world), storage, world=world, **load_keywords(**{option: values[world.rank == 1]}))

    for rank, error in enumerate(outcomes(load_otherwise)):
        assert isinstance(error, shardtree.errors.WorldError), f"rank {rank}: {error!r}"
        assert "rank 1: load: " in str(error)


@pytest.mark.parametrize(("option", "values"), OPTIONS)
def test_options_that_differ_between_ranks_are_an_error_on_all(option: str, values: tuple[str, str]) -> None:
    check_options_that_differ(shardtree.load, option, values)


def as_rank_zero(tree: Any, storage: Storage, *, world: World, **options: Any) -> Any:
    """The planted fault: a load that takes rank 0's options, whatever the others asked for."""
    return shardtree.load(tree, storage, world=world, **load_keywords(**world.broadcast(options)))


@pytest.mark.parametrize(("option", "values"), OPTIONS)
def test_the_law_catches_options_that_are_overruled(option: str, values: tuple[str, str]) -> None:
    with pytest.raises(AssertionError, match="rank 0: None"):
        check_options_that_differ(as_rank_zero, option, values)
