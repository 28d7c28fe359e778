"""Laws of simulated worlds: collectives agree with their definitions, and nothing hangs."""

from __future__ import annotations

import contextvars
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardtree.errors import CheckpointingException, UnsupportedValue, WorldError
from shardtree.live._simulated import Meeting, SimulatedWorld
from shardtree.world import World, one_process, simulate

VALUES = st.recursive(
    st.none() | st.integers() | st.text(max_size=3) | st.binary(max_size=3), lambda inner: st.lists(inner, max_size=3)
)


@st.composite
def values_by_rank(draw: st.DrawFn) -> list[Any]:
    return draw(st.lists(VALUES, min_size=1, max_size=16))


@given(values_by_rank())
def test_all_gather_gives_every_value_by_rank(values: list[Any]) -> None:
    assert simulate(len(values), lambda world: world.all_gather(values[world.rank])) == [values] * len(values)


def check_gather(values: Sequence[Any], root: int, wrap: Callable[[World], World] = lambda world: world) -> None:
    results = simulate(len(values), lambda world: wrap(world).gather(values[world.rank], "brief", root))
    for rank, found in enumerate(results):
        assert found == [value if rank in (root, at) else "brief" for at, value in enumerate(values)]


@given(values_by_rank(), st.data())
def test_gather_gives_one_rank_every_value_and_the_others_what_is_brief(values: list[Any], data: st.DataObject) -> None:
    check_gather(values, data.draw(st.integers(0, len(values) - 1)))


def test_the_gather_law_catches_values_that_every_rank_gets() -> None:
    class ByAllGather(SimulatedWorld):
        gather = World.gather

    with pytest.raises(AssertionError):
        check_gather([1, 2], 0, lambda world: ByAllGather(world.rank, world._meeting))  # type: ignore[attr-defined]


@given(values_by_rank(), st.data())
def test_broadcast_gives_the_roots_value(values: list[Any], data: st.DataObject) -> None:
    root = data.draw(st.integers(0, len(values) - 1))
    results = simulate(len(values), lambda world: world.broadcast(values[world.rank], root))
    assert results == [values[root]] * len(values)


@given(st.integers(1, 8))
def test_all_to_all_transposes(size: int) -> None:
    results = simulate(size, lambda world: world.all_to_all([(world.rank, to) for to in range(size)]))
    assert results == [[(source, rank) for source in range(size)] for rank in range(size)]
    twice = simulate(size, lambda world: world.all_to_all(world.all_to_all([(world.rank, to) for to in range(size)])))
    assert twice == [[(rank, to) for to in range(size)] for rank in range(size)]


@given(st.lists(VALUES, max_size=5), st.lists(VALUES, max_size=5))
def test_messages_arrive_in_the_order_in_which_they_were_sent(first: list[Any], second: list[Any]) -> None:
    def talk(world: World) -> list[Any]:
        if world.rank == 2:
            return [world.recv(0) for _ in first] + [world.recv(1) for _ in second]
        for value in (first, second)[world.rank]:
            world.send(value, 2)
        return []

    assert simulate(3, talk)[2] == first + second


class ByAllToAll(SimulatedWorld):
    """A world of a user's own, which has no exchange but the one that every world has."""

    exchange = World.exchange


class LateWorld(SimulatedWorld):
    """The planted fault: bytes arrive an element late."""

    def exchange(self, outgoing: Mapping[int, torch.Tensor], incoming: Mapping[int, torch.Tensor]) -> None:
        super().exchange({to: data.roll(1) for to, data in outgoing.items()}, incoming)


@st.composite
def byte_counts(draw: st.DrawFn) -> dict[tuple[int, int], int]:
    size = draw(st.integers(2, 6))
    pairs = [(source, to) for source in range(size) for to in range(size) if source != to]
    return draw(st.dictionaries(st.sampled_from(pairs), st.integers(0, 9), min_size=1))


