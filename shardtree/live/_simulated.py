"""Simulated ranks: threads of this process, which run the same code as real ranks."""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from threading import Lock, Thread
from typing import Any, NoReturn, TypeVar

import torch

from ..errors import WorldError, error_text
from ..shell.world import World, pack, unpack

T = TypeVar("T")

# The rendezvous of simulated ranks: the one object that their threads share.
#
# A rank that calls a collective registers its call and sleeps. The last rank to call, or the second of a sender and a
# receiver, delivers the results and wakes the others. If every rank sleeps or has returned, and none can be woken, the
# ranks called different collectives: that is detected at once rather than after a timeout.


class Stopped(BaseException):
    """Exception that stops the other ranks after a failure; ``except Exception`` doesn't catch it."""


@dataclass(frozen=True, slots=True)
class _Call:
    what: str  # name in errors; equal on all ranks of a collective
    value: Any
    sends_to: int = -1  # -1: not a message to one rank
    receives_from: int = -1


class Meeting:
    """The shared state of simulated ranks: the calls in which they wait for each other, and the results."""

    def __init__(self, size: int, timeout: float) -> None:
        self.size = size
        self.timeout = timeout
        self.error: WorldError | None = None
        self.stopped: set[int] = set()  # ranks in which Stopped was raised; their errors aren't reported
        self._stopped = False
        self._ended: set[int] = set()
        self._waiting: dict[int, _Call] = {}
        self._results: dict[int, Any] = {}
        self._lock = Lock()
        # Each rank has a lock that is always held: a rank sleeps by acquiring its own, and is woken by a release.
        self._wake_locks = [Lock() for _ in range(size)]
        for lock in self._wake_locks:
            lock.acquire()

    def collect(self, rank: int, what: str, value: Any) -> list[Any]:
        """Return every rank's value, by rank, once all ranks make the same call."""
        values: list[Any] = self._wait(rank, _Call(what, value))
        return values

    def send(self, rank: int, to: int, value: Any) -> None:
        """Return once rank ``to`` has received the value."""
        self._wait(rank, _Call(f"send(to={to})", value, sends_to=to))

    def recv(self, rank: int, source: int) -> Any:
        """Return the next value that rank ``source`` sends."""
        return self._wait(rank, _Call(f"recv(source={source})", None, receives_from=source))

    def end(self, rank: int) -> None:
        """Register that a rank has returned."""
        with self._lock:
            self._ended.add(rank)
            self._stop_if_stuck()

    def stop(self) -> None:
        """Raise `Stopped` in every rank that waits now or calls a collective later."""
        with self._lock:
            self._stop(None)

    def _wait(self, rank: int, call: _Call) -> Any:
        with self._lock:
            if self._stopped:
                self._raise_stopped(rank)
            self._waiting[rank] = call
            if not self._complete(rank, call):
                self._stop_if_stuck()
        if not self._wake_locks[rank].acquire(timeout=self.timeout):
            self._give_up(rank)
            self._wake_locks[rank].acquire()
        if rank not in self._results:
            self._raise_stopped(rank)
        return self._results.pop(rank)

    def _raise_stopped(self, rank: int) -> NoReturn:
        self.stopped.add(rank)
        raise Stopped

    def _complete(self, rank: int, call: _Call) -> bool:
        """Deliver the results if this was the last call that the other ranks waited for; return whether it was."""
        peer = max(call.sends_to, call.receives_from)
        if peer >= 0:
            other = self._waiting.get(peer)
            if other is None or (other.receives_from if call.sends_to >= 0 else other.sends_to) != rank:
                return False
            # Values are swapped: the receiver's is None, which the sender gets.
            self._deliver({rank: other.value, peer: call.value})
            return True
        if len(self._waiting) < self.size or any(other.what != call.what for other in self._waiting.values()):
            return False
        values = [self._waiting[rank].value for rank in range(self.size)]
        self._deliver(dict.fromkeys(range(self.size), values))
        return True

    def _deliver(self, results: dict[int, Any]) -> None:
        self._results.update(results)
        for rank in results:
            del self._waiting[rank]
            self._wake_locks[rank].release()

    def _stop_if_stuck(self) -> None:
        if self._waiting and not self._stopped and len(self._waiting) + len(self._ended) == self.size:
            heading = "the ranks called different collectives, and would wait for each other forever"
            self._stop(WorldError(error_text(heading, offenders=self._calls())))

    def _give_up(self, rank: int) -> None:
        with self._lock:
            if rank in self._waiting:
                heading = f"rank {rank} waited {self.timeout:g} seconds for other ranks"
                self._stop(WorldError(error_text(heading, offenders=self._calls())))

    def _stop(self, error: WorldError | None) -> None:
        self._stopped = True
        self.error = self.error or error
        for rank in self._waiting:
            self._wake_locks[rank].release()
        self._waiting.clear()

    def _calls(self) -> list[str]:
        def state(rank: int) -> str:
            return self._waiting[rank].what if rank in self._waiting else "returned" if rank in self._ended else "runs"

        return [f"rank {rank}: {state(rank)}" for rank in range(self.size)]


