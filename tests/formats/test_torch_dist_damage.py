"""Damaged and hostile folders of torch.distributed.checkpoint: nothing in them runs, and no flipped bit is loaded."""

from __future__ import annotations

import pickle
import time
from contextlib import suppress

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as some
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

import shardtree as st
from shardtree.errors import CheckpointingException, CorruptCheckpoint, UnsafeFile
from shardtree.storage import LocalStorage
from tests.formats.test_torch_dist_read import Writer
from tests.shell.table.folders import archive, flipped, folder_of

QUICK = 20.0  # seconds of processors, which other work on the machine doesn't change


WEIGHT = torch.arange(12.0).reshape(4, 3)
BIG = torch.arange(90_000)
OBJECT = {"seed": 1, "state": torch.arange(3)}


def saved():
    """Two tensors in rows, one of them large; a transposed one; an object; a plain value."""
    writer = Writer()
    writer.add("w", (4, 3), (0, 0), WEIGHT[:2].clone())
    writer.add("w", (4, 3), (2, 0), WEIGHT[2:].clone())
    writer.add("big", (90_000,), (0,), BIG)
    writer.add("t", (3, 4), (0, 0), WEIGHT.t())
    writer.add_value("rng/shard_0_1", [OBJECT])
    writer.add_value("step", 7)
    return writer.files()


FILES = saved()


def read_all(folder, verify="all"):
    target = {
        "w": [st.ShardedTensor("w", None, torch.float32, (4, n), (4, 3), (0, at), None) for at, n in ((0, 1), (1, 2))],
        "big": st.ShardedTensor("big", None, torch.int64, (90_000,), (90_000,), (0,), (1,)),
        "t": st.ShardedTensor("t", None, torch.float32, (3, 4), (3, 4), (0, 0), (1, 1)),
        "rng": st.ShardedObject("rng", None, (1,), (0,)),
    }
    return st.load(target, folder, options=st.LoadOptions(verify=verify))


def open_all(folder):
    opened = st.open_checkpoint(folder, options=st.LoadOptions(verify="all"))
    return st.load_plain_tensors(folder), [opened[key] for key in opened], opened.common(), st.verify(folder)


def is_right(loaded):
    return (
        torch.equal(torch.cat(loaded["w"], dim=1), WEIGHT)
        and torch.equal(loaded["big"], BIG)
        and torch.equal(loaded["t"], WEIGHT.t())
        and loaded["rng"]["seed"] == 1
        and torch.equal(loaded["rng"]["state"], torch.arange(3))
        and loaded["step"] == 7
    )


def test_undamaged_files_load():
    assert is_right(read_all(folder_of(FILES)))
    assert open_all(folder_of(FILES))[3] == ()


# Damage


def check_harmless(read, name, bit):
    """A flipped bit is refused, or changes nothing that is loaded."""
    try:
        loaded = read(folder_of(flipped(FILES, name, bit)))
    except CheckpointingException:
        return
    assert is_right(loaded)


DATA = FILES["__0_0.distcp"]
PAYLOAD = DATA.index(BIG.numpy().tobytes()[:4096])


@pytest.mark.slow
@settings(max_examples=150)
@given(some.integers(0, 8 * len(DATA) - 1))
@example(8 * PAYLOAD)
@example(8 * (PAYLOAD + BIG.nbytes) - 1)
def test_no_flipped_bit_of_a_data_file_is_loaded(bit):
    check_harmless(read_all, "__0_0.distcp", bit)


def test_the_check_of_flipped_bits_sees_a_load_that_does_not_verify():
    with pytest.raises(AssertionError):
        check_harmless(lambda folder: read_all(folder, verify=None), "__0_0.distcp", 8 * PAYLOAD + 3)


def without_crc():
    """The same data file, written by a torch that was told to record no checksums."""
    torch.serialization.set_crc32_options(False)
    try:
        return saved()
    finally:
        torch.serialization.set_crc32_options(True)


def test_without_checksums_nothing_is_checked_and_the_report_says_so():
    folder = folder_of(without_crc())
    reports = []
    target = st.ShardedTensor("big", None, torch.int64, (90_000,), (90_000,), (0,), (1,))
    assert torch.equal(
        st.load({"b": target}, folder, options=st.LoadOptions(verify="all", report=reports.append))["b"], BIG
    )
    assert (reports[0].blocks_checked, reports[0].blocks_unchecked) == (0, 1)
    assert is_right(read_all(folder))


