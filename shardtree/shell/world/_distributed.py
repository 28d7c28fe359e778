"""The world whose ranks are processes of torch.distributed, and the choice of a call's world."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any
from weakref import ref

import torch

from ...errors import WorldError, error_text, rank_text
from ._groups import Gloo, absent_ranks, coordination_group, member_of, wait_for_all
from ._world import (
    ALONE,
    DEFAULT_TIMEOUT,
    Exchange,
    T,
    World,
    pack,
    unpack,
)

# Values are sent as frames: a length, then the pickle. A frame's head has a fixed size, so that a small value takes one
# collective; the remaining bytes of a longer frame follow in their exact size. Up to about 128 KiB in total, the size
# doesn't affect a collective's duration, so fewer ranks get larger heads.
_LENGTH = 8
_LEAST_HEAD = 512
_ALL_HEADS = 64 * 1024

_VALUE, _BYTES = 0, 1  # tags that keep messages and exchanges apart


class DistributedWorld(World):
    """A world of the members of the caller's process group; they communicate through a gloo group of their own."""

    __slots__ = ("_caller_ref", "_group_ref", "_head")

    def __init__(self, group: Gloo, timeout: float, caller: torch.distributed.ProcessGroup) -> None:
        super().__init__(group.rank(), group.size(), timeout)
        self._group_ref = ref(group)
        self._caller_ref = ref(caller)
        self._head = max(_LEAST_HEAD, _ALL_HEADS // self.size)

    def all_gather(self, value: T) -> list[T]:
        mine = self._frame(pack("all_gather", value))
        with self._backend_errors("all_gather") as group:
            frames = self._exchange_frames(group, mine)
        return [value if rank == self.rank else _read("all_gather", frame) for rank, frame in enumerate(frames)]

    def gather(self, value: T, brief: T, root: int = 0) -> list[T]:
        self.check_rank("gather", root)
        # A value that fits into a head reaches every rank at no cost; of a longer one, only its length and `brief` do.
        data = pack("gather", value)
        frame = self._frame(pack("gather", (0, data)))
        if len(frame) > self._head:
            frame = self._frame(pack("gather", (len(data), pack("gather", brief))))
        with self._backend_errors("gather") as group:
            heard = [_read("gather", rank_frame) for rank_frame in self._exchange_frames(group, frame)]
        late = {rank: length for rank, (length, _) in enumerate(heard) if length and rank != root}
        with self._backend_errors("gather", late if self.rank == root else [root]) as group:
            rooms = {
                rank: torch.empty(length, dtype=torch.uint8, device="cpu")
                for rank, length in late.items()
                if self.rank == root
            }
            works = [group.recv([room], rank, _VALUE) for rank, room in rooms.items()]
            if self.rank in late:
                works = [group.send([torch.frombuffer(bytearray(data), dtype=torch.uint8)], root, _VALUE)]
            for work in works:
                self._wait(work)
        parts = [rooms[rank].numpy().data if rank in rooms else small for rank, (_, small) in enumerate(heard)]
        return [value if rank == self.rank else unpack("gather", part) for rank, part in enumerate(parts)]

    def broadcast(self, value: T, root: int = 0) -> T:
        self.check_rank("broadcast", root)
        frame = self._frame(pack("broadcast", value)) if self.rank == root else self._empty_frame()
        with self._backend_errors(f"broadcast(root={root})") as group:
            wait_for_all(group, group.broadcast(frame[: self._head], root), self.timeout)
            if self.rank != root:
                frame = self._empty_frame(frame)
            if len(frame) > self._head:
                wait_for_all(group, group.broadcast(frame[self._head :], root), self.timeout)
        if self.rank == root:
            return value
        result: T = _read("broadcast", frame)
        return result

    def barrier(self) -> None:
        # The group's own barrier isn't used: with several backends it may be the accelerator's.
        with self._backend_errors("barrier") as group:
            wait_for_all(group, group.allreduce(torch.zeros(1, dtype=torch.int32, device="cpu")), self.timeout)

    def all_to_all(self, values: Sequence[T]) -> list[T]:
        self.check_one_each(values)
        mine = [b"" if rank == self.rank else pack("all_to_all", value) for rank, value in enumerate(values)]
        with self._backend_errors("all_to_all") as group:
            pieces = self._exchange_pieces(group, mine)
        return [values[rank] if rank == self.rank else unpack("all_to_all", piece) for rank, piece in enumerate(pieces)]

    def send(self, value: Any, to: int) -> None:
        self.check_peer("send", to)
        frame = self._frame(pack("send", value))
        with self._backend_errors(f"send(to={to})", [to]) as group:
            for part in (frame[: self._head], frame[self._head :]):
                if len(part):
                    self._wait(group.send([part], to, _VALUE))

    def recv(self, source: int) -> Any:
        self.check_peer("recv", source)
        with self._backend_errors(f"recv(source={source})", [source]) as group:
            head = self._empty_frame()
            self._wait(group.recv([head], source, _VALUE))
            frame = self._empty_frame(head)
            if len(frame) > self._head:
                self._wait(group.recv([frame[self._head :]], source, _VALUE))
        return _read("recv", frame)

    def exchange(self, outgoing: Mapping[int, torch.Tensor], incoming: Mapping[int, torch.Tensor]) -> None:
        self.check_buffers(outgoing, incoming)
        with self._backend_errors("exchange", {*outgoing, *incoming}) as group:
            # Sizes aren't checked, which would take another message for each pair. Callers plan both sides alike, and
            # gloo aborts a process that receives more bytes than its buffer holds.
            works = [group.recv([room], source, _BYTES) for source, room in incoming.items() if room.numel()]
            works += [group.send([data], to, _BYTES) for to, data in outgoing.items() if data.numel()]
            for work in works:
                self._wait(work)

    def device_exchange(self, kind: str) -> Exchange | None:
        caller = self._caller_ref()
        if kind == "cpu" or caller is None or kind not in _backends(caller):
            return super().device_exchange(kind)
        send = group_exchange(caller, kind)

        def exchange(outgoing: Mapping[int, torch.Tensor], incoming: Mapping[int, torch.Tensor]) -> None:
            with self._backend_errors("exchange", {*outgoing, *incoming}):
                send(outgoing, incoming)

        return exchange

    def _exchange_frames(self, group: Gloo, mine: torch.Tensor) -> list[torch.Tensor]:
        """Send this rank's frame (see `_frame`) to all ranks, and return every rank's frame, by rank."""
        heads = [self._empty_frame() for _ in range(self.size)]
        wait_for_all(group, group.allgather(heads, mine[: self._head]), self.timeout)
        frames = [mine if rank == self.rank else self._empty_frame(head) for rank, head in enumerate(heads)]
        # With gloo, broadcasts of each frame's exact size are 3 to 5 times faster than an all_gather that is padded to
        # equal sizes.
        tails = [(frame[self._head :], rank) for rank, frame in enumerate(frames) if len(frame) > self._head]
        works = [group.broadcast(*tail) for tail in tails]
        for work in works:
            wait_for_all(group, work, self.timeout)
        return frames

    def _exchange_pieces(self, group: Gloo, mine: list[bytes]) -> list[memoryview]:
        """Send ``mine[i]`` to rank i, and return the bytes that each rank sent to this one, by rank."""
        sizes = torch.tensor([len(piece) for piece in mine], dtype=torch.int64, device="cpu")
        incoming_sizes = torch.empty_like(sizes)
        wait_for_all(group, group.alltoall_base(incoming_sizes, sizes, [], []), self.timeout)
        outgoing = torch.frombuffer(bytearray(b"".join(mine)) or bytearray(1), dtype=torch.uint8)[: int(sizes.sum())]
        incoming = torch.empty(int(incoming_sizes.sum()), dtype=torch.uint8, device="cpu")
        splits = incoming_sizes.tolist()
        wait_for_all(group, group.alltoall_base(incoming, outgoing, splits, sizes.tolist()), self.timeout)
        return [piece.numpy().data for piece in torch.split(incoming, splits)]

    def _frame(self, data: bytes) -> torch.Tensor:
        """Return the frame of a pickled value, uint8 (bytes,): the pickle's length, the pickle, and padding if needed.

        A frame is sent in two messages: first its head, whose size is fixed, then the remaining bytes, if there are
        any. Padding makes a short frame as long as a head.
        """
        frame = bytearray(max(self._head, _LENGTH + len(data)))
        frame[:_LENGTH] = len(data).to_bytes(_LENGTH, "little")
        frame[_LENGTH : _LENGTH + len(data)] = data
        return torch.frombuffer(frame, dtype=torch.uint8)

    def _empty_frame(self, head: torch.Tensor | None = None) -> torch.Tensor:
        """Return memory for receiving the head of a frame (see `_frame`) or, given that head, the whole frame.

        Args:
            head: Received head, which is copied to the start of the memory; None if it hasn't arrived yet.
        """
        if head is None:
            return torch.zeros(self._head, dtype=torch.uint8, device="cpu")
        frame = torch.empty(max(self._head, _LENGTH + _length(head)), dtype=torch.uint8, device="cpu")
        frame[: self._head] = head
        return frame

    def _wait(self, work: torch.distributed.Work) -> None:
        work.wait(timedelta(seconds=self.timeout))

    @contextmanager
    def _backend_errors(self, what: str, peers: Iterable[int] | None = None) -> Iterator[Gloo]:
        """Pass the gloo group to a block; turn the backend's exceptions into WorldErrors that name unresponsive peers.

        Args:
            what: Name of the collective, for the error.
            peers: Ranks that take part in the call; None for all.
        """
        group = self._group_ref()
        if group is None:
            raise WorldError(error_text(f"{what}: the process group of rank {self.rank} was destroyed"))
        try:
            yield group
        except (RuntimeError, ValueError) as error:
            absent = absent_ranks(group, range(self.size) if peers is None else peers, self.timeout)
            who = f"{rank_text(absent)} of {self.size} did not take part; " if absent else ""
            raise WorldError(
                error_text(
                    f"{what}: {who}rank {self.rank} of {self.size} cannot reach its peers",
                    found=f"{type(error).__name__}: {error}",
                    fix=f"See the peers' logs: one died, was silent for {self.timeout:g} s, or made another call.",
                )
            ) from error


def distributed(
    group: torch.distributed.ProcessGroup | None = None, timeout: float = DEFAULT_TIMEOUT, *, purpose: str | None = None
) -> World:
    """Return the world of a process group.

    The first call makes a gloo group with the same members, which later calls use again. So coordination never touches
    an accelerator's memory, whatever the backend of the caller's group. Every member must call this. Ranks are numbered
    as in the group.

    Args:
        group: Process group that contains this process; None for the default one.
        timeout: Seconds after which a silent peer counts as dead, equal on every member.
        purpose: Name of a separate gloo group, so that a thread, such as that of an asynchronous save, can coordinate
            while others use the common gloo group; None for the common one.

    Raises:
        WorldError: torch.distributed isn't initialised, or this process isn't in the group.
    """
    member = member_of(group)
    return DistributedWorld(coordination_group(member, timeout, purpose), timeout, member)


def _backends(group: torch.distributed.ProcessGroup) -> dict[str, str]:
    """Return the names of a process group's backends, by device type."""
    import torch.distributed as dist

    pairs = (part.split(":") for part in dist.get_backend_config(group).split(","))
    return dict(pairs)


def group_exchange(group: torch.distributed.ProcessGroup, kind: str) -> Exchange:
    """Return a function like `World.exchange` for buffers on devices, which uses the group's own backend, such as nccl.

    Like all work on a device, an exchange may continue after the call returns; work that is queued later waits for it.

    Args:
        group: Process group with a backend for devices of type `kind`; every member must call the returned function.
        kind: Type of the device that holds the buffers.
    """
    import torch.distributed as dist

    have_met = False

    def exchange(outgoing: Mapping[int, torch.Tensor], incoming: Mapping[int, torch.Tensor]) -> None:
        nonlocal have_met
        if not have_met:
            # nccl connects a group in its first call, which all ranks must make; later calls may be between two ranks.
            dist.all_reduce(torch.zeros(1, dtype=torch.float32, device=kind), group=group)
            have_met = True
        sends = {peer: data for peer, data in outgoing.items() if data.numel()}
        receives = {peer: room for peer, room in incoming.items() if room.numel()}
        rank = partial(dist.get_global_rank, group)
        operations = [dist.P2POp(dist.irecv, room, rank(peer), group) for peer, room in receives.items()]
        operations += [dist.P2POp(dist.isend, data, rank(peer), group) for peer, data in sends.items()]
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()

    return exchange


def _length(head: torch.Tensor) -> int:
    return int.from_bytes(head[:_LENGTH].numpy().tobytes(), "little")


def _read(what: str, frame: torch.Tensor) -> Any:
    return unpack(what, frame.numpy().data[_LENGTH : _LENGTH + _length(frame)])


def current_world(world: World | torch.distributed.ProcessGroup | None = None, *, purpose: str | None = None) -> World:
    """Return the world of a call: the one that the caller passed, or the default.

    Args:
        world: A world, which is returned unchanged; a process group of torch.distributed; or None, for the default
            group if it is initialised, else one process.
        purpose: Name of a separate gloo group, as in `distributed`; ignored for a passed world and for one process.

    Examples:
        >>> current_world(None).size
        1
    """
    if isinstance(world, World):
        return world
    if world is not None or (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return distributed(world, purpose=purpose)
    return ALONE
