"""What shardtree needs of a place that keeps files: the protocol that every storage follows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

Buffer = memoryview
"""Contiguous bytes."""


@dataclass(frozen=True, slots=True, eq=False)
class SizedBuffers:
    """Buffers of which it is known beforehand how many bytes they have, so that a storage can reserve room for them.

    Attributes:
        nbytes: of all buffers together; a storage that is given more or fewer writes those.
        buffers: in order.

    Examples:
        >>> sized = SizedBuffers(3, iter([memoryview(b"ab"), memoryview(b"c")]))
        >>> sized.nbytes, b"".join(sized)
        (3, b'abc')
    """

    nbytes: int
    buffers: Iterable[Buffer]

    def __iter__(self) -> Iterator[Buffer]:
        """Return an iterator over the buffers."""
        return iter(self.buffers)


class Reader(Protocol):
    """An open file."""

    @property
    def length(self) -> int:
        """The file's length in bytes."""

    def read_into(self, byte: int, buffers: Sequence[Buffer]) -> None:
        """Fill the buffers, one after the other, from consecutive bytes; raises where the file ends first."""

    def mapped(self, begin: int = 0, end: int | None = None) -> Buffer:
        """Return a stretch of the file, up to its end if need be, as memory that can be written to and stays its own.

        A local file is mapped, another is asked for these bytes only. Raises where the file ends first.
        """


@runtime_checkable
class Storage(Protocol):
    """A folder of files with ``/`` in their names; every name is relative to the folder.

    Errors: whatever goes wrong is a `StorageError` that names the file.
    """

    def write(self, name: str, buffers: Iterable[Buffer], *, durable: bool) -> int:
        """Write a new file from buffers, in order, and return its length; `durable` waits until it is on the medium.

        Where the length of a large file is known before, the buffers come as `SizedBuffers`. Several threads may write
        files of different names at a time.
        """

    def write_parts(self, name: str, length: int, parts: Iterable[tuple[int, Buffer]], *, durable: bool) -> None:
        """Write parts of a file that several ranks may write together, each its own parts, at the same time.

        The file has `length` bytes afterwards, whatever it had before; bytes that nobody writes are zero in a new file
        and else what they were. A storage that can't write into a file, as an object store, takes one writer's parts if
        these are the whole file in order.

        Args:
            name: of the file; all who write it give the same `length`.
            length: of the whole file, in bytes.
            parts: pairs of the byte that a part begins at and its bytes; neighbours are written together.
            durable: waits until the parts are on the medium.
        """

    def move(self, old: str, new: str) -> None:
        """Give a file another name, in place of the file that had it; one step where the storage has such a step."""

    def open(self, name: str) -> AbstractContextManager[Reader]:
        """Open a file for reading."""

    def replace(self, name: str, data: bytes, *, durable: bool) -> None:
        """Give a file new content in one step: at any moment a reader sees all of the old content or all of the new."""

    def read(self, name: str) -> bytes:
        """Return a file's bytes."""

    def length(self, name: str) -> int | None:
        """Return a file's length in bytes, None if there is no such file."""

    def names(self, folder: str = "") -> tuple[str, ...]:
        """Return the names of what is directly inside a folder, sorted; nothing where there is no such folder."""

    def make_folder(self, name: str = "", *, durable: bool = True) -> None:
        """Make a folder and those above it, if they aren't there; `durable` waits until they are on the medium."""

    def is_folder(self, name: str = "") -> bool:
        """Return whether there is a folder of that name."""

    def sync_folder(self, name: str = "") -> None:
        """Wait until what was made or removed in a folder is on the medium."""

    def remove(self, name: str) -> None:
        """Remove a file; nothing happens if it isn't there."""

    def remove_folder(self, name: str) -> None:
        """Remove a folder if it is empty."""

    def changed(self, name: str) -> float | None:
        """Return when a name was changed last, in seconds by the storage's own clock; None if it isn't there."""

    def where(self, name: str = "") -> str:
        """Return a name as people and error messages should see it."""
