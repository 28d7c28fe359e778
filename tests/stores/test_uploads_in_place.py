"""Uploads from memory that stays as it is, which isn't copied, and from memory that its source uses again."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

import shardtree as st
from shardtree.core import limits
from shardtree.storage import SizedBuffers
from shardtree.stores import _object_store
from shardtree.stores._object_streams import parts_of
from tests.s3.environment import ROOT, at
from tests.s3.server import Server

pytest.importorskip("obstore")

PART = 4096


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "UPLOAD_PART_BYTES", PART)


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Collect the lengths of buffers that are copied into parts."""
    found: list[int] = []

    def noting(buffers: Iterator[memoryview], size: int) -> Iterator[memoryview]:
        for part in parts_of(buffers, size):
            found.append(part.nbytes)
            yield part

    monkeypatch.setattr(_object_store, "parts_of", noting)
    return found


def saved(whole: torch.Tensor) -> torch.Tensor:
    """Save a tensor, and return it as it is loaded, all of it checked."""
    st.save({"w": st.ShardedTensor.from_rank_offsets("w", whole)}, ROOT, overwrite=True)
    target = {"w": st.ShardedTensor.from_rank_offsets("w", torch.zeros(whole.shape, dtype=whole.dtype))}
    return st.load(target, ROOT, options=st.LoadOptions(verify="all"))["w"]


@pytest.mark.parametrize("rows", [3, 500])
@pytest.mark.parametrize("turned", [False, True])
def test_a_save_uploads_tensors_from_where_they_are(server: Server, copied: list[int], rows: int, turned: bool) -> None:
    whole = torch.arange(rows * 128).reshape(rows, 128)
    whole = whole.T if turned else whole
    assert torch.equal(saved(whole), whole)
    # What is less than a part goes by one request, of one buffer, as the index and the common state do.
    assert max(copied) <= 3 * 1024 + 1024


def repeated(count: int) -> Iterator[memoryview]:
    memory = np.zeros(1000, dtype=np.uint8)
    for number in range(count):
        memory[:] = number
        yield memoryview(memory)


def test_memory_that_is_used_again_is_copied(server: Server) -> None:
    at().write("f", SizedBuffers(20_000, repeated(20)), durable=False)
    assert at().read("f") == b"".join(bytes([number]) * 1000 for number in range(20))


def test_it_shows_when_memory_that_is_used_again_is_said_to_stay(server: Server) -> None:
    at().write("f", SizedBuffers(20_000, repeated(20), stay=True), durable=False)
    assert at().read("f") != b"".join(bytes([number]) * 1000 for number in range(20))


@pytest.mark.parametrize("nbytes", [0, 1, PART, PART + 1, 5 * PART])
@pytest.mark.parametrize("announced", [1, PART, 5 * PART])
def test_the_length_that_is_announced_is_a_hint(server: Server, nbytes: int, announced: int) -> None:
    data = np.random.default_rng(nbytes).integers(0, 256, nbytes, dtype=np.uint8)
    buffers = [memoryview(data[begin : begin + 700]) for begin in range(0, nbytes, 700)]
    assert at().write("f", SizedBuffers(announced, iter(buffers), stay=True), durable=False) == nbytes
    assert at().read("f") == data.tobytes()
