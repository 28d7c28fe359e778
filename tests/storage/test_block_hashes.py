"""Block hashes, compared with hashing each block by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise

import numpy as np
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from shardtree.geometry import Column
from shardtree.storage import BLOCK_BYTES, BlockHasher, block_count, block_hashes
from shardtree.storage._blocks import missing
from tests.trees.samples import assert_caught

# A pattern that no block repeats, so that a block hashed at a wrong place is found.
FILE = b"".join(number.to_bytes(4, "little") for number in range(3 * BLOCK_BYTES // 4 + 250))

Span = tuple[int, int]


def near_blocks(highest: int = len(FILE)) -> st.SearchStrategy[int]:
    """Return a strategy for places in the file, most of them where blocks meet."""
    at_edges = st.builds(
        lambda block, off: block * BLOCK_BYTES + off, st.integers(0, 3), st.sampled_from([0, 0, 1, -1, 7])
    )
    return (at_edges | st.integers(0, highest)).map(lambda place: min(max(place, 0), highest))


LENGTHS = near_blocks()
CUTS = st.lists(near_blocks(), max_size=6)
SPANS = st.lists(st.tuples(near_blocks(), near_blocks()).map(sorted).map(tuple), max_size=6)


def expected(data: bytes) -> list[int]:
    return [xxhash.xxh3_64_intdigest(data[at : at + BLOCK_BYTES]) for at in range(0, len(data), BLOCK_BYTES)]


def parts(data: bytes, cuts: list[int]) -> Iterator[memoryview]:
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    return (memoryview(data)[low:high] for low, high in pairwise(edges))


def hashes_blocks(hash_all: Callable[..., list[int]], length: int, cuts: list[int]) -> None:
    data = FILE[:length]
    assert hash_all(parts(data, cuts)) == expected(data)


def ours(buffers: Iterator[memoryview]) -> list[int]:
    return [int(number) for number in block_hashes(buffers)]


@given(LENGTHS, CUTS)
def test_however_a_file_is_split_its_block_hashes_are_the_same(length: int, cuts: list[int]) -> None:
    hashes_blocks(ours, length, cuts)
    assert len(expected(FILE[:length])) == block_count(length)


def test_block_hashes_catch_one_hash_a_buffer() -> None:
    def by_buffer(buffers: Iterator[memoryview]) -> list[int]:
        return [xxhash.xxh3_64_intdigest(buffer) for buffer in buffers]

    assert_caught(hashes_blocks, by_buffer, LENGTHS, CUTS)


def knows_what_it_saw_whole(make: Callable[[int], BlockHasher], length: int, spans: list[Span]) -> None:
    """Show byte ranges in any order: known hashes are right, and a block that one range holds whole is known."""
    data, right = FILE[:length], expected(FILE[:length])
    hasher, whole = make(length), set[int]()
    at, since = None, 0
    for start, stop in spans:
        start, stop = min(start, length), min(stop, length)
        hasher.update(memoryview(data)[start:stop], start)
        since = since if start == at else start
        at = stop
        last = block_count(length) if stop == length else stop // BLOCK_BYTES
        whole |= set(range(-(-since // BLOCK_BYTES), last)) if stop > since else set()
    assert {number: right[number] for number in hasher.hashes} == hasher.hashes
    assert whole <= set(hasher.hashes)


@given(LENGTHS, SPANS)
def test_byte_ranges_give_the_hashes_of_the_blocks_that_they_hold_whole(length: int, spans: list[Span]) -> None:
    knows_what_it_saw_whole(BlockHasher, length, spans)


def test_byte_ranges_catch_a_hasher_that_takes_a_jump_for_a_continuation() -> None:
    class Jumping(BlockHasher):
        def update(self, buffer: memoryview, byte: int | None = None) -> None:
            super().update(buffer, None)

    assert_caught(knows_what_it_saw_whole, Jumping, LENGTHS, SPANS)


SPANS = st.lists(st.tuples(LENGTHS, near_blocks(2 * BLOCK_BYTES)), max_size=8)
MissingCount = Callable[[Column, Column, int], Column]


def counts_missing(count: MissingCount, spans: list[tuple[int, int]]) -> None:
    length = len(FILE) + 2 * BLOCK_BYTES
    read = np.zeros(length, dtype=np.bool_)
    for byte, size in spans:
        read[byte : byte + size] = True
    expected = [int((~read[at : at + BLOCK_BYTES]).sum()) for at in range(0, length, BLOCK_BYTES)]
    begin, lengths = np.array(sorted(spans), dtype=np.int64).reshape(-1, 2).T
    assert count(begin, begin + lengths, length).tolist() == expected


@given(SPANS)
def test_missing_bytes_are_those_that_no_span_holds(spans: list[tuple[int, int]]) -> None:
    counts_missing(missing, spans)


def test_counting_catches_overlaps_that_count_twice() -> None:
    def twice(begin: Column, end: Column, length: int) -> Column:
        none = begin[:0]
        whole = missing(none, none, length)
        spans = zip(begin[:, None], end[:, None], strict=True)
        return whole - sum((whole - missing(*span, length) for span in spans), np.zeros_like(whole))

    assert_caught(counts_missing, twice, SPANS)
