"""What several ranks write together, counted byte by byte: in memory, and in the requests to a bucket."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

import shardtree as st
from shardtree.checkpoint.comparison._compare import compare
from shardtree.checkpoint.conversion import ConversionReport, _write, convert
from shardtree.errors import StorageError
from shardtree.storage import MemoryStorage, wrapped
from shardtree.world import simulate
from tests.checkpoint.test_convert_formats import BACKENDS
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


def written(folder: MemoryStorage) -> Any:
    """Return a storage that adds up the bytes that are written, by the name that the file has at last."""
    counts: Counter[str] = Counter()

    def write(name: str, buffers: Iterable[Any], *, durable: bool) -> int:
        length = folder.write(name, buffers, durable=durable)
        counts[name] += length
        return length

    def write_parts(name: str, length: int, parts: Iterable[tuple[int, Any]], *, durable: bool) -> None:
        def seen() -> Iterator[tuple[int, Any]]:
            for byte, buffer in parts:
                counts[name] += buffer.nbytes
                yield byte, buffer

        folder.write_parts(name, length, seen(), durable=durable)

    def move(old: str, new: str) -> None:
        folder.move(old, new)
        counts[new] += counts.pop(old, 0)

    storage = wrapped(folder, write=write, write_parts=write_parts, move=move)
    storage.counts = counts
    return storage


def saved(folder: Any) -> Any:
    st.save(dict(enumerate(TENSORS)), folder)
    return folder


def check_once(ranks: int, backend: tuple[str, int]) -> None:
    folder = MemoryStorage()
    storage = written(folder)
    reports = run(ranks, saved(MemoryStorage()), storage, backend, transform=doubled)
    assert reports[0].batches > 10
    there = {name: folder.length(name) for name in storage.counts}
    assert {name: count for name, count in storage.counts.items() if there[name] is not None} == {
        name: length for name, length in there.items() if length is not None
    }, "bytes were written twice"
    assert storage.counts.total() >= NBYTES
    gone = sum(count for name, count in storage.counts.items() if there[name] is None)
    assert gone < IN_FLIGHT, "a file was written that isn't needed"


@pytest.mark.parametrize("backend", BACKENDS, ids=str)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_each_byte_is_written_once(ranks: int, backend: tuple[str, int]) -> None:
    check_once(ranks, backend)


def test_the_count_catches_ranks_that_do_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def everything(sized: Sequence[tuple[int, int]], ranks: int) -> list[list[list[int]]]:
        return [[[number for number, _ in sized if number or not rank] for rank in range(ranks)]]

    monkeypatch.setattr(_write, "deal", everything)
    with pytest.raises(AssertionError, match="bytes were written twice"):
        check_once(2, ("huggingface", 1))


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


def test_what_a_bucket_refuses_one_rank_fails_on_both_and_is_gone_on_with(server: Server) -> None:
    saved(at())
    server.fault = lambda request: "expired" if request.action == "PutObject" and "/00009-of-" in request.key else None

    def attempt(world: st.World) -> str:
        with pytest.raises(StorageError) as caught:
            convert(at(), at("there"), backend="safetensors", max_bytes_in_flight=IN_FLIGHT, world=world)
        return str(caught.value)

    first, second = simulate(2, attempt)
    assert first == second and "failed on 1 rank" in first
    assert not st.is_checkpoint(at("there"))
    server.reset()
    reports = run(3, at(), at("there"), "safetensors", leave_out=[])
    assert {report.resumed > 0 for report in reports} == {True}
    assert not compare(at(), at("there"))