class SimulatedWorld(World):
    """A world of simulated ranks, which are threads.

    Values are pickled, as between processes: ranks can't share mutable state by accident, and what real ranks couldn't
    send can't be sent here either. Pickling costs microseconds, once for each sender and receiver.
    """

    __slots__ = ("_meeting",)

    def __init__(self, rank: int, meeting: Meeting) -> None:
        super().__init__(rank, meeting.size, meeting.timeout)
        self._meeting = meeting

    def all_gather(self, value: T) -> list[T]:
        pieces = self._meeting.collect(self.rank, "all_gather", pack("all_gather", value))
        return [value if rank == self.rank else unpack("all_gather", data) for rank, data in enumerate(pieces)]

    def gather(self, value: T, brief: T, root: int = 0) -> list[T]:
        self.check_rank("gather", root)
        mine = pack("gather", value), pack("gather", brief)
        pairs = self._meeting.collect(self.rank, f"gather(root={root})", mine)
        parts = (whole if self.rank == root else small for whole, small in pairs)
        return [value if rank == self.rank else unpack("gather", data) for rank, data in enumerate(parts)]

    def broadcast(self, value: T, root: int = 0) -> T:
        self.check_rank("broadcast", root)
        mine = pack("broadcast", value) if self.rank == root else b""
        pieces = self._meeting.collect(self.rank, f"broadcast(root={root})", mine)
        if self.rank == root:
            return value
        result: T = unpack("broadcast", pieces[root])
        return result

    def barrier(self) -> None:
        self._meeting.collect(self.rank, "barrier", b"")

    def all_to_all(self, values: Sequence[T]) -> list[T]:
        self.check_one_each(values)
        mine = [b"" if rank == self.rank else pack("all_to_all", value) for rank, value in enumerate(values)]
        rows = self._meeting.collect(self.rank, "all_to_all", mine)
        return [
            values[rank] if rank == self.rank else unpack("all_to_all", row[self.rank]) for rank, row in enumerate(rows)
        ]

    def send(self, value: Any, to: int) -> None:
        self.check_peer("send", to)
        self._meeting.send(self.rank, to, pack("send", value))

    def recv(self, source: int) -> Any:
        self.check_peer("recv", source)
        return unpack("recv", self._meeting.recv(self.rank, source))

    def exchange(self, outgoing: Mapping[int, torch.Tensor], incoming: Mapping[int, torch.Tensor]) -> None:
        self.check_buffers(outgoing, incoming)
        buffers = self._meeting.collect(self.rank, "exchange", (dict(outgoing), dict(incoming)))
        _check_sizes(buffers)
        for source, buffer in incoming.items():
            if buffer.numel():
                buffer.copy_(buffers[source][0][self.rank])
        # Wait for all copies: buffers aren't pickled, and senders may overwrite theirs once they return.
        self._meeting.collect(self.rank, "exchange: the end", None)


