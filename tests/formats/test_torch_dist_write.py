"""Saving as Megatron-Core's `torch_dist`: what lies in the folder, and what its own reader makes of it."""

from __future__ import annotations

import io
import json
import pickle
import pickletools
import zipfile
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch

import shardtree as st
from shardtree.storage import LocalStorage, MemoryStorage, Storage, wrapped
from shardtree.world import World
from tests.options import save_keywords

TORCH_DIST, DCP = ("torch_dist", 1), ("dcp", 1)

# What torch says, once, when it makes a tensor of half-precision complex numbers.
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


def index_of(storage: Storage) -> Any:
    """What torch.distributed.checkpoint gets when it reads the index."""
    return pickle.loads(storage.read(".metadata"))


def archived(storage: Storage, place: Any) -> Any:
    """What torch.load makes of one archive."""
    data = storage.read(place.relative_path)[place.offset : place.offset + place.length]
    return torch.load(io.BytesIO(data), weights_only=True)


def saved(make: Callable[[World], Any], ranks: int = 1, backend: Any = TORCH_DIST, **options: Any) -> MemoryStorage:
    storage = MemoryStorage()
    st.simulate(ranks, lambda world: st.save(make(world), storage, backend, world=world, **save_keywords(**options)))
    return storage


def rows(world: World) -> dict[str, Any]:
    whole = torch.arange(24.0).view(6, 4)
    return {
        "w": st.ShardedTensor.from_rank_offsets("w", whole.chunk(world.size)[world.rank], (0, world.rank, world.size)),
        "norm": st.ShardedTensor.from_rank_offsets("norm", torch.ones(3), replica_id=world.rank),
        "rng": st.ShardedObject("rng", {"seed": world.rank}, (world.size,), (world.rank,)),
        "step": 7,
    }


# -- the folder


def test_the_folder_holds_what_megatron_core_expects_and_nothing_else() -> None:
    storage = saved(rows, ranks=2)
    assert storage.names() == (".metadata", "__0_0.distcp", "__1_0.distcp", "common.pt", "metadata.json")
    assert json.loads(storage.read("metadata.json")) == {
        "sharded_backend": "torch_dist",
        "sharded_backend_version": 1,
        "common_backend": "torch",
        "common_backend_version": 1,
    }


def test_every_archive_is_one_that_torch_loads_and_begins_at_a_multiple_of_64() -> None:
    storage = saved(rows, ranks=2)
    places = index_of(storage).storage_data
    found = {(index.fqn, index.offset): archived(storage, place) for index, place in places.items()}
    assert found["rng/shard_1_2", None] == [{"seed": 1}]
    assert torch.equal(found["w", torch.Size([3, 0])], torch.arange(12.0, 24.0).view(3, 4))
    assert all(place.offset % 64 == 0 for place in places.values())
    for name in ("__0_0.distcp", "__1_0.distcp"):
        taken = sorted((place.offset, place.length) for place in places.values() if place.relative_path == name)
        assert all(begin + length <= after for (begin, length), (after, _) in pairwise(taken))
        assert sum(taken[-1]) == storage.length(name)
        assert min(taken)[0] == 0


def test_the_index_is_what_torch_writes() -> None:
    """Class for class and field for field, as torch.distributed.checkpoint makes them."""
    from torch.distributed.checkpoint import metadata as dcp
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    index = index_of(saved(rows))
    size = torch.Size([6, 4])
    properties = dcp.TensorProperties(torch.float32, torch.strided, False, torch.contiguous_format, False)
    expected = dcp.TensorStorageMetadata(properties, size, [dcp.ChunkStorageMetadata(torch.Size([0, 0]), size)])
    assert index.state_dict_metadata["w"] == expected
    assert index.state_dict_metadata["rng/shard_0_1"] == dcp.BytesStorageMetadata()
    assert (index.planner_data, index.version) == (None, "1.0.0")
    place = index.storage_data[dcp.MetadataIndex("w", torch.Size([0, 0]))]
    assert isinstance(place, _StorageInfo)
    assert (place.relative_path, place.transform_descriptors) == ("__0_0.distcp", None)
    assert {found.index for found in index.storage_data if found.fqn == "w"} == {0}
    assert pickle.loads(pickle.dumps(index)) == index


