"""`check_world` and its checks of a world: rank numbers, exchanged values, barriers, and errors on every rank.

The docstring of each check is the promise that it tests; errors print it.
"""

from __future__ import annotations

import contextvars
import time
from collections.abc import Callable, Sequence
from functools import partial
from threading import Lock, Thread
from typing import Any

import torch

from ..errors import RemoteError, WorldError, error_text
from ..shell.world import World, agree

Run = Callable[[Callable[[World], Any]], Any]
"""Function that calls another function on each rank, with the rank's world."""

_HANGS = 120.0  # seconds; a sound world takes milliseconds for each check, even on a busy machine


def check_world(run: Run, *, hears_of_the_dead: bool = False, hangs_after: float = _HANGS) -> None:
    """Raise unless the worlds of all ranks keep every promise of `World`.

    A process that runs or starts all ranks, as `simulate` does, calls this once. Where each process is a rank, as under
    ``mpirun``, every rank calls it, and the ranks that notice a broken promise raise.

    Args:
        run: Function that takes a function of a world, calls it on every rank with that rank's world, and raises the
            errors of these calls. For example ``lambda function: simulate(3, function)``; in a process that is a rank,
            ``lambda function: function(world)``. It is called several times, with the same worlds or new ones.
        hears_of_the_dead: Whether to check, last of all, that ranks get an error after another rank has ended. This
            takes as long as the world's timeout, and the world can't be used afterwards. Leave it out if the launcher
            ends the whole job when a rank ends.
        hangs_after: Seconds after which an unfinished check counts as broken, and later checks are left out; must be
            more than the timeout of the worlds.

    Raises:
        AssertionError: A world breaks a promise; the error names the broken promises and their faults.

    Examples:
        >>> from shardtree.world import simulate
        >>> check_world(lambda function: simulate(3, function), hears_of_the_dead=True)
    """
    problems: list[str] = []
    last = [_lasts] if hears_of_the_dead else []
    for check in (_is_told, *_CHECKS, *last):
        error = _error_of(run, check, hangs_after)
        if not _is_wanted(check, error):
            problems.append(f"{str(check.__doc__).rstrip('.')}: {_told(error)}")
        if isinstance(error, TimeoutError):
            break
    if problems:
        raise AssertionError(error_text("check_world: a world breaks these promises", offenders=problems))


def _error_of(run: Run, check: Callable[[World], None], seconds: float) -> Exception | None:
    """Run a check on all ranks; return its error, a TimeoutError if it does not end in time, or None if it passes."""
    errors: list[BaseException] = []

    def attempt() -> None:
        try:
            run(check)
        except BaseException as error:  # kept, since no caller gets a thread's exception
            errors.append(error)

    # The check runs in a separate thread, which is abandoned if ranks wait for each other forever.
    thread = Thread(target=contextvars.copy_context().run, args=(attempt,), daemon=True, name="check_world")
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        return TimeoutError(f"it does not end within {seconds:g} seconds; pass hangs_after= above the world's timeout")
    for error in errors:
        if not isinstance(error, Exception):
            raise error
        return error
    return None


def _is_wanted(check: Callable[[World], None], error: Exception | None) -> bool:
    if check is _is_told:
        return error is not None and _PLANTED in str(error)
    # Where each process is a rank, the one that ends gets no error.
    return error is None or (check is _lasts and isinstance(error, WorldError))


def _told(error: Exception | None) -> str:
    if error is None:
        return "nothing is raised"
    return str(error) if isinstance(error, (AssertionError, TimeoutError)) else f"{type(error).__name__}: {error}"


_PLANTED = "planted by check_world"


def _is_told(world: World) -> None:
    """`run` raises the error of a rank that fails."""
    # Every rank raises, since a process that is one rank gets only its own errors.
    raise ValueError(f"{_PLANTED} on rank {world.rank}")


# Each check makes all its calls before it looks at the results, since a rank that raised in between would leave the
# others waiting.


def _is_numbered(world: World) -> None:
    """Ranks are numbered from 0."""
    seats = world.all_gather((world.rank, world.size))
    assert world.size > 1, "it has one rank, but checks need several"
    assert seats == [(rank, world.size) for rank in range(world.size)], f"rank and size are {seats}"
    assert world.timeout > 0, f"its timeout is {world.timeout!r}"