def check_exchange(kind: type[SimulatedWorld], counts: Mapping[tuple[int, int], int]) -> None:
    data = {pair: torch.arange(count, dtype=torch.uint8) + 10 * pair[0] for pair, count in counts.items()}

    def talk(world: World) -> None:
        mine = kind(world.rank, world._meeting)  # type: ignore[attr-defined]
        for turn in range(2):
            outgoing = {to: part + turn for (source, to), part in data.items() if source == world.rank}
            rooms = {source: torch.full_like(part, 99) for (source, to), part in data.items() if to == world.rank}
            mine.exchange(outgoing, rooms)
            for part in outgoing.values():
                part.fill_(77)  # the sender's buffers are its own again
            for source, room in rooms.items():
                assert torch.equal(room, data[source, world.rank] + turn)

    simulate(7, talk)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [SimulatedWorld, ByAllToAll])
@given(byte_counts())
def test_an_exchange_fills_each_buffer_with_what_its_peer_sent(
    kind: type[SimulatedWorld], counts: dict[tuple[int, int], int]
) -> None:
    check_exchange(kind, counts)


def test_the_exchange_law_catches_bytes_in_the_wrong_place() -> None:
    with pytest.raises(AssertionError):
        check_exchange(LateWorld, {(0, 1): 3})


@pytest.mark.parametrize("kind", [SimulatedWorld, ByAllToAll])
@pytest.mark.parametrize(("sent", "room"), [(3, 4), (4, 3), (3, 0), (0, 3)])
def test_an_exchange_of_other_sizes_than_expected_raises(kind: type[SimulatedWorld], sent: int, room: int) -> None:
    def talk(world: World) -> None:
        mine = kind(world.rank, world._meeting)  # type: ignore[attr-defined]
        data, buffer = torch.zeros(sent, dtype=torch.uint8), torch.zeros(room, dtype=torch.uint8)
        mine.exchange(*(({1: data}, {}) if world.rank == 0 else ({}, {0: buffer})))

    with pytest.raises(WorldError, match="exchange: "):
        simulate(2, talk)


@pytest.mark.parametrize("world", [one_process(), SimulatedWorld(0, Meeting(1, 1.0))])
def test_a_world_of_one_is_the_identity(world: World) -> None:
    value = [1]
    assert world.all_gather(value)[0] is value
    assert world.broadcast(value) is value
    assert world.all_to_all([value])[0] is value
    world.barrier()
    world.exchange({}, {})
    with pytest.raises(WorldError):
        world.exchange({0: torch.zeros(1, dtype=torch.uint8)}, {})
    with pytest.raises(WorldError):
        world.send(value, 0)
    with pytest.raises(WorldError):
        world.recv(0)


@pytest.mark.parametrize("make", [lambda: [0], lambda: np.zeros(2), lambda: torch.zeros(2)])
def test_what_another_rank_sent_is_a_copy_and_writable(make: Callable[[], Any]) -> None:
    def spoil(world: World) -> bool:
        mine = make()
        for rank, value in enumerate(world.all_gather(mine)):
            assert (value is mine) == (rank == world.rank)
            if rank != world.rank:
                value[0] = 1 + world.rank
        world.barrier()
        return bool(mine[0] == 0)

    assert all(simulate(4, spoil))


@pytest.mark.parametrize(
    "calls",
    [
        (lambda world: world.barrier(), lambda world: world.all_gather(1)),
        (lambda world: world.broadcast(1, 0), lambda world: world.broadcast(1, 1)),
        (lambda world: world.recv(1), lambda world: world.recv(0)),
        (lambda world: world.send(1, 1), lambda world: world.send(1, 0)),
        (lambda world: world.send(1, 1), lambda world: world.barrier()),
        (lambda world: world.exchange({}, {}), lambda world: world.barrier()),
        (lambda world: world.barrier(), lambda world: None),
        (lambda world: [world.barrier(), world.barrier()], lambda world: world.barrier()),
    ],
)
def test_unequal_collectives_raise_at_once(calls: tuple[Callable[[World], Any], Callable[[World], Any]]) -> None:
    began = time.monotonic()
    with pytest.raises(WorldError, match=r"(?s)the ranks called different collectives.*rank 0: .*rank 1: "):
        simulate(2, lambda world: calls[world.rank](world))
    assert time.monotonic() - began < 60


