"""Ranks as threads of this process, over the same code path as real ones."""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Mapping, Sequence
from threading import Thread
from typing import Any

import torch

from ..errors import WorldError, error_text
from ._meeting import Meeting
from ._pickled import pack, unpack
from ._world import T, World, check_buffers, check_one_each, check_peer, check_rank


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
