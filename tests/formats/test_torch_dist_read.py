"""Laws of reading archives of torch.save: stored in any layout, asked for in any; and what old versions wrote."""

from __future__ import annotations

import json
import math
import pickle
from pathlib import PosixPath

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some
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
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

import shardtree as st
from shardtree.errors import CorruptCheckpoint, UnsupportedValue
from shardtree.testing import cut, first_difference, layouts, tensors
from tests.formats.zarr_nodes import load_cut
from tests.shell.table.folders import archive, folder_of

# What torch.save takes; it has no storage for dtypes of fewer bits than a byte.
SAVED = [
    getattr(torch, name)
    for name in """
        float32 float64 float16 bfloat16 float8_e4m3fn float8_e5m2 bool
        int8 int16 int32 int64 uint8 uint16 uint32 uint64
        complex64 complex128
    """.split()
]

TORCH_DIST = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}


class Writer:
    """A folder as torch.distributed.checkpoint and Megatron-Core leave it, made of single chunks."""

    def __init__(self, files=1):
        self.data = [bytearray() for _ in range(files)]
        self.metadata = Metadata({}, None, {})
        self.metadata.mcore_data = {}

    def add(self, key, shape, offset, tensor, file=0, **flat):
        entry = self.metadata.state_dict_metadata.setdefault(
            key, TensorStorageMetadata(TensorProperties(dtype=tensor.dtype), torch.Size(shape), [])
        )
        entry.chunks.append(ChunkStorageMetadata(torch.Size(offset), tensor.shape))
        self.put(MetadataIndex(key, torch.Size(offset)), tensor, file)
        self.metadata.mcore_data[key] = flat

    def put(self, index, value, file=0):
        content, data = archive(value), self.data[file]
        self.metadata.storage_data[index] = _StorageInfo(f"__{file}_0.distcp", len(data), len(content))
        data += content

    def add_value(self, key, value):
        self.metadata.state_dict_metadata[key] = BytesStorageMetadata()
        self.put(MetadataIndex(key), value)

    def files(self):
        data = {f"__{number}_0.distcp": bytes(each) for number, each in enumerate(self.data)}
        return {".metadata": pickle.dumps(self.metadata, 4), **data}

    def folder(self, **changes):
        return folder_of(self.files() | changes)


