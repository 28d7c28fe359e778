"""The protocol that every storage implements, checks of file names, and files that are written in parts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from ...errors import StorageError, error_text
from ._owner import maker_is_dead, process_token

Buffer = memoryview
"""Contiguous bytes."""

AnyBuffer = bytes | bytearray | memoryview | NDArray[Any]
"""Contiguous memory with items of any type; every other object with the buffer protocol is accepted too."""


def byte_view(buffer: AnyBuffer, where: str) -> Buffer:
    r"""Return a view of a buffer's memory as bytes.

    Args:
        buffer: Contiguous bytes, bytearray, array, or another object with the buffer protocol.
        where: Name of the destination file, for messages.

    Raises:
        StorageError: the object isn't a buffer, or isn't contiguous.

    Examples:
        >>> bytes(byte_view(np.array([1, 256], dtype=np.int16), "f"))
        b'\x01\x00\x00\x01'
    """
    try:
        view = memoryview(buffer)
        if view.format == "B" and view.ndim == 1 and view.c_contiguous:
            return view
        # NumPy casts what memoryview's own cast refuses: complex numbers, records, and shapes with a zero in them.
        return memoryview(np.frombuffer(view, dtype=np.uint8)) if view.nbytes else memoryview(b"")
    except (TypeError, ValueError, BufferError) as error:
        kind = f"{type(buffer).__name__} ({error})"
        expected = "bytes, a bytearray, a memoryview or a contiguous array"
        fix = "Turn tensors into tensor.contiguous().numpy(). Pass buffers in a list, even one: [buffer]."
        heading = f"cannot write {where!r}: the value is not a contiguous buffer"
        raise StorageError(error_text(heading, found=kind, expected=expected, fix=fix)) from error


def copy_bytes(memory: bytearray | Buffer, at: int, source: Buffer) -> None:
    r"""Copy bytes to the offset `at` of a memory, without holding Python's global lock.

    Examples:
        >>> memory = bytearray(4)
        >>> copy_bytes(memory, 1, memoryview(b"ab"))
        >>> memory
        bytearray(b'\x00ab\x00')
    """
    # NumPy releases Python's global lock while it copies; assigning to a memoryview's slice doesn't.
    np.frombuffer(memory, dtype=np.uint8, count=source.nbytes, offset=at)[:] = np.frombuffer(source, dtype=np.uint8)


@dataclass(frozen=True, slots=True, eq=False)
class SizedBuffers:
    """Buffers whose total length is known beforehand, so that a storage can reserve space for them.

    Attributes:
        nbytes: Total length of the buffers. It is a hint: a storage writes the bytes that it gets, more or fewer.
        buffers: The buffers, in order.
        stay: Whether the buffers' memory stays unchanged until the file is written. Then a storage needn't copy a
            buffer to send it later. Otherwise the iterator may reuse a buffer's memory for the next buffer.

    Examples:
        >>> sized = SizedBuffers(3, iter([memoryview(b"ab"), memoryview(b"c")]))
        >>> sized.nbytes, b"".join(sized)
        (3, b'abc')
    """

    nbytes: int
    buffers: Iterable[Buffer]
    stay: bool = False

    def __iter__(self) -> Iterator[Buffer]:
        """Return an iterator over the buffers."""
        return iter(self.buffers)


class Reader(Protocol):
    """An open file."""

    @property
    def length(self) -> int:
        """The file's length in bytes."""

    def read_into(self, byte: int, buffers: Sequence[Buffer]) -> None:
        """Fill the buffers, in order, with the file's bytes from offset `byte` on; raise if the file ends early."""

    def read(self, begin: int = 0, end: int | None = None) -> Buffer:
        """Return a copy of a byte range of the file, by default up to its end.

        Raises if the range reaches beyond the file's end.
        """


CALLS = ("write", "replace", "open", "read", "length", "names", "remove", "changed", "where")
"""Names of the methods of `Storage`, which every storage has."""


