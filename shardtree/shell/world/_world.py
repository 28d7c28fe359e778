"""The interface through which ranks communicate, and the world of one process."""

from __future__ import annotations

import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NoReturn, TypeVar

import numpy as np
import torch

from ...errors import UnsupportedValue, WorldError, error_text, plural

T = TypeVar("T")

Exchange = Callable[[Mapping[int, torch.Tensor], Mapping[int, torch.Tensor]], None]
"""Function that sends buffers to some ranks and fills buffers from some ranks, both by rank: `World.exchange`."""

DEFAULT_TIMEOUT = 600.0  # seconds


class World(ABC):
    """A group of ranks, from the view of one of them.

    Every rank calls the same collectives in the same order. A rank gets its own value back unchanged; values of other
    ranks are always copies, so all values must be picklable. A collective that raises ``UnsupportedValue`` has sent
    nothing.

    Attributes:
        rank: Rank of this process or thread, from 0.
        size: Number of ranks.
        timeout: Seconds after which a silent peer counts as dead.
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
            WorldError: a peer is silent, or calls another collective and the world can detect it.
            UnsupportedValue: the value can't be pickled.
        """

    def gather(self, value: T, brief: T, root: int = 0) -> list[T]:
        """Return every rank's value, by rank, on rank ``root``; on others, values may be replaced by their `brief`.

        This default gives every rank all values. Worlds should override it if their transport can send to one rank.

        Args:
            value: Value of this rank, for the root.
            brief: Short substitute for a long value, which the other ranks get.
            root: Rank that gets all values, equal on every rank.

        Raises:
            WorldError, UnsupportedValue: see `all_gather`.
        """
        self.check_rank("gather", root)
        return self.all_gather(value)

    @abstractmethod
    def broadcast(self, value: T, root: int = 0) -> T:
        """Return the value of rank ``root``; the arguments of other ranks are ignored."""

    @abstractmethod
    def barrier(self) -> None:
        """Wait until every rank has called this."""

    @abstractmethod
    def all_to_all(self, values: Sequence[T]) -> list[T]:
        """Send ``values[i]`` to rank i, and return the values that the ranks sent to this one, by rank."""

    @abstractmethod
    def send(self, value: Any, to: int) -> None:
        """Send a value to another rank, which receives values in the order of the sends.

        It may block until the other rank receives, so two ranks that both send before they receive may deadlock; use
        `all_to_all` to exchange values.
        """

    @abstractmethod
    def recv(self, source: int) -> Any:
        """Return the next value that rank ``source`` sends to this one."""

    def exchange(self, outgoing: Mapping[int, torch.Tensor], incoming: Mapping[int, torch.Tensor]) -> None:
        """Send bytes to some ranks, and fill buffers with bytes from some ranks; every rank calls it.

        This default uses `all_to_all`, which pickles and copies the bytes. Worlds whose transport avoids that should
        override this method. In an override, ranks that exchange nothing needn't wait for each other.

        Args:
            outgoing: Bytes for each peer, uint8 (bytes,), contiguous, in the CPU's memory.
            incoming: Buffer for each peer's bytes, of the same dtype and layout, and as long as the bytes sent.

        Raises:
            WorldError: a buffer is of another type or a peer is this rank (nothing is sent then); a peer is silent; or
                ranks disagree about the number of bytes and the world can detect it.
        """
        self.check_buffers(outgoing, incoming)
        # Arrays are sent, since a pickled tensor contains the whole storage that it views.
        rows = [outgoing[rank].numpy() if rank in outgoing else None for rank in range(self.size)]
        pieces = {rank: data for rank, data in enumerate(self.all_to_all(rows)) if data is not None and data.size}
        sizes = {rank: data.size for rank, data in pieces.items()}
        expected = {rank: buffer.numel() for rank, buffer in incoming.items() if buffer.numel()}
        if sizes != expected:
            heading = f"exchange: rank {self.rank} did not receive as many bytes as its `incoming` buffers hold"
            raise WorldError(error_text(heading, found=f"bytes by sender {sizes}", expected=expected))
        for rank, data in pieces.items():
            np.copyto(incoming[rank].numpy(), data)

    def device_exchange(self, kind: str) -> Exchange | None:
        """Return a function like `exchange` for buffers on devices of one type; None if the world doesn't support them.

        Every rank must call the returned function the same number of times, even without buffers.

        Args:
            kind: Type of the device, such as ``"cuda"``; for ``"cpu"`` the result is `exchange`.
        """
        return self.exchange if kind == "cpu" else None

    # What subclasses check before they send anything, in the errors' common form

    def check_rank(self, what: str, rank: int) -> None:
        """Raise if a rank isn't in the world; the error begins with the name of the collective."""
        if not 0 <= rank < self.size:
            raise WorldError(error_text(f"{what}: invalid rank", found=rank, expected=f"0 to {self.size - 1}"))

    def check_peer(self, what: str, rank: int) -> None:
        """Raise if a rank isn't in the world, or is this one."""
        self.check_rank(what, rank)
        if rank == self.rank:
            raise WorldError(error_text(f"{what}: rank {rank} cannot exchange messages with itself"))

    def check_buffers(self, outgoing: Mapping[int, torch.Tensor], incoming: Mapping[int, torch.Tensor]) -> None:
        """Raise unless all peers are other ranks of the world and all buffers are contiguous bytes on the CPU."""
        for peer, buffer in (*outgoing.items(), *incoming.items()):
            self.check_peer("exchange", peer)
            plain = buffer.is_cpu and buffer.dtype == torch.uint8 and buffer.ndim == 1 and buffer.is_contiguous()
            if not plain:
                found = f"shape {tuple(buffer.shape)}, strides {buffer.stride()}, {buffer.dtype}, {buffer.device}"
                expected = "shape (n,), strides (1,), torch.uint8, cpu"
                raise WorldError(error_text(f"exchange: bad buffer for rank {peer}", found=found, expected=expected))

    def check_one_each(self, values: Sequence[object]) -> None:
        """Raise unless there is one value for each rank."""
        if len(values) != self.size:
            heading = f"all_to_all: rank {self.rank} must pass {self.size} values, one for each rank"
            raise WorldError(error_text(heading, found=plural(len(values), "value")))


