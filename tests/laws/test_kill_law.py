"""A save that dies at any call of its storage leaves the old checkpoint loadable, or the new one, never neither."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

import shardtree
from shardtree.maintenance import remove_sharded
from shardtree.mapping import ShardedObject, ShardedTensor
from shardtree.shell.storage import make_folder
from shardtree.shell.table import safetensors
from shardtree.storage import LocalStorage, MemoryStorage, Storage, wrapped
from shardtree.strategies import (
    AsyncRequest,
    Checkpoint,
    PendingSave,
    Strategies,
    StrategyAction,
    default_strategies,
)
from shardtree.testing import Call, outline, watched
from shardtree.world import World, simulate
from tests.options import save_keywords

OLD, NEW = 1.0, 2.0
RANKS = [1, 2]


def tree(world: World, value: float) -> dict[str, Any]:
    shard = ShardedTensor.from_rank_offsets("w", torch.full((2, 3), value), (0, world.rank, world.size))
    copied = ShardedTensor.from_rank_offsets("norm", torch.full((3,), value), replica_id=world.rank)
    return {"w": shard, "norm": copied, "rng": ShardedObject("rng", value, (1,), (0,), world.rank), "step": value}


def save(storage: Storage, ranks: int, value: float, **options: Any) -> None:
    simulate(ranks, lambda world: shardtree.save(tree(world, value), storage, world=world, **save_keywords(**options)))


def value_in(storage: Storage, ranks: int) -> float | None:
    """Return which checkpoint is there, having read all of it; None if there is none."""
    if not shardtree.is_checkpoint(storage):
        return None
    opened = shardtree.open_checkpoint(storage, options=shardtree.LoadOptions(verify="all"))
    tensors = shardtree.load_plain_tensors(storage, options=shardtree.LoadOptions(verify="all"))
    value = float(shardtree.load_common_state_dict(storage)["step"])
    expected = {"norm": torch.full((3,), value), "w": torch.full((2 * ranks, 3), value)}
    assert outline(tensors) == outline(expected)
    assert opened["rng/shard_0_1"].data == value
    return value


def snapshot(storage: MemoryStorage) -> MemoryStorage:
    return MemoryStorage(dict(storage._files), dict(storage._folders), count(10**6))


class Killed(Exception):
    """What a storage raises from the call on at which its process is dead."""


@dataclass(frozen=True)
class Fault:
    """Raise at one call, or from it on."""

    number: int
    for_good: bool

    def __call__(self, call: Call) -> None:
        if call.number == self.number or (self.for_good and call.number > self.number):
            raise Killed(f"at {call}")


def calls_of(run: Callable[[Storage], None], storage: Storage) -> list[Call]:
    calls: list[Call] = []
    run(watched(storage, before=calls.append))
    return calls


def check_kill_law(begin: MemoryStorage, ranks: int, saving: Callable[[Storage], None], *, for_good: bool) -> int:
    """Raise unless, whichever call fails, the old or the new state can be loaded; return how many calls there are."""
    before = value_in(begin, ranks)
    number = 0
    while number < 200:
        storage = snapshot(begin)
        faults: list[Call] = []
        fault = Fault(number, for_good)

        def strike(call: Call, fault: Fault = fault, faults: list[Call] = faults) -> None:
            try:
                fault(call)
            except Killed:
                faults.append(call)
                raise

        try:
            saving(watched(storage, before=strike))
            done = True
        except (Killed, shardtree.CheckpointingException):
            done = False
        found = value_in(storage, ranks)
        assert found in ((NEW,) if done else (before, NEW)), f"{found} after {faults}"
        if not faults:
            return number
        number += 1
    raise AssertionError("the save makes too many calls")


def beginning(ranks: int) -> MemoryStorage:
    storage = MemoryStorage()
    save(storage, ranks, OLD)
    return storage


@pytest.mark.slow
@pytest.mark.parametrize("for_good", [True, False], ids=["killed", "one call fails"])
@pytest.mark.parametrize("ranks", RANKS)
def test_a_save_that_dies_leaves_the_old_checkpoint_or_the_new(ranks: int, for_good: bool) -> None:
    calls = check_kill_law(
        beginning(ranks), ranks, lambda storage: save(storage, ranks, NEW, overwrite=True), for_good=for_good
    )
    assert calls > 10


@pytest.mark.slow
@pytest.mark.parametrize("for_good", [True, False], ids=["killed", "one call fails"])
@pytest.mark.parametrize("ranks", RANKS)
def test_a_first_save_that_dies_leaves_none_or_all_of_it(ranks: int, for_good: bool) -> None:
    check_kill_law(MemoryStorage(), ranks, lambda storage: save(storage, ranks, NEW), for_good=for_good)


def check_next_save(ranks: int, **options: Any) -> None:
    """Raise unless, whichever call a save died at, the next one replaces what is there and leaves nothing else."""
    begin = beginning(ranks)
    length = len(calls_of(lambda storage: save(storage, ranks, NEW, overwrite=True, **options), snapshot(begin)))
    for number in range(length):
        storage = snapshot(begin)
        with suppress(Killed, shardtree.CheckpointingException):  # a save that dies cleaning up has saved
            save(watched(storage, before=Fault(number, True)), ranks, NEW, overwrite=True, **options)
        save(storage, ranks, NEW, overwrite=True, stale_after=0.0, **options)
        assert value_in(storage, ranks) == NEW
        assert len(storage.names()) == 2, f"left over: {storage.names()}"


@pytest.mark.slow
@pytest.mark.parametrize("ranks", RANKS)
def test_after_a_dead_save_the_next_one_works(ranks: int) -> None:
    check_next_save(ranks)


def with_row(action: StrategyAction, fn: Callable[..., Any]) -> Strategies:
    return {**default_strategies, (action, "safetensors", 1): fn}


def never_cleaning(pending: PendingSave, shards: Sequence[ShardedTensor | ShardedObject]) -> AsyncRequest[Any]:
    """The planted fault: what a dead save left stays for good."""
    return replace(safetensors.save_sharded(pending, shards), clean_up=lambda: None)


def test_the_law_catches_left_overs_that_stay() -> None:
    with pytest.raises(AssertionError, match="left over"):
        check_next_save(1, strategies=with_row(StrategyAction.SAVE_SHARDED, never_cleaning))


def check_removals(ranks: int, **options: Any) -> None:
    """Raise unless, whichever call a removal dies at, the checkpoint of before or after it can be loaded."""
    begin = beginning(ranks)

    def remove(storage: Storage) -> None:
        shardtree.remove_sharded_tensors(storage, "norm", **options)

    for number in range(len(calls_of(remove, snapshot(begin)))):
        storage = snapshot(begin)
        with pytest.raises((Killed, shardtree.CheckpointingException)):
            remove(watched(storage, before=Fault(number, True)))
        tensors = shardtree.load_plain_tensors(storage, options=shardtree.LoadOptions(verify="all"))
        assert set(tensors) in ({"w"}, {"w", "norm"})
        assert bool((tensors["w"] == OLD).all())


@pytest.mark.parametrize("ranks", RANKS)
def test_a_removal_that_dies_leaves_a_checkpoint(ranks: int) -> None:
    check_removals(ranks)


def files_first(checkpoint: Checkpoint, key_prefix: str) -> None:
    """The planted fault: files that are needed no more are removed before metadata.json names those that are."""
    flips: list[tuple[str, bytes]] = []

    def later(name: str, data: bytes, *, durable: bool) -> None:
        flips.append((name, data))

    remove_sharded(replace(checkpoint, storage=wrapped(checkpoint.storage, replace=later)), key_prefix)
    for name, data in flips:
        checkpoint.storage.replace(name, data, durable=True)


def test_the_law_catches_files_that_are_removed_first() -> None:
    with pytest.raises((AssertionError, shardtree.CheckpointingException), match="index"):
        check_removals(1, strategies=with_row(StrategyAction.REMOVE_SHARDED, files_first))


def in_place(storage: Storage) -> Storage:
    """The planted fault: a storage that removes a file before it writes it anew."""

    def replace(name: str, data: bytes, *, durable: bool) -> None:
        storage.remove(name)
        storage.write(name, [memoryview(data)], durable=durable)

    faulty: Storage = wrapped(storage, replace=replace)
    return faulty


def test_the_law_catches_a_metadata_file_written_in_place() -> None:
    with pytest.raises((AssertionError, shardtree.CheckpointingException)):
        check_kill_law(beginning(1), 1, lambda storage: save(in_place(storage), 1, NEW, overwrite=True), for_good=True)


def metadata_first(storage: Any) -> Storage:
    """The planted fault: a storage in which a file of metadata is there before what it tells of."""

    def folder_made(name: str = "", *, durable: bool = True) -> None:
        storage.inner.replace("metadata.json", metadata_of(NEW), durable=True)
        make_folder(storage, name, durable=durable)

    def length(name: str) -> int | None:
        return None if name == "metadata.json" else storage.length(name)

    faulty: Storage = wrapped(storage, make_folder=folder_made, length=length)
    return faulty


def metadata_of(value: float) -> bytes:
    storage = MemoryStorage()
    save(storage, 1, value)
    return storage.read("metadata.json")


def test_the_law_catches_metadata_that_is_written_first() -> None:
    with pytest.raises((AssertionError, shardtree.CheckpointingException), match="index"):
        check_kill_law(MemoryStorage(), 1, lambda storage: save(metadata_first(storage), 1, NEW), for_good=True)


def check_every_moment(storage: Storage, ranks: int, saving: Callable[[Storage], None]) -> list[float | None]:
    """Raise unless a whole checkpoint can be opened after every call of the storage; return which ones were seen."""
    seen: list[float | None] = []

    def look(call: Call) -> None:
        value = value_in(storage, ranks)
        assert value is not None, f"no checkpoint after {call}"
        seen.append(value)

    saving(watched(storage, after=look))
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("kind", ["memory", "files"])
def test_overwriting_leaves_no_moment_without_a_checkpoint(kind: str, ranks: int, tmp_path: Path) -> None:
    storage = MemoryStorage() if kind == "memory" else LocalStorage(str(tmp_path))
    save(storage, ranks, OLD)
    seen = check_every_moment(storage, ranks, lambda watched: save(watched, ranks, NEW, overwrite=True))
    assert seen == sorted(seen, key=lambda value: value or 0)
    assert (seen[0], seen[-1]) == (OLD, NEW)


def test_the_law_catches_a_moment_without_a_checkpoint() -> None:
    storage = beginning(1)
    with pytest.raises(AssertionError, match="no checkpoint after"):
        check_every_moment(storage, 1, lambda watched: save(in_place(watched), 1, NEW, overwrite=True))
