"""The prospect of a load before it reads: problems, and the cost of reading."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ._misfits import Misfit


@dataclass(frozen=True, slots=True)
class ReadCost:
    """The cost of reading tensors.

    Attributes:
        bytes_wanted: Bytes of the elements that are loaded.
        bytes_read: Bytes read from storage: the wanted bytes, gaps between them where a range is read in one call,
            whole compressed chunks, and further parts of blocks, or whole blocks again, to check their hashes.
        pieces: Number of runs of bytes that are consecutive in file and memory, and of boxes copied row by row.
        files: Number of files opened.
    """

    bytes_wanted: int = 0
    bytes_read: int = 0
    pieces: int = 0
    files: int = 0

    def __add__(self, other: ReadCost) -> ReadCost:
        return ReadCost(*(getattr(self, name) + getattr(other, name) for name in self.__slots__))

    @property
    def over_read(self) -> float:
        """The ratio of bytes read to bytes wanted; 1.0 if none are wanted."""
        return self.bytes_read / self.bytes_wanted if self.bytes_wanted else 1.0


@dataclass(frozen=True, slots=True)
class Prospect:
    """The prospect of loading shards, which a format computes before it reads any.

    Attributes:
        problems: Reasons why some shards can't be loaded.
        cost: Function that returns the cost of loading the other shards; None if the format can't compute it.
        uncompared: Keys of optimizer states whose master weights won't be compared with weights, though they could be.
    """

    problems: tuple[Misfit, ...] = ()
    # The cost is a function, since it takes a plan of all reads, which isn't needed if there are problems.
    cost: Callable[[], ReadCost] | None = None
    uncompared: tuple[str, ...] = ()
