"""The prospect of a load before it reads: what doesn't fit, and what reading the rest takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ._misfits import Misfit


@dataclass(frozen=True, slots=True)
class ReadCost:
    """What reading tensors takes.

    Attributes:
        bytes_wanted: of the elements that are loaded.
        bytes_read: from storage: those, what lies between them where a range is read or requested at once,
            compressed chunks as they are stored, and what is read once more, or wider, to check its hash.
        pieces: consecutive bytes that go to one place, and boxes that are copied row by row.
        files: opened.
    """

    bytes_wanted: int = 0
    bytes_read: int = 0
    pieces: int = 0
    files: int = 0

    def __add__(self, other: ReadCost) -> ReadCost:
        return ReadCost(*(getattr(self, name) + getattr(other, name) for name in self.__slots__))

    @property
    def over_read(self) -> float:
        """How many bytes are read for each one that is wanted; 1.0 where none is."""
        return self.bytes_read / self.bytes_wanted if self.bytes_wanted else 1.0


@dataclass(frozen=True, slots=True)
class Prospect:
    """What loading shards would take, as a format says before it reads any.

    Attributes:
        problems: why some can't be loaded.
        cost: finds out what loading the others takes; None where the format doesn't know.
        uncompared: keys of an optimizer's states whose masters won't be compared with weights, though they could be.
    """

    problems: tuple[Misfit, ...] = ()
    # A function, since problems are looked for first, and a cost takes a plan of all reads.
    cost: Callable[[], ReadCost] | None = None
    uncompared: tuple[str, ...] = ()
