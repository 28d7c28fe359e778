"""Reading a local file: by calls that fail where another program cuts it short, never by a mapping."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from typing import Self

from ..errors import StorageError, error_text
from ._storage import Buffer

MOST_BUFFERS = 1024  # IOV_MAX on Linux and macOS

# O_NONBLOCK: opening a pipe that somebody put here would otherwise wait for its writer for ever.
_TO_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK


class LocalReader:
    """A file of a local or mounted file system, open inside of a ``with`` block.

    Not a generator's context manager, which takes half as long as a small read.

    Attributes:
        path: of the file.
        descriptor: while it is open.
        length: in bytes, when it was opened.
    """

    __slots__ = ("descriptor", "length", "path")

    descriptor: int
    length: int

    def __init__(self, path: str) -> None:
        self.path = path

    def __enter__(self) -> Self:
        try:
            self.descriptor = os.open(self.path, _TO_READ)
            try:
                found = os.fstat(self.descriptor)
                if not stat.S_ISREG(found.st_mode):
                    raise StorageError(error_text(f"cannot open {self.path!r}", found="no regular file"))
            except BaseException:
                os.close(self.descriptor)
                raise
        except StorageError:
            raise
        except OSError as error:
            raise StorageError(error_text(f"cannot open {self.path!r}", found=error.strerror or error)) from error
        self.length = found.st_size
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.descriptor)

    def read_into(self, byte: int, buffers: Sequence[Buffer]) -> None:
        """Fill the buffers from consecutive bytes; raises where the file ends first."""
        pending = [*filter(len, buffers)]
        while pending:
            # preadv, never a mapping: if another program cuts the file short, that is an error here, and a bus error,
            # which ends the process, there. Nor can every file system map files.
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
            pending = remaining(pending, count) if len(pending) > 1 or count < pending[0].nbytes else []

    def read(self, begin: int = 0, end: int | None = None) -> Buffer:
        """Return a byte range of the file, by default up to its end, as new memory; raises where it ends first."""
        stop = self.length if end is None else end
        # Compared before memory is made: a damaged header may ask for any number of bytes.
        if stop > self.length:
            what = f"{self.path!r} ends at byte {self.length}"
            raise StorageError(error_text(what, expected=f"bytes {begin} to {stop}"))
        try:
            data = memoryview(bytearray(max(stop - begin, 0)))
        except MemoryError as error:
            what = f"no memory for bytes {begin} to {stop} of {self.path!r}"
            raise StorageError(
                error_text(what, fix="Is the file what it should be? It may consist of holes.")
            ) from error
        self.read_into(begin, [data])
        return data


def remaining(buffers: list[Buffer], count: int) -> list[Buffer]:
    """Return what is left of buffers when their first `count` bytes are done.

    Examples:
        >>> [bytes(buffer) for buffer in remaining([memoryview(b"abc"), memoryview(b"de")], 2)]
        [b'c', b'de']
    """
    for position, buffer in enumerate(buffers):
        if count < buffer.nbytes:
            return [buffer[count:], *buffers[position + 1 :]]
        count -= buffer.nbytes
    return []
