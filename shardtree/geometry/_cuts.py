"""One axis cut into parts, and parts cut again: which stretches of it a part is."""

from __future__ import annotations

from math import ceil

Spans = tuple[tuple[int, int], ...]
"""Stretches of an axis, as (start, stop), in the order in which a local tensor has them; no two of them adjoin."""


def cut_spans(spans: Spans, parts: int, index: int, split_factor: int = 1) -> Spans:
    """Return the part of some stretches that is cut off for one of several holders.

    The indices are divided into `split_factor` blocks, each block into `parts` pieces, and the part is piece `index`
    of every block. Blocks and pieces are as `torch.chunk` makes them: all as long as the first, but the last ones,
    which may be shorter or have nothing.

    Args:
        spans: what is cut.
        parts: how many holders there are.
        index: which one, from 0.
        split_factor: how many blocks there are; more than one interleaves the parts.

    Examples:
        >>> [cut_spans(((0, 10),), 4, index) for index in range(4)]
        [((0, 3),), ((3, 6),), ((6, 9),), ((9, 10),)]
        >>> cut_spans(((0, 8),), 2, 1, split_factor=2)
        ((2, 4), (6, 8))

    References:
        torch.distributed.tensor's Shard and _StridedShard, torch 2.13.
    """
    length = sum(stop - start for start, stop in spans)
    if split_factor == 1:
        return _between(spans, *_piece(length, parts, index))
    found: list[tuple[int, int]] = []
    for block in range(split_factor):
        begin, end = _piece(length, split_factor, block)
        start, stop = _piece(end - begin, parts, index)
        found += _between(spans, begin + start, begin + stop)
    return _joined(found)


def _piece(length: int, parts: int, index: int) -> tuple[int, int]:
    size = ceil(length / parts)
    return min(index * size, length), min((index + 1) * size, length)


def _between(spans: Spans, start: int, stop: int) -> Spans:
    """Return what lies between two positions, counted along the stretches."""
    found, position = [], 0
    for begin, end in spans:
        low, high = max(start - position, 0), min(stop - position, end - begin)
        if low < high:
            found.append((begin + low, begin + high))
        position += end - begin
    return tuple(found)


def _joined(spans: list[tuple[int, int]]) -> Spans:
    joined: list[tuple[int, int]] = []
    for start, stop in spans:
        if joined and joined[-1][1] == start:
            start = joined.pop()[0]
        joined.append((start, stop))
    return tuple(joined)
