"""Formats whose files are read in many small places: where each read is a request, all are made at once."""

from __future__ import annotations

import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some

import shardtree as st
from shardtree.maintenance import fetch_ahead, opened
from shardtree.storage import Capabilities
from tests.s3.environment import ROOT
from tests.s3.server import Request, Server

pytest.importorskip("obstore")

TENSORS, AT_ONCE = 40, 8
FORMATS = [("torch_dist", 1), ("dcp", 1)]


class Counting:
    """A file of a storage whose reads are counted."""

    def __init__(self, content: bytes) -> None:
        self.content, self.spans = content, list[tuple[int, int]]()
        self.capabilities = Capabilities(read_range=self.read_range)

    def where(self, name: str = "") -> str:
        return name

    def read_range(self, name: str, begin: int, end: int) -> tuple[memoryview, int]:
        self.spans.append((begin, end))
        return memoryview(self.content)[begin:end], len(self.content)


@given(data=some.data(), length=some.integers(1, 100_000))
def test_what_is_read_is_the_file_and_what_was_fetched_is_not_read_again(data: some.DataObject, length: int) -> None:
    spans = some.tuples(some.integers(0, length), some.integers(0, length)).map(lambda pair: (min(pair), max(pair)))
    storage = Counting(bytes(torch.arange(length, dtype=torch.int16).numpy().tobytes()[:length]))
    ahead, read = data.draw(some.lists(spans, max_size=5)), data.draw(some.lists(spans, max_size=10))
    with opened(storage, "file", length) as reader:  # type: ignore[arg-type]
        fetch_ahead(reader, ahead)
        fetched = list(storage.spans)
        for begin, end in read:
            assert bytes(reader.read(begin, end)) == storage.content[begin:end]
        inside = [span for span in read if any(span[0] >= low and span[1] <= high for low, high in ahead)]
        before = len(storage.spans)
        for begin, end in inside:
            assert bytes(reader.read(begin, end)) == storage.content[begin:end]
        assert len(storage.spans) == before
    assert all(any(low <= begin and end <= high for low, high in fetched) for begin, end in ahead)


def saved(backend: tuple[str, int]) -> dict[str, st.ShardedTensor]:
    tree = {
        f"w{number}": st.ShardedTensor.from_rank_offsets(f"w{number}", torch.full((100, 1024), float(number)))
        for number in range(TENSORS)
    }
    st.save(tree, ROOT, backend)
    return tree


@pytest.mark.parametrize("backend", FORMATS, ids=str)
def test_archives_are_looked_up_side_by_side(server: Server, backend: tuple[str, int]) -> None:
    tree, meeting = saved(backend), threading.Barrier(AT_ONCE)
    first = iter(range(AT_ONCE))

    def fault(request: Request) -> None:
        # The first of the small reads go on once there are as many; one after the other, they would wait for ever.
        small = request.key.endswith(".distcp") and request.headers.get("range", "") and request.action == "GetObject"
        if small and next(first, None) is not None:
            meeting.wait(60)

    server.reset()
    server.fault = fault
    loaded = st.load(tree, ROOT)
    server.fault = lambda _: None
    assert all(torch.equal(loaded[key], shard.data) for key, shard in tree.items())
    # Both ends of archives that lie side by side come by one request.
    assert len(server.log) <= TENSORS + 16, server.actions()


@pytest.mark.slow
@pytest.mark.parametrize("backend", [*FORMATS, ("safetensors", 1), ("zarr", 3)], ids=str)
def test_a_verification_fetches_each_byte_once(server: Server, backend: tuple[str, int]) -> None:
    saved(backend)
    server.reset()
    assert not [one for one in st.verify(ROOT) if one.what]
    stored = sum(len(each.data) for each in server.store.objects.values())
    assert sum(request.sent for request in server.log) <= 1.05 * stored + 2**16