@runtime_checkable
class Storage(Protocol):
    """A folder of files with ``/`` in their names; every name is relative to the folder.

    A storage with further abilities has an attribute ``capabilities``: see `Capabilities`. Every failure is a
    `StorageError` that names the file. `shardtree.testing.check_storage` checks all promises of this protocol.
    """

    def write(self, name: str, buffers: Iterable[Buffer], *, durable: bool) -> int:
        """Write a file from buffers, in order, and return its length; `durable` waits until it is on the medium.

        An existing file of that name, such as an interrupted save's, is replaced. If the length of a large file is
        known beforehand, the buffers come as `SizedBuffers`. Several threads may write files of different names at the
        same time. Exceptions of the iterator pass through. The library's own storages take any contiguous buffers:
        bytes, bytearrays, arrays.
        """

    def replace(self, name: str, data: bytes, *, durable: bool) -> None:
        """Replace a file's content atomically: a reader sees either all of the old content or all of the new.

        Raises:
            OutcomeUnknown: no answer came; the file may have the new content already, or still get it.
        """

    def open(self, name: str) -> AbstractContextManager[Reader]:
        """Open a file for reading."""

    def read(self, name: str) -> bytes:
        """Return a file's bytes."""

    def length(self, name: str) -> int | None:
        """Return a file's length in bytes, or None if there is no such file."""

    def names(self, folder: str = "") -> tuple[str, ...]:
        """Return the sorted names of a folder's direct entries; empty if there is no such folder."""

    def remove(self, name: str) -> None:
        """Remove a file if it exists."""

    def changed(self, name: str) -> float | None:
        """Return the time of a file's last change, in seconds by the storage's own clock; None if there is no file.

        For a folder: the time when an entry was last added to it, or None if unknown.
        """

    def where(self, name: str = "") -> str:
        """Return the full path or URL of a name, for people and error messages."""


# A folder that replaces a whole checkpoint, for storages that can exchange two folders atomically.


class Sibling(Protocol):
    """A folder that a save makes beside a storage's own folder; the two are exchanged atomically.

    Before the exchange the sibling holds the new files, which the save writes. Afterwards it holds the old files, which
    were in the storage's own folder. The new folder is the one of the two that holds the new files. Failures are
    StorageErrors, as for `Storage`.
    """

    @property
    def storage(self) -> Storage:
        """The storage of the sibling folder: it has the new files until `exchange`, then the old files."""

    def make(self, note: bytes, *, durable: bool) -> None:
        """Make the sibling folder, empty, with a note that identifies the saving process.

        Raises:
            StrategyError: the file system can't exchange the sibling and the storage's own folder.
            StorageError: the sibling can't be made.
        """

    def note(self) -> bytes | None:
        """Return the bytes that `make` stored to identify the saving process, or None if there are none."""

    def is_exchanged(self) -> bool | None:
        """Return whether the exchange has happened, so that the sibling holds the old files of the storage's folder.

        None means that this is unknown, for example since a removal of the sibling has begun.
        """

    def changed(self) -> float | None:
        """Return the time of the last change in the sibling folder, in seconds by the storage's clock; None if unknown.

        A change adds or removes a file or folder.
        """

    def old_names(self) -> tuple[str, ...]:
        """Return the names of all files, links (not followed) and empty folders in the replaced folder.

        Names of empty folders end in a slash.
        """

    def check_shareable(self, names: Sequence[str]) -> None:
        """Raise if one of these old files can't be linked into the save's new folder.

        Raises:
            StrategyError: the file system doesn't support links, or forbids a link.
        """

    def share(self, names: Sequence[str], *, durable: bool) -> tuple[str, ...]:
        """Link old files into the new folder; return the names that are already taken there by different files.

        A link has the old file's name. Old files that were removed meanwhile are skipped.
        """

    def exchange(self, *, durable: bool) -> None:
        """Exchange the sibling folder and the storage's own folder atomically."""

    def remove(self) -> None:
        """Remove the folder and its content; linked files keep their other names."""


# Names within a storage are relative paths that stay inside its folder.

_PLAIN = re.compile(r"(?:(?:[\w-][\w.-]*/)*[\w-][\w.-]*)?", re.ASCII)
_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{16}\.new", re.DOTALL)


def temporary_name(name: str) -> str:
    """Return a unique name for a temporary file that will be renamed to `name`.

    Examples:
        >>> is_temporary(temporary_name("metadata.json"))
        True
    """
    return f".{name}.{process_token()}.new"


def is_temporary(name: str) -> bool:
    """Return whether a name has the form of those from `temporary_name`.

    Examples:
        >>> is_temporary(".metadata.json.0123456789abcdef.new"), is_temporary("notes.new")
        (True, False)
    """
    return _TEMPORARY.fullmatch(name) is not None


def is_left_over(name: str) -> bool:
    """Return whether a name is that of a temporary file whose process is known to have ended."""
    return is_temporary(name) and maker_is_dead(name[-20:-4]) is True


