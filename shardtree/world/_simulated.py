"""Ranks as threads of this process, over the same code path as real ones."""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from threading import Lock, Thread
from typing import Any, NoReturn

import torch

from ..errors import WorldError, error_text
from ._world import T, World, check_buffers, check_one_each, check_peer, check_rank, pack, unpack

# Where simulated ranks meet: the one object that their threads share.
#
# A rank that comes says what it calls and sleeps. Whoever comes last, or makes a pair of a sender and a receiver, hands
# the results out and wakes those concerned. When no rank runs any more and nobody can be woken, the ranks called
# different things, which is found at once and not by waiting.


class Stopped(BaseException):
    """Tells a simulated rank that the others are gone. No ``except Exception`` should hold it up."""


@dataclass(frozen=True, slots=True)
class _Call:
    what: str  # as it reads in an error; ranks that meet have equal ones
    brought: Any
    sends_to: int = -1  # -1: to nobody in particular
    receives_from: int = -1


class Meeting:
    """Ranks that wait for each other."""

    def __init__(self, size: int, timeout: float) -> None:
        self.size = size
        self.timeout = timeout
        self.error: WorldError | None = None
        self.told: set[int] = set()  # the ranks that were stopped, so that what they raise is no news
        self._stopped = False
        self._ended: set[int] = set()
        self._waiting: dict[int, _Call] = {}
        self._results: dict[int, Any] = {}
        self._lock = Lock()
        # A rank sleeps by taking its own bell, which is taken already; to release it is to wake the rank.
        self._bells = [Lock() for _ in range(size)]
        for bell in self._bells:
            bell.acquire()

    def collect(self, rank: int, what: str, value: Any) -> list[Any]:
        """Return what every rank brought, by rank, once all of them call the same thing."""
        brought: list[Any] = self._wait(rank, _Call(what, value))
        return brought

    def send(self, rank: int, to: int, value: Any) -> None:
        """Return once rank ``to`` has received the value."""
        self._wait(rank, _Call(f"send(to={to})", value, sends_to=to))

    def recv(self, rank: int, source: int) -> Any:
        """Return what rank ``source`` sends next."""
        return self._wait(rank, _Call(f"recv(source={source})", None, receives_from=source))

    def end(self, rank: int) -> None:
        """Let the others know that a rank has returned."""
        with self._lock:
            self._ended.add(rank)
            self._stop_if_stuck()

    def stop(self) -> None:
        """Make every rank that waits here, or comes here from now on, raise `Stopped`."""
        with self._lock:
            self._stop(None)

    def _wait(self, rank: int, call: _Call) -> Any:
        with self._lock:
            if self._stopped:
                self._tell(rank)
            self._waiting[rank] = call
            if not self._complete(rank, call):
                self._stop_if_stuck()
        if not self._bells[rank].acquire(timeout=self.timeout):
            self._give_up(rank)
            self._bells[rank].acquire()
        if rank not in self._results:
            self._tell(rank)
        return self._results.pop(rank)

    def _tell(self, rank: int) -> NoReturn:
        self.told.add(rank)
        raise Stopped

    def _complete(self, rank: int, call: _Call) -> bool:
        """Hand out results if the call that just came is what others waited for."""
        peer = max(call.sends_to, call.receives_from)
        if peer >= 0:
            return self._pair(rank, call, peer)
        if len(self._waiting) < self.size or any(other.what != call.what for other in self._waiting.values()):
            return False
        brought = [self._waiting[rank].brought for rank in range(self.size)]
        self._hand_out(dict.fromkeys(range(self.size), brought))
        return True

    def _pair(self, rank: int, call: _Call, peer: int) -> bool:
        """Hand a message over if its sender and its receiver are both here."""
        other = self._waiting.get(peer)
        if other is None or (other.receives_from if call.sends_to >= 0 else other.sends_to) != rank:
            return False
        # The receiver brought None, which is what the sender gets.
        self._hand_out({rank: other.brought, peer: call.brought})
        return True

    def _hand_out(self, results: dict[int, Any]) -> None:
        self._results.update(results)
        for rank in results:
            del self._waiting[rank]
            self._bells[rank].release()

    def _stop_if_stuck(self) -> None:
        if self._waiting and not self._stopped and len(self._waiting) + len(self._ended) == self.size:
            what = "the ranks called different things, and would wait for each other forever"
            self._stop(WorldError(error_text(what, offenders=self._calls())))

    def _give_up(self, rank: int) -> None:
        with self._lock:
            if rank in self._waiting:
                what = f"rank {rank} waited {self.timeout:g} seconds"
                self._stop(WorldError(error_text(what, offenders=self._calls())))

    def _stop(self, error: WorldError | None) -> None:
        self._stopped = True
        self.error = self.error or error
        for rank in self._waiting:
            self._bells[rank].release()
        self._waiting.clear()

    def _calls(self) -> list[str]:
        def state(rank: int) -> str:
            return self._waiting[rank].what if rank in self._waiting else "returned" if rank in self._ended else "runs"

        return [f"rank {rank}: {state(rank)}" for rank in range(self.size)]


