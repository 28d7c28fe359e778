"""Byte ranges of files overlap where a byte belongs to two of them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from shardtree.shell.table.index._file import overlap

LENGTHS = [7, 0, 9]


@some.composite
def byte_ranges(draw):
    file = draw(some.sampled_from([0, 2]))
    begin = draw(some.integers(0, LENGTHS[file]))
    return file, begin, draw(some.integers(0, LENGTHS[file] - begin))


def check_counts_bytes(overlapping, rows):
    held = [byte for file, begin, length in rows for byte in ((file, begin + at) for at in range(length))]
    columns = np.array(rows, dtype=np.int64).reshape(-1, 3).T
    assert overlapping(np.array(LENGTHS), *columns) == (len(set(held)) < len(held))


@pytest.mark.slow
@settings(max_examples=300)
@given(some.lists(byte_ranges(), max_size=4))
def test_byte_ranges_overlap_where_a_byte_is_in_two(rows):
    check_counts_bytes(overlap, rows)


def test_the_law_catches_files_that_are_one():
    def one_file(file_length, file, begin, length):
        return overlap(np.array([100]), np.zeros_like(file), begin, length)

    rows = [(0, 0, 5), (2, 0, 5)]
    check_counts_bytes(overlap, rows)
    with pytest.raises(AssertionError):
        check_counts_bytes(one_file, rows)
