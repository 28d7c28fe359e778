"""`.metadata` taken as columns is what the careful reader, and `pickle` itself, make of it, and nothing else."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as hs
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from shardtree.errors import CheckpointingException
from shardtree.formats.pickles import read_pickle
from shardtree.formats.torch_dist import _metadata_file as file_module
from shardtree.formats.torch_dist import _metadata_scan as scan_module
from shardtree.formats.torch_dist import _pickled_columns as columns_module
from shardtree.formats.torch_dist._metadata_content import metadata_classes

NUMBERS = hs.one_of(hs.integers(0, 3), hs.sampled_from([255, 256, 65_535, 65_536, 2**31 - 1, 2**31, 2**40, 2**59]))
BROKEN = (CheckpointingException, ValueError, TypeError, KeyError, OverflowError)


@pytest.fixture(autouse=True)
def _small_runs() -> Iterator[None]:
    """Let a scan take even one record, so that small files have runs."""
    with patch.object(scan_module, "_LEAST", 1):
        yield


@hs.composite
def metadata(draw: hs.DrawFn) -> Metadata:
    """Draw the content of a file: tensors of any number of axes and chunks, values, and shapes that are shared."""
    state: dict[str, Any] = {}
    stored = {}
    shared = draw(hs.booleans())
    for number in range(draw(hs.integers(0, 6))):
        key = draw(hs.sampled_from(["w", "layers.", "é" * 130, "a" * 250])) + str(number)
        if draw(hs.integers(0, 5)) == 0:
            state[key] = BytesStorageMetadata()
            stored[MetadataIndex(key)] = _StorageInfo("__0_0.distcp", draw(NUMBERS), draw(NUMBERS))
            continue
        axes = draw(hs.integers(0, 6))
        shapes = hs.lists(NUMBERS, min_size=axes, max_size=axes).map(torch.Size)
        chunks = [ChunkStorageMetadata(draw(shapes), draw(shapes)) for _ in range(draw(hs.integers(0, 5)))]
        dtype = draw(hs.sampled_from([torch.float32, torch.bfloat16, torch.int8]))
        state[key] = TensorStorageMetadata(TensorProperties(dtype=dtype), draw(shapes), chunks)
        for at, chunk in enumerate(chunks):
            offset = chunk.offsets if shared else torch.Size(list(chunk.offsets))
            name = draw(hs.sampled_from(["__0_0.distcp", "__1_0.distcp", "x.safetensors"]))
            index = MetadataIndex(key, offset, draw(hs.sampled_from([None, at])))
            stored[index] = _StorageInfo(name, draw(NUMBERS), draw(NUMBERS))
    paths = draw(hs.sampled_from([None, {key: (key,) for key in state}]))
    return Metadata(state, paths, stored, StorageMeta("/here", "a"), "1.0.0")


def by_c(value: Metadata) -> bytes:
    return pickle.dumps(value)


def by_python(value: Metadata) -> bytes:
    file = io.BytesIO()
    pickle._Pickler(file, protocol=5).dump(value)  # type: ignore[attr-defined]
    return file.getvalue()


def in_small_batches(value: Metadata) -> bytes:
    """Pickle as for a file of more than 1000 records: batches of two of them."""
    file = io.BytesIO()
    pickler = type("Batches", (pickle._Pickler,), {"_BATCHSIZE": 2})  # type: ignore[attr-defined]
    pickler(file, protocol=4).dump(value)
    return file.getvalue()


WRITERS: list[Callable[[Metadata], bytes]] = [by_c, by_python, in_small_batches]


def content(found: file_module.MetadataFile) -> Any:
    """Return what a file says as plain values."""
    places = found.places

    def place(row: int) -> tuple[Any, ...]:
        return places.file[row], int(places.byte[row]), int(places.length[row]), places.refusals.get(row, "")

    tensors = {
        key: (entry.dtype, entry.shape, entry.grid_shape, entry.boxes, [place(row) for row in entry.places.tolist()])
        for key, entry in found.tensors.items()
    }
    return tensors, {key: place(row) for key, row in found.values.items()}, found.paths


def carefully(data: bytes) -> Any:
    root = read_pickle(data, metadata_classes(), what="careful")
    return content(file_module._parse(root, scan_module.ScanColumns()))


def taken(data: bytes) -> Any:
    return content(file_module.parse_metadata(data, "taken"))


def outcome(read: Callable[[bytes], Any], data: bytes) -> Any:
    try:
        return read(data)
    except BROKEN:
        return None


def boxes_by_pickle(data: bytes) -> dict[str, list[tuple[tuple[int, ...], tuple[int, ...]]]]:
    """Return each tensor's chunks as `pickle` reads them, each offset once."""
    found: dict[str, list[tuple[tuple[int, ...], tuple[int, ...]]]] = {}
    for key, entry in pickle.loads(data).state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            boxes: dict[tuple[int, ...], tuple[int, ...]] = {}
            for chunk in entry.chunks:
                if 0 not in chunk.sizes or tuple(chunk.offsets) not in boxes:
                    boxes[tuple(chunk.offsets)] = tuple(chunk.sizes)
            found[key] = list(boxes.items())
    return found


