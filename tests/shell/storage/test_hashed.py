"""A file's bytes on their way: passed on as they are, hashed right, and hashed before the source is asked for more."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from shardtree.core import limits
from shardtree.shell.storage import BlockHasher, Buffer, _blocks, hash_column, hashed, in_parts
from tests.core.trees.samples import assert_caught

BLOCK = 16
PART = 4 * BLOCK
LONG = 16 * BLOCK

OnTheWay = Callable[[Iterable[Buffer], BlockHasher], Iterator[Buffer]]

SIZES = st.lists(
    st.builds(
        lambda unit, count, more: max(unit * count + more, 0),
        st.sampled_from([BLOCK, PART, LONG]),
        st.integers(0, 3),
        st.integers(-1, 1) | st.integers(0, LONG),
    ),
    max_size=6,
)


def content(sizes: list[int]) -> list[bytes]:
    """Return buffers of bytes that no block repeats."""
    whole = b"".join(number.to_bytes(4, "little") for number in range(sum(sizes) // 4 + 1))
    return [whole[sum(sizes[:number]) :][:size] for number, size in enumerate(sizes)]


def in_one_memory(buffers: list[bytes]) -> Iterator[Buffer]:
    """Yield buffers that all lie in the same memory: each is overwritten when the next is asked for."""
    memory = bytearray(max(map(len, buffers), default=0))
    for buffer in buffers:
        memory[: len(buffer)] = buffer
        yield memoryview(memory)[: len(buffer)]
        memory[:] = bytes(len(memory))


def passes_on_and_hashes(on_the_way: OnTheWay, sizes: list[int]) -> None:
    buffers = content(sizes)
    whole = b"".join(buffers)
    hasher = BlockHasher()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_blocks, "BLOCK_BYTES", BLOCK)
        patch.setattr(limits, "STEP_BYTES", PART)
        found = [bytes(part) for part in on_the_way(in_one_memory(buffers), hasher)]
        assert list(map(len, found)) == [part.nbytes for part in in_parts(map(memoryview, buffers))]
    assert b"".join(found) == whole
    expected = [xxhash.xxh3_64_intdigest(whole[at : at + BLOCK]) for at in range(0, len(whole), BLOCK)]
    assert hash_column(hasher).tolist() == expected


@settings(max_examples=100)
@given(SIZES)
def test_bytes_and_hashes_are_those_of_the_source(sizes: list[int]) -> None:
    passes_on_and_hashes(hashed, sizes)


def hashes_at_the_end(buffers: Iterable[Buffer], hasher: BlockHasher) -> Iterator[Buffer]:
    for part in (kept := list(in_parts(buffers))):
        yield part
    for part in kept:
        hasher.update(part)
    hasher.finish()


def forgets_where_it_is(buffers: Iterable[Buffer], hasher: BlockHasher) -> Iterator[Buffer]:
    for buffer in buffers:
        hasher.update(buffer)
        yield from in_parts([buffer])
    hasher.finish()


@pytest.mark.parametrize("broken", [hashes_at_the_end, forgets_where_it_is])
def test_the_law_catches(broken: OnTheWay) -> None:
    assert_caught(passes_on_and_hashes, broken, SIZES)
