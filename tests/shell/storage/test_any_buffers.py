"""Files are written from any contiguous buffers: bytes, bytearrays, memoryviews, arrays, memory of tensors."""

from __future__ import annotations

import array
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shardtree.core import limits
from shardtree.errors import StorageError
from shardtree.shell.storage import block_hashes, write_parts
from shardtree.storage import MemoryStorage, Storage
from shardtree.strategies import PendingSave, SaveOptions, rank_file, write_file
from shardtree.world import one_process
from tests.s3.environment import at, s3
from tests.shell.storage.storages import STORAGES, made

BUFFERS: dict[str, Any] = {
    "bytes": b"abcd",
    "bytearray": bytearray(b"abcd"),
    "memoryview": memoryview(b"xabcdx")[1:5],
    "memoryview of numbers": memoryview(array.array("d", [1.0, 2.0])),
    "memoryview of rows": memoryview(bytes(range(6))).cast("B", (2, 3)),
    "array": np.arange(6, dtype=np.float32).reshape(2, 3),
    "array of complex numbers": np.array([1 + 2j]),
    "array of records": np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")]),
    "empty array": np.zeros((2, 0)),
    "read-only array": np.frombuffer(b"abcdefgh", dtype=np.int16),
    "tensor's memory": memoryview(torch.arange(5, dtype=torch.int64).numpy()),
    "array.array": array.array("i", [1, -1]),
}
WHOLE = b"".join(np.ascontiguousarray(buffer).tobytes() for buffer in map(memoryview, BUFFERS.values()))

NO_BUFFERS: dict[str, Any] = {
    "text": ["abcd"],
    "a number": [7],
    "one buffer in place of a list": b"abcd",
    "every other byte": [memoryview(b"abcdef")[::2]],
    "a transposed array": [np.zeros((2, 3)).T],
    "a tensor": [torch.zeros(2)],
}


@pytest.fixture(params=[*STORAGES, "s3://"])
def storage(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterable[Storage]:
    if request.param != "s3://":
        yield made(request.param, tmp_path)
        return
    pytest.importorskip("obstore")
    with s3(monkeypatch):
        yield at()


@pytest.mark.parametrize("kind", BUFFERS)
def test_a_file_is_written_from_any_buffer(storage: Storage, kind: str) -> None:
    expected = np.ascontiguousarray(BUFFERS[kind]).tobytes()
    assert storage.write("f", [b"<", BUFFERS[kind], b">"], durable=False) == len(expected) + 2  # type: ignore[list-item]
    assert storage.read("f") == b"<" + expected + b">"


def test_so_is_one_of_several_parts(storage: Storage) -> None:
    parts: list[tuple[int, Any]] = []
    for buffer in BUFFERS.values():
        parts.append((sum(memoryview(each).nbytes for _, each in parts), buffer))
    write_parts(storage, "f", len(WHOLE), parts, durable=False)
    assert storage.read("f") == WHOLE


def test_a_large_file_in_parts_too(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "UPLOAD_PART_BYTES", 16)
    assert storage.write("f", iter(BUFFERS.values()), durable=False) == len(WHOLE)
    assert storage.read("f") == WHOLE


@pytest.mark.parametrize("kind", NO_BUFFERS)
def test_what_is_no_buffer_is_named(storage: Storage, kind: str) -> None:
    with pytest.raises(StorageError, match=r"cannot write .*is not a contiguous buffer\n  found .*, expected bytes"):
        storage.write("f", NO_BUFFERS[kind], durable=False)


@pytest.mark.parametrize("checksums", [True, False])
def test_a_backend_writes_a_file_of_any_buffers_with_the_hashes_of_its_blocks(checksums: bool) -> None:
    pending = PendingSave(MemoryStorage(), "save-1", one_process(), options=SaveOptions(checksums=checksums))
    file = write_file(pending, rank_file(pending, "raw"), iter(BUFFERS.values()))
    assert (file.length, pending.storage.read(file.name)) == (len(WHOLE), WHOLE)
    known = None if file.hashes is None else file.hashes.tolist()
    assert known == (block_hashes([memoryview(WHOLE)]).tolist() if checksums else None)
