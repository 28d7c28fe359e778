"""A series that compares steps warns of one that repeats the last one, and of tensors that changed before the write."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as hs

import shardtree as st
from shardtree.series import _progress
from shardtree.world import World

STORED = st.SaveOptions(fingerprint=True)
UNSAFE = st.SaveOptions(fingerprint=True, snapshot=False)


def rows(world: World, weight: torch.Tensor) -> dict[str, st.ShardedTensor]:
    part = weight.chunk(world.size)[world.rank]
    return {"w": st.ShardedTensor.from_rank_offsets("w", part, (0, world.rank, world.size))}


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("compare", [True, False])
def test_a_step_that_repeats_the_last_one_is_told(compare: bool, caplog: pytest.LogCaptureFixture) -> None:
    root = st.storage.MemoryStorage()

    def run(world: World) -> None:
        series = st.CheckpointSeries(root, world=world)
        for step, value in ((100, 1.0), (200, 2.0), (300, 2.0)):
            series.save(rows(world, torch.full((4,), value)), step, options=STORED, compare=compare)
        series.save(rows(world, torch.full((4,), 2.0)), 400, compare=compare)  # without fingerprints

    st.simulate(2, run)
    expected = "series: step 300 has the tensors of step 200, all 1 of them; was an older step's copy saved?"
    assert warnings_of(caplog) == [expected] * compare


def test_tensors_that_change_before_they_are_written_are_told(caplog: pytest.LogCaptureFixture) -> None:
    series = st.CheckpointSeries(st.storage.MemoryStorage())
    for step, options in ((100, STORED), (200, UNSAFE)):
        weight = torch.full((4,), float(step))
        later = {"async_sharded_save": True, "compare": True}
        request = series.save(rows(st.world.one_process(), weight), step, options=options, **later)
        weight += 1
        request.execute_sync()
    [warning] = warnings_of(caplog)
    assert warning.startswith("series: step 200 holds other values than memory did when save was called: 'w';")


# The law: exactly those steps are told of that repeat the one before, or hold other values than memory did.


@contextmanager
def told() -> Iterator[list[str]]:
    """Yield the list of the warnings that are logged meanwhile."""
    messages: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("shardtree")
    logger.addHandler(handler)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)


def check_steps_are_told(values: Sequence[int], changed: Collection[int]) -> None:
    """Raise unless a series says of its steps what is true.

    Args:
        values: Values of the tensor, by step.
        changed: The steps whose tensor changes between the call of `save` and the write.
    """
    series = st.CheckpointSeries(st.storage.MemoryStorage())
    stored: list[int] = []
    with told() as messages:
        for number, value in enumerate(values):
            weight = torch.full((4,), float(value))
            options = UNSAFE if number in changed else STORED
            tree = rows(st.world.one_process(), weight)
            request = series.save(tree, number, options=options, async_sharded_save=True, compare=True)
            if number in changed:
                weight += 10
            request.execute_sync()
            stored.append(int(weight[0]))
    expected = [(number, "has") for number in range(1, len(values)) if stored[number] == stored[number - 1]]
    expected += [(number, "holds") for number in changed if number < len(values)]
    found = [(int(message.split()[2]), message.split()[3]) for message in messages]
    assert sorted(found) == sorted(expected), messages


@given(hs.lists(hs.integers(0, 2), min_size=1, max_size=5), hs.sets(hs.integers(0, 4), max_size=2))
@example([0, 1, 1], set())
@example([0, 0, 1], {1})
def test_exactly_the_steps_that_repeat_or_changed_are_told(values: list[int], changed: set[int]) -> None:
    check_steps_are_told(values, changed)


def by_keys_alone(stored: Any) -> Any:
    return lambda *args: dict.fromkeys(stored(*args), 0)


def of_the_first_step(listed: Any) -> Any:
    return lambda *args: listed(*args)[:1]


def of_nothing(fingerprint: Any) -> Any:
    return lambda *args, **options: {}


FAULTS = [("_stored", by_keys_alone), ("list_steps", of_the_first_step), ("fingerprint", of_nothing)]


@pytest.mark.parametrize(("name", "fault"), FAULTS)
def test_the_law_of_steps_that_are_told_catches(
    name: str, fault: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_progress, name, fault(getattr(_progress, name)))
    with pytest.raises(AssertionError):
        check_steps_are_told([0, 1, 1], {0})