def _gathers(world: World) -> None:
    """`all_gather` returns the values of all ranks, by rank."""
    everyone = range(world.size)
    # Rank 0 is late in even rounds, the last rank in odd ones.
    rounds = []
    for turn in range(12):
        if world.rank == (0, world.size - 1)[turn % 2]:
            time.sleep(0.005)
        rounds.append(world.all_gather((turn, world.rank)))
    whole = [world.gather(("whole", world.rank), ("brief", world.rank), root) for root in everyone]
    long = world.all_gather(bytes([world.rank]) * (300_000 + world.rank))
    for turn, values in enumerate(rounds):
        assert values == [(turn, rank) for rank in everyone], f"{values} in round {turn}"
    assert whole[world.rank] == [("whole", rank) for rank in everyone], (
        f"gather returns {whole[world.rank]} on its root"
    )
    lengths = [(data[:1], len(data)) for data in long]
    assert lengths == [(bytes([rank]), 300_000 + rank) for rank in everyone], f"long values come as {lengths}"


def _broadcasts(world: World) -> None:
    """`broadcast` returns the root's value, whatever other ranks pass."""
    values = []
    for root in (*range(world.size), 0):
        # A lock can't be pickled, so that a world fails if it packs the other ranks' arguments.
        values.append(world.broadcast(("from", root) if world.rank == root else Lock(), root))
    long = world.broadcast(bytes(300_000) if world.rank == 0 else None)
    assert values == [("from", root) for root in (*range(world.size), 0)], f"{values} from each root in turn"
    assert long == bytes(300_000), "a long value comes with other bytes"


def _passes_to_all(world: World) -> None:
    """`all_to_all` gives each rank the value that every other rank has for it."""
    rounds = [world.all_to_all([(turn, world.rank, to) for to in range(world.size)]) for turn in range(4)]
    uneven = world.all_to_all([bytes(50_000 * world.rank + to) for to in range(world.size)])
    for turn, values in enumerate(rounds):
        assert values == [(turn, source, world.rank) for source in range(world.size)], f"{values} in round {turn}"
    lengths = [len(data) for data in uneven]
    assert lengths == [50_000 * source + world.rank for source in range(world.size)], f"bytes of lengths {lengths}"


_MESSAGES = (0, "one", [2, {"three": 4.0}], b"\0" * 200_000, None, 5)


def _sends(world: World) -> None:
    """`recv` returns what `send` sent, in the order in which it was sent."""
    received = []
    # Pairs take turns, in the same order on both sides, since a send may wait until it is received.
    for source in range(world.size):
        for to in range(world.size):
            for message in _MESSAGES if source != to else ():
                if world.rank == source:
                    world.send((source, to, message), to)
                elif world.rank == to:
                    received.append(world.recv(source))
    expected = [
        (source, world.rank, message) for source in range(world.size) if source != world.rank for message in _MESSAGES
    ]
    wrong = next((pair for pair in zip(received, expected, strict=True) if pair[0] != pair[1]), None)
    assert wrong is None, f"{_brief(wrong[0])}, where {_brief(wrong[1])} was sent" if wrong else ""