# Values are pickled for sending them between ranks.
#
# Unpickling may run any code. That is safe here, since the bytes come from ranks of the same job, which run the same
# code anyway, and never from a file: files are read by the codec.


def pack(what: str, value: object) -> bytes:
    """Return a value as pickled bytes.

    Args:
        what: Name of the collective, for the error.
        value: Value to send.

    Raises:
        UnsupportedValue: the value can't be pickled.
    """
    try:
        return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        raise UnsupportedValue(
            error_text(
                f"{what}: cannot send a {type(value).__qualname__} to another rank",
                found=f"{type(error).__name__}: {error}",
                expected="a picklable value",
            )
        ) from error


def unpack(what: str, data: bytes | bytearray | memoryview) -> Any:
    """Rebuild a value from the bytes that `pack` returned.

    Args:
        what: Name of the collective, for the error.
        data: Pickled value.

    Raises:
        WorldError: the value's class can't be imported or rebuilt here.
    """
    try:
        return pickle.loads(data)
    except Exception as error:
        raise WorldError(
            error_text(
                f"{what}: cannot rebuild a value that another rank sent",
                found=f"{type(error).__name__}: {error}",
                fix="Import the value's class on every rank, and run the same code on all of them.",
            )
        ) from error


# The world of one process.


class OneProcess(World):
    """A world of a single rank, in which collectives return the rank's own values."""

    __slots__ = ()

    def all_gather(self, value: T) -> list[T]:
        return [value]

    def broadcast(self, value: T, root: int = 0) -> T:
        self.check_rank("broadcast", root)
        return value

    def barrier(self) -> None:
        pass

    def all_to_all(self, values: Sequence[T]) -> list[T]:
        self.check_one_each(values)
        return list(values)

    def send(self, value: Any, to: int) -> NoReturn:
        raise WorldError(error_text(f"send(to={to}): rank 0 is the only rank"))

    def recv(self, source: int) -> NoReturn:
        raise WorldError(error_text(f"recv(source={source}): rank 0 is the only rank"))


ALONE: Final[World] = OneProcess(0, 1, DEFAULT_TIMEOUT)


def one_process() -> World:
    """Return the world of a single rank.

    Examples:
        >>> world = one_process()
        >>> world.rank, world.size, world.all_gather("here")
        (0, 1, ['here'])
    """
    return ALONE
