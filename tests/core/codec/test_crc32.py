"""CRC32 is the same whoever computes it."""

from __future__ import annotations

import subprocess
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as some

from shardtree.core.codec import crc32, crc32_thread_bytes
from tests.quick_python.command import quick_python

WITHOUT_ISAL = """
import sys
sys.modules["isal"] = None
from shardtree.core.codec import crc32, crc32_thread_bytes
print(crc32(b"789", crc32(b"123456")), crc32_thread_bytes())
"""


@given(some.binary(), some.binary())
def test_the_sum_of_parts_is_the_sum_of_the_whole(left: bytes, right: bytes) -> None:
    assert crc32(memoryview(right), crc32(left)) == zlib.crc32(left + right)


@pytest.mark.slow
def test_zlib_computes_it_where_isal_is_missing() -> None:
    done = subprocess.run([*quick_python(), "-c", WITHOUT_ISAL], capture_output=True, text=True, timeout=900)
    assert done.stdout.split() == [str(zlib.crc32(b"123456789")), str(2**20)], done.stderr
    assert crc32_thread_bytes() > 2**20  # isal's, which the tests have