def _check_sizes(buffers: Sequence[tuple[Mapping[int, torch.Tensor], Mapping[int, torch.Tensor]]]) -> None:
    """Raise WorldError unless each rank sends exactly as many bytes to each peer as the peer expects.

    Args:
        buffers: Outgoing and incoming buffers of each rank, by peer; all ranks pass the same, and so raise alike.
    """
    sizes = {(rank, to): data.numel() for rank, (outgoing, _) in enumerate(buffers) for to, data in outgoing.items()}
    room = {(source, rank): part.numel() for rank, (_, rooms) in enumerate(buffers) for source, part in rooms.items()}
    wrong = [
        f"rank {pair[0]} sends {sizes.get(pair, 0)} bytes to rank {pair[1]}, which expects {room.get(pair, 0)}"
        for pair in sorted(sizes.keys() | room.keys())
        if sizes.get(pair, 0) != room.get(pair, 0)
    ]
    if wrong:
        raise WorldError(error_text("exchange: ranks disagree about the sizes of messages", offenders=wrong))


def simulate(size: int, fn: Callable[[World], T], *, timeout: float = 60.0) -> list[T]:
    """Run fn on several simulated ranks, and return its results, by rank.

    Each rank is a thread that runs ``fn(world)``, with a copy of the caller's context variables. Once a rank raises,
    the others stop in their next collective; all threads have ended when this returns or raises.

    Args:
        size: Number of ranks.
        fn: Function that each rank calls with its world.
        timeout: Seconds that a rank waits for the others.

    Raises:
        BaseException: The error of fn, with its rank as a note. If several ranks fail before they are stopped, the
            lowest rank's error is raised, so that a test fails in the same way each time.
        WorldError: The ranks called different collectives, or wait for each other in a circle; the error names each
            rank's call.

    Examples:
        >>> simulate(3, lambda world: world.all_gather(world.rank * 10))
        [[0, 10, 20], [0, 10, 20], [0, 10, 20]]
        >>> simulate(2, lambda world: world.barrier() if world.rank else world.all_gather(1))
        Traceback (most recent call last):
        shardtree.errors.WorldError: the ranks called different collectives, and would wait for each other forever
          rank 0: all_gather
          rank 1: barrier
    """
    if size < 1:
        raise WorldError(error_text("simulate: too few ranks", found=size, expected="at least 1"))
    meeting = Meeting(size, timeout)
    results: dict[int, T] = {}
    errors: dict[int, BaseException] = {}
    _run_all(size, lambda rank: _run(SimulatedWorld(rank, meeting), meeting, fn, results, errors), meeting.stop)
    if meeting.error is not None:
        raise meeting.error
    for rank in sorted(errors):
        errors[rank].add_note(f"on rank {rank} of {size}")
        raise errors[rank]
    return [results[rank] for rank in range(size)]


def _run(
    world: World, meeting: Meeting, fn: Callable[[World], T], results: dict[int, T], errors: dict[int, BaseException]
) -> None:
    """Call fn on one rank, record its result or error, and tell the other ranks."""
    try:
        results[world.rank] = fn(world)
    except BaseException as error:
        if world.rank not in meeting.stopped:
            errors[world.rank] = error
        meeting.stop()
    else:
        meeting.end(world.rank)


def _run_all(size: int, run: Callable[[int], None], stop: Callable[[], None]) -> None:
    """Run every rank in a thread, and wait for all of them."""
    threads = [
        Thread(target=contextvars.copy_context().run, args=(run, rank), name=f"rank {rank} of {size}")
        for rank in range(size)
    ]
    running = []
    try:
        for thread in threads:
            thread.start()
            running.append(thread)
        for thread in running:
            thread.join()
    except BaseException:
        # A KeyboardInterrupt, or no more threads can be started.
        stop()
        for thread in running:
            thread.join()
        raise
