"""Laws of what ranks raise together: one class on one rank and on many, whichever ranks fail with which errors."""

from __future__ import annotations

import builtins
import copy
import pickle
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import shardtree
from shardtree import errors
from shardtree.errors import (
    REMOTE_TWINS,
    AlreadyACheckpoint,
    CheckpointingException,
    CorruptCheckpoint,
    KeyMismatch,
    NotACheckpoint,
    RemoteError,
    RemoteNotACheckpoint,
    StorageError,
    UnsupportedValue,
    WorldError,
)
from shardtree.mapping import ShardedTensor
from shardtree.shell.world import agree, gather, on_one_rank, step
from shardtree.storage import MemoryStorage
from shardtree.world import World, simulate


class NoSuchStep(NotACheckpoint):
    """A user's, with an attribute."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.step = 7


class OddKey(KeyMismatch):
    """Another user's."""


class OwnError(CheckpointingException):
    """A user's, of no class below ours."""


@dataclass(frozen=True)
class FrozenMismatch(KeyMismatch):
    """A user's that takes no attribute."""

    key: str


def remote(kind: type[RemoteError]) -> Callable[[str], BaseException]:
    return lambda text: kind(text, {3: text})


OURS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, CheckpointingException)]
LOCAL = [kind for kind in OURS if not issubclass(kind, RemoteError)]
USERS = [NoSuchStep, OddKey, OwnError, FrozenMismatch]
FOREIGN = [OSError, FileNotFoundError, KeyError, ValueError, RuntimeError, ZeroDivisionError]
MAKERS: dict[type[BaseException], Callable[[str], BaseException]] = {
    **{kind: kind for kind in (*LOCAL, *USERS, *FOREIGN)},
    **{kind: remote(kind) for kind in OURS if issubclass(kind, RemoteError)},
}
CATCHABLE = [
    *OURS,
    *(kind for kind in vars(builtins).values() if isinstance(kind, type) and issubclass(kind, Exception)),
]

Phase = Callable[[World, str, Callable[[], Any]], Any]
Kind = type[BaseException]


def on_last(world: World, phase: str, fn: Callable[[], Any]) -> Any:
    return on_one_rank(world, phase, fn, rank=world.size - 1)


def raised(world: World, phase: Phase, faults: Sequence[Kind | None]) -> tuple[Any, ...]:
    """Return a rank's own error, what it raised and what it got, then show that the ranks are still in step."""
    fault = faults[world.rank]
    own = None if fault is None else MAKERS[fault](f"odd {world.rank}")

    def work() -> int:
        if own is not None:
            raise own
        return world.rank

    caught, got = None, None
    try:
        got = phase(world, "work", work)
    except BaseException as error:
        caught = error
    assert world.all_gather(world.rank) == list(range(world.size))
    return own, caught, got


def expected_class(kinds: set[Kind]) -> type[RemoteError]:
    """Return what ranks raise that failed with these classes, by the sentence in DESIGN.md."""
    below = [kind for kind in LOCAL if kind not in (CheckpointingException, WorldError)]
    shared = [kind for kind in below if all(issubclass(failed, kind) for failed in kinds)]
    specific = [kind for kind in shared if not any(other is not kind and issubclass(other, kind) for other in shared)]
    return getattr(errors, f"Remote{specific[0].__name__}") if specific else RemoteError


def check_one_class(phase: Phase, faults: Sequence[Kind | None]) -> None:
    outcomes = simulate(len(faults), lambda world: raised(world, phase, faults))
    failed = {rank: kind for rank, kind in enumerate(faults) if kind is not None}
    if phase is on_last:
        failed = {rank: kind for rank, kind in failed.items() if rank == len(faults) - 1}
    for rank, (own, error, got) in enumerate(outcomes):
        if not failed:
            every = list(range(len(faults)))
            assert error is None and got == {agree: rank, gather: every, on_last: every[-1]}.get(phase, got)
        elif len(faults) == 1:
            assert error is own
        else:
            assert type(error) is expected_class(set(failed.values()))
            assert error.__cause__ is (own if rank in failed else None)
            assert error.phase == "work" and set(error.failures) == set(failed)
            assert all(f"odd {other}" in text for other, text in error.failures.items())
            check_it_travels(error)
        for kind in CATCHABLE:  # what catches each rank's error in a world of one catches what all raise
            ours = issubclass(kind, CheckpointingException) or len(set(failed.values())) == 1
            if failed and ours and all(issubclass(one, kind) for one in failed.values()) and not foreign(failed):
                assert isinstance(error, kind), f"except {kind.__name__} misses {error!r}"


