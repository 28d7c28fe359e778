"""Byte ranges of files with CRC32s of their own: read in any pieces, checked whole, damage named."""

from __future__ import annotations

import zlib
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some

from shardtree.core.plans import Runs
from shardtree.core.plans._load import runs_plan
from shardtree.errors import CorruptCheckpoint
from shardtree.shell.storage import fetch
from shardtree.shell.storage._checked import joined_crc32
from shardtree.storage import ByteRanges, MemoryStorage, StoredFile


@pytest.mark.parametrize("length", [1, 255, 2**16, 2**24 + 3])
def test_joining_holds_for_long_bytes(length):
    right = bytes(length)
    assert joined_crc32(zlib.crc32(b"x"), zlib.crc32(right), length) == zlib.crc32(b"x" + right)


LENGTH = 3 * 2**20
DATA = np.random.default_rng(0).integers(0, 256, LENGTH, dtype=np.uint8).tobytes()
EDGES = [10, 1000, 300_000, 900_001, 2_500_000, LENGTH - 5]
RANGES = SimpleNamespace(begin=EDGES[:-1], end=[edge - 3 for edge in EDGES[1:]])


def described(**changes):
    crc32 = [zlib.crc32(DATA[begin:end]) for begin, end in zip(RANGES.begin, RANGES.end, strict=True)]
    for number, value in changes.get("crc32", {}).items():
        crc32[number] = value
    return StoredFile("f", LENGTH, ranges=ByteRanges(*map(np.array, (RANGES.begin, RANGES.end, crc32))))


def read(spans, verify, data=DATA, **changes):
    """Read spans (byte range, from, to) of the file, each into a memory of its own."""
    rows = [(RANGES.begin[n] + low, RANGES.begin[n] + high) for n, low, high in spans]
    order = sorted(range(len(rows)), key=rows.__getitem__)
    memories = [torch.empty(stop - start, dtype=torch.uint8) for start, stop in rows]
    byte, target = np.array([rows[n][0] for n in order]), np.array(order)
    length, zero = np.array([rows[n][1] - rows[n][0] for n in order]), np.zeros(len(rows), dtype=np.int64)
    storage = MemoryStorage()
    storage.write("f", [memoryview(data)], durable=False)
    plan = runs_plan(Runs(zero, byte, target, zero, length))
    report = fetch(storage, {0: described(**changes)}, plan, memories, verify=verify)
    for (start, stop), memory in zip(rows, memories, strict=True):
        assert memory.numpy().tobytes() == data[start:stop]
    return report


@settings(max_examples=60)
@given(some.data(), some.sampled_from(["whole", "all", None]))
def test_any_pieces_are_read_and_checked(data, verify):
    spans = []
    for _ in range(data.draw(some.integers(1, 5))):
        number = data.draw(some.integers(0, 4))
        size = RANGES.end[number] - RANGES.begin[number]
        low, high = sorted(data.draw(some.tuples(some.integers(0, size), some.integers(0, size))))
        spans.append((number, low, high))
    report = read(spans, verify)
    assert report.bytes_read == sum(high - low for _, low, high in spans)
    assert report.blocks_checked + report.blocks_unchecked == 5
    if verify != "whole":
        assert report.blocks_checked == (5 if verify else 0)


WHOLE = [(n, 0, RANGES.end[n] - RANGES.begin[n]) for n in range(5)]


@pytest.mark.parametrize("number", range(5))
@pytest.mark.parametrize("pieces", [1, 2, 5])
def test_a_wrong_byte_is_found_however_it_is_read(number, pieces):
    damaged = bytearray(DATA)
    damaged[RANGES.end[number] - 1] ^= 1
    size = RANGES.end[number] - RANGES.begin[number]
    cuts = [size * n // pieces for n in range(pieces + 1)]
    spans = [(number, low, high) for low, high in pairwise(cuts)]
    with pytest.raises(CorruptCheckpoint, match=f"bytes {RANGES.begin[number]} to {RANGES.end[number]}"):
        read(spans, "whole", bytes(damaged))
    assert read(spans, None, bytes(damaged)).blocks_checked == 0


def test_what_is_read_twice_is_checked_once():
    overlapping = [(4, 0, 400_000), (4, 0, 100), *WHOLE, (4, 7, 300_000)]
    assert read(overlapping, "whole").blocks_checked == 5


def test_a_byte_range_without_a_checksum_is_not_checked():
    report = read(WHOLE, "all", crc32={3: 0})
    assert (report.blocks_checked, report.blocks_unchecked) == (4, 1)


def test_a_part_is_checked_only_if_asked_unless_it_is_small():
    part = [(0, 0, 5), (3, 0, 1000)]
    assert read(part, "whole").blocks_checked == 1
    assert read(part, "all").blocks_checked == 5
    with pytest.raises(CorruptCheckpoint):
        read(part, "all", crc32={3: 1})
    assert read(part, "whole", crc32={3: 1}).blocks_checked == 1
