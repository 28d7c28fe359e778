"""A file's bytes on their way to it, and their block hashes."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

from ._blocks import BLOCK_BYTES, BlockHasher, Hashes, hash_column
from ._storage import Buffer
from ._threads import usual_threads

_PART_BYTES = 4 * BLOCK_BYTES

_BESIDE_BYTES = 16 * BLOCK_BYTES
"""Smaller buffers aren't worth another thread's attention."""


def hashed(buffers: Iterable[Buffer], hasher: BlockHasher) -> Generator[Buffer, None, None]:
    """Yield a file's bytes as they are, hashing them on their way.

    Large buffers come in parts that end at the same places of the file whatever lies where, since the system keeps a
    file in larger pages when it is written in aligned pieces. Each is hashed right before it is written, when it is
    then in the processor's cache.
    """
    for part in in_parts(buffers):
        hasher.update(part)
        yield part
    hasher.finish()


def hashed_beside(buffers: Iterable[Buffer], hasher: BlockHasher) -> Generator[Buffer, None, None]:
    """Yield a file's bytes as `hashed` does; where this process has another thread to spend, that one hashes.

    It hashes a large buffer while it is written. Whoever doesn't take all of them closes it, which ends that thread.
    """
    if usual_threads() < 2:
        yield from hashed(buffers, hasher)
    else:
        yield from _hashed_beside(buffers, hasher)
        hasher.finish()


def _hashed_beside(buffers: Iterable[Buffer], hasher: BlockHasher) -> Iterator[Buffer]:
    with ThreadPoolExecutor(1) as thread:
        at = 0
        for buffer in buffers:
            if buffer.nbytes < _BESIDE_BYTES:
                hasher.update(buffer)
                yield from in_parts([buffer], at)
            else:
                # Done before the next buffer is asked for, which may lie in the same memory.
                wait = _beside(thread, hasher, buffer)
                yield from in_parts([buffer], at)
                wait()
            at += buffer.nbytes


def _beside(thread: ThreadPoolExecutor, hasher: BlockHasher, buffer: Buffer) -> Callable[[], None]:
    """Have another thread hash a buffer, and return what waits for it."""
    left = [buffer]

    def catch_up() -> None:
        while left:
            hasher.update(left.pop())

    try:
        return thread.submit(catch_up).result
    except RuntimeError:
        # An asynchronous save may go on while the interpreter ends, and no thread takes work then. Where one couldn't
        # be begun for another reason, a later one may find this work too, when there is nothing left of it.
        return catch_up


def in_parts(buffers: Iterable[Buffer], at: int = 0) -> Generator[Buffer, None, None]:
    """Yield buffers in parts that end at multiples of a MiB of the file that they begin in at a byte.

    Examples:
        >>> [part.nbytes for part in in_parts([memoryview(bytes(10)), memoryview(bytes(1024 * 1024))])]
        [10, 1048566, 10]
    """
    for buffer in buffers:
        start = 0
        while start < buffer.nbytes:
            part = buffer[start : start + _PART_BYTES - at % _PART_BYTES]
            yield part
            start += part.nbytes
            at += part.nbytes


def block_hashes(buffers: Iterable[Buffer]) -> Hashes:
    """Return the hashes of all blocks of a file, given as buffers in order.

    Examples:
        >>> block_hashes([memoryview(bytes(BLOCK_BYTES)), memoryview(b"end")]).size
        2
    """
    hasher = BlockHasher()
    for _ in hashed(buffers, hasher):
        pass
    return hash_column(hasher)
