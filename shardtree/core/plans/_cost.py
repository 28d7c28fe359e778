"""Results of planning a load, before it reads: the problems that prevent it, and the cost of its reads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ._misfits import Misfit


@dataclass(frozen=True, slots=True)
class ReadCost:
    """The cost of reading tensors: numbers of bytes, copies and files.

    Attributes:
        bytes_wanted: Number of bytes of the elements that are loaded.
        bytes_read: Number of bytes read from storage. It includes gaps that are read together with wanted bytes, whole
            compressed chunks, and bytes that are read only to check the hashes of blocks.
        pieces: Number of copies from file to memory: contiguous runs of bytes, and boxes that are copied row by row.
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
    """Result of planning the load of some shards, which a format computes before it reads any.

    Attributes:
        problems: Reasons why some shards can't be loaded.
        cost: Function that returns the cost of loading the shards that can be loaded; None if the format can't compute
            it.
        uncompared: Keys of optimizer states whose master weights could be compared with the weights, but will not be.
    """

    problems: tuple[Misfit, ...] = ()
    # The cost is a function, since it takes a plan of all reads, which isn't needed if there are problems.
    cost: Callable[[], ReadCost] | None = None
    uncompared: tuple[str, ...] = ()
