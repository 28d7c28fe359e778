"""Runs a load plan on a storage where each read is a request: many in flight, each checked and copied as it comes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice

import numpy as np
import torch

from ..codec import crc32
from ..geometry import rows_of
from ..plans import LoadPlan, Runs, Strided
from ._blocks import BLOCK_BYTES, Flags, block_hash
from ._byte_ranges import range_crc32
from ._capabilities import ReadRange, can
from ._checked import (
    ReadReport,
    StoredFile,
    Verify,
    block_spans,
    blocks_to_check,
    damaged,
    in_file_order,
    of_file,
    ranges_to_check,
    touched_blocks,
    wrong_length,
)
from ._object_streams import copy_bytes
from ._requests import REQUEST_BYTES, Request, Wanted, requests_of
from ._storage import Buffer, Storage
from ._strided import copy_piece
from ._threads import usual_threads

_IN_FLIGHT = 32
"""Requests of a load at a time; those of a process have at most `_MOST_BYTES` together."""

_SHORT_LATENCY = 0.01  # seconds
_LONG_WAIT = 0.05  # seconds

_MOST_BYTES = 256 * 1024 * 1024

_LITTLE = 64 * 1024


@dataclass(frozen=True, slots=True, eq=False)
class Checks:
    """What of a file is checked while it is read.

    Attributes:
        file: which file.
        touched: blocks that are checked if they come whole, bool (blocks,); None where there are no hashes.
        ranges: numbers of the byte ranges that are checked by their CRC32s.
        unchecked: how many blocks or byte ranges aren't looked at in any case.
    """

    file: StoredFile
    touched: Flags | None = None
    ranges: Sequence[int] = ()
    unchecked: int = 0


@dataclass(slots=True, eq=False)
class Sums:
    """The checksums found in a file's requests.

    Attributes:
        blocks: hash of each block that came whole, by its number; -1 if it came twice, with different bytes.
        parts: CRC32s of parts of byte ranges: first byte → (one past the last byte, CRC32).
    """

    blocks: dict[int, int] = field(default_factory=dict)
    parts: dict[int, tuple[int, int]] = field(default_factory=dict)


def checks_of(file: StoredFile, runs: Runs, strided: Strided, verify: Verify) -> tuple[Checks, Wanted]:
    """Return what of a file is checked, and what is fetched for that in addition.

    Args:
        file: to be read.
        runs: all of that file.
        strided: likewise.
        verify: which blocks are checked.
    """
    none = np.zeros(0, dtype=np.int64)
    if file.ranges is not None:
        if verify is None:
            return Checks(file, unchecked=file.ranges.begin.size), Wanted(none, none, False, file.length)
        chosen = ranges_to_check(file.ranges, runs, everything=verify == "all")
        spans = (file.ranges.begin[chosen], file.ranges.end[chosen])
        return Checks(file, ranges=chosen, unchecked=file.ranges.begin.size - len(chosen)), Wanted(
            *spans, False, file.length
        )
    touched = touched_blocks(file, runs, strided)
    if verify is None or file.hashes is None:
        return Checks(file, unchecked=int(touched.sum())), Wanted(none, none, False, file.length)
    by_runs = touched_blocks(file, runs, rows_of(strided, slice(0)))
    spans = block_spans(blocks_to_check(file, by_runs, runs, verify), file.length)
    return Checks(file, touched), Wanted(*spans, True, file.length)


def fetch_ranged(
    storage: Storage,
    read_range: ReadRange,
    files: Mapping[int, StoredFile],
    plan: LoadPlan,
    views: Sequence[Buffer],
    memories: Sequence[torch.Tensor],
    *,
    verify: Verify,
    progress: Callable[[int], None],
) -> ReadReport:
    """Read what a plan says by requests, and return how much that was.

    Args:
        storage: where the files are.
        read_range: its request.
        files: by their number in the plan.
        plan: what to read.
        views: for each requested shard its bytes, for runs.
        memories: for each requested shard its bytes, uint8 (bytes,), for pieces.
        verify: which blocks are checked against their hashes.
        progress: called with the bytes read since the last call, by one thread at a time.

    Raises:
        CorruptCheckpoint: a file's length, or twice a block's hash, isn't what the index says.
        StorageError: a file can't be read.
    """
    checks, wanted = _checks_of_plan(files, plan, verify)
    requests = requests_of(plan, wanted, REQUEST_BYTES * can(storage).request_scale)
    sums = {number: Sums() for number in checks}
    run = partial(_run, storage, read_range, checks, views, memories)
    # A store that answers at once keeps the cores busy with a few requests. More only take turns there, each with other
    # memory: on two cores, 32 in flight took 1.3 times as long as 4.
    answers_at_once = (can(storage).latency or 1.0) < _SHORT_LATENCY
    most = min(2 * usual_threads(), _IN_FLIGHT) if answers_at_once else _IN_FLIGHT
    done = _in_flight(run, requests, sums, progress, most)
    # Once more before it is called damage: what came over a network may differ from what the store holds.
    wrong = {number: _wrong(check, sums[number]) for number, check in checks.items()}
    again = [each for each in requests if _touches(each, wrong[each.file])]
    for number, spans in wrong.items():
        for begin, end in spans:
            sums[number] = _without(sums[number], begin, end)
    _in_flight(run, again, sums, lambda _: None, most)
    for number, check in checks.items():
        _raise_if_wrong(storage.where(check.file.name), check, sums[number])
    return _report(done, checks, sums)


def _checks_of_plan(
    files: Mapping[int, StoredFile], plan: LoadPlan, verify: Verify
) -> tuple[dict[int, Checks], dict[int, Wanted]]:
    strided = in_file_order(plan.strided)
    numbers = np.union1d(plan.runs.file, strided.file).tolist()
    both = {
        number: checks_of(files[number], of_file(plan.runs, number), of_file(strided, number), verify)
        for number in numbers
    }
    return {number: pair[0] for number, pair in both.items()}, {number: pair[1] for number, pair in both.items()}


def planned_requests(files: Mapping[int, StoredFile], plan: LoadPlan, verify: Verify) -> list[Request]:
    """Return the requests by which `fetch_ranged` would run a plan."""
    return requests_of(plan, _checks_of_plan(files, plan, verify)[1])


def _run(
    storage: Storage,
    read_range: ReadRange,
    checks: Mapping[int, Checks],
    views: Sequence[Buffer],
    memories: Sequence[torch.Tensor],
    request: Request,
) -> tuple[int, Sums]:
    """Fetch what a request asks for, and copy it; return how many bytes were copied, and the checksums."""
    check = checks[request.file]
    with _on_the_way.taking(request.end - request.begin):
        data, length = read_range(check.file.name, request.begin, request.end)
        if length != check.file.length:
            raise wrong_length(check.file, length, storage.where(check.file.name))
        if request.pieces.file.size:
            data = memoryview(bytearray(data))  # torch minds memory that can't be written to
        found = _sums(check, data, request)
        return _copy(request, data, views, memories), found


def _sums(check: Checks, data: Buffer, request: Request) -> Sums:
    found, begin, end = Sums(), request.begin, request.end
    if check.touched is not None:
        first = -(-begin // BLOCK_BYTES)
        last = end // BLOCK_BYTES if end < check.file.length else -(-end // BLOCK_BYTES)
        for number in (np.flatnonzero(check.touched[first:last]) + first).tolist():
            at = number * BLOCK_BYTES - begin
            found.blocks[number] = block_hash(data[at : at + BLOCK_BYTES])
    ranges = check.file.ranges
    if ranges is not None:
        lows = np.maximum(ranges.begin[check.ranges], begin)
        highs = np.minimum(ranges.end[check.ranges], request.own_end)
        rows = lows < highs
        for low, high in zip(lows[rows].tolist(), highs[rows].tolist(), strict=True):
            found.parts[low] = (high, crc32(data[low - begin : high - begin]))
    return found


def _copy(request: Request, data: Buffer, views: Sequence[Buffer], memories: Sequence[torch.Tensor]) -> int:
    runs, pieces = request.runs, request.pieces
    columns = (runs.byte - request.begin, runs.target, runs.target_byte, runs.length)
    for byte, target, at, length in zip(*(column.tolist() for column in columns), strict=True):
        if length < _LITTLE:
            views[target][at : at + length] = data[byte : byte + length]
        else:
            copy_bytes(views[target], at, data[byte : byte + length])
    total = int(runs.length.sum())
    for row, target in enumerate(pieces.target.tolist()):
        total += copy_piece(data, request.begin, pieces, row, memories[target])
    return total


class _Budget:
    """Bytes that may be in flight at a time, in all loads of a process."""

    def __init__(self, most: int) -> None:
        self._left, self._most, self._changed = most, most, threading.Condition()

    @contextmanager
    def taking(self, nbytes: int) -> Iterator[None]:
        nbytes = min(nbytes, self._most)
        with self._changed:
            self._changed.wait_for(lambda: self._left >= nbytes)
            self._left -= nbytes
        try:
            yield
        finally:
            with self._changed:
                self._left += nbytes
                self._changed.notify_all()


_on_the_way = _Budget(_MOST_BYTES)


def _in_flight(
    run: Callable[[Request], tuple[int, Sums]],
    requests: Sequence[Request],
    sums: Mapping[int, Sums],
    progress: Callable[[int], None],
    most: int,
) -> int:
    """Run requests side by side, add their checksums to the files', and return how many bytes were copied.

    At first at most `most` are in flight, and twice as many whenever none of them is done for a while: slow connections
    need many.
    """
    # Threads rather than cores: they wait for the network nearly all the time.
    total, left = 0, iter(requests)
    waiting: dict[Future[tuple[int, Sums]], int] = {}
    pool = ThreadPoolExecutor(max(1, min(_IN_FLIGHT, len(requests))))
    try:
        while True:
            waiting |= {pool.submit(run, each): each.file for each in islice(left, most - len(waiting))}
            if not waiting:
                return total
            ended = wait(waiting, _LONG_WAIT if most < _IN_FLIGHT else None, FIRST_COMPLETED).done
            most = most if ended else min(2 * most, _IN_FLIGHT)
            for each in ended:
                done, found = each.result()
                _merge(sums[waiting.pop(each)], found)
                progress(done)
                total += done
    finally:
        pool.shutdown(cancel_futures=True)


def _merge(sums: Sums, found: Sums) -> None:
    for number, each in found.blocks.items():
        # Of a block that came twice, bytes of either may have been delivered: if they differ, fail.
        sums.blocks[number] = each if sums.blocks.get(number, each) == each else -1
    sums.parts.update(found.parts)


def _wrong(check: Checks, sums: Sums) -> list[tuple[int, int]]:
    """Return begin and end of the blocks or byte ranges of a file whose checksum differs."""
    known, ranges = check.file.hashes, check.file.ranges
    found: list[tuple[int, int]] = []
    if known is not None:
        numbers = (number for number, each in sorted(sums.blocks.items()) if each != int(known[number]))
        found += [(at * BLOCK_BYTES, min(check.file.length, (at + 1) * BLOCK_BYTES)) for at in numbers]
    if ranges is not None:
        places = [(number, int(ranges.begin[number]), int(ranges.end[number])) for number in check.ranges]
        crc32s = (int(ranges.crc32[number]) for number, *_ in places)
        found += [
            place[1:] for place, each in zip(places, crc32s, strict=True) if range_crc32(sums.parts, *place[1:]) != each
        ]
    return found


def _touches(request: Request, spans: Sequence[tuple[int, int]]) -> bool:
    return any(begin < request.end and request.begin < end for begin, end in spans)


def _without(sums: Sums, begin: int, end: int) -> Sums:
    """Return checksums without those of a span."""
    blocks = {number: each for number, each in sums.blocks.items() if not begin <= number * BLOCK_BYTES < end}
    return Sums(blocks, {at: each for at, each in sums.parts.items() if not begin <= at < end})


def _raise_if_wrong(where: str, check: Checks, sums: Sums) -> None:
    if wrong := _wrong(check, sums):
        hashes = check.file.ranges is None
        what = f"the hash of {len(wrong)} of its blocks" if hashes else f"the checksum of {len(wrong)} of its tensors"
        raise damaged(where, f"{what} differs", (f"bytes {begin} to {end}" for begin, end in wrong))


def _report(done: int, checks: Mapping[int, Checks], sums: Mapping[int, Sums]) -> ReadReport:
    report = ReadReport(done, files=len(checks))
    for number, check in checks.items():
        checked = len(sums[number].blocks) + len(check.ranges)
        touched = 0 if check.touched is None else int(check.touched.sum())
        unchecked = check.unchecked + touched - len(sums[number].blocks)
        report = replace(
            report,
            blocks_checked=report.blocks_checked + checked,
            blocks_unchecked=report.blocks_unchecked + unchecked,
        )
    return report
