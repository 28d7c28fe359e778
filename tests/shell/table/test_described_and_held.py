"""What metadata describes is held by a file, once; else a checkpoint of any format is corrupt, and verify finds it."""

from __future__ import annotations

import io
import json
import pickle
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

import shardtree as st
from shardtree.errors import CorruptCheckpoint, ShapeError
from shardtree.formats.archives import describe_archive
from shardtree.formats.archives._describe import _Places
from shardtree.formats.archives._zip import open_archive
from shardtree.formats.deepspeed._listing import zero_files
from shardtree.formats.dtensor_files import rank_files
from shardtree.formats.rank_archives import ArchiveFile, Piece, Tensors, contents_of
from shardtree.shell.table.index import decode_index, encode_index
from shardtree.strategies import Damage
from tests.fuzz import seeds
from tests.fuzz.slots import sealed
from tests.shell.table.folders import Files, archive, folder_of


def refused(files: Files, words: str) -> None:
    """Check that a folder is corrupt, by every call that looks at what is in it."""
    place = folder_of(files)
    for call in (st.open_checkpoint, st.load_plain_tensors):
        with pytest.raises(CorruptCheckpoint, match=words):
            call(place)
    (damage,) = (one for one in st.verify(place) if isinstance(one, Damage))
    assert re.search(words, damage.what)


# A tensor of which nothing is stored.


@pytest.mark.parametrize(("key", "row"), [("f", 0), ("h", 1)])
def test_a_tensor_without_a_chunk_is_damage_natively(key: str, row: int) -> None:
    files = seeds.saved(("safetensors", 1))
    name = json.loads(files["metadata.json"])["index"]["name"]
    index = decode_index(memoryview(files[name]), "")
    kept = np.arange(index.chunk_key.size) != row
    columns = {one: getattr(index, one)[kept] for one in vars(type(index))["__slots__"] if one.startswith("chunk_")}
    refused(
        sealed(files | {name: encode_index(replace(index, **columns))}), f"1 tensor without a chunk, such as '{key}'"
    )


def test_a_tensor_without_elements_needs_no_chunk() -> None:
    storage = st.storage.MemoryStorage()
    st.save({"e": st.ShardedTensor.from_rank_offsets("e", torch.zeros(0, 3))}, storage)
    assert st.verify(storage) == () and st.load_plain_tensors(storage)["e"].shape == (0, 3)


def partly_saved(backend: str) -> st.storage.MemoryStorage:
    """Return what a rank saves of two tensors, of one of which it has an empty part."""
    storage = st.storage.MemoryStorage()
    empty = st.ShardedTensor("a", torch.empty(0, 4), torch.float32, (0, 4), (8, 4), (0, 0), None, 0)
    whole = st.ShardedTensor.from_rank_offsets("b", torch.ones(2))
    st.save({"b": whole, "a": empty}, storage, sharded_strategy=backend, validate_access_integrity=False)
    return storage


def only_others_load(place: st.storage.MemoryStorage, key: str, shape: tuple[int, ...], others: set[str]) -> None:
    """Check that a folder opens, and that only a load of a tensor of which nothing is stored is refused."""
    stored = st.load_tensors_metadata(place)
    assert others | {key} == set(stored) <= set(st.open_checkpoint(place).metadata)
    for other in others:
        data = torch.zeros(stored[other].global_shape, dtype=stored[other].dtype)
        target = st.ShardedTensor.from_rank_offsets(other, data)
        assert st.load({other: target}, place)[other].any()
    target = st.ShardedTensor.from_rank_offsets(key, torch.zeros(shape))
    said = rf"'{key}' at .*: 0 of {target.data.numel()} elements are stored"
    for call in (partial(st.load, {key: target}), st.load_plain_tensors):
        with pytest.raises(ShapeError, match=said):
            call(place)


@pytest.mark.parametrize("backend", ["safetensors", "dcp", "torch_dist", "zarr"])
def test_a_part_of_a_save_that_stores_nothing_of_a_tensor_is_sound(backend: str) -> None:
    place = partly_saved(backend)
    only_others_load(place, "a", (8, 4), {"b"})
    assert st.verify(place) == ()


