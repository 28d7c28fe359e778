"""The one interface through which ranks talk to each other."""

from __future__ import annotations

import pickle
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch

from ..errors import UnsupportedValue, WorldError, error_text, plural

T = TypeVar("T")

DEFAULT_TIMEOUT = 600.0  # seconds


class World(ABC):
    """The ranks that take part in something, seen from one of them.

    Every rank calls the same collectives in the same order. A rank's own value comes back to it as it is; what comes
    from another rank is always a copy, so whatever is passed must be picklable. A collective that raises
    ``UnsupportedValue`` hasn't sent anything.

    Attributes:
        rank: which one this is, from 0.
        size: how many there are.
        timeout: seconds after which a silent peer counts as dead.
    """

    __slots__ = ("rank", "size", "timeout")

    def __init__(self, rank: int, size: int, timeout: float) -> None:
        self.rank = rank
        self.size = size
        self.timeout = timeout

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: rank {self.rank} of {self.size}>"

    @abstractmethod
    def all_gather(self, value: T) -> list[T]:
        """Return every rank's value, by rank.

        Raises:
            WorldError: if a peer is silent, or calls something else where that can be noticed.
            UnsupportedValue: if the value can't be pickled.
        """

    @abstractmethod
    def broadcast(self, value: T, root: int = 0) -> T:
        """Return the value of rank ``root``; what other ranks pass is ignored."""

    @abstractmethod
    def barrier(self) -> None:
        """Wait until every rank is here."""

    @abstractmethod
    def all_to_all(self, values: Sequence[T]) -> list[T]:
        """Return what each rank has for this one, by rank; ``values[i]`` goes to rank i."""

    @abstractmethod
    def send(self, value: Any, to: int) -> None:
        """Hand a value to another rank, which receives values in the order in which they were sent.

        It may wait until the other rank receives, so two ranks that both send before they receive are stuck;
        `all_to_all` is what exchanges.
        """

    @abstractmethod
    def recv(self, source: int) -> Any:
        """Return the next value that rank ``source`` sends to this one."""

    def exchange(self, outgoing: Mapping[int, torch.Tensor], incoming: Mapping[int, torch.Tensor]) -> None:
        """Send bytes to some ranks and fill buffers with what some ranks send; every rank calls it.

        Nothing is pickled. A world whose transport can should override it, and neither copy nor let ranks that have
        nothing for each other wait; this one goes by `all_to_all`.

        Args:
            outgoing: for each peer the bytes that it gets, uint8 (bytes,), contiguous, in the CPU's memory.
            incoming: for each peer the buffer for its bytes, likewise; as many as the peer sends.

        Raises:
            WorldError: if a buffer is something else or a peer this rank, before anything is sent; if ranks don't agree
                about what is sent, where that can be noticed; if a peer is silent.
        """
        check_buffers(self, outgoing, incoming)
        # Arrays are pickled without the rest of the memory that they are a part of; tensors aren't.
        rows = [outgoing[rank].numpy() if rank in outgoing else None for rank in range(self.size)]
        received = {rank: data for rank, data in enumerate(self.all_to_all(rows)) if data is not None and data.size}
        sizes = {rank: data.size for rank, data in received.items()}
        expected = {rank: buffer.numel() for rank, buffer in incoming.items() if buffer.numel()}
        if sizes != expected:
            what = f"exchange: rank {self.rank} gets other bytes than it has room for, by rank"
            raise WorldError(error_text(what, found=sizes, expected=expected))
        for rank, data in received.items():
            np.copyto(incoming[rank].numpy(), data)


def check_rank(world: World, what: str, rank: int) -> None:
    """Raise unless the world has such a rank."""
    if not 0 <= rank < world.size:
        raise WorldError(error_text(f"{what}: no such rank", found=rank, expected=f"0 to {world.size - 1}"))


def check_peer(world: World, what: str, rank: int) -> None:
    """Raise unless the world has such a rank, and it is another one."""
    check_rank(world, what, rank)
    if rank == world.rank:
        raise WorldError(error_text(f"{what}: rank {rank} can't exchange messages with itself"))


def check_buffers(world: World, outgoing: Mapping[int, torch.Tensor], incoming: Mapping[int, torch.Tensor]) -> None:
    """Raise unless peers are other ranks of the world, and buffers what can be sent as it lies in memory."""
    for peer, buffer in (*outgoing.items(), *incoming.items()):
        check_peer(world, "exchange", peer)
        plain = buffer.is_cpu and buffer.dtype == torch.uint8 and buffer.ndim == 1 and buffer.is_contiguous()
        if not plain:
            found = f"{tuple(buffer.shape)} {buffer.dtype} on {buffer.device}, strides {buffer.stride()}"
            expected = "contiguous bytes in the CPU's memory, uint8 of one axis"
            raise WorldError(error_text(f"exchange: the buffer for rank {peer}", found=found, expected=expected))


def check_one_each(world: World, values: Sequence[object]) -> None:
    """Raise unless there is one value for each rank."""
    if len(values) != world.size:
        raise WorldError(
            error_text(
                f"all_to_all: rank {world.rank}", found=plural(len(values), "value"), expected=f"{world.size}, one each"
            )
        )


# Values on their way between ranks, as bytes.
#
# Unpickling runs what the bytes say. These bytes come from the ranks of the job itself, which already run its code, and
# never from a file; files have the codec.


def pack(what: str, value: object) -> bytes:
    """Return a value as bytes.

    Args:
        what: the collective that wants it, for the error.

    Raises:
        UnsupportedValue: if it can't be pickled.
    """
    try:
        return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        raise UnsupportedValue(
            error_text(
                f"{what}: a {type(value).__qualname__} can't go to another rank",
                found=f"{type(error).__name__}: {error}",
                expected="a picklable value",
            )
        ) from error


def unpack(what: str, data: bytes | bytearray | memoryview) -> Any:
    """Return the value that some rank packed, always a new one.

    Raises:
        WorldError: if its class can't be found or rebuilt here.
    """
    try:
        return pickle.loads(data)
    except Exception as error:
        raise WorldError(
            error_text(
                f"{what}: what another rank sent can't be rebuilt here",
                found=f"{type(error).__name__}: {error}",
                fix="Import its class on every rank, and run the same code on all of them.",
            )
        ) from error
