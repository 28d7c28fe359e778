"""The protocol that every storage implements, and names and parts of files within one."""

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
"""Contiguous memory of any items; whatever else Python's memoryview takes is taken too."""


def byte_view(buffer: AnyBuffer, where: str) -> Buffer:
    r"""Return the bytes of a buffer, which share its memory.

    Args:
        buffer: bytes, a bytearray, an array, or anything else that gives its memory to memoryview; contiguous.
        where: the file that it is written to, for messages.

    Raises:
        StorageError: it gives none, or not in one piece.

    Examples:
        >>> bytes(byte_view(np.array([1, 256], dtype=np.int16), "f"))
        b'\x01\x00\x00\x01'
    """
    try:
        view = memoryview(buffer)
        if view.format == "B" and view.ndim == 1 and view.c_contiguous:
            return view
        # By NumPy: memoryview's own cast refuses complex numbers, records, and shapes with a zero in them.
        return memoryview(np.frombuffer(view, dtype=np.uint8)) if view.nbytes else memoryview(b"")
    except (TypeError, ValueError, BufferError) as error:
        kind = f"{type(buffer).__name__} ({error})"
        expected = "bytes, a bytearray, a memoryview or an array, contiguous"
        fix = "Of a tensor, pass tensor.contiguous().numpy(); of one buffer, a list of it."
        what = f"cannot write {where!r}: this isn't a buffer"
        raise StorageError(error_text(what, found=kind, expected=expected, fix=fix)) from error


def copy_bytes(memory: bytearray | Buffer, at: int, source: Buffer) -> None:
    r"""Copy bytes; other threads go on meanwhile.

    Examples:
        >>> memory = bytearray(4)
        >>> copy_bytes(memory, 1, memoryview(b"ab"))
        >>> memory
        bytearray(b'\x00ab\x00')
    """
    # By NumPy: a slice of a memoryview is copied under Python's global lock.
    np.frombuffer(memory, dtype=np.uint8, count=source.nbytes, offset=at)[:] = np.frombuffer(source, dtype=np.uint8)


@dataclass(frozen=True, slots=True, eq=False)
class SizedBuffers:
    """Buffers whose total length is known beforehand, so that a storage can reserve space for them.

    Attributes:
        nbytes: of all buffers together; a hint only: a storage that gets more or fewer bytes writes those.
        buffers: in order.
        stay: whether their memory stays as it is until the file is written, so that what is sent later needn't be
            copied; else their source may use it again as soon as it is asked for more.

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
        """Fill the buffers, one after the other, from consecutive bytes; raises where the file ends first."""

    def read(self, begin: int = 0, end: int | None = None) -> Buffer:
        """Return a byte range of the file, by default up to its end, as memory; writing to it doesn't change the file.

        Raises where the file ends first.
        """


CALLS = ("write", "replace", "open", "read", "length", "names", "remove", "changed", "where")
"""What every storage can do: the methods of `Storage`."""


@runtime_checkable
class Storage(Protocol):
    """A folder of files with ``/`` in their names; every name is relative to the folder.

    What a storage can do beyond that, it says by an attribute ``capabilities``: see `Capabilities`. Every failure is a
    `StorageError` that names the file. `shardtree.testing.check_storage` checks all that is promised here.
    """

    def write(self, name: str, buffers: Iterable[Buffer], *, durable: bool) -> int:
        """Write a file from buffers, in order, and return its length; `durable` waits until it is on the medium.

        A file of that name, as an interrupted save may have left it, is replaced. Where the length of a large file is
        known beforehand, the buffers come as `SizedBuffers`. Several threads may write files of different names at the
        same time. What the buffers raise is raised. The library's own storages take any contiguous buffers: bytes,
        bytearrays, arrays.
        """

    def replace(self, name: str, data: bytes, *, durable: bool) -> None:
        """Give a file new content in one step: at any moment a reader sees all of the old content or all of the new.

        Raises:
            OutcomeUnknown: no answer came, so that the file may have the new content already, or get it yet.
        """

    def open(self, name: str) -> AbstractContextManager[Reader]:
        """Open a file for reading."""

    def read(self, name: str) -> bytes:
        """Return a file's bytes."""

    def length(self, name: str) -> int | None:
        """Return a file's length in bytes, None if there is no such file."""

    def names(self, folder: str = "") -> tuple[str, ...]:
        """Return the names of what is directly inside a folder, sorted; nothing where there is no such folder."""

    def remove(self, name: str) -> None:
        """Remove a file; nothing happens if it isn't there."""

    def changed(self, name: str) -> float | None:
        """Return when a file was changed last, in seconds by the storage's own clock; None if it isn't there.

        Of a folder, when something was made in it, None where that isn't known.
        """

    def where(self, name: str = "") -> str:
        """Return a name as people and error messages should see it."""


# A folder that takes the place of the whole, where that can be done in one step.


