"""The cost of running a load plan, computed without reading, by the same choices that `fetch` makes."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np

from ..geometry import Column
from ..plans import LoadPlan, ReadCost, Runs, Strided
from ._blocks import BLOCK_BYTES, incomplete_reads
from ._byte_ranges import ByteRanges, range_crc32
from ._checked import (
    StoredFile,
    Verify,
    blocks_to_check,
    in_file_order,
    of_file,
    ranges_to_check,
    read_modes,
    touched_blocks,
)
from ._ranged_fetch import planned_requests
from ._runs import clipped, windows_of
from ._strided import GAP_BYTES, hashed_ranges, split_pieces


def fetch_cost(files: Mapping[int, StoredFile], plan: LoadPlan, *, verify: Verify = "whole") -> ReadCost:
    """Return what `fetch` would read for a plan.

    A byte range in which strided pieces lie counts as read whole, as it is.

    Args:
        files: by their number in the plan.
        plan: what would be read.
        verify: which blocks would be checked against their hashes.

    Examples:
        >>> one = np.ones(1, dtype=np.int64)
        >>> from shardtree.plans import runs_plan
        >>> plan = runs_plan(Runs(file=one, byte=one, target=one - 1, target_byte=one - 1, length=one * 8))
        >>> fetch_cost({1: StoredFile("a", 100)}, plan)
        ReadCost(bytes_wanted=8, bytes_read=8, pieces=1, files=1)
    """
    strided = in_file_order(plan.strided)
    numbers = np.union1d(plan.runs.file, strided.file).tolist()
    extra = sum(
        _extra_bytes(files[number], of_file(plan.runs, number), of_file(strided, number), verify) for number in numbers
    )
    runs = int(plan.runs.length.sum())
    return ReadCost(plan.bytes_read, runs + extra, len(plan.runs.file) + len(strided.file), len(numbers))


def ranged_cost(files: Mapping[int, StoredFile], plan: LoadPlan, *, verify: Verify = "whole") -> ReadCost:
    """Return what `fetch` would read for a plan where each read is a request, as `fetch_cost` says of others.

    Examples:
        >>> one = np.ones(1, dtype=np.int64)
        >>> from shardtree.plans import runs_plan
        >>> plan = runs_plan(Runs(file=one, byte=one, target=one - 1, target_byte=one - 1, length=one * 8))
        >>> ranged_cost({1: StoredFile("a", 100)}, plan)
        ReadCost(bytes_wanted=8, bytes_read=8, pieces=1, files=1)
    """
    requests = planned_requests(files, plan, verify)
    nbytes = sum(request.end - request.begin for request in requests)
    pieces = len(plan.runs.file) + len(plan.strided.file)
    return ReadCost(plan.bytes_read, nbytes, pieces, len({request.file for request in requests}))


def _extra_bytes(file: StoredFile, runs: Runs, strided: Strided, verify: Verify) -> int:
    """Return how many bytes of a file are read in addition to its runs."""
    extra = sum(
        _strided_bytes(pieces, file.length, whole_blocks) for pieces, whole_blocks in read_modes(file, strided, verify)
    )
    if verify is None:
        return extra
    if file.ranges is not None:
        return extra + _ranges_read_again(file.ranges, runs, file.length, verify)
    if file.hashes is None:
        return extra
    incomplete = incomplete_reads(
        runs, file.length, blocks_to_check(file, touched_blocks(file, runs, strided), runs, verify)
    )
    again = np.unique(incomplete.byte // BLOCK_BYTES) * BLOCK_BYTES
    return extra + int((np.minimum(again + BLOCK_BYTES, file.length) - again).sum())


def _strided_bytes(pieces: Strided, length: int, whole_blocks: bool | None) -> int:
    """Return how many bytes are read for strided pieces."""
    pieces = split_pieces(pieces, GAP_BYTES) if whole_blocks is None else split_pieces(pieces)
    ranges = hashed_ranges(pieces, length, whole_blocks=bool(whole_blocks))
    return sum(end - begin for _, begin, end in ranges)


def _chains(begin: Column, end: Column) -> list[tuple[int, int]]:
    """Return (begin, end) of each chain of adjacent spans."""
    first = np.flatnonzero(np.append(True, begin[1:] != end[:-1])) if begin.size else begin
    last = np.append(first[1:], begin.size) - 1 if begin.size else begin
    return list(zip(begin[first].tolist(), end[last].tolist(), strict=True))


def _ranges_read_again(ranges: ByteRanges, runs: Runs, length: int, verify: Verify) -> int:
    """Return how many bytes are in ranges that are to be checked but aren't read whole."""
    # The windows of `read_runs`, since each thread's parts begin with its window.
    parts: dict[int, tuple[int, int]] = {}
    for window in windows_of(runs, length):
        part = clipped(runs, window)
        for low, high in _cut(ranges, _chains(part.byte, part.byte + part.length)):
            if high > parts.get(low, (0, 0))[0]:
                parts[low] = (high, 0)
    size: Any = ranges.end - ranges.begin
    chosen = ranges_to_check(ranges, runs, everything=verify == "all")
    places = ((int(ranges.begin[number]), int(ranges.end[number]), number) for number in chosen)
    return sum(int(size[number]) for begin, end, number in places if range_crc32(parts, begin, end) is None)


def _cut(ranges: ByteRanges, chains: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return chains cut where ranges begin."""
    pieces = []
    for low, high in chains:
        first, last = np.searchsorted(ranges.begin, [low, high], side="right").tolist()
        edges = [low, *(edge for edge in ranges.begin[first:last].tolist() if edge < high), high]
        pieces += list(pairwise(edges))
    return pieces
