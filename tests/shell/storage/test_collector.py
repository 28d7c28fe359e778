"""The garbage collector after a step that pauses it: as it was, whatever the step did and whoever did the same."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from threading import Semaphore, Thread, current_thread

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardtree import _ambient
from shardtree.core.ambient import collector_paused
from tests.core.trees.samples import assert_caught

Pause = Callable[[], AbstractContextManager[None]]

MADE = 20_000


@pytest.fixture(scope="module", autouse=True)
def _nothing_is_frozen() -> Iterator[None]:
    """Unfreeze what the tests' start has frozen: a pause treats a program that freezes differently."""
    gc.unfreeze()
    gc.collect()  # else the next collection would be a full one: too few objects have outlived the last
    yield
    gc.freeze()


STEPS = st.lists(st.sampled_from(["pause", "fail"]), max_size=4)


@contextmanager
def real_collector(on: bool) -> Iterator[None]:
    before = gc.isenabled()
    (gc.enable if on else gc.disable)()
    try:
        yield
    finally:
        (gc.enable if before else gc.disable)()


def nested(pause: Pause, steps: list[str]) -> None:
    """Pause within a pause within a pause; a step that fails is caught outside of it."""
    if not steps:
        return
    fails = steps[0] == "fail"
    before = gc.isenabled()
    with pytest.raises(OSError, match="a step") if fails else nullcontext(), pause():
        assert not gc.isenabled()
        nested(pause, steps[1:])
        assert not gc.isenabled(), "the pause goes on after one that was within it"
        if fails:
            raise OSError("a step failed")
    assert gc.isenabled() == before


def is_as_it_was(pause: Pause, on: bool, steps: list[str]) -> None:
    with real_collector(on):
        nested(pause, steps)
        assert gc.isenabled() == on


@given(st.booleans(), STEPS)
def test_the_collector_is_as_it_was(on: bool, steps: list[str]) -> None:
    is_as_it_was(collector_paused, on, steps)


@contextmanager
def always_on_again() -> Iterator[None]:
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextmanager
def on_again_if_all_went_well() -> Iterator[None]:
    was_on = gc.isenabled()
    gc.disable()
    yield
    if was_on:
        gc.enable()


@pytest.mark.parametrize("broken", [always_on_again, on_again_if_all_went_well])
def test_the_law_catches(broken: Pause) -> None:
    assert_caught(is_as_it_was, broken, st.booleans(), STEPS)


class Collector:
    """A collector before each call of which a thread waits for its turn."""

    def __init__(self, on: bool, threads: int) -> None:
        self.on = on
        self.waits = [Semaphore(0) for _ in range(threads)]
        self.turns = [Semaphore(0) for _ in range(threads)]

    def turn(self) -> None:
        number = int(current_thread().name)
        self.waits[number].release()
        self.turns[number].acquire()

    def isenabled(self) -> bool:
        self.turn()
        return self.on

    def disable(self) -> None:
        self.turn()
        self.on = False

    def enable(self) -> None:
        self.turn()
        self.on = True

    def get_count(self) -> tuple[int, int, int]:
        return MADE, 0, 0

    def get_stats(self) -> list[dict[str, int]]:
        return [{"collections": 0}] * 3

    def collect(self) -> None:
        pass

    def get_freeze_count(self) -> int:
        return 0

    def freeze(self) -> None:
        pass

    unfreeze = freeze


@st.composite
def schedules(draw: st.DrawFn) -> list[int]:
    """Return whose turn it is: each of some threads looks, turns off, works, turns on."""
    return draw(st.permutations([number for number in range(draw(st.integers(1, 3))) for _ in range(4)]))


def mixes_well(pause: Pause, on: bool, schedule: list[int]) -> None:
    threads = max(schedule) + 1
    collector = Collector(on, threads)
    done = [False] * threads

    def work(number: int) -> None:
        with pause():
            collector.turn()
        done[number] = True
        collector.waits[number].release()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_ambient, "gc", collector)
        started = [Thread(target=work, args=(number,), name=str(number), daemon=True) for number in range(threads)]
        for number, thread in enumerate(started):
            thread.start()
            collector.waits[number].acquire()
        for number in schedule:
            if not done[number]:
                collector.turns[number].release()
                collector.waits[number].acquire()
        assert all(done)
        for thread in started:
            thread.join()
    assert collector.on == on


@given(st.booleans(), schedules())
def test_however_threads_mix_the_collector_is_as_it_was(on: bool, schedule: list[int]) -> None:
    mixes_well(collector_paused, on, schedule)


def test_the_law_of_threads_catches_one_that_turns_off_what_another_has_just_turned_on() -> None:
    @contextmanager
    def off_whatever_it_was() -> Iterator[None]:
        collector = _ambient.gc
        was_on = collector.isenabled()
        collector.disable()
        try:
            yield
        finally:
            if was_on:
                collector.enable()

    assert_caught(mixes_well, off_whatever_it_was, st.booleans(), schedules())


def leaves_no_work(pause: Pause) -> None:
    """What was made in a pause isn't looked at as soon as it ends: the collector takes it as old."""
    with real_collector(True):
        with pause():
            made: list[list[int]] = [[] for _ in range(MADE)]
        young = gc.get_objects(generation=0) + gc.get_objects(generation=1)
        assert gc.get_count()[0] < MADE // 2
    assert not set(map(id, made)) & set(map(id, young))


def test_what_a_step_has_made_isnt_looked_at_when_it_ends() -> None:
    leaves_no_work(collector_paused)


def test_the_law_catches_a_plain_pause() -> None:
    @contextmanager
    def plain() -> Iterator[None]:
        gc.disable()
        yield
        gc.enable()

    with pytest.raises(AssertionError):
        leaves_no_work(plain)


def test_what_a_program_has_frozen_stays_frozen() -> None:
    gc.freeze()
    try:
        with real_collector(True), collector_paused():
            made: list[list[int]] = [[] for _ in range(MADE)]
        assert made
        assert gc.get_freeze_count()
    finally:
        gc.unfreeze()


def test_garbage_of_a_step_is_still_found() -> None:
    class Link:
        own: Link

    with real_collector(True), collector_paused():
        made: list[list[int]] = [[] for _ in range(MADE)]
        link = Link()
        link.own = link
        gone = weakref.ref(link)
        del link
    assert made
    gc.collect()
    assert gone() is None


def test_after_an_interrupt_the_collector_is_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(_ambient, "_mark_as_old", interrupted)
    with real_collector(True):
        with pytest.raises(KeyboardInterrupt), collector_paused():
            pass
        assert gc.isenabled()


def most_alive(pause: Pause, rounds: int) -> int:
    """Return how many cycles there are at the most of those that a program drops, one between each two pauses."""

    class Link:
        own: Link

    links: list[weakref.ref[Link]] = []
    most = 0
    with real_collector(True):
        for _ in range(rounds):
            link = Link()
            link.own = link
            links.append(weakref.ref(link))
            with pause():
                made: list[list[int]] = [[] for _ in range(MADE)]
            del made, link
            most = max(most, sum(link() is not None for link in links))
    return most


@pytest.mark.slow
def test_cycles_are_found_however_often_there_is_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_ambient, "_MOST_UNSEEN", 5 * MADE)
    assert most_alive(collector_paused, 40) < 10


def test_it_shows_where_they_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_ambient, "_MOST_UNSEEN", 10**12)
    assert most_alive(collector_paused, 40) == 40