class Sibling(Protocol):
    """A folder that a save makes beside a storage's own, and exchanges with it in one step.

    Before the exchange it holds the new files, and afterwards the old ones. Errors are those of `Storage`.
    """

    @property
    def storage(self) -> Storage:
        """The folder: of the new files, and after the exchange of the old ones."""

    def make(self, note: bytes, *, durable: bool) -> None:
        """Make the folder, empty, with a note of its owner; raises unless it can be exchanged later.

        Raises:
            StrategyError: the two can't be exchanged here.
            StorageError: the folder can't be made.
        """

    def note(self) -> bytes | None:
        """Return the note, None if there is none."""

    def is_exchanged(self) -> bool | None:
        """Return whether the old files are in it; None if they are being removed, or it is unknown."""

    def changed(self) -> float | None:
        """Return when something was last made or removed in it, by the storage's clock."""

    def old_names(self) -> tuple[str, ...]:
        """Return the names of all old files, of links (not followed), and of empty folders, which end in ``/``."""

    def check_shareable(self, names: Sequence[str]) -> None:
        """Raise unless old files can be linked into the new folder.

        Raises:
            StrategyError: the file system doesn't support links, or doesn't allow one.
        """

    def share(self, names: Sequence[str], *, durable: bool) -> tuple[str, ...]:
        """Link old files into the new folder, by the same names; return the names that another file has there.

        An old file that was removed meanwhile is left out.
        """

    def exchange(self, *, durable: bool) -> None:
        """Exchange the two folders in one step."""

    def remove(self) -> None:
        """Remove the folder with all that is in it; files that were linked keep their other names."""


# Names within a storage: relative paths that stay inside its folder.

_PLAIN = re.compile(r"(?:(?:[\w-][\w.-]*/)*[\w-][\w.-]*)?", re.ASCII)
_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{16}\.new", re.DOTALL)


def temporary_name(name: str) -> str:
    """Return a unique name for a temporary file, which will be renamed to `name`.

    Examples:
        >>> is_temporary(temporary_name("metadata.json"))
        True
    """
    return f".{name}.{process_token()}.new"


def is_temporary(name: str) -> bool:
    """Return whether a name is one that `temporary_name` gives.

    Examples:
        >>> is_temporary(".metadata.json.0123456789abcdef.new"), is_temporary("notes.new")
        (True, False)
    """
    return _TEMPORARY.fullmatch(name) is not None


def is_left_over(name: str) -> bool:
    """Return whether a temporary file's process has ended, as far as its name tells."""
    return is_temporary(name) and maker_is_dead(name[-20:-4]) is True


def inside(name: str, root: str) -> str:
    """Return a name in its normal form, or raise if it would leave the folder.

    Args:
        name: of a file or folder; "" is the storage's own folder.
        root: what errors call that folder.

    Raises:
        StorageError: the name is absolute, contains "..", or can't be the name of a file.

    Examples:
        >>> inside("a/./b//c", "checkpoint")
        'a/b/c'
        >>> inside("../a", "checkpoint")
        Traceback (most recent call last):
        ...
        shardtree.errors.StorageError: '../a' would leave the folder 'checkpoint'
          expected a name inside it
    """
    # Names come from files that anybody may have made, so each is checked; nearly all are plain, and this is faster.
    if _PLAIN.fullmatch(name):
        return name
    path = PurePosixPath(name)
    try:
        name.encode("utf-8", "surrogateescape")  # a file's name may have bytes that aren't UTF-8
        is_nameable = "\0" not in name
    except UnicodeEncodeError:
        is_nameable = False
    if path.is_absolute() or ".." in path.parts or not is_nameable:
        raise StorageError(error_text(f"{name!r} would leave the folder {root!r}", expected="a name inside it"))
    return "/".join(path.parts)


# Parts of a file that several ranks write together.


def parts_in_file(parts: Iterable[tuple[int, AnyBuffer]], length: int, where: str) -> Iterator[tuple[int, Buffer]]:
    """Yield the parts that aren't empty, and raise for one that reaches beyond the file.

    Args:
        parts: pairs of the byte that a part begins at and its bytes.
        length: of the whole file, in bytes.
        where: the file's name, for messages.

    Raises:
        StorageError: a part doesn't lie in the file.

    Examples:
        >>> [len(list(parts_in_file([(1, data)], 3, "f"))) for data in (b"", b"ab")]
        [0, 1]
    """
    for byte, each in parts:
        buffer = byte_view(each, where)
        if buffer.nbytes:
            if not 0 <= byte <= length - buffer.nbytes:
                found, expected = f"bytes {byte} to {byte + buffer.nbytes}", f"a part of bytes 0 to {length}"
                raise StorageError(error_text(f"cannot write {where!r}", found=found, expected=expected))
            yield byte, buffer


def adjacent(
    parts: Iterable[tuple[int, Buffer]], *, most_bytes: int, most_buffers: int
) -> Iterator[tuple[int, list[Buffer]]]:
    """Yield adjacent parts in groups, each group with the byte that it begins at.

    Args:
        parts: pairs of the byte that a part begins at and its bytes.
        most_bytes: a group that has reached this length is complete.
        most_buffers: the most parts that a group may have.

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
    """Yield the buffers of parts that make up a whole file in order, and raise for others.

    Raises:
        StorageError: the parts leave gaps or aren't in order, as with several writers.

    Examples:
        >>> [bytes(buffer) for buffer in whole([(0, memoryview(b"ab")), (2, memoryview(b"c"))], 3, "f")]
        [b'ab', b'c']
    """
    end = 0
    for byte, buffer in parts_in_file(parts, length, where):
        if byte != end:
            raise _not_whole(where, byte, end)
        yield buffer
        end += buffer.nbytes
    if end != length:
        raise _not_whole(where, length, end)


def _not_whole(where: str, found: int, expected: int) -> StorageError:
    fix = "Save from one process, in another format, or to a local or mounted folder."
    what = f"cannot write {where!r} in parts: such a store takes a file from one writer, whole and in order"
    return StorageError(error_text(what, found=f"byte {found}", expected=f"byte {expected}", fix=fix))