def test_the_index_tells_nothing_of_where_it_was_saved(tmp_path: Any) -> None:
    st.save(rows(st.world.one_process()), tmp_path, TORCH_DIST)
    data = (tmp_path / ".metadata").read_bytes()
    assert str(tmp_path).encode() not in data
    assert index_of(LocalStorage(str(tmp_path))).storage_meta.checkpoint_id is None
    named = {argument for opcode, argument, _ in pickletools.genops(data) if isinstance(argument, str)}
    assert not any("pathlib" in name for name in named)


# -- shards


def test_chunks_without_elements_are_left_out_unless_the_tensor_has_none() -> None:
    def make(world: World) -> dict[str, Any]:
        rows = 4 if world.rank == 0 else 0
        part = st.ShardedTensor("w", torch.ones(rows, 2), torch.float32, (rows, 2), (4, 2), (4 - rows, 0), None)
        # Each rank holds a part without elements of it, and none of them is another's replica.
        empty = st.ShardedTensor("none", torch.ones(0, 2), torch.float32, (0, 2), (0, 2), (0, 0), None)
        return {"w": part, "none": empty}

    index = index_of(saved(make, ranks=2))
    assert {name: len(found.chunks) for name, found in index.state_dict_metadata.items()} == {"w": 1, "none": 1}
    assert len(index.storage_data) == 2


def test_what_is_stored_of_a_view_of_something_large_is_row_major_and_nothing_more() -> None:
    data = torch.randn(2**20)[:: 2**17].view(4, 2).T
    storage = saved(lambda world: {"w": st.ShardedTensor.from_rank_offsets("w", data)})
    (place,) = index_of(storage).storage_data.values()
    found = archived(storage, place)
    assert torch.equal(found, data) and found.is_contiguous()
    assert place.length < found.nbytes + 2000


def test_a_file_that_rank_0_does_not_see_is_found() -> None:
    inner = MemoryStorage()
    storage = wrapped(inner, length=lambda name: None if name == "__1_0.distcp" else inner.length(name))
    with pytest.raises(st.CheckpointingException, match=r"rank 0 does not see .*__1_0\.distcp.* as rank 1 wrote it"):
        st.simulate(2, lambda world: st.save(rows(world), storage, TORCH_DIST, world=world))


@pytest.mark.parametrize("transpose", [False, True])
def test_the_checksum_of_a_large_tensor_is_that_of_all_its_bytes(transpose: bool) -> None:
    data = torch.arange(2**18, dtype=torch.float32).view(512, 512)
    tensor = data.T if transpose else data
    storage = saved(lambda world: {"w": st.ShardedTensor.from_rank_offsets("w", tensor)})
    (place,) = index_of(storage).storage_data.values()
    assert torch.equal(archived(storage, place), tensor)
    archive = bytearray(storage.read(place.relative_path)[place.offset : place.offset + place.length])
    assert zipfile.ZipFile(io.BytesIO(archive)).testzip() is None
    archive[len(archive) // 2] ^= 1
    assert zipfile.ZipFile(io.BytesIO(archive)).testzip() == "archive/data/0"


def test_a_folder_with_a_common_state_of_megatron_core_takes_no_plain_checkpoint() -> None:
    storage = MemoryStorage()
    storage.write("common.pt", [memoryview(b"theirs")], durable=False)
    with pytest.raises(st.errors.StrategyError, match=r"common\.pt"):
        st.save(rows(st.world.one_process()), storage, DCP)
    assert storage.names() == ("common.pt",)
