"""Laws of phases: what fails on one rank raises on all, whatever failed where."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardtree.errors import RemoteError
from shardtree.shell.world import agree, gather, on_rank_zero, share, step, tried
from shardtree.world import World, current_world, one_process, simulate

Phase = Callable[[World, str, Callable[[], Any]], Any]


def test_the_failure_names_phase_ranks_and_messages() -> None:
    def step(rank: int) -> None:
        if rank:
            error = ValueError(f"odd {rank}") if rank == 1 else OSError("full")
            error.add_note("at tree['a']")
            raise error

    with pytest.raises(RemoteError) as caught:
        simulate(3, lambda world: agree(world, "write files", lambda: step(world.rank)))
    assert caught.value.phase == "write files"
    assert caught.value.failures == {1: "ValueError: odd 1\nat tree['a']", 2: "OSError: full\nat tree['a']"}


@given(st.integers(1, 8))
def test_rank_zero_tells_its_value(size: int) -> None:
    ran = []

    def step(world: World) -> str:
        def name() -> str:
            ran.append(world.rank)
            return "run-1"

        return on_rank_zero(world, "name", name)

    assert simulate(size, step) == ["run-1"] * size
    assert ran == [0]


@pytest.mark.parametrize("phase", [gather, on_rank_zero])
def test_a_value_that_cannot_be_pickled_is_a_failure(phase: Phase) -> None:
    def step(world: World) -> str:
        with pytest.raises(RemoteError, match="UnsupportedValue"):
            phase(world, "share", lambda: (lambda: None) if world.rank == 0 else 1)
        world.barrier()
        return "in step"

    assert simulate(2, step) == ["in step"] * 2


def test_a_value_that_stays_need_not_be_picklable() -> None:
    assert all(callable(value) for value in simulate(2, lambda world: agree(world, "make", lambda: lambda: None)))


def test_the_current_world_is_the_given_one_or_one_process() -> None:
    world = one_process()
    assert current_world(world) is world
    assert current_world(None).size == 1
    assert simulate(2, lambda world: current_world(world) is world) == [True, True]


def test_what_went_wrong_alike_is_told_once_and_set_in() -> None:
    error = RemoteError(
        "load: read", {0: "KeyMismatch: a\n  'x'", 2: "OSError: full", **dict.fromkeys(range(4, 9), "OSError: full")}
    )
    assert str(error).splitlines() == [
        "load: read: failed on 7 ranks",
        "  rank 0: KeyMismatch: a",
        "    'x'",
        "  ranks 2, 4-8: OSError: full",
    ]
    assert len(error.failures) == 7


STEPS = ("open", "look", "close")


def in_steps(world: World, fault: str | None, agreed: Callable[..., Any] = agree) -> str:
    """Run a phase of three steps, of which one fails, and return what this rank hears."""

    def fail_at(name: str) -> None:
        if name == fault:
            raise ValueError(f"{name} on rank {world.rank}")

    def work() -> None:
        for name in STEPS:
            with step(name):
                fail_at(name)

    try:
        agreed(world, "all of it", work, steps=STEPS)
    except RemoteError as error:
        return f"{error.phase}: {', '.join(error.failures.values())}"
    return "well"


def check_all_hear_of_the_first(faults: list[str | None], agreed: Callable[..., Any] = agree) -> None:
    failed = [name for name in STEPS if name in faults]
    expected = "well"
    if failed:
        ranks = [rank for rank, name in enumerate(faults) if name == failed[0]]
        texts = [f"ValueError: {failed[0]} on rank {rank}" for rank in ranks]
        expected = f"{failed[0]}: {', '.join(texts)}"
    heard = simulate(len(faults), lambda world: in_steps(world, faults[world.rank], agreed))
    assert heard == [expected] * len(faults)


@given(faults=st.lists(st.sampled_from([None, *STEPS]), min_size=2, max_size=5))
def test_of_several_steps_all_hear_of_the_first_that_failed(faults: list[str | None]) -> None:
    check_all_hear_of_the_first(faults)


def without_steps(world: World, phase: str, fn: Callable[[], Any], *, steps: Any) -> Any:
    """The planted fault: a phase that doesn't know its steps."""
    return agree(world, phase, fn)


def test_the_law_catches_steps_that_are_not_told_apart() -> None:
    with pytest.raises(AssertionError):
        check_all_hear_of_the_first(["look", "open"], without_steps)


def test_others_get_what_is_told_and_a_rank_keeps_its_own() -> None:
    own = simulate(3, lambda world: share(world, "measure", lambda: [world.rank] * world.rank, len))
    assert own == [([rank] * rank, [0, 1, 2]) for rank in range(3)]
    assert share(one_process(), "measure", lambda: "abc", len) == ("abc", [3])


def test_what_fails_before_a_phase_is_every_rank_s_error_in_it() -> None:
    def count(world: World) -> int:
        half = tried(lambda: 10 // world.rank)
        return agree(world, "halve", half)

    with pytest.raises(RemoteError, match=r"halve: failed on 1 rank\n  rank 0: ZeroDivisionError"):
        simulate(3, count)
    assert simulate(2, lambda world: agree(world, "add", tried(lambda: world.rank + 1))) == [1, 2]