def test_verify_tells_of_every_file(tmp_path):
    longer = folder_of(FILES | {"__0_0.distcp": DATA + b"more"})
    (damage,) = st.verify(longer)
    assert (damage.begin, damage.end) == (len(DATA), len(DATA) + 4)
    assert is_right(read_all(longer))
    unlisted = folder_of(FILES | {"__0_0.distcp": DATA + archive(torch.zeros(1, 0))})  # as Megatron-Core 0.11 leaves
    assert st.verify(unlisted) == ()
    cut = st.verify(folder_of(FILES | {"__0_0.distcp": DATA[:-1]}))
    assert [damage.keys for damage in cut] == [("step",)]
    (gone,) = st.verify(folder_of({".metadata": FILES[".metadata"]}))
    assert gone.what == "no such file" and gone.keys == ("big", "rng/shard_0_1", "step", "t", "w")
    (index,) = st.verify(folder_of(FILES | {".metadata": FILES[".metadata"][:-1]}))
    assert index.file == ".metadata"


def test_verify_tells_of_places_that_contradict_each_other():
    metadata = pickle.loads(FILES[".metadata"])
    metadata.planner_data = {"step": ("a",), "w": ("a", "b")}
    folder = folder_of(FILES | {".metadata": pickle.dumps(metadata, 4)})
    (damage,) = st.verify(folder)
    assert "tree['a'] is there twice" in damage.what
    with pytest.raises(CorruptCheckpoint, match="is there twice"):
        st.load({}, folder)


# Hostile


def test_an_index_with_unknown_classes_needs_leave():
    metadata = pickle.loads(FILES[".metadata"])
    metadata.extra = Harmless()
    folder = folder_of(FILES | {".metadata": pickle.dumps(metadata, 4)})
    with pytest.raises(UnsafeFile, match="Harmless"):
        st.load_common_state_dict(folder)
    assert st.load_common_state_dict(folder, options=st.LoadOptions(allow_pickle=True)) == {"step": 7}
    garbage = folder_of(FILES | {".metadata": FILES[".metadata"][:50]})
    with pytest.raises(CorruptCheckpoint):
        st.load_common_state_dict(garbage, options=st.LoadOptions(allow_pickle=True))


class Harmless:
    """A class that no `.metadata` has."""


def changed(change):
    metadata = pickle.loads(FILES[".metadata"])
    change(metadata)
    return FILES | {".metadata": pickle.dumps(metadata, 4)}


def place(metadata, key, **fields):
    for index, info in metadata.storage_data.items():
        if index.fqn == key:
            vars(info).update(fields)


def chunk(metadata, key, number=0, **fields):
    vars(metadata.state_dict_metadata[key].chunks[number]).update(
        {name: torch.Size(value) if isinstance(value, tuple) else value for name, value in fields.items()}
    )


def entry(metadata, key, **fields):
    vars(metadata.state_dict_metadata[key]).update(fields)


def drop(metadata, key):
    for index in [index for index in metadata.storage_data if index.fqn == key]:
        del metadata.storage_data[index]


def more_chunks(metadata):
    """As many chunks as fit, each of which claims the whole large tensor's bytes."""
    chunks = [ChunkStorageMetadata(torch.Size((n,)), torch.Size((2**40,))) for n in range(1000)]
    size = torch.Size((2**50,))
    metadata.state_dict_metadata["big"] = TensorStorageMetadata(TensorProperties(dtype=torch.int64), size, chunks)
    metadata.storage_data |= {
        MetadataIndex("big", box.offsets): _StorageInfo("__0_0.distcp", 0, len(DATA)) for box in chunks
    }


def wide(metadata):
    shape = torch.Size((1,) * 100_000)
    for number in range(20):
        box = ChunkStorageMetadata(shape, shape)
        metadata.state_dict_metadata[f"wide {number}"] = TensorStorageMetadata(TensorProperties(), shape, [box])
        metadata.storage_data[MetadataIndex(f"wide {number}", shape)] = _StorageInfo("__0_0.distcp", 0, 10)


