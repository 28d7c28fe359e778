"""The requests that fetch what a load plan reads: few and large, for storages where each read is a request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ..geometry import Column, rows_of
from ..plans import LoadPlan, Runs, Strided
from ._blocks import BLOCK_BYTES
from ._checked import of_file
from ._strided import last_byte, split_pieces

_GAP_BYTES = 1024 * 1024
"""Unused bytes are fetched too if there are fewer of them in a row: a request costs more than they do."""

REQUEST_BYTES = 8 * 1024 * 1024
"""Requests end at multiples of this, where blocks end, so that two of them don't fetch the same bytes; pieces that lie
across one are fetched with what comes before."""


@dataclass(frozen=True, slots=True, eq=False)
class Wanted:
    """What is fetched of a file in addition to what a plan reads of it, so that it can be checked.

    Attributes:
        begin: first byte of each byte range, int64 (ranges,).
        end: one past its last byte, int64 (ranges,).
        whole_blocks: whether pieces are fetched with the whole blocks that they touch.
        length: of the file, in bytes.
    """

    begin: Column
    end: Column
    whole_blocks: bool
    length: int


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """A byte range of a file that is fetched by one request, and what is copied out of it.

    Attributes:
        file: number of the file.
        begin: first byte.
        end: one past the last byte.
        own_end: where the next request of the file begins, if that is before `end`.
        runs: what is copied as it lies there.
        pieces: what is copied item by item.
    """

    file: int
    begin: int
    end: int
    own_end: int
    runs: Runs
    pieces: Strided


def requests_of(plan: LoadPlan, wanted: Mapping[int, Wanted], most_bytes: int = REQUEST_BYTES) -> list[Request]:
    """Return the requests that fetch what a plan reads, by file and byte.

    Args:
        plan: what to read.
        wanted: what is fetched in addition, by file.
        most_bytes: of a request; they end at multiples of this.

    Examples:
        >>> from shardtree.plans import runs_plan
        >>> column = lambda *numbers: np.array(numbers)
        >>> runs = Runs(column(0, 0), column(10, 5_000_000), column(0, 0), column(0, 100), column(100, 100))
        >>> [(each.begin, each.end) for each in requests_of(runs_plan(runs), {})]
        [(10, 110), (5000000, 5000100)]
        >>> block = Wanted(column(0), column(262144), True, 6_000_000)
        >>> [(each.begin, each.end) for each in requests_of(runs_plan(runs), {0: block})]
        [(0, 262144), (5000000, 5000100)]
    """
    runs, pieces = _cut_runs(plan.runs, most_bytes), split_pieces(plan.strided, _GAP_BYTES)
    pieces = rows_of(pieces, np.argsort(pieces.file, kind="stable"))  # runs are sorted already
    return [
        request
        for number in np.union1d(runs.file, pieces.file).tolist()
        for request in _of_file(number, of_file(runs, number), of_file(pieces, number), wanted.get(number), most_bytes)
    ]


def _of_file(number: int, runs: Runs, pieces: Strided, wanted: Wanted | None, most_bytes: int) -> list[Request]:
    low, high = pieces.byte, last_byte(pieces)
    if wanted is not None and wanted.whole_blocks:
        low, high = low // BLOCK_BYTES * BLOCK_BYTES, -(-high // BLOCK_BYTES) * BLOCK_BYTES
        high = np.minimum(high, wanted.length)
    more = _cells(wanted.begin, wanted.end, most_bytes)[1:] if wanted is not None else (low[:0], low[:0])
    begin = np.concatenate((runs.byte, low, more[0]))
    end = np.concatenate((runs.byte + runs.length, high, more[1]))
    group = _groups(begin, end, most_bytes)
    of_runs, of_pieces = np.split(group, [runs.byte.size, runs.byte.size + low.size])[:2]
    count = int(group.max(initial=-1)) + 1
    first, last = np.full(count, np.iinfo(np.int64).max), np.zeros(count, dtype=np.int64)
    np.minimum.at(first, group, begin)
    np.maximum.at(last, group, end)
    own_last = np.minimum(last, np.append(first[1:], last[-1:]))
    by_run, by_piece = _by_group(of_runs, count), _by_group(of_pieces, count)
    return [
        Request(
            number,
            int(first[each]),
            int(last[each]),
            int(own_last[each]),
            rows_of(runs, by_run[each]),
            rows_of(pieces, by_piece[each]),
        )
        for each in range(count)
    ]


def _groups(begin: Column, end: Column, most_bytes: int) -> Column:
    """Return the number of the request that each span belongs to, ascending by their first bytes, int64 (spans,)."""
    order = np.argsort(begin, kind="stable")
    low, reached = begin[order], np.maximum.accumulate(end[order])
    breaks = low[1:] > reached[:-1] + _GAP_BYTES
    cluster = np.append(0, breaks.cumsum())[: low.size]
    first, last = (np.searchsorted(cluster, cluster, side=side) for side in ("left", "right"))
    # What is little in all comes by one request, wherever it lies.
    is_long = reached[last - 1] - low[first] > most_bytes * 3 // 2
    cell = np.where(is_long, low // most_bytes, -1)
    is_next = breaks | (cell[1:] != cell[:-1])
    group = np.zeros(low.size, dtype=np.int64)
    group[order[1:]] = is_next.cumsum()
    return group


def _by_group(group: Column, count: int) -> list[Column]:
    """Return the rows of each group, in their order."""
    order = np.argsort(group, kind="stable")
    return np.split(order, np.searchsorted(group[order], np.arange(1, count)))


def _cut_runs(runs: Runs, most_bytes: int) -> Runs:
    """Return runs, cut where requests end."""
    runs = rows_of(runs, runs.length > 0)
    row, begin, end = _cells(runs.byte, runs.byte + runs.length, most_bytes)
    target_byte = runs.target_byte[row] + begin - runs.byte[row]
    return Runs(runs.file[row], begin, runs.target[row], target_byte, end - begin)


def _cells(begin: Column, end: Column, most_bytes: int) -> tuple[Column, Column, Column]:
    """Return spans cut where requests end: of each part the number of its span, its begin and its end."""
    first = begin // most_bytes
    count = (end - 1) // most_bytes - first + 1
    row = np.repeat(np.arange(count.size), count)
    number = first[row] + np.arange(row.size) - np.repeat(np.cumsum(count) - count, count)
    low, high = number * most_bytes, (number + 1) * most_bytes
    return row, np.maximum(begin[row], low), np.minimum(end[row], high)
