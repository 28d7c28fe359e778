"""Steps are removed and saved while the process dies at any call: what is listed is whole, and nobody's files go."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from itertools import count
from typing import Any

import pytest
import torch

import shardtree as st
from shardtree.series import _remove
from shardtree.shell.storage import folder_in
from shardtree.storage import MemoryStorage, Storage
from shardtree.testing import Call, watched
from tests.faults.sampling import first
from tests.options import load_keywords
from tests.series.test_series import NOT_SYNCED, tree

POLICY = st.retention.keep_last(1)
NOTES = "step_00000002/notes.txt"
BACKENDS = {1: ("torch_dist", 1), 2: ("safetensors", 1), 3: ("zarr", 3), 4: ("safetensors", 1), 5: ("safetensors", 1)}


class Killed(Exception):
    """What a storage raises from the call on at which its process is dead."""


def killed_at(number: int, seen: list[Call]) -> Callable[[Call], None]:
    def strike(call: Call) -> None:
        seen.append(call)
        if call.number >= number:
            raise Killed(f"at {call}")

    return strike


def failing_at(number: int, seen: list[Call]) -> Callable[[Call], None]:
    def strike(call: Call) -> None:
        seen.append(call)
        if call.number == number:
            raise st.errors.StorageError(f"at {call}")

    return strike


def series(storage: Storage) -> st.CheckpointSeries:
    return st.CheckpointSeries(storage)


def begin(storage: Storage) -> Storage:
    for number, backend in BACKENDS.items():
        series(storage).save(tree(float(number)), number, sharded_strategy=backend, options=NOT_SYNCED)
    storage.replace(NOTES, b"mine", durable=False)
    storage.replace("readme.txt", b"mine too", durable=False)
    return storage


def copy(storage: MemoryStorage) -> MemoryStorage:
    return MemoryStorage(dict(storage._files), dict(storage._folders), count(10**6))


def value_in(storage: Storage, **options: Any) -> float:
    """Return which checkpoint is there, having read all of it."""
    tensors = st.load_plain_tensors(storage, options=st.LoadOptions(verify="all"))
    value = float(st.load_common_state_dict(storage, **load_keywords(**options))["step"])
    assert torch.equal(tensors["w"], torch.full((2, 3), value))
    return value


def check_listed(storage: Storage) -> set[int]:
    """Raise unless every listed step is whole, the newest is there, and so are the user's files."""
    steps = series(storage).steps()
    for step in steps:
        assert value_in(folder_in(storage, step.folder)) == step.number
    assert max(BACKENDS) in {step.number for step in steps}
    assert storage.read("readme.txt") == b"mine too"
    assert storage.read(NOTES) == b"mine"
    return {step.number for step in steps}


def check_done(storage: Storage) -> None:
    assert check_listed(storage) == {5}
    assert storage.names() == ("readme.txt", "step_00000002", "step_00000005")
    assert storage.names("step_00000002") == ("notes.txt",)


def check_removals(
    start: Callable[[], Storage],
    run: Callable[[Storage], object],
    fault: Callable[[int, list[Call]], Callable[[Call], None]] = killed_at,
    stride: int = 1,
) -> int:
    """Raise unless, whichever call is the last, nothing is half there, and the next run finishes; return the calls."""
    number = first(stride)
    while number < 2000:
        storage, seen = start(), list[Call]()
        with suppress(Killed, st.CheckpointingException):
            run(watched(storage, fault(number, seen)))
        check_listed(storage)
        if len(seen) <= number:
            return number
        series(storage).remove(series(storage).plan_removal(POLICY))
        check_done(storage)
        number += stride
    raise AssertionError("the removal makes too many calls")


def remove(storage: Storage) -> None:
    # The plan reads alone; it is made without faults.
    inner = getattr(storage, "inner", storage)
    series(storage).remove(series(inner).plan_removal(POLICY))


@pytest.fixture(scope="module")
def template() -> MemoryStorage:
    storage = MemoryStorage()
    begin(storage)
    return storage