def foreign(failed: dict[int, Kind]) -> bool:
    return not all(issubclass(kind, CheckpointingException) and kind is not OwnError for kind in failed.values())


def check_it_travels(error: RemoteError) -> None:
    error.add_note("seen")
    for other in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
        assert type(other) is type(error) and vars(other) == vars(error)
        assert str(other) == str(error) and repr(other) == repr(error)


PHASES = [agree, gather, on_last]


@pytest.mark.parametrize("phase", PHASES)
@given(faults=st.lists(st.sampled_from([None, *MAKERS]), min_size=1, max_size=6))
@example(faults=[NotACheckpoint] * 3)
@example(faults=[None, NoSuchStep, NotACheckpoint])
@example(faults=[NotACheckpoint, RemoteNotACheckpoint])
@example(faults=[StorageError, OSError])
def test_all_ranks_raise_one_class_which_one_rank_alone_would_raise(
    phase: Phase, faults: Sequence[Kind | None]
) -> None:
    check_one_class(phase, faults)


STEPS = ("open", "look")


@given(st.lists(st.tuples(st.sampled_from(STEPS), st.sampled_from([*LOCAL, *USERS])), min_size=2, max_size=5))
def test_only_ranks_that_failed_in_the_step_that_is_reported_count(faults: list[tuple[str, Kind]]) -> None:
    first = min((name for name, _ in faults), key=STEPS.index)
    counted = {kind for name, kind in faults if name == first}

    def run(world: World) -> BaseException:
        name, kind = faults[world.rank]

        def fail() -> None:
            with step(name):
                raise MAKERS[kind](name)

        with pytest.raises(RemoteError) as caught:
            agree(world, "all of it", fail, steps=STEPS)
        return caught.value

    assert [type(error) for error in simulate(len(faults), run)] == [expected_class(counted)] * len(faults)


@pytest.mark.parametrize("phase", [agree, gather])
@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_is_raised_where_it_occurred_and_a_plain_error_elsewhere(interrupt: Kind, phase: Phase) -> None:
    def work(rank: int) -> None:
        raise interrupt() if rank == 1 else NotACheckpoint("none")

    def run(world: World) -> BaseException:
        with pytest.raises((RemoteError, interrupt)) as caught:
            phase(world, "work", lambda: work(world.rank))
        return caught.value

    assert [type(error) for error in simulate(3, run)] == [RemoteError, interrupt, RemoteError]


def plainly(world: World, phase: str, fn: Callable[[], Any]) -> Any:
    """The planted fault: a plain RemoteError, whatever failed."""
    try:
        return agree(world, phase, fn)
    except RemoteError as error:
        raise RemoteError(error.phase, error.failures) from error.__cause__


def as_rank_zero(world: World, phase: str, fn: Callable[[], Any]) -> Any:
    """The planted fault: the twin of the lowest rank's error, whatever the others failed with."""
    try:
        return agree(world, phase, fn)
    except RemoteError as error:
        first = min(error.failures.items())[1].partition(":")[0]
        twins = {kind.__name__: twin for kind, twin in REMOTE_TWINS.items()}
        raise twins.get(first, RemoteError)(error.phase, error.failures) from error.__cause__


@pytest.mark.parametrize(
    ("broken", "faults"),
    [
        (plainly, [NotACheckpoint, None]),
        (as_rank_zero, [NotACheckpoint, CorruptCheckpoint]),
    ],
)
def test_the_law_catches(broken: Phase, faults: Sequence[Kind | None]) -> None:
    with pytest.raises(AssertionError):
        check_one_class(broken, faults)


def check_twins(classes: Sequence[type]) -> None:
    for kind in classes:
        if kind in (CheckpointingException, WorldError):  # a RemoteError is a WorldError already
            continue
        twin = getattr(errors, f"Remote{kind.__name__}", None)
        assert twin is not None and REMOTE_TWINS.get(kind) is twin, f"{kind.__name__} has no twin"
        assert (
            issubclass(twin, RemoteError) and issubclass(twin, kind) and twin.__doc__ and "__init__" not in vars(twin)
        )


def test_every_error_has_a_twin() -> None:
    check_twins(LOCAL)
    assert len(REMOTE_TWINS) == len(LOCAL) - 2


def test_an_error_without_a_twin_is_found() -> None:
    with pytest.raises(AssertionError, match="OwnError has no twin"):
        check_twins([*LOCAL, OwnError])


