"""Block hashes, compared with hashing each block by itself."""

from __future__ import annotations

from collections.abc import Callable

import xxhash
from hypothesis import given
from hypothesis import strategies as st

from shardtree.shell.storage import BLOCK_BYTES, BlockHasher, block_count
from tests.core.trees.samples import assert_caught

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
SPANS = st.lists(st.tuples(near_blocks(), near_blocks()).map(sorted).map(tuple), max_size=6)


def expected(data: bytes) -> list[int]:
    return [xxhash.xxh3_64_intdigest(data[at : at + BLOCK_BYTES]) for at in range(0, len(data), BLOCK_BYTES)]


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
    assert set(hasher.hashes) <= set(range(len(right)))
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