def inside(name: str, root: str) -> str:
    """Return the normal form of a name; raise if it can't be the name of a file or folder within the storage.

    Args:
        name: Name of a file or folder; "" is the storage's own folder.
        root: The storage's own folder, for messages.

    Raises:
        StorageError: the name is absolute, contains "..", or can't be the name of a file.

    Examples:
        >>> inside("a/./b//c", "checkpoint")
        'a/b/c'
        >>> inside("../a", "checkpoint")
        Traceback (most recent call last):
        ...
        shardtree.errors.StorageError: '../a' cannot be a name in the folder 'checkpoint'
          expected a relative path in UTF-8, without '..' and NUL
    """
    # Each name is checked, since names come from files of any origin. The pattern is a fast path for plain names.
    if _PLAIN.fullmatch(name):
        return name
    path = PurePosixPath(name)
    try:
        name.encode("utf-8", "surrogateescape")  # file names may contain bytes that aren't UTF-8
        is_nameable = "\0" not in name
    except UnicodeEncodeError:
        is_nameable = False
    if path.is_absolute() or ".." in path.parts or not is_nameable:
        expected = "a relative path in UTF-8, without '..' and NUL"
        raise StorageError(error_text(f"{name!r} cannot be a name in the folder {root!r}", expected=expected))
    return "/".join(path.parts)


# Parts of a file that several ranks write together.


def parts_in_file(parts: Iterable[tuple[int, AnyBuffer]], length: int, where: str) -> Iterator[tuple[int, Buffer]]:
    """Yield a file's nonempty parts, their buffers as views of bytes; raise if a part reaches beyond the file.

    Args:
        parts: (offset, buffer) pairs.
        length: Length of the whole file, in bytes.
        where: Name of the file, for messages.

    Raises:
        StorageError: a part doesn't lie within the file.

    Examples:
        >>> [len(list(parts_in_file([(1, data)], 3, "f"))) for data in (b"", b"ab")]
        [0, 1]
    """
    for byte, part in parts:
        buffer = byte_view(part, where)
        if buffer.nbytes:
            if not 0 <= byte <= length - buffer.nbytes:
                found, expected = f"bytes {byte} to {byte + buffer.nbytes}", f"a part of bytes 0 to {length}"

                heading = f"cannot write {where!r}: a part lies outside the file"
                raise StorageError(error_text(heading, found=found, expected=expected))
            yield byte, buffer


def adjacent(
    parts: Iterable[tuple[int, Buffer]], *, most_bytes: int, most_buffers: int
) -> Iterator[tuple[int, list[Buffer]]]:
    """Join parts of a file that follow each other without gaps; yield the (offset, buffers) of each such group.

    Args:
        parts: (offset, bytes) pairs.
        most_bytes: Length in bytes at which a group is complete.
        most_buffers: Maximum number of parts in a group.

    Examples:
        >>> parts = [(0, memoryview(b"ab")), (2, memoryview(b"c")), (9, memoryview(b"d"))]
        >>> [(byte, len(group)) for byte, group in adjacent(parts, most_bytes=100, most_buffers=100)]
        [(0, 2), (9, 1)]
    """
    begin, end, group = 0, 0, list[Buffer]()
    for byte, buffer in parts:
        if group and (byte != end or end - begin >= most_bytes or len(group) == most_buffers):
            yield begin, group
            group = []
        if not group:
            begin = byte
        group.append(buffer)
        end = byte + buffer.nbytes
    if group:
        yield begin, group


def whole(parts: Iterable[tuple[int, AnyBuffer]], length: int, where: str) -> Iterator[Buffer]:
    """Yield the buffers of parts that tile a whole file in order; raise if they don't.

    Raises:
        StorageError: the parts leave gaps or aren't in order, for example because other ranks write some of the parts.

    Examples:
        >>> [bytes(buffer) for buffer in whole([(0, memoryview(b"ab")), (2, memoryview(b"c"))], 3, "f")]
        [b'ab', b'c']
    """
    end = 0
    for byte, buffer in parts_in_file(parts, length, where):
        if byte != end:
            raise _not_whole(where, f"a part at byte {byte}", f"the next part at byte {end}")
        yield buffer
        end += buffer.nbytes
    if end != length:
        raise _not_whole(where, f"parts up to byte {end}", f"parts up to byte {length}")


def _not_whole(where: str, found: str, expected: str) -> StorageError:
    fix = "Save from one process, in another format, or to a local or mounted folder."
    heading = f"cannot write {where!r} in parts: in this storage, one writer must write a whole file in order"
    return StorageError(error_text(heading, found=found, expected=expected, fix=fix))