@pytest.mark.parametrize(
    "stride", [pytest.param(13, marks=pytest.mark.slow), pytest.param(1, marks=pytest.mark.exhaustive)]
)
@pytest.mark.parametrize("fault", [killed_at, failing_at], ids=["killed", "one call fails"])
def test_a_removal_that_dies_leaves_nothing_half_done(
    template: MemoryStorage, fault: Callable[..., Any], stride: int
) -> None:
    assert check_removals(lambda: copy(template), remove, fault, stride) > 50


def interrupted(template: MemoryStorage, number: int) -> MemoryStorage:
    storage = copy(template)
    with suppress(Killed):
        remove(watched(storage, killed_at(number, [])))
    return storage


@pytest.mark.slow
def test_finishing_a_removal_may_die_too(template: MemoryStorage) -> None:
    calls: list[Call] = []
    remove(watched(copy(template), calls.append))
    first_gone = next(call.number for call in calls if call.method == "remove") + 4
    check_removals(lambda: interrupted(template, first_gone), lambda storage: series(storage).clean(), stride=5)


def without_a_note(storage: Storage) -> None:
    """The planted fault: files go one by one, and nothing says so."""
    inner = getattr(storage, "inner", storage)
    for item in series(inner).plan_removal(POLICY).going:
        for file in reversed(item.files):
            storage.remove(f"{item.folder}/{file.name}")


def test_the_law_catches_files_that_go_one_by_one(template: MemoryStorage) -> None:
    with pytest.raises((AssertionError, st.CheckpointingException)):
        check_removals(lambda: copy(template), without_a_note)


def the_whole_folder(root: Storage, item: Any) -> bool:
    """The planted fault: whatever is in the folder goes."""
    for name in root.names(item.folder):
        root.remove(f"{item.folder}/{name}")
    return True


def test_the_law_catches_a_users_file_that_goes(template: MemoryStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_remove, "_PHASES", (the_whole_folder,))
    with pytest.raises((AssertionError, st.CheckpointingException), match="notes"):
        check_removals(lambda: copy(template), remove)


OLD, NEW = {"loss": 1.0}, {"loss": 2.0}


def saved_once() -> MemoryStorage:
    storage = MemoryStorage()
    series(storage).save(tree(1.0), 7, metrics=OLD, pinned=True)
    return storage


def check_saves(start: Callable[[], MemoryStorage], run: Callable[[Storage], object], stride: int = 1) -> int:
    """Raise unless, at whichever call a save dies, a listed step has no metrics but its own; return the calls."""
    number, at_the_start = first(stride), len(series(start()).steps())
    while number < 200:
        storage, seen = start(), list[Call]()
        with suppress(Killed):
            run(watched(storage, killed_at(number, seen)))
        found = series(storage).steps()
        assert len(found) >= at_the_start
        for step in found:
            value = value_in(series(storage).at(step))
            assert step.metrics in ({}, {1.0: OLD, 2.0: NEW}[value]), f"{step} at {seen[-1]}"
            assert step.pinned
        if len(seen) <= number:
            assert [step.metrics for step in found] == [NEW]
            return number
        number += stride
    raise AssertionError("the save makes too many calls")


def save_over(storage: Storage) -> None:
    series(storage).save(tree(2.0), 7, metrics=NEW, pinned=True, overwrite=True)


@pytest.mark.parametrize("start", [MemoryStorage, saved_once])
def test_a_save_that_dies_leaves_no_step_with_anothers_metrics(start: Callable[[], MemoryStorage]) -> None:
    assert check_saves(start, save_over, stride=3) > 10


def test_the_law_catches_metrics_that_come_before_their_checkpoint() -> None:
    def too_early(storage: Storage) -> None:
        series(storage).note(7, NEW)
        save_over(storage)

    with pytest.raises(AssertionError, match="loss"):
        check_saves(saved_once, too_early)
