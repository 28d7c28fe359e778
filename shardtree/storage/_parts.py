"""Parts of a file, each with the byte that it begins at: checked, joined to neighbours, put into a whole."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ..errors import StorageError, error_text
from ._storage import Buffer


def checked(parts: Iterable[tuple[int, Buffer]], length: int, where: str) -> Iterator[tuple[int, Buffer]]:
    """Yield the parts that aren't empty; one that reaches beyond the file raises.

    Args:
        parts: pairs of the byte that a part begins at and its bytes.
        length: of the whole file, in bytes.
        where: the file's name, for messages.

    Raises:
        StorageError: a part doesn't lie in the file.

    Examples:
        >>> list(checked([(4, memoryview(b""))], 3, "f")), len(list(checked([(1, memoryview(b"ab"))], 3, "f")))
        ([], 1)
    """
    for byte, buffer in parts:
        if buffer.nbytes:
            if not 0 <= byte <= length - buffer.nbytes:
                found, expected = f"bytes {byte} to {byte + buffer.nbytes}", f"a part of bytes 0 to {length}"
                raise StorageError(error_text(f"cannot write {where!r}", found=found, expected=expected))
            yield byte, buffer


def neighbours(
    parts: Iterable[tuple[int, Buffer]], *, most_bytes: int, most_buffers: int
) -> Iterator[tuple[int, list[Buffer]]]:
    """Yield parts in groups without a gap, each group with the byte that it begins at.

    Args:
        parts: pairs of the byte that a part begins at and its bytes.
        most_bytes: a group of that many bytes takes no further part.
        most_buffers: how many parts a group has at most.

    Examples:
        >>> parts = [(0, memoryview(b"ab")), (2, memoryview(b"c")), (9, memoryview(b"d"))]
        >>> [(byte, len(group)) for byte, group in neighbours(parts, most_bytes=100, most_buffers=100)]
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


def whole(parts: Iterable[tuple[int, Buffer]], length: int, where: str) -> Iterator[Buffer]:
    """Yield the buffers of parts that are all of a file, in order; others raise.

    Raises:
        StorageError: the parts leave gaps or aren't in order, as those of one of several writers.

    Examples:
        >>> [bytes(buffer) for buffer in whole([(0, memoryview(b"ab")), (2, memoryview(b"c"))], 3, "f")]
        [b'ab', b'c']
    """
    end = 0
    for byte, buffer in checked(parts, length, where):
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
