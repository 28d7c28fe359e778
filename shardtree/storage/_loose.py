"""The ends of what is read that are parts of blocks: their hashes need the whole blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from ..geometry import Column
from ..plans import Runs
from ._blocks import BLOCK_BYTES, BlockHasher, Flags
from ._storage import Buffer, Reader

_STRETCH_BLOCKS = 4


def loose_ends(runs: Runs, length: int, blocks: Flags) -> Runs:
    """Return the parts of runs that lie in blocks of which they are no whole, each in one block, in the file's order.

    Runs that follow each other in the file, one right behind the other, are looked at together, as a `BlockHasher`
    that they go through does.

    Args:
        runs: of one file, in its order; they may overlap.
        length: of the file, in bytes.
        blocks: which of its blocks matter, bool (blocks,).

    Examples:
        >>> column = lambda *numbers: np.array(numbers)
        >>> begin, size, zeros = column(5, 10), column(5, BLOCK_BYTES), column(0, 0)
        >>> runs = Runs(file=zeros, byte=begin, target=column(0, 1), target_byte=zeros, length=size)
        >>> loose = loose_ends(runs, 2 * BLOCK_BYTES, np.array([False, True]))
        >>> loose.byte.tolist(), loose.target_byte.tolist(), loose.length.tolist()
        ([262144], [262134], [10])
    """
    runs = _rows(runs, np.flatnonzero(runs.length))
    if not runs.byte.size:
        return runs
    low, high = _chains(runs.byte, runs.byte + runs.length)
    inner = -(-low // BLOCK_BYTES) * BLOCK_BYTES
    outer = np.where(high == length, high, np.maximum(high // BLOCK_BYTES * BLOCK_BYTES, inner))
    parts = (_clipped(runs, low, np.minimum(inner, high)), _clipped(runs, outer, high))
    both = Runs(*(np.concatenate([getattr(part, name) for part in parts]) for name in Runs.__slots__))
    both = _rows(both, np.argsort(both.byte, kind="stable"))
    return _rows(both, np.flatnonzero(blocks[both.byte // BLOCK_BYTES]))


def _chains(begin: Column, end: Column) -> tuple[Column, Column]:
    """Return, for each span, where the chain of spans begins and ends that it is part of."""
    is_first = np.append(True, begin[1:] != end[:-1])
    chain = is_first.cumsum() - 1
    first = np.flatnonzero(is_first)
    last = np.append(first[1:], begin.size) - 1
    return begin[first][chain], end[last][chain]


def _clipped(runs: Runs, low: Column, high: Column) -> Runs:
    """Return what of each run lies between two places; those of which nothing does are left out."""
    begin, end = np.maximum(runs.byte, low), np.minimum(runs.byte + runs.length, high)
    clipped = Runs(runs.file, begin, runs.target, runs.target_byte + begin - runs.byte, end - begin)
    return _rows(clipped, np.flatnonzero(begin < end))


def _rows(runs: Runs, rows: Column) -> Runs:
    return Runs(*(getattr(runs, name)[rows] for name in Runs.__slots__))


def read_rest(reader: Reader, loose: Runs, views: Sequence[Buffer], hasher: BlockHasher) -> None:
    """Read the blocks once more, and whole, that were read in part: what is delivered is what was hashed.

    Args:
        reader: of the file.
        loose: the parts, as `loose_ends` gives them.
        views: for each requested shard its bytes.
        hasher: of the file; is given all that is read.
    """
    scratch = memoryview(bytearray(_STRETCH_BLOCKS * BLOCK_BYTES))
    for first, last in _stretches(np.unique(loose.byte // BLOCK_BYTES).tolist()):
        begin = first * BLOCK_BYTES
        stretch = scratch[: min((last + 1) * BLOCK_BYTES, reader.length) - begin]
        reader.read_into(begin, [stretch])
        hasher.update(stretch, begin)
        rows = np.searchsorted(loose.byte, [begin, begin + stretch.nbytes])
        columns = (loose.byte, loose.target, loose.target_byte, loose.length)
        for byte, target, at, length in zip(*(column[slice(*rows)].tolist() for column in columns), strict=True):
            views[target][at : at + length] = stretch[byte - begin : byte - begin + length]


def _stretches(numbers: list[int]) -> Iterator[tuple[int, int]]:
    """Yield the first and the last of numbers that follow each other, a few at a time: they come in one request."""
    start = 0
    for stop, number in enumerate(numbers, start=1):
        goes_on = stop < len(numbers) and numbers[stop] == number + 1
        if not goes_on or stop - start == _STRETCH_BLOCKS:
            yield numbers[start], number
            start = stop
