"""A folder in memory beside another one, whose place it takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ._memory import Beside, MemoryStorage


@dataclass(frozen=True, slots=True, eq=False)
class MemorySibling:
    """A folder in memory that takes another one's place.

    Args:
        target: the other one.
        name: of the save.

    Examples:
        >>> from shardtree.storage import MemoryStorage
        >>> target = MemoryStorage()
        >>> target.replace("old.txt", b"old", durable=False)
        >>> sibling = MemorySibling(target, "save-1")
        >>> sibling.make(b"note", durable=False)
        >>> sibling.storage.replace("new.txt", b"new", durable=False)
        >>> sibling.exchange(durable=False)
        >>> target.names(), sibling.storage.names()
        (('new.txt',), ('old.txt',))
    """

    target: MemoryStorage
    name: str
    _beside: Beside = field(init=False)

    def __post_init__(self) -> None:
        """Have something to write to even before it is made, as a path is."""
        object.__setattr__(self, "_beside", self.target.place_beside(self.name))

    @property
    def storage(self) -> MemoryStorage:
        """The folder that takes the place."""
        return self._beside.storage

    def make(self, note: bytes, *, durable: bool) -> None:
        """Make the folder with a note of who did."""
        with self.target.lock:
            self.target.beside[self.name] = self._beside
            self._beside.note = note

    def note(self) -> bytes | None:
        """Return the note, None if there is none."""
        return self._beside.note

    def is_exchanged(self) -> bool | None:
        """Return whether the old files are in it."""
        return self._beside.exchanged if self.name in self.target.beside else None

    def changed(self) -> float | None:
        """Return at which tick something in it was changed last."""
        names = self.storage.all_names()
        return max((self.storage.changed(name) or 0.0 for name in names), default=None)

    def old_names(self) -> tuple[str, ...]:
        """Return the names of all old files."""
        return (self._beside.storage if self._beside.exchanged else self.target).all_names()

    def check_shareable(self, names: Sequence[str]) -> None:
        """Do nothing: memory can be shared."""

    def share(self, names: Sequence[str], *, durable: bool) -> tuple[str, ...]:
        """Let the new folder have old files too; return the names that are another file's there."""
        pair = (self.target, self._beside.storage)
        new, old = pair if self._beside.exchanged else pair[::-1]
        return tuple(name for name in names if not new.share(name, old))

    def exchange(self, *, durable: bool) -> None:
        """Give the two folders each other's files."""
        with self.target.lock:
            beside = self._beside
            self.target.swap(beside.storage)
            beside.exchanged = not beside.exchanged

    def remove(self) -> None:
        """Remove the folder with all that is in it."""
        with self.target.lock:
            self.target.beside.pop(self.name, None)
            self._beside.storage.clear()
            self._beside.note, self._beside.exchanged = None, False