def law_of_content(value: Metadata, write: Callable[[Metadata], bytes]) -> None:
    data = write(value)
    expected = carefully(data)
    assert {key: entry[3] for key, entry in expected[0].items()} == boxes_by_pickle(data)
    assert outcome(taken, data) == expected


@given(metadata(), hs.sampled_from(WRITERS))
def test_columns_hold_what_the_careful_reader_and_pickle_read(
    value: Metadata, write: Callable[[Metadata], bytes]
) -> None:
    law_of_content(value, write)


def many(chunks: int, tensors: int = 1, *, shared: bool = True) -> Metadata:
    """Return the content of a regular file."""
    state, stored = {}, {}
    for tensor in range(tensors):
        key = f"layers.{tensor}.weight"
        boxes = [ChunkStorageMetadata(torch.Size([300 * row, 0]), torch.Size([300, 7])) for row in range(chunks)]
        whole = torch.Size([300 * chunks, 7])
        state[key] = TensorStorageMetadata(TensorProperties(dtype=torch.float32), whole, boxes)
        for row, box in enumerate(boxes):
            offset = box.offsets if shared else torch.Size(list(box.offsets))
            stored[MetadataIndex(key, offset, row)] = _StorageInfo(f"__{row % 4}_0.distcp", 2**33 + row, 512)
    return Metadata(state, {key: (key,) for key in state}, stored, StorageMeta(), "1.0.0")


def numbers_without_signs(buffer: Any, at: Any) -> Any:
    values, width = columns_module_numbers(buffer, at)
    return np.where(values >= 2**31, values & 0xFFFF_FFFF, values), width


columns_module_numbers = columns_module.numbers_at


def test_the_law_of_content_catches_numbers_cut_to_32_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    law_of_content(many(5), by_c)
    monkeypatch.setattr(columns_module, "numbers_at", numbers_without_signs)
    with pytest.raises(AssertionError):
        law_of_content(many(5), by_c)


@pytest.mark.slow
@pytest.mark.parametrize(("chunks", "tensors"), [(2500, 1), (1, 2500), (3, 700)])
@pytest.mark.parametrize("shared", [True, False])
def test_all_but_a_few_records_of_a_regular_file_are_taken(chunks: int, tensors: int, shared: bool) -> None:
    data = by_c(many(chunks, tensors, shared=shared))
    scan = scan_module.MetadataScan(metadata_classes())
    read_pickle(data, metadata_classes(), what="regular", scan=scan)
    count = chunks * tensors
    # A record that lies across the border of a frame of 64 KiB isn't taken, nor is the first one.
    frames = 3 + len(data) // 65_536 * (chunks + 1 if tensors > 1 else 1)
    assert len(scan.columns.pair_key) >= count - frames
    assert scan.columns.chunks >= count - 2 * frames - chunks * (tensors > 1)
    law_of_content(many(chunks, tensors, shared=shared), by_c)


def test_tensors_and_chunks_that_are_listed_out_of_order_find_their_places() -> None:
    value = many(6, 3)
    stored = dict(reversed([*value.storage_data.items()]))  # type: ignore[union-attr]
    law_of_content(replace(value, storage_data=stored), by_c)


SMALL = by_c(many(4, 3))


def law_of_damage(data: bytes) -> None:
    """What a scan accepts, the careful reader reads to the same value."""
    found = outcome(taken, data)
    assert found is None or found == outcome(carefully, data)


@given(hs.lists(hs.tuples(hs.integers(0, len(SMALL) - 1), hs.integers(0, 255)), min_size=1, max_size=3))
def test_of_damaged_bytes_nothing_else_is_taken_than_is_read_carefully(changes: list[tuple[int, int]]) -> None:
    data = bytearray(SMALL)
    for at, value in changes:
        data[at] = value
    law_of_damage(bytes(data))


@given(
    hs.integers(0, len(SMALL)), hs.integers(0, len(SMALL)), hs.sampled_from([b"", b"0", b"2", b"a", b"\x85", b"h\x07"])
)
def test_of_moved_bytes_nothing_else_is_taken_than_is_read_carefully(begin: int, end: int, between: bytes) -> None:
    law_of_damage(SMALL[:begin] + between + SMALL[end:])


@pytest.mark.slow
def test_every_byte_damaged_in_turn() -> None:
    for at in range(0, len(SMALL), 3):
        law_of_damage(SMALL[:at] + bytes([SMALL[at] ^ 1]) + SMALL[at + 1 :])


def test_the_law_of_damage_catches_references_that_are_not_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan_module.MetadataScan, "check", lambda *_: None)
    with pytest.raises(AssertionError):
        test_every_byte_damaged_in_turn()


def exploit() -> bytes:
    """Return a file in whose middle a function is named and called."""
    call = b"\x8c\x08builtins\x8c\x05print\x93\x8c\x03ran\x85R0"
    data = by_c(many(40))
    middle = data.index(b"ub", len(data) // 2) + 2
    return data[:2] + data[11:middle] + call + data[middle:]


def test_what_a_file_names_between_regular_records_is_refused_and_not_run(capsys: pytest.CaptureFixture[str]) -> None:
    data = exploit()
    pickle.loads(data)
    assert capsys.readouterr().out == "ran\n"  # it would run
    with pytest.raises(CheckpointingException, match=r"builtins\.print"):
        taken(data)
    assert not capsys.readouterr().out
