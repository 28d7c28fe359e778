"""Of two first saves to one folder one wins, whole, wherever in one the other comes, which is told before it writes."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import count
from pathlib import Path
from threading import Barrier, Thread
from typing import Any

import pytest
import torch

import shardtree as st
from shardtree.conversion import _convert
from shardtree.errors import AlreadyACheckpoint, CheckpointingException, CheckpointReplaced
from shardtree.interop.deepspeed import save_universal
from shardtree.shell.table import _save_folders
from shardtree.storage import LocalStorage, MemoryStorage, Storage, wrapped
from shardtree.testing import Call, watched
from shardtree.world import World, simulate
from tests.faults.sampling import first, sample, usually
from tests.quick_python.command import quick_python

OLD, FIRST, SECOND = 0.0, 1.0, 2.0
NOT_SYNCED = st.SaveOptions(durable=False)

Saver = Callable[[Storage, float], object]


def tree(value: float, world: World | None = None, *, plain: bool = True) -> dict[str, Any]:
    rank, ranks = (0, 1) if world is None else (world.rank, world.size)
    tensors = {key: torch.full((2, 3), value) for key in ("v", "w")}
    shards = {key: st.ShardedTensor.from_rank_offsets(key, data, (0, rank, ranks)) for key, data in tensors.items()}
    return shards | ({"step": value} if plain else {})


def saver(*formats: Any, ranks: int = 1, later: bool = False) -> Saver:
    def save(storage: Storage, value: float) -> None:
        def of_rank(world: World) -> None:
            shards = tree(value, world, plain=formats != (("huggingface", 1),))
            options = {"world": world, "options": NOT_SYNCED, "async_sharded_save": later}
            request = st.save(shards, storage, *formats, **options)
            if request is not None:
                request.execute_sync()

        simulate(ranks, of_rank)

    return save


@cache
def source(value: float) -> MemoryStorage:
    storage = MemoryStorage()
    saver()(storage, value)
    return storage


def convert(storage: Storage, value: float) -> None:
    st.convert(source(value), storage, backend="dcp", verify=False, save_options=NOT_SYNCED)


def universal(storage: Storage, value: float) -> None:
    save_universal(st.open_checkpoint(source(value)), storage, common={}, durable=False)


SAVERS: dict[str, Saver] = {
    "native": saver(),
    "torch_dist": saver(("torch_dist", 1)),
    "torch_dist, 2 ranks": saver(("torch_dist", 1), ranks=2),
    "torch_dist, async": saver(("torch_dist", 1), later=True),
    "torch_dist, native common": saver(("torch_dist", 1), ("safetensors", 1)),
    "dcp": saver(("dcp", 1)),
    "zarr": saver(("zarr", 3)),
    "zarr, 2 ranks": saver(("zarr", 3), ranks=2),
    "huggingface": saver(("huggingface", 1)),
    "huggingface, native common": saver(("huggingface", 1), ("safetensors", 1)),
    "convert to dcp": convert,
    "universal": universal,
}
MIXED = [(one, other) for one in SAVERS for other in SAVERS if one != other]


def value_in(storage: Storage) -> float:
    """Return which checkpoint is there, having read all of it."""
    assert st.verify(storage) == ()
    tensors = st.load_plain_tensors(storage, options=st.LoadOptions(verify="all"))
    (value,) = {float(each) for tensor in tensors.values() for each in tensor.flatten()}
    assert st.load_common_state_dict(storage).get("step", value) == value
    return value


@dataclass
class Race:
    """Two savers of one folder, the second of which runs whole before some call of the first one's.

    Attributes:
        inner: the folder.
        wrote: the names of the files that each one wrote.
        errors: why each one's save failed; None where it didn't.
        is_locked: whether the first one holds the folder's lock.
        was_locked: whether it held it before.
        came_between: whether the first one had begun, and had not locked the folder, when the second one ran.
    """

    inner: MemoryStorage
    wrote: dict[float, set[str]] = field(default_factory=lambda: {FIRST: set(), SECOND: set()})
    errors: dict[float, CheckpointingException | None] = field(default_factory=dict)
    is_locked: bool = False
    was_locked: bool = False
    came_between: bool = False

    def run(self, saver: Saver, value: float, before: Callable[[Call], None] = lambda _: None) -> None:
        def note(call: Call) -> None:
            before(call)
            if call.method in ("write", "write_parts", "replace", "sibling.make"):
                self.wrote[value].add(call.name)

        lock = self.locked if value == FIRST else self.inner.locked
        try:
            folder = wrapped(self.inner, locked=lock, sibling=self.inner.sibling, siblings=self.inner.siblings)
            saver(watched(folder, before=note), value)
            self.errors[value] = None
        except CheckpointingException as error:
            self.errors[value] = error

    @contextmanager
    def locked(self, folder: str = "") -> Iterator[None]:
        with self.inner.locked(folder):
            self.is_locked = True
            try:
                yield
            finally:
                self.is_locked, self.was_locked = False, True


TOLD = r"another save to .* is in progress|has the common.pt of a checkpoint"


def race(one: Saver, other: Saver, number: int, inner: MemoryStorage | None = None) -> tuple[Race, int]:
    """Return how a race ended in which the second saver runs whole before a call of the first, and how many calls."""
    result, numbers, threads = Race(MemoryStorage() if inner is None else inner), count(), list[Thread]()

    def strike(call: Call) -> None:
        if next(numbers) != number:
            return
        threads.append(Thread(target=result.run, args=(other, SECOND)))
        threads[0].start()
        if not result.is_locked:  # else it waits for the lock, and comes right after
            result.came_between = bool(result.wrote[FIRST]) and not result.was_locked
            threads[0].join()

    result.run(one, FIRST, strike)
    for thread in threads:
        thread.join()
    return result, next(numbers)


def check_race(result: Race) -> float:
    """Raise unless one saver won, whole, and the other was told before it wrote to its files; return the winner."""
    winners = [value for value, error in result.errors.items() if error is None]
    assert len(winners) == 1, f"won: {winners}; {result.errors}"
    assert value_in(result.inner) == winners[0]
    (loser,) = filter(None, result.errors.values())
    known = isinstance(loser, CheckpointReplaced | AlreadyACheckpoint) or re.search(TOLD, str(loser))
    assert known, loser
    assert not result.wrote[FIRST] & result.wrote[SECOND], "files of both"
    return winners[0]


def check_law(one: str, other: str, pick: Callable[[list[int]], list[int]]) -> set[float]:
    """Raise unless it holds wherever one saver comes in the other one; return who has won."""
    undisturbed, calls = race(SAVERS[one], SAVERS[other], -1)
    won = set()
    for number in pick([*range(calls)]):
        result, made = race(SAVERS[one], SAVERS[other], number)
        if number >= made:
            continue  # of several ranks, which don't always make as many calls
        won.add(check_race(result))
        assert one != other or plain_names(result.inner) == plain_names(undisturbed.inner), "left over"
    return won


def plain_names(storage: MemoryStorage) -> list[str]:
    return sorted(re.sub(r"save-\w+-\w+", "SAVE", name) for name in storage.all_names())


def mostly_late(points: list[int]) -> list[int]:
    """Return some points, more of those around the commit, where most is decided."""
    return sorted({*sample(points, 4), *points[-24 + first(4) :: 4]})


@pytest.mark.slow
@pytest.mark.parametrize("name", SAVERS)
def test_of_two_first_saves_one_wins(name: str) -> None:
    assert check_law(name, name, mostly_late)


@pytest.mark.parametrize(("one", "other"), usually(MIXED, 6))
def test_of_two_first_saves_in_two_formats_one_wins(one: str, other: str) -> None:
    assert check_law(one, other, partial(sample, count=4))


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("one", SAVERS)
def test_wherever_one_saver_comes_in_the_other(one: str) -> None:
    for other in SAVERS:
        won = check_law(one, other, list)
        assert won == {FIRST, SECOND}, other


def test_a_conversion_takes_no_files_of_one_that_commits_while_it_cleans_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """In our own format two may be under way: the second has looked again, and then the first commits."""
    inner, clean_up = MemoryStorage(), _convert.remove_others

    def native(storage: Storage, value: float) -> None:
        st.convert(source(value), storage, backend="safetensors", verify=False, save_options=NOT_SYNCED)

    def stop_at_the_clean_up(call: Call) -> None:
        if call.method == "remove" and call.name.startswith(".convert-"):
            raise Stopped

    def after_the_other(journal: Any) -> None:
        monkeypatch.setattr(_convert, "remove_others", clean_up)
        with pytest.raises(Stopped):
            native(watched(inner, before=stop_at_the_clean_up), FIRST)
        clean_up(journal)

    monkeypatch.setattr(_convert, "remove_others", after_the_other)
    with pytest.raises((AlreadyACheckpoint, CheckpointReplaced)):
        native(inner, SECOND)
    assert value_in(inner) == FIRST


class Stopped(BaseException):
    """Ends a conversion as a kill does, or holds it up."""


def test_a_conversion_takes_no_files_of_one_that_is_committed_and_has_not_cleaned_up() -> None:
    """It looked at the folder before the other one began, and was alone in it only after the commit."""
    inner, others = MemoryStorage(), count()

    def stop_at_the_clean_up(call: Call) -> None:
        if call.method == "remove" and call.name.startswith(".convert-"):
            raise Stopped

    def let_the_other_go_first(call: Call) -> None:
        if call.method == "locked" and not next(others):
            with pytest.raises(Stopped):
                convert(watched(inner, before=stop_at_the_clean_up), FIRST)

    with pytest.raises(AlreadyACheckpoint, match="already holds a checkpoint"):
        convert(watched(inner, before=let_the_other_go_first), SECOND)
    assert value_in(inner) == FIRST
    convert(inner, FIRST)  # which was stopped, and finishes its clean-up
    assert not [name for name in inner.all_names() if name.startswith((".convert-", "save-"))]


# What replaces a checkpoint, or a part of it: the last one that was told that it succeeded has its checkpoint there.


def overwriter(*formats: Any) -> Saver:
    return lambda storage, value: st.save(tree(value), storage, *formats, overwrite=True, options=NOT_SYNCED)


def remove(storage: Storage, value: float) -> None:
    st.remove_sharded_tensors(storage, "v")


OVERWRITERS = {"native": overwriter(), "zarr": overwriter(("zarr", 3)), "removal": remove}
TWO = [
    (old, one, other)
    for old in ("native", "zarr")
    for one in OVERWRITERS
    for other in OVERWRITERS
    if (one, other) != ("removal", "removal")
]


def begun(old: str) -> MemoryStorage:
    storage = MemoryStorage()
    SAVERS[old](storage, OLD)
    return storage


def check_overwrites(old: str, one: str, other: str, pick: Callable[[list[int]], list[int]]) -> None:
    """Raise unless what is there is whole, of one that was told so, and no change was lost to one that began before."""
    pair = OVERWRITERS[one], OVERWRITERS[other]
    kinds = {FIRST: one, SECOND: other}
    for number in pick([*range(race(*pair, -1, begun(old))[1])]):
        result, _ = race(*pair, number, begun(old))
        done = {value for value, error in result.errors.items() if error is None}
        assert done, result.errors
        assert len(done) == 1 or not result.came_between, f"lost at {number}"
        saved = {value for value in done if kinds[value] != "removal"}
        assert value_in(result.inner) in (saved or {OLD}), number


@pytest.mark.slow
@pytest.mark.parametrize(("old", "one", "other"), usually(TWO, 5))
def test_of_two_that_change_a_checkpoint_none_is_lost(old: str, one: str, other: str) -> None:
    check_overwrites(old, one, other, mostly_late)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("old", "one", "other"), TWO)
def test_wherever_one_change_comes_in_another(old: str, one: str, other: str) -> None:
    check_overwrites(old, one, other, list)


# The planted faults: a lock that nobody waits for, and a saver that looks at nobody else's note.


def test_the_law_catches_a_commit_that_another_one_interrupts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Race, "locked", lambda self, folder="": nullcontext())
    with pytest.raises(AssertionError, match="won"):
        check_law("native", "native", list)
    with pytest.raises(AssertionError, match="lost"):
        check_overwrites("native", "native", "native", list)


@pytest.mark.parametrize("name", ["torch_dist", "zarr"])
def test_the_law_catches_a_saver_that_looks_at_nobodys_note(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_save_folders, "check_alone", lambda *_, **options: None)
    with pytest.raises((AssertionError, CheckpointingException)):
        check_law(name, name, list)


# The same on a disk, by threads and by processes that begin together.


def check_folder(folder: Path, outcomes: list[str]) -> None:
    assert outcomes.count("") == 1, outcomes
    assert value_in(LocalStorage(str(folder))) == [FIRST, SECOND][outcomes.index("")]
    assert not [*folder.glob("save-*/owner.json")]


def outcome(name: str, folder: Path, value: float) -> str:
    try:
        SAVERS[name](LocalStorage(str(folder)), value)
    except CheckpointingException as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", ["native", "dcp"])
def test_of_two_threads_that_begin_together_one_wins(name: str, tmp_path: Path) -> None:
    for number in range(5):
        folder, barrier, outcomes = tmp_path / f"{number}", Barrier(2), {}

        def save(value: float, folder: Path = folder, barrier: Barrier = barrier, outcomes: Any = outcomes) -> None:
            barrier.wait()
            outcomes[value] = outcome(name, folder, value)

        threads = [Thread(target=save, args=(value,)) for value in (FIRST, SECOND)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        check_folder(folder, [outcomes[FIRST], outcomes[SECOND]])


PROCESS = """
import json, sys, time
from pathlib import Path
from tests.laws.test_two_savers_law import outcome

root, value, names = Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3].split(",")
outcomes = []
for number, name in enumerate(names):
    (root / f"{number}-{value}").touch()
    while len([*root.glob(f"{number}-*")]) < 2:
        time.sleep(0)
    outcomes.append(outcome(name, root / f"{number}", value))
print(json.dumps(outcomes))
"""


@pytest.mark.slow
def test_of_two_processes_that_begin_together_one_wins(tmp_path: Path) -> None:
    names = ["native", "torch_dist", "dcp", "zarr", "huggingface"] * 4
    command = [*quick_python(), "-c", PROCESS, str(tmp_path)]
    processes = [
        subprocess.Popen([*command, str(value), ",".join(names)], stdout=subprocess.PIPE, text=True)
        for value in (FIRST, SECOND)
    ]
    outcomes = [json.loads(process.communicate(timeout=300)[0]) for process in processes]
    for number, both in enumerate(zip(*outcomes, strict=True)):
        check_folder(tmp_path / f"{number}", list(both))