Change = Callable[[Any], None]


def changed(backend: str, change: Change) -> Files:
    """Return a checkpoint of DCP's files whose .metadata says something else."""
    files = seeds.saved((backend, 1))
    metadata = pickle.loads(files[".metadata"])
    change(metadata)
    return files | {".metadata": pickle.dumps(metadata, 4)}


def without_chunks(metadata: Any) -> None:
    metadata.state_dict_metadata["w"].chunks.clear()


def place_of(metadata: Any, key: str) -> Any:
    return next(place for place in metadata.storage_data if place.fqn == key)


def twice(metadata: Any) -> None:
    metadata.state_dict_metadata["w2"] = metadata.state_dict_metadata["w"]
    place = place_of(metadata, "w")
    metadata.storage_data[replace(place, fqn="w2")] = metadata.storage_data[place]


def anothers_place(metadata: Any) -> None:
    metadata.storage_data[place_of(metadata, "w")] = metadata.storage_data[place_of(metadata, "h")]


def into_the_next(metadata: Any) -> None:
    places = metadata.storage_data
    tensors = [place for place in places if place.fqn in ("w", "h")]  # in one file
    first, second = sorted(tensors, key=lambda place: places[place].offset)
    places[first] = replace(places[first], length=places[second].offset - places[first].offset + 1)


def by_two_names(metadata: Any) -> None:
    place = place_of(metadata, "w")
    metadata.storage_data[place] = replace(metadata.storage_data[place], relative_path="./__0_0.distcp")


@pytest.mark.parametrize("backend", ["dcp", "torch_dist"])
def test_a_tensor_without_chunks_in_dcp_metadata_is_an_error_when_it_is_asked_for(backend: str) -> None:
    place = folder_of(changed(backend, without_chunks))
    stored = dict(st.load_tensors_metadata(place))
    only_others_load(place, "w", stored.pop("w").global_shape, set(stored))
    (damage,) = st.verify(place)  # its bytes are there, and nothing says what they are
    assert damage.file == "__0_0.distcp"


METADATA: dict[str, tuple[Change, str]] = {
    "one place for two": (twice, r"'w' and 'w2' share bytes of '__0_0\.distcp'"),
    "another's place": (anothers_place, r"'h' and 'w' share bytes of '__0_0\.distcp'"),
    "a byte of the next": (into_the_next, "share bytes of"),
    "a file by two names": (by_two_names, "a file has two names"),
}


@pytest.mark.parametrize("name", METADATA)
@pytest.mark.parametrize("backend", ["dcp", "torch_dist"])
def test_dcp_metadata_that_claims_more_than_files_hold_is_damage(backend: str, name: str) -> None:
    change, words = METADATA[name]
    refused(changed(backend, change), words)


# Ranks' files of torch.save.


def tensors_of(*boxes: tuple[tuple[int, ...], tuple[int, ...]], shape: tuple[int, ...] = (4, 2)) -> Tensors:
    tensors = Tensors()
    tensors.add("w", torch.float32, shape, [Piece("w", 0, 0, offset, size) for offset, size in boxes])
    return tensors


FILES = [ArchiveFile("a.pt", "a.pt", 64, None, ())]


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        (tensors_of(), "'w': 0 of 8 elements$"),
        (tensors_of(((0, 0), (3, 2))), "'w': 6 of 8 elements, some of them in 'a.pt'"),
        (tensors_of(((0, 0), (2, 2)), ((1, 0), (2, 2))), "'w': some elements twice, and some not at all"),
        (tensors_of(((0, 0), (4, 1)), ((0, 0), (4, 1))), "'w': some elements twice, and some not at all"),
    ],
)
def test_boxes_that_do_not_tile_a_tensor_are_damage(tensors: Tensors, words: str) -> None:
    with pytest.raises(CorruptCheckpoint) as caught:
        contents_of(FILES, tensors, common={})
    assert re.search(words, str(caught.value), re.MULTILINE)


