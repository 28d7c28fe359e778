"""A folder that hashes what it is given, and keeps of it only what isn't zero: files of terabytes that take no room."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

import xxhash

from shardtree.storage import LocalStorage

STEPS = (1024 * 1024, 64 * 1024, 4096)
"""Bytes that are hashed at once; those in which something isn't zero, again in smaller steps."""


@dataclass(frozen=True, slots=True)
class SparseFolder(LocalStorage):
    """A folder whose files have holes where they are zeros, which their hashes tell.

    Examples:
        >>> import tempfile
        >>> folder = SparseFolder(tempfile.mkdtemp())
        >>> folder.write("a", [memoryview(bytes(2**30)), memoryview(b"end")], durable=False)
        1073741827
        >>> os.stat(folder.where("a")).st_blocks * 512 < 2**20
        True
    """

    def write(self, name: str, buffers: Iterable[Any], *, durable: bool) -> int:
        """Write a new file from buffers, in order, and return its length."""
        length = 0
        with open(self.where(name), "wb", buffering=0) as file:
            for buffer in buffers:
                _write_hashed(file.fileno(), length, memoryview(buffer).cast("B"))
                length += memoryview(buffer).nbytes
            file.truncate(length)
        return length

    def write_parts(self, name: str, length: int, parts: Iterable[tuple[int, Any]], *, durable: bool) -> None:
        """Write parts of a file of `length` bytes."""
        descriptor = os.open(self.where(name), os.O_WRONLY | os.O_CREAT, 0o666)
        try:
            os.ftruncate(descriptor, length)
            for byte, buffer in parts:
                _write_hashed(descriptor, byte, memoryview(buffer).cast("B"))
        finally:
            os.close(descriptor)


def _write_hashed(descriptor: int, byte: int, buffer: memoryview, steps: tuple[int, ...] = STEPS) -> None:
    for start in range(0, buffer.nbytes, steps[0]):
        part = buffer[start : start + steps[0]]
        if xxhash.xxh3_64_intdigest(part) == _hash_of_zeros(part.nbytes):
            continue
        if steps[1:]:
            _write_hashed(descriptor, byte + start, part, steps[1:])
        else:
            os.pwrite(descriptor, part, byte + start)


@cache
def _hash_of_zeros(nbytes: int) -> int:
    return xxhash.xxh3_64_intdigest(bytes(nbytes))
