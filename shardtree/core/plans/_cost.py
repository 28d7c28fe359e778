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
        bytes_read: Bytes read from storage: the wanted ones, gaps between them where a range is read or requested at
            once, compressed chunks as they are stored, and blocks read again, or wider, to check their hashes.
        pieces: Number of runs of consecutive bytes that go to one place, and of boxes that are copied row by row.
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
        cost: Function that returns the cost of loading the others; None if the format doesn't know.
        uncompared: Keys of an optimizer's states whose masters won't be compared with weights, though they could be.
    """

    problems: tuple[Misfit, ...] = ()
    # The cost is a function, since problems come first, and a cost takes a plan of all reads.
    cost: Callable[[], ReadCost] | None = None
    uncompared: tuple[str, ...] = ()