def _brief(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."


def _exchanges(world: World) -> None:
    """`exchange` fills each buffer with the bytes that its peer sent, and doesn't use buffers after it returns."""
    rank, others = world.rank, [peer for peer in range(world.size) if peer != world.rank]
    wrong = []
    for turn in range(3):
        outgoing = {peer: _bytes(turn, rank, peer) for peer in others}
        incoming = {peer: torch.full_like(_bytes(turn, peer, rank), 255) for peer in others}
        world.exchange(outgoing, incoming)
        for buffer in outgoing.values():
            buffer.fill_(254)
        wrong += [peer for peer in others if not torch.equal(incoming[peer], _bytes(turn, peer, rank))]
    world.exchange({}, {})
    world.barrier()
    assert not wrong, f"rank {rank} has other bytes than rank {wrong[0]} sent"


def _bytes(turn: int, source: int, to: int) -> torch.Tensor:
    # The first pair sends nothing, the others various lengths that differ between rounds.
    count = (source * 7 + to * 3 + turn * 1001 - 3) if (source, to, turn) != (0, 1, 0) else 0
    return (torch.arange(max(count, 0), device="cpu") % 200 + source + to).to(torch.uint8)


def _copies(world: World) -> None:
    """Values of other ranks are copies, which may be changed."""
    rank = world.rank
    passed_by = {name: [name, rank] for name in ("all_gather", "broadcast", "all_to_all", "send")}
    tensor = torch.full((4,), float(rank), device="cpu")
    tensors, lists = world.all_gather(tensor), world.all_gather(passed_by["all_gather"])
    passed = world.all_to_all([passed_by["all_to_all"]] * world.size)
    foreign = [values[peer] for values in (lists, passed) for peer in range(world.size) if peer != rank]
    root_list = world.broadcast(passed_by["broadcast"], 0)
    if rank == 0:
        for peer in range(1, world.size):
            world.send(passed_by["send"], peer)
    else:
        foreign += [root_list, world.recv(0)]
    world.barrier()
    for value in foreign:
        value.append("changed")
    for peer in range(world.size):
        if peer != rank:
            tensors[peer].add_(1)
    world.barrier()
    changed = [name for name, value in passed_by.items() if value != [name, rank]]
    assert not changed, f"another rank changed what rank {rank} passed to {', '.join(changed)}"
    assert tensor.tolist() == [float(rank)] * 4, f"another rank changed a tensor of rank {rank}, which is {tensor}"
    expected = [[float(peer) + (peer != rank)] * 4 for peer in range(world.size)]
    assert [values.tolist() for values in tensors] == expected, f"rank {rank} has the tensors {tensors}"


_LATE, _SLACK = 0.25, 0.1  # seconds: delay of the late rank; largest difference between machines' clocks


def _waits(world: World) -> None:
    """`barrier` returns only after every rank has called it."""
    times = []
    for late in range(world.size):
        if world.rank == late:
            time.sleep(_LATE)
        arrival = time.time()
        world.barrier()
        times.append((arrival, time.time()))
    for late, pairs in enumerate(zip(*world.all_gather(times), strict=True)):
        # Clocks are compared rather than durations, so that a busy machine makes no sound barrier look broken.
        first = min(range(world.size), key=lambda rank: pairs[rank][1])
        ahead = pairs[late][0] - pairs[first][1]
        assert ahead < _SLACK, f"rank {first} leaves {ahead:.2f} seconds before rank {late} comes"


def _raises(world: World) -> None:
    """A rank that passes a value that cannot be sent gets an error, and sends nothing."""
    # Every rank passes such a value, since the others would wait for a rank that sends nothing.
    silent = []
    calls: Sequence[tuple[str, Callable[[], Any]]] = (
        ("all_gather", lambda: world.all_gather(Lock())),
        ("all_to_all", lambda: world.all_to_all([Lock()] * world.size)),
    )
    for name, call in calls:
        try:
            call()
        except Exception:
            continue
        silent.append(name)
    after = world.all_gather(world.rank)
    assert not silent, f"{' and '.join(silent)} of a lock raise nothing"
    assert after == list(range(world.size)), f"the call after it returns {after}"


def _tells_failures(world: World) -> None:
    """A failure on one rank is an error on every rank, which names the rank that failed."""
    heard = []
    for bad in range(world.size):
        try:
            agree(world, "check_world", partial(_fail, world.rank, bad))
            heard.append("no error")
        except RemoteError as error:
            heard.append(", ".join(f"rank {rank}: {text}" for rank, text in error.failures.items()))
    expected = [f"rank {bad}: ValueError: planted on rank {bad}" for bad in range(world.size)]
    wrong = next((pair for pair in zip(heard, expected, strict=True) if pair[0] != pair[1]), None)
    assert wrong is None, f"rank {world.rank} hears {wrong[0]!r}, not {wrong[1]!r}" if wrong else ""


def _fail(rank: int, bad: int) -> None:
    if rank == bad:
        raise ValueError(f"planted on rank {bad}")


_CHECKS = (
    _is_numbered,
    _gathers,
    _broadcasts,
    _passes_to_all,
    _sends,
    _exchanges,
    _copies,
    _waits,
    _raises,
    _tells_failures,
)


def _lasts(world: World) -> None:
    """Ranks that wait for a rank that has ended get a WorldError."""
    if world.rank < world.size - 1:
        world.barrier()
        raise AssertionError(f"rank {world.rank} goes on")
