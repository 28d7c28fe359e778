"""Reading a file of a local or mounted file system: in parts, or mapped."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from ..errors import StorageError, error_text
from ._storage import Buffer

MOST_BUFFERS = 1024  # IOV_MAX on Linux and macOS


@dataclass(frozen=True)
class LocalReader:
    """An open file of a local or mounted file system."""

    descriptor: int
    path: str

    @property
    def length(self) -> int:
        """The file's length in bytes."""
        try:
            return os.fstat(self.descriptor).st_size
        except OSError as error:
            raise StorageError(error_text(f"cannot look at {self.path!r}", found=error.strerror)) from error

    def read_into(self, byte: int, buffers: Sequence[Buffer]) -> None:
        """Fill the buffers from consecutive bytes; raises where the file ends first."""
        pending = [buffer for buffer in buffers if buffer.nbytes]
        while pending:
            try:
                count = os.preadv(self.descriptor, pending[:MOST_BUFFERS], byte)
            except OSError as error:
                raise StorageError(
                    error_text(f"cannot read {self.path!r} at byte {byte}", found=error.strerror)
                ) from error
            if not count:
                missing = sum(buffer.nbytes for buffer in pending)
                raise StorageError(error_text(f"{self.path!r} ends at byte {byte}", expected=f"{missing} bytes more"))
            byte += count
            pending = rest(pending, count)

    def mapped(self, begin: int = 0, end: int | None = None) -> Buffer:
        """Return a stretch of the file as memory that can be written to and stays its own."""
        stretch = self._mapping[begin:end]
        if end is not None and stretch.nbytes < end - begin:
            what = f"{self.path!r} ends at byte {self._mapping.nbytes}"
            raise StorageError(error_text(what, expected=f"bytes {begin} to {end}"))
        return stretch

    @cached_property
    def _mapping(self) -> Buffer:
        # A private mapping is writable without touching the file, and tensors want writable memory.
        if not self.length:
            return memoryview(bytearray())
        try:
            mapped = mmap.mmap(self.descriptor, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        except OSError as error:
            raise StorageError(error_text(f"cannot map {self.path!r}", found=error.strerror)) from error
        return memoryview(mapped)


def rest(buffers: list[Buffer], count: int) -> list[Buffer]:
    """Return what is left of buffers when their first `count` bytes are done.

    Examples:
        >>> [bytes(buffer) for buffer in rest([memoryview(b"abc"), memoryview(b"de")], 2)]
        [b'c', b'de']
    """
    for position, buffer in enumerate(buffers):
        if count < buffer.nbytes:
            return [buffer[count:], *buffers[position + 1 :]]
        count -= buffer.nbytes
    return []
