"""The native format holds every tensor bit for bit, however it lies in memory and whatever its key is."""

from __future__ import annotations

import json
import math
import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some

import shardtree as st
from shardtree.shell.table.safetensors._layout import parts
from shardtree.storage import MemoryStorage
from shardtree.testing import STORABLE_DTYPES, random_bits
from tests.shell.checkpoint.parts import saved
from tests.shell.table.test_native_files import data_files

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


def whole(key, tensor, *cuts, **fields):
    return st.ShardedTensor.from_rank_offsets(key, tensor, *cuts, **fields)


def header_of(data):
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + length]), 8 + length


def test_dtypes_that_the_format_lacks_are_bytes_there():
    folder = saved([whole("c", torch.ones(2, 3, dtype=torch.complex128)), whole("f", torch.ones(2))])
    (data,) = data_files(folder).values()
    header, _ = header_of(data)
    assert header["c"]["dtype"] == "U8" and header["c"]["shape"] == [96]
    assert header["f"]["dtype"] == "F32" and header["f"]["shape"] == [2]


def test_many_keys_go_to_several_parts_when_a_header_would_be_too_long():
    keys = [f"{number:02d}" + "k" * 1_000_000 for number in range(12)]
    folder = saved([whole(key, torch.tensor(number)) for number, key in enumerate(keys)])
    assert list(data_files(folder)) == ["00000-of-00001-1.safetensors", "00000-of-00001.safetensors"]
    loaded = st.load_plain_tensors(folder)
    assert [int(loaded[key]) for key in keys] == list(range(12))


KEYS_AND_DTYPES = some.tuples(some.sampled_from(["a", "a#1", "b", "é"]), some.sampled_from([*STORABLE_DTYPES, None]))


def held_of(key, dtype):
    """Return a tensor shard, or an object where there is no dtype, and what the format sorts by."""
    if dtype is None:
        item = st.ShardedObject(key, key, (1,), (0,))
        return item, (-1, item.unique_key)
    return whole(key, random_bits((3,), dtype)), (-dtype.itemsize, key)


@given(some.integers(0, 3000), some.lists(KEYS_AND_DTYPES, min_size=1, max_size=8))
def test_parts_hold_each_item_once_in_order_and_aligned(header_bytes, chosen):
    shards, sorted_by = zip(*(held_of(*each) for each in chosen), strict=True)
    layout = parts(shards, allow_pickle=False, header_bytes=header_bytes)
    order = [number for part in layout for number in part.entries.number.tolist()]
    assert order == sorted(range(len(shards)), key=lambda number: (*sorted_by[number], number))
    for part in layout:
        assert len(part.header) % 64 == 0
        assert len(part.header) <= max(header_bytes, 1000)
        ends = (part.byte + part.entries.length).tolist()
        assert part.byte.tolist() == [len(part.header), *ends[:-1]] and part.length == ends[-1]
        assert not (part.byte % part.entries.item_size).any()


@pytest.mark.peers
def test_pieces_of_one_tensor_in_one_file_read_as_numbered_entries(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    full = torch.arange(8.0)
    st.save([whole("w", full[:4], (0, 0, 2)), whole("w", full[4:], (0, 1, 2))], tmp_path)
    (file,) = tmp_path.glob("save-*/0*.safetensors")
    found = safetensors.load_file(file)
    assert {name: tensor.tolist() for name, tensor in found.items()} == {"w": [0, 1, 2, 3], "w#1": [4, 5, 6, 7]}


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_rank_with_nothing_to_write_writes_no_file(ranks):
    folder = MemoryStorage()
    tree = {"w": whole("w", torch.arange(2)), "step": 1}
    st.simulate(ranks, lambda world: st.save(tree if world.rank == 0 else {"step": 1}, folder, world=world))
    assert len(data_files(folder)) == 1
    assert math.prod(st.load_plain_tensors(folder)["w"].shape) == 2
