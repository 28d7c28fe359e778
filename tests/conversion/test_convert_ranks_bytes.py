"""What several ranks write together, counted byte by byte: in memory, and in the requests to a bucket."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import shardtree as st
from shardtree.conversion import ConversionReport, convert
from shardtree.inspection._comparison import compare
from shardtree.storage import MemoryStorage
from shardtree.world import simulate
from tests.s3.environment import at, s3
from tests.s3.server import Server

ROW = 30
TENSORS = [
    st.ShardedTensor.from_rank_offsets("w", torch.arange(40.0 * ROW).reshape(40, ROW)),  # most of it
    *(st.ShardedTensor.from_rank_offsets(f"v{number}", torch.arange(20) + number) for number in range(6)),
]
NBYTES = sum(leaf.data.nbytes for leaf in TENSORS)
IN_FLIGHT = 400


def doubled(tree: dict[str, Any]) -> dict[str, Any]:
    return {key: replace(leaf, data=leaf.data * 2) for key, leaf in tree.items()}


def run(ranks: int, source: Any, folder: Any, backend: Any, **options: Any) -> list[ConversionReport]:
    options = {"max_bytes_in_flight": IN_FLIGHT, "leave_out": ["common"], **options}
    return simulate(ranks, lambda world: convert(source, folder, backend=backend, **options, world=world))


def saved(folder: Any) -> Any:
    st.save(dict(enumerate(TENSORS)), folder)
    return folder


# The same over a network.


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    pytest.importorskip("obstore")
    with s3(monkeypatch) as running:
        yield running


def put(server: Server) -> Counter[str]:
    """Return the bytes that were sent to each object, as far as the server took them."""
    counts = Counter[str]()
    for request in server.log:
        if request.action in ("PutObject", "UploadPart") and request.status == 200:
            counts[request.key] += request.received
    return counts


def sizes(server: Server) -> dict[str, int]:
    return {name: len(one.data) for name, one in server.store.objects.items() if "/there/" in name}


@pytest.mark.slow
@pytest.mark.parametrize("backend", [("safetensors", 1), ("huggingface", 1), ("torch_dist", 1), ("zarr", 3)], ids=str)
def test_two_ranks_put_each_object_of_a_bucket_once(server: Server, backend: tuple[str, int]) -> None:
    saved(at())
    server.reset()
    reports = run(2, at(), at("there"), backend, transform=doubled)
    assert reports[0] == reports[1] and reports[0].verified_nbytes == NBYTES
    data = {name: size for name, size in sizes(server).items() if not name.endswith("metadata.json")}
    ends = {name.rpartition("/")[2] for name in data}
    sent = [count for name, count in put(server).items() if name.rpartition("/")[2] in ends]
    assert sorted(sent) == sorted(data.values())  # those of Hugging Face get their names at the commit
    assert sum(data.values()) >= NBYTES
    assert not server.store.uploads and not any(".convert" in name for name in server.store.objects)
    alone = MemoryStorage()
    run(1, at(), alone, backend, transform=doubled)
    assert not compare(alone, at("there"))