HOSTILE = {
    "negative byte": lambda metadata: place(metadata, "big", offset=-8),
    "byte beyond the file": lambda metadata: place(metadata, "big", offset=2**40),
    "byte beyond an int64": lambda metadata: place(metadata, "big", offset=2**70),
    "negative length": lambda metadata: place(metadata, "big", length=-1),
    "huge length": lambda metadata: place(metadata, "big", length=2**60),
    "no length": lambda metadata: place(metadata, "big", length=0),
    "length of no kind": lambda metadata: place(metadata, "big", length="long"),
    "byte of a float": lambda metadata: place(metadata, "big", offset=0.0),
    "file that climbs out": lambda metadata: place(metadata, "big", relative_path="../../etc/passwd"),
    "absolute file": lambda metadata: place(metadata, "big", relative_path="/etc/passwd"),
    "null byte": lambda metadata: place(metadata, "big", relative_path="a\0b"),
    "no file": lambda metadata: place(metadata, "big", relative_path=""),
    "a folder as file": lambda metadata: place(metadata, "big", relative_path="."),
    "file of no kind": lambda metadata: place(metadata, "big", relative_path=3),
    "missing file": lambda metadata: place(metadata, "big", relative_path="__9_0.distcp"),
    "another archive": lambda metadata: place(metadata, "big", offset=0),
    "no place": lambda metadata: drop(metadata, "big"),
    "no object's place": lambda metadata: drop(metadata, "rng/shard_0_1"),
    "huge chunk": lambda metadata: chunk(metadata, "big", sizes=(2**62,)),
    "chunk beyond an int64": lambda metadata: chunk(metadata, "big", sizes=(2**70,)),
    "chunk beyond its tensor": lambda metadata: chunk(metadata, "w", 1, sizes=(3, 3)),
    "overlapping chunks": lambda metadata: chunk(metadata, "w", 0, sizes=(4, 3)),
    "smaller chunk": lambda metadata: chunk(metadata, "big", sizes=(89_999,)),
    "negative offset": lambda metadata: chunk(metadata, "big", offsets=(-1,)),
    "negative size": lambda metadata: chunk(metadata, "big", sizes=(-90_000,)),
    "sizes of no kind": lambda metadata: chunk(metadata, "big", sizes="all"),
    "sizes of lists": lambda metadata: chunk(metadata, "big", sizes=[90_000]),
    "fewer axes": lambda metadata: chunk(metadata, "w", sizes=(6,)),
    "more axes": lambda metadata: chunk(metadata, "big", sizes=(90_000, 1), offsets=(0, 0)),
    "huge tensor": lambda metadata: entry(metadata, "big", size=torch.Size((2**62, 2**62))),
    "another shape": lambda metadata: entry(metadata, "t", size=torch.Size((4, 3))),
    "another dtype": lambda metadata: entry(metadata, "big", properties=TensorProperties(dtype=torch.float64)),
    "no dtype": lambda metadata: entry(metadata, "big", properties=None),
    "no chunks": lambda metadata: entry(metadata, "big", chunks=[]),
    "chunks of no kind": lambda metadata: entry(metadata, "big", chunks=7),
    "chunks of numbers": lambda metadata: entry(metadata, "big", chunks=[7]),
    "entry of no kind": lambda metadata: metadata.state_dict_metadata.update(big=3),
    "key of no kind": lambda metadata: metadata.state_dict_metadata.update({3: BytesStorageMetadata()}),
    "file of no text": lambda metadata: place(metadata, "big", relative_path="\ud800"),
    "paths of no kind": lambda metadata: setattr(metadata, "planner_data", 7),
    "deep path": lambda metadata: setattr(metadata, "planner_data", {"step": ("a",) * 100_000}),
    "far position": lambda metadata: setattr(metadata, "planner_data", {"step": ("a", 2**40)}),
    "two at one path": lambda metadata: setattr(metadata, "planner_data", {"step": ("w",)}),
    "more than fits in memory": more_chunks,
    "many wide shapes": wide,
    "key of no text": lambda metadata: metadata.state_dict_metadata.update(
        {"\ud800": metadata.state_dict_metadata.pop("big")}
    ),
    "no tensors": lambda metadata: setattr(metadata, "state_dict_metadata", None),
    "no places": lambda metadata: setattr(metadata, "storage_data", []),
}


@pytest.mark.slow
@pytest.mark.parametrize("row", HOSTILE)
def test_a_hostile_index_is_refused(row, tmp_path):
    files = changed(HOSTILE[row])
    local = LocalStorage(str(tmp_path))
    for name, data in files.items():
        local.write(name, [memoryview(data)], durable=False)
    for folder in (folder_of(files), local):
        began = time.process_time()
        with pytest.raises(CheckpointingException):
            read_all(folder)
        with suppress(CheckpointingException):
            open_all(folder)
        assert time.process_time() - began < QUICK


RAW = {
    "nothing": b"",
    "no pickle": b"\xff" * 64,
    "another value": pickle.dumps([1, 2]),
    "a billion laughs": b"\x80\x04](" + b"".join(b"\x94h" + bytes([n]) for n in range(200)) + b"t.",
}


@pytest.mark.parametrize("row", RAW)
def test_bytes_that_are_no_index_are_refused(row):
    began = time.process_time()
    folder = folder_of(FILES | {".metadata": RAW[row]})
    for read in (read_all, open_all):
        with pytest.raises(CheckpointingException):
            read(folder)
    (damage,) = st.verify(folder)
    assert damage.file == ".metadata"
    assert time.process_time() - began < QUICK


def test_a_tensor_too_large_for_memory_is_our_error():
    """Zero bytes are stored of it, so that nothing else is wrong."""

    def change(metadata):
        entry(metadata, "big", size=torch.Size((2**50,)))

    folder = folder_of(changed(change))
    for read in (lambda: st.load_plain_tensors(folder), lambda: st.open_checkpoint(folder)["big"].data.read()):
        with pytest.raises(CheckpointingException, match="'big'"):
            read()