def test_unequal_collectives_are_named_by_rank() -> None:
    def wander(world: World) -> None:
        if world.rank == 0:
            world.broadcast(1, 2)
        elif world.rank == 1:
            world.recv(0)
        elif world.rank == 2:
            world.all_to_all([1, 2, 3, 4])

    with pytest.raises(WorldError) as caught:
        simulate(4, wander)
    assert str(caught.value).splitlines()[1:] == [
        "  rank 0: broadcast(root=2)",
        "  rank 1: recv(source=0)",
        "  rank 2: all_to_all",
        "  rank 3: returned",
    ]


@given(st.integers(1, 16), st.data())
def test_an_exception_stops_the_others_and_tells_its_rank(size: int, data: st.DataObject) -> None:
    bad = data.draw(st.integers(0, size - 1))
    stopped = set()

    def fail(world: World) -> None:
        world.barrier()
        if world.rank == bad:
            raise KeyError("lost")
        try:
            world.barrier()
        except BaseException:
            stopped.add(world.rank)
            raise

    before = threading.active_count()
    with pytest.raises(KeyError) as caught:
        simulate(size, fail)
    assert caught.value.__notes__ == [f"on rank {bad} of {size}"]
    assert stopped == set(range(size)) - {bad}
    assert threading.active_count() == before


def test_of_several_exceptions_the_lowest_ranks_is_raised() -> None:
    def fail(world: World) -> None:
        if world.rank == 0:
            try:
                world.barrier()
            finally:
                raise KeyError("only because rank 0 was stopped")
        time.sleep(0.05 * (3 - world.rank))
        raise ValueError(world.rank)

    with pytest.raises(ValueError, match="1"):
        simulate(4, fail)

    def fail_together(world: World) -> None:
        world.barrier()
        raise ValueError(world.rank)

    for _ in range(20):
        with pytest.raises(ValueError, match="0"):
            simulate(4, fail_together)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_what_is_no_exception_also_ends_the_simulation(error: type[BaseException]) -> None:
    def leave(world: World) -> None:
        if world.rank == 1:
            raise error
        world.barrier()

    with pytest.raises(error):
        simulate(3, leave)


def test_a_rank_that_stays_away_is_named_after_the_timeout() -> None:
    gave_up = threading.Event()

    def stay_away(world: World) -> None:
        if world.rank == 1:
            assert gave_up.wait(60)
        try:
            world.barrier()
        finally:
            gave_up.set()

    with pytest.raises(WorldError, match=r"(?s)seconds.*rank 0: barrier.*rank 1: runs"):
        simulate(2, stay_away, timeout=0.1)


@pytest.mark.parametrize(
    "call",
    [
        lambda world: world.broadcast(1, 2),
        lambda world: world.broadcast(1, -1),
        lambda world: world.send(1, 2),
        lambda world: world.send(1, world.rank),
        lambda world: world.recv(world.rank),
        lambda world: world.all_to_all([1]),
        lambda world: world.exchange({2: torch.zeros(1, dtype=torch.uint8)}, {}),
        lambda world: world.exchange({}, {world.rank: torch.zeros(1, dtype=torch.uint8)}),
    ],
)
def test_ranks_that_do_not_exist_are_errors(call: Callable[[World], Any]) -> None:
    with pytest.raises(WorldError):
        simulate(2, call)


def test_what_cannot_be_pickled_is_named_before_anything_is_sent() -> None:
    def send(world: World) -> list[int]:
        with pytest.raises(UnsupportedValue, match="all_gather: cannot send a function to another rank"):
            world.all_gather(lambda: None)
        return world.all_gather(world.rank)

    assert simulate(2, send) == [[0, 1], [0, 1]]


class Unreadable:
    def __reduce__(self) -> tuple[Any, ...]:
        return int, ("not a number",)


def test_what_cannot_be_rebuilt_is_an_error() -> None:
    with pytest.raises(CheckpointingException, match="cannot rebuild"):
        simulate(2, lambda world: world.broadcast(Unreadable()))


@pytest.mark.slow
def test_ranks_see_the_callers_context() -> None:
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable")
    variable.set("outside")
    assert simulate(2, lambda world: variable.get()) == ["outside"] * 2
