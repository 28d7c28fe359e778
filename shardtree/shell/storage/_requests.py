"""The requests that execute a load plan: byte ranges that are read together, their destinations, and their checks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, starmap

import numpy as np

from ...core import limits
from ...core.geometry import Column, joined_rows, rows_of, span_numbers
from ...core.plans import LoadPlan, ReadCost, Runs, Strided
from ._blocks import (
    BLOCK_BYTES,
    NEARLY_WHOLE_BYTES,
    BlockHasher,
    Flags,
    Verify,
    block_spans,
    checks_all,
    missing,
    touched_units,
)
from ._capabilities import can
from ._checked import RangeHasher, StoredFile, in_file_order, of_file, ranges_to_check
from ._storage import Storage
from ._strided import GAP_BYTES, is_contiguous, last_byte, split_pieces, wide_reads
from ._threads import usual_threads

_GAP_BYTES = 1024 * 1024
"""Shorter gaps between wanted bytes are fetched from a store too: they cost less than another request."""

_FAR = 2**62


@dataclass(frozen=True, slots=True)
class Cut:
    """A rule for cutting a load plan into requests.

    Attributes:
        most_bytes: Size in bytes of the windows into which files are divided. Reads that begin in the same window form
            a request, and contiguous reads are cut at the windows' boundaries.
        whole: Whether all bytes from the first to the last byte of a request are fetched, as from an object store. Then
            a request also ends at a long gap, and a short group of reads close together is one request even if it
            crosses a window's boundary. Blocks that strided pieces touch are fetched whole, to be checked. If `whole`
            is False, only the wanted bytes of a request are read.
    """

    most_bytes: int
    whole: bool

    def nbytes(self, request: Request) -> int:
        """Return the number of bytes that a request reads."""
        if self.whole:
            return request.end - request.begin
        wide = wide_reads(request.low, request.high)
        return int(request.runs.length.sum()) + sum(end - begin for _, begin, end in wide)


def cut_of(storage: Storage | None, plan: LoadPlan) -> Cut:
    """Return the rule for cutting a plan into requests to the storage of its files; None stands for local files."""
    if storage is not None and can(storage).read_range is not None:
        return Cut(limits.REQUEST_BYTES * can(storage).request_scale, whole=True)
    # A small plan gets smaller windows than usual, so that each thread gets a share.
    share = -(-plan.bytes_read // (usual_threads() * limits.STEP_BYTES)) * limits.STEP_BYTES
    return Cut(min(limits.WINDOW_BYTES, max(limits.WINDOW_BYTES // 4, share)), whole=False)


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """A byte range of a file, and the reads and copies that one thread makes for it.

    Attributes:
        file: Number of the file in the plan.
        begin: First byte of the range.
        end: One past the last byte of the range.
        runs: Contiguous reads into contiguous memory, in file order and without overlaps. Bytes that are read only to
            be hashed have the target number -1.
        pieces: Strided pieces (boxes of elements), sorted by `low`; they are copied element by element.
        low: First byte that is read for each piece, int64 (pieces,).
        high: One past the last byte that is read for each piece, int64 (pieces,).
    """

    file: int
    begin: int
    end: int
    runs: Runs
    pieces: Strided
    low: Column
    high: Column


@dataclass(frozen=True, slots=True, eq=False)
class Checks:
    """The checks of a file while it is read: of blocks by their hashes, or of byte ranges by their CRC32s.

    Attributes:
        file: The file.
        units: Number of blocks that the plan touches, checked or not. If the file has CRC32s of byte ranges instead of
            block hashes: the number of its byte ranges.
        blocks: Flags of the blocks to check, bool (blocks,); None if no block is checked.
        ranges: Indices of the byte ranges to check.
    """

    file: StoredFile
    units: int
    blocks: Flags | None = None
    ranges: Sequence[int] = ()

    def hasher(self) -> BlockHasher | RangeHasher | None:
        """Return a new hasher for the bytes of a request, or None if nothing is checked."""
        if self.file.ranges is not None and self.ranges:
            return RangeHasher(self.file.ranges)
        return None if self.blocks is None else BlockHasher(self.file.length)

    def looks_at(self, begin: int, end: int) -> bool:
        """Return whether a byte range touches a block that is checked."""
        return self.blocks is not None and bool(self.blocks[begin // BLOCK_BYTES : -(-end // BLOCK_BYTES)].any())


def requests_of(
    files: Mapping[int, StoredFile], plan: LoadPlan, verify: Verify, cut: Cut
) -> tuple[list[Request], dict[int, Checks]]:
    """Return the requests that execute a plan, ordered by file and byte, and the checks of each file by its number.

    A block or byte range that is checked is read whole: by one request, or in adjacent parts by several.

    Args:
        files: Files by their number in the plan.
        plan: Reads to execute.
        verify: Choice of the blocks to check: "whole", "all" or None, as `Verify` explains.
        cut: The rule that cuts the plan into requests.

    Examples:
        >>> from shardtree.core.plans import runs_plan
        >>> column = lambda *numbers: np.array(numbers)
        >>> runs = Runs(column(0, 0), column(10, 5_000_000), column(0, 0), column(0, 100), column(100, 100))
        >>> file, cut = StoredFile("w", 6_000_000, np.zeros(23, np.uint64)), Cut(limits.REQUEST_BYTES, whole=True)
        >>> [(each.begin, each.end) for each in requests_of({0: file}, runs_plan(runs), None, cut)[0]]
        [(10, 110), (5000000, 5000100)]
        >>> [(each.begin, each.end) for each in requests_of({0: file}, runs_plan(runs), "all", cut)[0]]
        [(0, 262144), (4980736, 5242880)]
    """
    runs, pieces = plan.runs, in_file_order(plan.strided)
    requests, checks = list[Request](), dict[int, Checks]()
    for number in np.union1d(runs.file, pieces.file).tolist():
        rows = of_file(runs, number), of_file(pieces, number)
        new, checks[number] = _requests_of_file(files[number], number, *rows, verify, cut)
        requests += new
    return requests, checks


def fetch_cost(
    files: Mapping[int, StoredFile], plan: LoadPlan, *, verify: Verify = "whole", storage: Storage | None = None
) -> ReadCost:
    """Return the cost of reading a plan by `fetch`: the numbers of bytes, pieces and files.

    A byte range that contains strided pieces counts as a whole, since it is read whole.

    Args:
        files: Files by their number in the plan.
        plan: Reads whose cost is estimated.
        verify: Choice of the blocks to check: "whole", "all" or None, as `Verify` explains.
        storage: Storage of the files; None for a local folder.

    Examples:
        >>> one = np.ones(1, dtype=np.int64)
        >>> from shardtree.core.plans import runs_plan
        >>> plan = runs_plan(Runs(file=one, byte=one, target=one - 1, target_byte=one - 1, length=one * 8))
        >>> fetch_cost({1: StoredFile("a", 100)}, plan)
        ReadCost(bytes_wanted=8, bytes_read=8, pieces=1, files=1)
    """
    cut = cut_of(storage, plan)
    requests, checks = requests_of(files, plan, verify, cut)
    pieces = len(plan.runs.file) + len(plan.strided.file)
    return ReadCost(plan.bytes_read, sum(map(cut.nbytes, requests)), pieces, len(checks))


def _requests_of_file(
    file: StoredFile, number: int, runs: Runs, pieces: Strided, verify: Verify, cut: Cut
) -> tuple[list[Request], Checks]:
    direct, pieces = _apart(runs if runs.length.all() else rows_of(runs, runs.length > 0), pieces)
    pieces = split_pieces(pieces, _GAP_BYTES if cut.whole else GAP_BYTES)
    check, *whole = _checks_of(file, direct, pieces, runs, verify, cut)
    direct = _cut_runs(with_left_out(direct, number, *whole), cut.most_bytes)
    low, high = _widen(pieces, check)
    if low.size > 1:
        order = np.argsort(low, kind="stable")
        pieces, low, high = rows_of(pieces, order), low[order], high[order]
    begin, end = np.concatenate((direct.byte, low)), np.concatenate((direct.byte + direct.length, high))
    group = _groups(begin, end, cut)
    count = int(group.max(initial=-1)) + 1
    first, last = np.full(count, _FAR), np.zeros(count, dtype=np.int64)
    np.minimum.at(first, group, begin)
    np.maximum.at(last, group, end)
    # Runs and pieces are in the order of their groups already.
    of_runs, of_pieces = (
        starmap(slice, pairwise(part.searchsorted(np.arange(count + 1)).tolist()))
        for part in (group[: direct.byte.size], group[direct.byte.size :])
    )
    return [
        Request(number, low_byte, high_byte, rows_of(direct, run), rows_of(pieces, piece), low[piece], high[piece])
        for low_byte, high_byte, run, piece in zip(first.tolist(), last.tolist(), of_runs, of_pieces, strict=True)
    ], check


def _apart(runs: Runs, pieces: Strided) -> tuple[Runs, Strided]:
    """Turn runs that overlap each other in the file into strided pieces; return the remaining runs and all pieces.

    Runs are read straight into their targets, so a byte of the file may be in only one. Pieces are copied instead.
    """
    meets = runs.byte[1:] < np.maximum.accumulate(runs.byte + runs.length)[:-1]
    if not meets.any():
        return runs, pieces
    cluster = np.append(0, (~meets).cumsum())
    overlaps = np.bincount(cluster)[cluster] > 1
    rows = rows_of(runs, overlaps)
    shape = np.ones((rows.file.size, max(1, pieces.shape.shape[1])), dtype=np.int64)
    shape[:, -1] = rows.length
    ones = np.ones_like(shape)
    copies = Strided(rows.file, rows.byte, rows.target, rows.target_byte, shape, ones, ones, ones[:, 0])
    return rows_of(runs, ~overlaps), joined_rows([pieces, copies]) if pieces.file.size else copies


def _checks_of(
    file: StoredFile, direct: Runs, pieces: Strided, runs: Runs, verify: Verify, cut: Cut
) -> tuple[Checks, Column, Column]:
    """Return the checks of a file, and the spans that must be read whole for them.

    Args:
        file: The file.
        direct: Runs in the file that overlap no other run.
        pieces: Strided pieces in the file, and the overlapping runs in the form of pieces.
        runs: All runs in the file, overlapping or not.
        verify: Choice of the blocks to check: "whole", "all" or None, as `Verify` explains.
        cut: Rule for cutting a load plan into requests.

    Returns:
        The checks; first byte of each span, and one past its last byte, int64 (spans,) each.
    """
    if file.ranges is not None:
        numbers = [] if verify is None else ranges_to_check(file.ranges, runs, everything=verify == "all")
        ranges = file.ranges
        return Checks(file, ranges.begin.size, ranges=numbers), ranges.begin[numbers], ranges.end[numbers]
    begin, end = direct.byte, direct.byte + direct.length
    by_runs = touched_units(begin, end, file.length, BLOCK_BYTES)
    by_pieces = touched_units(pieces.byte, last_byte(pieces), file.length, BLOCK_BYTES)
    blocks = by_runs | by_pieces
    count = int(np.count_nonzero(blocks))
    if verify is None or file.hashes is None:
        return Checks(file, count), begin[:0], begin[:0]
    if not checks_all(file.length, verify):
        rows = is_contiguous(pieces)
        begin, end = np.append(begin, pieces.byte[rows]), np.append(end, last_byte(pieces)[rows])
        order = np.argsort(begin, kind="stable")
        nearly = missing(begin[order], end[order], file.length) <= NEARLY_WHOLE_BYTES
        blocks &= nearly | by_pieces if cut.whole else nearly
    return Checks(file, count, blocks if blocks.any() else None), *block_spans(blocks & by_runs, file.length)


def _widen(pieces: Strided, check: Checks) -> tuple[Column, Column]:
    """Return the first byte that is read for each piece, and one past the last, int64 (pieces,) each.

    If a block is checked, it is read whole.
    """
    low, high = pieces.byte, last_byte(pieces)
    if check.blocks is None:
        return low, high
    first, last = low // BLOCK_BYTES, (high - 1) // BLOCK_BYTES
    is_first, is_last = (check.blocks.take(number, mode="clip") for number in (first, last))
    end = np.minimum((last + 1) * BLOCK_BYTES, check.file.length)
    return np.where(is_first, first * BLOCK_BYTES, low), np.where(is_last, end, high)


def with_left_out(runs: Runs, file: int, low: Column, high: Column) -> Runs:
    """Add runs for the bytes of the given spans that the given runs don't cover; return all runs in file order.

    The new runs have the target -1: their bytes are read only to be hashed.

    Args:
        runs: Runs in one file, in file order, without overlaps.
        file: Number of the file.
        low: First byte of each span, ascending, int64 (spans,). Spans are byte ranges to read whole, such as blocks.
        high: One past the last byte of each span, int64 (spans,).
    """
    if not low.size:
        return runs
    gap_low, gap_high = np.append(0, runs.byte + runs.length), np.append(runs.byte, _FAR)
    gaps = gap_low < gap_high
    gap_low, gap_high = gap_low[gaps], gap_high[gaps]
    first = high.searchsorted(gap_low, side="right")
    count = np.maximum(low.searchsorted(gap_high) - first, 0)
    gap, span = span_numbers(first, count)
    begin, end = np.maximum(gap_low[gap], low[span]), np.minimum(gap_high[gap], high[span])
    rows = np.flatnonzero(begin < end)
    if not rows.size:
        return runs
    none = np.zeros_like(rows)
    both = joined_rows([runs, Runs(none + file, begin[rows], none - 1, none, end[rows] - begin[rows])])
    return rows_of(both, np.argsort(both.byte, kind="stable"))


def _groups(begin: Column, end: Column, cut: Cut) -> Column:
    """Assign spans to requests by the rule `cut`, and return the number of each span's request, int64 (spans,).

    The numbers ascend with the spans' first bytes.
    """
    order = np.argsort(begin, kind="stable")
    low, reach = begin[order], np.maximum.accumulate(end[order])
    cell = low // cut.most_bytes
    is_next = cell[1:] != cell[:-1]
    if cut.whole:
        breaks = low[1:] > reach[:-1] + _GAP_BYTES
        cluster = np.append(0, breaks.cumsum())[: low.size]
        first, last = (np.searchsorted(cluster, cluster, side=side) for side in ("left", "right"))
        # A short cluster of spans is one request, even if it crosses a window's boundary.
        is_long = reach[last - 1] - low[first] > cut.most_bytes * 3 // 2
        is_next = breaks | (is_next & is_long[1:])
    group = np.zeros(low.size, dtype=np.int64)
    group[order[1:]] = is_next.cumsum()
    return group


def _cut_runs(runs: Runs, most_bytes: int) -> Runs:
    """Return runs, cut at the boundaries of windows: ranges of `most_bytes` bytes that tile a file."""
    if (runs.byte // most_bytes == (runs.byte + runs.length - 1) // most_bytes).all():
        return runs
    row, begin, end = _cells(runs.byte, runs.byte + runs.length, most_bytes)
    target_byte = runs.target_byte[row] + begin - runs.byte[row]
    return Runs(runs.file[row], begin, runs.target[row], target_byte, end - begin)


def _cells(begin: Column, end: Column, most_bytes: int) -> tuple[Column, Column, Column]:
    """Cut spans of a file at all multiples of `most_bytes`, and return the parts.

    Returns:
        Index of each part's span, first byte of the part, and one past its last byte, int64 (parts,) each.
    """
    first = begin // most_bytes
    count = (end - 1) // most_bytes - first + 1
    row, number = span_numbers(first, count)
    low, high = number * most_bytes, (number + 1) * most_bytes
    return row, np.maximum(begin[row], low), np.minimum(end[row], high)