def test_boxes_that_tile_a_tensor_and_what_is_refused_anyway_pass() -> None:
    found = contents_of(FILES, tensors_of(((0, 0), (4, 1)), ((0, 1), (4, 1))), common={})
    assert found.stored.chunk_key.tolist() == [0, 0]
    refused_one = tensors_of()
    refused_one.refused["w"] = "ranks differ"
    assert contents_of(FILES, refused_one, common={}).refused == {"w": "ranks differ"}


def test_a_rank_has_one_file_whatever_zeros_stand_before_its_number() -> None:
    names = [f"model_world_size_2_rank_{rank}.pt" for rank in ("0", "1", "01", "00")]
    assert rank_files([*names, "model_world_size_02_rank_1.pt"], "example").names == {"model": tuple(names[:2])}
    names = [f"zero_pp_rank_{rank}_mp_rank_{other}_optim_states.pt" for rank in (0, 1) for other in ("00", "000")]
    names += [f"zero_pp_rank_0{rank}_mp_rank_00_optim_states.pt" for rank in (0, 1)]
    models = ["mp_rank_00_model_states.pt", "mp_rank_000_model_states.pt"]
    found = zero_files(folder_of(dict.fromkeys([*names, *models], b"")), "")
    assert (found.models, found.optimizers) == ((models[0],), (names[0], names[2]))


def test_a_folder_that_two_parameters_name_is_damage() -> None:
    files = seeds.universal()[0]
    name = next(one for one in files if one.endswith("mp_rank_00_model_states.pt"))
    states = torch.load(io.BytesIO(files[name]), weights_only=False)
    states["param_shapes"][0]["./emb.weight"] = states["param_shapes"][0]["emb.weight"]
    refused(files | {name: archive(states)}, r"names files twice\n  'zero/emb\.weight/")


# Ranks that are missing, as many as a name claims, are counted.


def test_missing_ranks_are_counted_and_a_few_are_named() -> None:
    with pytest.raises(CorruptCheckpoint, match=r"rank_1\.pt\n(  \S+\n){8}  \S+_rank_11\.pt\n  and 999999987 more"):
        rank_files([f"model_world_size_999999999_rank_{rank}.pt" for rank in (0, 2)], "example")
    names = ["mp_rank_00_model_states.pt", "zero_pp_rank_999999999_mp_rank_00_optim_states.pt"]
    with pytest.raises(CorruptCheckpoint, match=r"data-parallel ranks\n  0\n  1\n(.*\n){8}  and 999999989 more"):
        zero_files(folder_of(dict.fromkeys(names, b"")), "")


# Tensors of which a few bytes are a gigabyte stay as they were saved.


def test_expanded_tensors_of_the_common_state_take_no_memory() -> None:
    large = [torch.ones(1).expand(2**28) for _ in range(40)]
    files = {"model_world_size_1_rank_0.pt": archive({"w": torch.ones(2)})}
    place = folder_of(files | {"extra_state_world_size_1_rank_0.pt": archive({"large": large})})
    found = st.load_common_state_dict(place)["large"]
    assert [each.shape for each in found] == [(2**28,)] * 40 and {each[2**28 - 1].item() for each in found} == {1.0}
    assert sum(each.untyped_storage().nbytes() for each in found) == 160


def test_a_rank_is_looked_up_in_a_mesh_of_any_size() -> None:
    data = archive(torch.arange(3)[2:].expand(2**26, 2))
    read = partial(lambda data, begin, end: data[begin:end], data)
    places = _Places(open_archive(read, len(data), "a mesh"), "mesh.pt")
    mesh = describe_archive(read, len(data), what="a mesh", file="mesh.pt").value
    assert places._element(mesh, (2**26 - 1, 1)) == 2
    turned = archive(torch.arange(6).reshape(2, 3).t())
    read = partial(lambda data, begin, end: data[begin:end], turned)
    mesh = describe_archive(read, len(turned), what="a mesh", file="mesh.pt").value
    assert _Places(open_archive(read, len(turned), "a mesh"), "mesh.pt")._element(mesh, (2, 1)) == 5
