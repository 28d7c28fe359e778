"""Damaged and hostile checkpoints are refused, quickly and with our own errors; no flipped bit goes unnoticed."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as some

import shardtree as st
from shardtree.errors import CheckpointingException
from shardtree.shell.storage import digest
from shardtree.shell.table import decode_metadata, encode_metadata
from shardtree.shell.table.index import decode_index, encode_index, text_columns
from shardtree.storage import LocalStorage
from tests.shell.checkpoint.parts import saved_by
from tests.shell.table.folders import flipped, folder_of

QUICK = 10.0  # seconds of processors, which other work on the machine doesn't change


def tree(rank=0):
    return {
        "w": st.ShardedTensor.from_rank_offsets("w", torch.arange(40_000.0) + rank, (0, rank, 2)),
        "b": st.ShardedTensor.from_rank_offsets("b", torch.tensor([1, 2], dtype=torch.int8), replica_id=rank),
        "o": st.ShardedObject("o", {"rank": rank}, (2,), (rank,)),
        "step": 3,
        "name": "run",
    }


FOLDER = saved_by([tree(rank) for rank in range(2)])
FILES = {name: FOLDER.read(name) for name in FOLDER.all_names()}
KINDS = ("metadata.json", "index", "common", "00000", "00001")


def name_of(kind):
    return next(name for name in FILES if kind in name)


def read_all(folder, verify="all"):
    """Everything that is stored: tensors, objects, the common state."""
    target = {"w": whole("w", (80_000,), torch.float32), "b": whole("b", (2,), torch.int8)}
    objects = [st.ShardedObject("o", None, (2,), (rank,)) for rank in range(2)]
    return st.load(target | {"objects": objects}, folder, options=st.LoadOptions(verify=verify))


def whole(key, shape, dtype):
    return st.ShardedTensor(key, None, dtype, shape, shape, (0,) * len(shape), None)


def check_detected(read, name, bit):
    with pytest.raises(CheckpointingException):
        read(folder_of(flipped(FILES, name, bit)))


def bits_of(kind):
    return some.tuples(some.just(name_of(kind)), some.integers(0, 8 * len(FILES[name_of(kind)]) - 1))


# The index, the common state and metadata.json are checked without `verify` too.
CHECKED = [*product(KINDS, ["all"]), *product(KINDS[:3], [None])]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "verify"), CHECKED)
def test_a_flipped_bit_in_any_file_is_detected(kind, verify):
    @given(bits_of(kind))
    @example((name_of(kind), 0))
    @example((name_of(kind), 8 * len(FILES[name_of(kind)]) - 1))
    def law(place):
        check_detected(lambda folder: read_all(folder, verify), *place)

    law()


def test_the_check_of_flipped_bits_sees_a_load_that_does_not_verify():
    name = name_of("00000")
    with pytest.raises(pytest.fail.Exception):
        check_detected(lambda folder: read_all(folder, verify=None), name, 8 * 50_000)


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_that_is_gone_is_named(kind):
    folder = folder_of(FILES)
    folder.remove(name_of(kind))
    with pytest.raises(CheckpointingException, match=name_of(kind).rpartition("/")[2]):
        read_all(folder)


# Hostile: whoever made these knew how to compute hashes.


def index_entry():
    return decode_metadata(FILES["metadata.json"], "metadata.json")["index"]


INDEX = decode_index(memoryview(bytearray(FILES[name_of("index")])), "index")


def with_index(data):
    name = index_entry()["name"]
    return with_fields(index={"name": name, "length": len(data), "digest": digest(data)}) | {name: data}


def with_fields(**changes):
    fields = decode_metadata(FILES["metadata.json"], "metadata.json") | changes
    return FILES | {"metadata.json": encode_metadata(fields)}


def changed(**columns):
    return with_index(encode_index(replace(INDEX, **columns)))


def at(column, place, value):
    copy = np.array(column)
    copy[place] = value
    return copy


def texts(group, *values):
    text, start = text_columns(values)
    return {f"{group}_text": text, f"{group}_start": start}


def appended(column, value):
    return np.concatenate([column, np.array([value], dtype=column.dtype)])


MOST = 2**63 - 1
ROWS = {
    "many elements": lambda: changed(key_shape=at(INDEX.key_shape, (1, -1), MOST)),
    "many axes": lambda: changed(key_axes=at(INDEX.key_axes, 0, MOST)),
    "negative axes": lambda: changed(key_axes=at(INDEX.key_axes, 0, -1)),
    "negative shape": lambda: changed(key_shape=at(INDEX.key_shape, (0, 0), -5)),
    "prepended": lambda: changed(key_prepended=at(INDEX.key_prepended, 0, 2)),
    "dtype out of range": lambda: changed(key_dtype=at(INDEX.key_dtype, 0, 99)),
    "unknown dtype": lambda: changed(**texts("dtype", "float31", "int8")),
    "quantised dtype": lambda: changed(**texts("dtype", "float32", "qint8")),
    "duplicate keys": lambda: changed(**texts("key", "w", "w")),
    "unsorted keys": lambda: changed(**texts("key", "w", "b")),
    "keys of no text": lambda: changed(key_text=np.array([0xFF, 0x62], dtype=np.uint8)),
    "duplicate objects": lambda: changed(**texts("object", "o/shard_0_2", "o/shard_0_2")),
    "object names": lambda: changed(**texts("object", "o", "o/shard_x_y")),
    "text beyond its column": lambda: changed(key_start=at(INDEX.key_start, -1, 9)),
    "empty key": lambda: changed(key_start=at(INDEX.key_start, 1, 0)),
    "chunk of no key": lambda: changed(chunk_key=at(INDEX.chunk_key, -1, 7)),
    "chunk beyond its tensor": lambda: changed(chunk_offset=at(INDEX.chunk_offset, (2, 0), 60_000)),
    "negative offset": lambda: changed(chunk_offset=at(INDEX.chunk_offset, (2, 0), -1)),
    "offset that wraps": lambda: changed(chunk_offset=at(INDEX.chunk_offset, (2, 0), MOST)),
    "flat range": lambda: changed(chunk_start=at(INDEX.chunk_start, 1, 5)),
    "chunk of no file": lambda: changed(chunk_file=at(INDEX.chunk_file, 0, 2)),
    "negative file": lambda: changed(chunk_file=at(INDEX.chunk_file, 0, -1)),
    "chunk beyond its file": lambda: changed(chunk_byte=at(INDEX.chunk_byte, 0, MOST)),
    "negative byte": lambda: changed(chunk_byte=at(INDEX.chunk_byte, 0, -8)),
    "chunk's length": lambda: changed(chunk_length=at(INDEX.chunk_length, 0, 1)),
    "object's length": lambda: changed(object_length=at(INDEX.object_length, 0, MOST)),
    "file's length": lambda: changed(file_length=at(INDEX.file_length, 0, 2**60)),
    "blocks": lambda: changed(file_block=at(INDEX.file_block, 1, 0)),
    "missing hashes": lambda: changed(block_hash=INDEX.block_hash[:-1]),
    "one row more": lambda: changed(chunk_byte=appended(INDEX.chunk_byte, 0)),
    "a column of another kind": lambda: changed(chunk_start=INDEX.chunk_start.astype(np.uint64)),
    "overlapping chunks": lambda: changed(chunk_offset=at(INDEX.chunk_offset, (2, 0), 39_000)),
    "unknown column": lambda: with_index(FILES[name_of("index")].replace(b'"key_axes"', b'"new_axes"')),
    "no index": lambda: with_index(b""),
    "no header": lambda: with_index(b"\xff" * 64),
    "names that climb out": lambda: changed(**texts("file", "../../a", "/etc/passwd")),
}


@pytest.mark.parametrize("row", ROWS)
def test_a_hostile_index_is_refused(row, tmp_path):
    files = ROWS[row]()
    local = LocalStorage(str(tmp_path))
    for name, data in files.items():
        local.make_folder(name.rpartition("/")[0])
        local.write(name, [memoryview(data)], durable=False)
    for folder in (folder_of(files), local):
        began = time.process_time()
        with pytest.raises(CheckpointingException):
            read_all(folder)
        with pytest.raises(CheckpointingException):
            open_all(folder)
        assert time.process_time() - began < QUICK


def open_all(folder):
    """Everything again, without saying what is wanted."""
    opened = st.open_checkpoint(folder)
    return st.load_plain_tensors(folder), [opened[key] for key in opened]


def test_an_index_of_an_unknown_name_can_be_replaced():
    entry = index_entry()
    other = entry["name"].replace("index-0", "another")
    folder = folder_of(with_fields(index=entry | {"name": other}) | {other: FILES[entry["name"]]})
    st.remove_sharded_tensors(folder, "w")
    assert list(st.load_plain_tensors(folder)) == ["b"]


def test_a_column_of_a_later_version_is_ignored_where_its_name_says_so():
    data = FILES[name_of("index")]
    header = data[8 : 8 + int.from_bytes(data[:8], "little")]
    assert header.rstrip().endswith(b"}")
    extra = header.rstrip()[:-1] + b',"x_note":{"dtype":"U8","shape":[0],"data_offsets":[%d,%d]}}' % (
        (len(data) - 8 - len(header),) * 2
    )
    new = len(extra).to_bytes(8, "little") + extra + data[8 + len(header) :]
    assert read_all(folder_of(with_index(new)))["step"] == 3