@pytest.mark.parametrize("twin", REMOTE_TWINS.values())
def test_a_twin_prints_its_lines_whatever_it_derives_from(twin: type[RemoteError]) -> None:
    error = twin("load: open", {0: "KeyMismatch: a\n  b"})
    error.errno, error.strerror = 2, "No such file"  # type: ignore[attr-defined]
    assert str(error) == "load: open: failed on 1 rank\n  rank 0: KeyMismatch: a\n    b"
    assert repr(error) == f"{twin.__name__}({str(error)!r})"


def failing(attributes: Sequence[dict[str, Any]], phase: Phase = agree) -> list[Any]:
    """Return each rank's own attributes and what it raises, where all fail with these attributes."""

    def run(world: World) -> Any:
        own = StorageError(f"rank {world.rank}")
        for name, value in attributes[world.rank].items():
            setattr(own, name, value)

        def work() -> None:
            raise own

        with pytest.raises(StorageError) as caught:
            phase(world, "work", work)
        return vars(own), caught.value

    return simulate(len(attributes), run)


VALUES = st.none() | st.integers() | st.text() | st.lists(st.text()) | st.dictionaries(st.text(), st.integers())


@given(
    st.lists(st.dictionaries(st.sampled_from(["missing", "keys", "errno", "filename"]), VALUES), min_size=2, max_size=4)
)
def test_attributes_are_the_lowest_failing_ranks(attributes: list[dict[str, Any]]) -> None:
    check_attributes(attributes, agree)


def check_attributes(attributes: Sequence[dict[str, Any]], phase: Phase) -> None:
    for _, error in failing(attributes, phase):
        found = vars(error) | {name: getattr(error, name) for name in ("errno", "filename")}
        expected = {"errno": None, "filename": None} | attributes[0]
        assert {name: value for name, value in found.items() if name not in ("phase", "failures")} == expected
        check_it_travels(error)


def with_ones_own(world: World, phase: str, fn: Callable[[], Any]) -> Any:
    """The planted fault: each rank's error has its own attributes."""
    try:
        return agree(world, phase, fn)
    except RemoteError as error:
        vars(error).update(vars(error.__cause__))
        raise


def test_the_law_of_attributes_catches() -> None:
    check_attributes([{"keys": [1]}, {"keys": [2]}], agree)
    with pytest.raises(AssertionError):
        check_attributes([{"keys": [1]}, {"keys": [2]}], with_ones_own)


@pytest.mark.parametrize("value", [threading.Lock(), b"x" * (17 * 2**20)], ids=["unpicklable", "too long"])
def test_attributes_that_cannot_travel_are_left_out(value: object) -> None:
    for own, error in failing([{"odd": value, "missing": ["a"], "phase": "mine", "_own": 1}, {}]):
        assert error.missing == ["a"] and error.phase == "work" and set(error.failures) == {0, 1}
        assert not hasattr(error, "odd") and not hasattr(error, "_own")
        assert own.get("odd", value) is value  # its own error, the cause, keeps it


class Untellable(NotACheckpoint):
    def __str__(self) -> str:
        raise ValueError("no text")


def test_an_error_without_a_text_reaches_the_others() -> None:
    def work() -> None:
        raise Untellable

    def run(world: World) -> Any:
        with pytest.raises(RemoteNotACheckpoint, match="Untellable, whose text raises a ValueError") as caught:
            agree(world, "work", work if world.rank else int)
        return caught.value.failures

    assert simulate(2, run) == [{1: "Untellable, whose text raises a ValueError"}] * 2


@pytest.mark.parametrize(("ranks", "bad"), [(1, {0}), (2, {1}), (3, {0, 2}), (3, {0, 1, 2})])
def test_loads_and_saves_are_caught_alike_on_any_number_of_ranks(ranks: int, bad: set[int]) -> None:
    there, nowhere = MemoryStorage(), MemoryStorage()
    simulate(ranks, lambda world: shardtree.save({"step": 1}, there, world=world))

    def load(tree: Any, folder: MemoryStorage, world: World) -> Any:
        return shardtree.load(tree if world.rank in bad else {}, folder, world=world, validate_access_integrity=False)

    def save(tree: Any, folder: MemoryStorage, world: World) -> Any:
        return shardtree.save(tree if world.rank in bad else {"step": 1}, folder, world=world)

    calls: dict[Kind, Callable[[World], Any]] = {
        NotACheckpoint: partial(load, {}, nowhere),
        KeyMismatch: partial(load, {"w": ShardedTensor.from_rank_offsets("w", torch.zeros(2))}, there),
        AlreadyACheckpoint: partial(save, {"step": 1}, there),
        UnsupportedValue: partial(save, {"step": print}, nowhere),
    }
    for kind, call in calls.items():
        with pytest.raises(kind) as caught:
            simulate(ranks, call)
        assert isinstance(caught.value, RemoteError) == (ranks > 1)
