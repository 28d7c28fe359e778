"""What a storage can have beside the protocol of all storages: another folder that takes its own one's place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from ._storage import Storage


class Sibling(Protocol):
    """A folder that one save takes beside a storage's own, and that takes its place in one step.

    Before that it holds the new files, and after it the old ones. Errors are those of `Storage`.
    """

    @property
    def storage(self) -> Storage:
        """The folder: of the new files, and once it was exchanged, of the old ones."""

    def make(self, note: bytes, *, durable: bool) -> None:
        """Make the folder, empty, with a note of who did; raises unless it can be exchanged later.

        Raises:
            StrategyError: the two can't be exchanged here.
            StorageError: the folder can't be made.
        """

    def note(self) -> bytes | None:
        """Return the note, None if there is none."""

    def is_exchanged(self) -> bool | None:
        """Return whether the old files are in it; None if they are being removed, or that can't be told."""

    def changed(self) -> float | None:
        """Return when something was made or removed in it last, by the storage's clock."""

    def old_names(self) -> tuple[str, ...]:
        """Return the names of all old files, links too and not followed, and of empty folders, which end in ``/``."""

    def check_shareable(self, names: Sequence[str]) -> None:
        """Raise unless old files can get a second name in the new folder.

        Raises:
            StrategyError: the file system has no such thing, or doesn't allow it.
        """

    def share(self, names: Sequence[str], *, durable: bool) -> tuple[str, ...]:
        """Let the new folder have old files too, by the same names; return the names that are another file's there.

        An old file that is gone meanwhile is left out.
        """

    def exchange(self, *, durable: bool) -> None:
        """Give the two folders each other's place, in one step."""

    def remove(self) -> None:
        """Remove the folder with all that is in it; files that are shared stay where else they are."""


@runtime_checkable
class Exchanging(Protocol):
    """A storage whose folder can be exchanged with one beside it."""

    def sibling(self, name: str) -> Sibling:
        """Return the folder that a save of that name takes, or has taken, beside this one."""

    def siblings(self) -> tuple[str, ...]:
        """Return the names of the saves that have taken one, sorted."""