class SimulatedWorld(World):
    """One of several ranks that are threads.

    Values are pickled on their way, as between processes: ranks can't share mutable state by accident, and what
    couldn't be sent in earnest can't be sent here. It costs microseconds, once a sender and once a receiver.
    """

    __slots__ = ("_meeting",)

    def __init__(self, rank: int, meeting: Meeting) -> None:
        super().__init__(rank, meeting.size, meeting.timeout)
        self._meeting = meeting

    def all_gather(self, value: T) -> list[T]:
        packed = self._meeting.collect(self.rank, "all_gather", pack("all_gather", value))
        return [value if rank == self.rank else unpack("all_gather", data) for rank, data in enumerate(packed)]

    def broadcast(self, value: T, root: int = 0) -> T:
        check_rank(self, "broadcast", root)
        mine = pack("broadcast", value) if self.rank == root else b""
        packed = self._meeting.collect(self.rank, f"broadcast(root={root})", mine)
        if self.rank == root:
            return value
        received: T = unpack("broadcast", packed[root])
        return received

    def barrier(self) -> None:
        self._meeting.collect(self.rank, "barrier", b"")

    def all_to_all(self, values: Sequence[T]) -> list[T]:
        check_one_each(self, values)
        mine = [b"" if rank == self.rank else pack("all_to_all", value) for rank, value in enumerate(values)]
        packed = self._meeting.collect(self.rank, "all_to_all", mine)
        return [
            values[rank] if rank == self.rank else unpack("all_to_all", row[self.rank])
            for rank, row in enumerate(packed)
        ]

    def send(self, value: Any, to: int) -> None:
        check_peer(self, "send", to)
        self._meeting.send(self.rank, to, pack("send", value))

    def recv(self, source: int) -> Any:
        check_peer(self, "recv", source)
        return unpack("recv", self._meeting.recv(self.rank, source))

    def exchange(self, outgoing: Mapping[int, torch.Tensor], incoming: Mapping[int, torch.Tensor]) -> None:
        check_buffers(self, outgoing, incoming)
        brought = self._meeting.collect(self.rank, "exchange", (dict(outgoing), dict(incoming)))
        _check_sizes(brought)
        for source, buffer in incoming.items():
            if buffer.numel():
                buffer.copy_(brought[source][0][self.rank])
        # The buffers are the senders' own, who may change them once they return.
        self._meeting.collect(self.rank, "exchange: the end", None)


def _check_sizes(brought: Sequence[tuple[Mapping[int, torch.Tensor], Mapping[int, torch.Tensor]]]) -> None:
    """Raise, on every rank alike, unless each buffer has a counterpart of its size."""
    sent = {(rank, to): data.numel() for rank, (outgoing, _) in enumerate(brought) for to, data in outgoing.items()}
    room = {(source, rank): part.numel() for rank, (_, rooms) in enumerate(brought) for source, part in rooms.items()}
    wrong = [
        f"rank {pair[0]} sends rank {pair[1]} {sent.get(pair, 0)} bytes, which has room for {room.get(pair, 0)}"
        for pair in sorted(sent.keys() | room.keys())
        if sent.get(pair, 0) != room.get(pair, 0)
    ]
    if wrong:
        raise WorldError(error_text("exchange: the ranks don't agree about what is sent", offenders=wrong))


def simulate(size: int, fn: Callable[[World], T], *, timeout: float = 60.0) -> list[T]:
    """Return what fn returns on each of several simulated ranks, by rank.

    Each rank is a thread that runs ``fn(world)``, in the caller's context variables. Once a rank raises, the others
    stop in their next collective; all threads have ended when this returns or raises.

    Args:
        size: how many ranks.
        fn: what each rank does; its world tells it which one it is.
        timeout: seconds that a rank waits for the others.

    Raises:
        BaseException: what fn raised, with its rank as a note. Where several ranks raised before they could hear of
            each other it is the lowest one's, so that a test fails in the same way each time.
        WorldError: if the ranks called different collectives, or wait for each other in a circle; it names who called
            what.

    Examples:
        >>> simulate(3, lambda world: world.all_gather(world.rank * 10))
        [[0, 10, 20], [0, 10, 20], [0, 10, 20]]
        >>> simulate(2, lambda world: world.barrier() if world.rank else world.all_gather(1))
        Traceback (most recent call last):
        shardtree.errors.WorldError: the ranks called different things, and would wait for each other forever
          rank 0: all_gather
          rank 1: barrier
    """
    if size < 1:
        raise WorldError(error_text("simulate: no ranks", found=size, expected="at least 1"))
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
    """Run one rank to its end."""
    try:
        results[world.rank] = fn(world)
    except BaseException as error:
        if world.rank not in meeting.told:
            errors[world.rank] = error
        meeting.stop()
    else:
        meeting.end(world.rank)


def _run_all(size: int, run: Callable[[int], None], stop: Callable[[], None]) -> None:
    """Run every rank in a thread, and return when all of them have ended."""
    threads = [
        Thread(target=contextvars.copy_context().run, args=(run, rank), name=f"rank {rank} of {size}")
        for rank in range(size)
    ]
    started = []
    try:
        for thread in threads:
            thread.start()
            started.append(thread)
        for thread in started:
            thread.join()
    except BaseException:
        # A KeyboardInterrupt, or no more threads to be had.
        stop()
        for thread in started:
            thread.join()
        raise