def store(writer, key, whole, layout):
    """Add a tensor's main replicas as Megatron-Core 0.11 to 0.15 stored them: flat ranges as ranges of grid cells."""
    shards = [shard for rank in range(layout.ranks) for shard in cut(layout, key, whole, rank)]
    shards = [shard for shard in shards if st.is_main_replica(shard.replica_id) and shard.data.numel()]
    for number, shard in enumerate(shards):
        data, file = shard.data, number % len(writer.data)
        if shard.flattened_range is None:
            box = data.reshape((1,) * shard.prepend_axis_num + shard.local_shape)
            writer.add(key, layout.global_shape, shard.global_offset, box.contiguous(), file)
        else:
            cell = (1,) * shard.prepend_axis_num + shard.local_shape
            grid = tuple(size // part for size, part in zip(layout.global_shape, cell, strict=True))
            place = tuple(at // part for at, part in zip(shard.global_offset, cell, strict=True))
            flat = {"nd_reformulated_orig_global_shape": layout.global_shape}
            inside = data.reshape((1,) * len(cell) + (-1,)).contiguous()
            start = shard.flattened_range.start
            writer.add(key, (*grid, math.prod(cell)), (*place, start), inside, file, **flat)


def has_cells(layout):
    """Whether Megatron-Core could have stored a layout: all of it flat on a grid, or none of it."""
    pieces = [piece for piece in layout.pieces if math.prod(piece.shape)]
    flat = {piece.flat is not None for piece in pieces}
    even = layout.grid is not None and len({piece.shape for piece in pieces}) <= 1
    return flat <= {False} or (flat == {True} and even)


def check_any_layout(whole, stored, asked, store=store):
    writer = Writer(files=2)
    store(writer, "w", whole, stored)
    found = load_cut(writer.folder(), "w", whole, asked)
    assert not first_difference(found, whole)


@pytest.mark.slow
@settings(max_examples=120, deadline=None)
@given(some.data())
def test_what_is_stored_in_any_layout_loads_in_any(data):
    whole = data.draw(tensors(dtype=some.sampled_from(SAVED)))
    if not whole.numel():
        return
    stored = data.draw(layouts(tuple(whole.shape), data.draw(some.integers(1, 4))).filter(has_cells))
    asked = data.draw(layouts(tuple(whole.shape), data.draw(some.integers(1, 4))))
    check_any_layout(whole, stored, asked)


def test_the_law_sees_flat_ranges_at_the_wrong_place():
    """The planted fault: cells are counted along the other axis."""
    grid = [((row, column), (2, 3)) for row in (0, 2) for column in (0, 3)]
    pieces = tuple(st.testing.Piece(0, offset, shape, flat) for offset, shape in grid for flat in ((0, 4), (4, 6)))
    layout = st.testing.Layout(1, (4, 6), pieces, grid=(2, 2))
    whole = torch.arange(24.0).reshape(4, 6)
    check_any_layout(whole, layout, layout)

    def turned(writer, key, whole, layout):
        store(writer, key, whole, layout)
        boxes = writer.metadata.state_dict_metadata[key].chunks
        places = dict(writer.metadata.storage_data)
        writer.metadata.storage_data.clear()
        for box in boxes:
            row, column, start = box.offsets
            place = places[MetadataIndex(key, box.offsets)]
            writer.metadata.storage_data[MetadataIndex(key, torch.Size((column, row, start)))] = place

    with pytest.raises(AssertionError):
        check_any_layout(whole, layout, layout, turned)


# Large chunks


# What is peculiar in files of other versions


def test_flat_tensors_of_one_axis_with_true_offsets_load():
    """As Megatron-Core 0.8 to 0.10 stored them: nothing beside them says that they are flat."""
    writer, whole = Writer(), torch.arange(12.0)
    for offset, size in ((0, 2), (6, 2), (2, 4), (8, 4)):
        writer.add("b", (12,), (offset,), whole[offset : offset + size].clone())
    assert torch.equal(st.load_plain_tensors(writer.folder())["b"], whole)
    flat = st.ShardedTensor("b", None, torch.float32, (6,), (12,), (6,), (2,), flattened_range=slice(1, 5))
    assert torch.equal(st.load({"b": flat}, writer.folder(), validate_access_integrity=False)["b"], whole[7:11])


def test_flat_tensors_that_fit_no_grid_are_refused_and_others_load():
    writer = Writer()
    shapes = {
        "axes": ((2, 24), {}, (8, 6)),
        "uneven": ((3, 1, 16), {}, (8, 6)),
        "cell": ((2, 1, 23), {}, (8, 6)),
        "two cells": ((2, 1, 24), {"size": (2, 1, 24)}, (8, 6)),
        "no numbers": ((2, 1, 24), {}, None),
    }
    for key, (shape, options, true) in shapes.items():
        size = options.get("size", (1,) * (len(shape) - 1) + shape[-1:])
        tensor = torch.zeros(size)
        writer.add(key, shape, (0,) * len(shape), tensor, nd_reformulated_orig_global_shape=true)
    writer.add("w", (3,), (0,), torch.arange(3.0))
    writer.metadata.mcore_data["gone"] = {"nd_reformulated_orig_global_shape": (1,)}
    folder = writer.folder()
    assert st.load_tensors_metadata(folder).keys() == {"w", "no numbers"}
    assert st.load({"w": st.ShardedTensor.from_rank_offsets("w", torch.zeros(3))}, folder)["w"].tolist() == [0, 1, 2]
    for key in ("axes", "uneven", "cell", "two cells"):
        target = st.ShardedTensor.from_rank_offsets(key, torch.zeros(8, 6))
        with pytest.raises(UnsupportedValue, match=f"'{key}': it"):
            st.load({"w": target}, folder)


def test_chunks_without_elements_do_no_harm():
    writer = Writer()
    for offset, rows in ((0, 2), (2, 1)):
        writer.add("w", (3, 2), (offset, 0), torch.full((rows, 2), float(offset)))
    chunks = writer.metadata.state_dict_metadata["w"].chunks
    chunks += [ChunkStorageMetadata(torch.Size((0, 0)), torch.Size((0, 2))), chunks[0]]
    assert st.load_plain_tensors(writer.folder())["w"].tolist() == [[0, 0], [0, 0], [2, 2]]


def test_an_archive_with_another_tensor_is_refused():
    for stored in (torch.zeros(3, 2), torch.zeros(2, 3, dtype=torch.int32), torch.zeros(6)):
        writer = Writer()
        writer.add("w", (2, 3), (0, 0), stored)
        entry = writer.metadata.state_dict_metadata["w"]
        entry.properties = TensorProperties(dtype=torch.float32)
        entry.chunks[:] = [ChunkStorageMetadata(torch.Size((0, 0)), torch.Size((2, 3)))]
        with pytest.raises(CorruptCheckpoint, match=r"'w'.*not the tensor that \.metadata lists"):
            st.load_plain_tensors(writer.folder())


def test_what_lies_behind_an_extension_is_refused_where_it_is_asked_for():
    writer = Writer()
    writer.add("w", (3,), (0,), torch.arange(3.0))
    writer.add("z", (2,), (0,), torch.zeros(2))
    for index, place in writer.metadata.storage_data.items():
        if index.fqn == "z":
            place.transform_descriptors = ["stream.zstd"]
    folder = writer.folder()
    target = {key: st.ShardedTensor.from_rank_offsets(key, torch.zeros(n)) for key, n in (("w", 3), ("z", 2))}
    assert st.load({"w": target["w"]}, folder)["w"].tolist() == [0, 1, 2]
    with pytest.raises(UnsupportedValue, match=r"'z': it is stored through an extension, \['stream\.zstd'\]"):
        st.load(target, folder)
    assert st.verify(folder) == ()


def old_metadata(writer, names):
    """The writer's index as other versions pickled it: their names of classes, a path, plans of all ranks."""
    writer.metadata.storage_meta = StorageMeta(PosixPath("/checkpoints"), "1")
    writer.metadata.all_local_plans = [SavePlan([WriteItem(MetadataIndex("w"), WriteItemType.TENSOR)])]
    data = pickle.dumps(writer.metadata, protocol=2)  # names are lines in it
    for name, other in (NAMES | names).items():
        named = "c" + "\n".join(name.rsplit(".", 1)) + "\n"
        assert named.encode() in data
        data = data.replace(named.encode(), ("c" + "\n".join(other.rsplit(".", 1)) + "\n").encode())
    return data


TORCH, SHARD = "torch.distributed.checkpoint", "torch.distributed._shard.sharded_tensor.metadata"
MEGATRON = "megatron.core.dist_checkpointing.strategies.torch"
NAMES = {f"{TORCH}.planner.SavePlan": f"{MEGATRON}.MCoreSavePlan"}
VERSIONS = {
    "torch 2.13": {},
    "torch 2.2": {
        f"{TORCH}.metadata.TensorProperties": f"{SHARD}.TensorProperties",
        f"{TORCH}.metadata._MEM_FORMAT_ENCODING": f"{SHARD}.MEM_FORMAT_ENCODING",
    },
    "Python 3.13": {"pathlib.PosixPath": "pathlib._local.PosixPath"},
    "Megatron-Core 0.11": {f"{TORCH}.metadata.Metadata": f"{MEGATRON}.MCoreMetadata"},
}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("allow_pickle", [False, True])
def test_an_index_of_another_version_is_read(version, allow_pickle):
    writer = Writer()
    writer.add("w", (3,), (0,), torch.arange(3.0))
    folder = writer.folder(**{".metadata": old_metadata(writer, VERSIONS[version])})
    target = st.ShardedTensor.from_rank_offsets("w", torch.zeros(3))
    assert st.load({"w": target}, folder, options=st.LoadOptions(allow_pickle=allow_pickle))["w"].tolist() == [0, 1, 2]


def test_megatrons_metadata_json_makes_the_same_files_its_own():
    writer = Writer()
    writer.add("w", (3,), (0,), torch.arange(3.0))
    folder = writer.folder(**{"metadata.json": json.dumps(TORCH_DIST).encode()})
    assert st.load_plain_tensors(folder)["w"].tolist() == [0, 1, 2]
    with pytest.raises(CorruptCheckpoint, match="has no common state"):
        st.load_common_state_dict(folder)
