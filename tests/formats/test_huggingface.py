"""Hugging Face models: whole tensors that ranks write together, and any layout that they are read in."""

from __future__ import annotations

import json
import struct
from threading import Barrier

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as some

import shardtree as st
from shardtree.errors import (
    AlreadyACheckpoint,
    CheckpointingException,
    CorruptCheckpoint,
    IntegrityError,
    KeyMismatch,
    NotACheckpoint,
    StorageError,
    UnsupportedValue,
)
from shardtree.formats import huggingface
from shardtree.formats.huggingface._listing import ModelListing
from shardtree.formats.huggingface._load import read_headers
from shardtree.storage import MemoryStorage, wrapped
from shardtree.strategies import StrategyAction, default_strategies
from shardtree.testing import GlobalState, check_roundtrip, even_layout, layouts, random_bits, shapes
from tests.core.trees.samples import assert_caught
from tests.options import save_keywords
from tests.shell.storage.storages import STORAGES

HF = ("huggingface", 1)
TAGGED = [torch.bool, torch.int8, torch.bfloat16, torch.float32, torch.float64, torch.complex64]
PAIRS = [torch.float4_e2m1fn_x2] if hasattr(torch, "float4_e2m1fn_x2") else []  # torch 2.6 hasn't; they need an axis
quiet = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


def table(max_file_bytes):
    row = (StrategyAction.SAVE_SHARDED, *HF)
    return default_strategies | {row: huggingface.save_sharded_up_to(max_file_bytes)}


def whole(key, tensor, *cuts, **fields):
    return st.ShardedTensor.from_rank_offsets(key, tensor, *cuts, **fields)


def file_of(tensors, metadata=None):
    """Return the bytes of a safetensors file, made by hand."""
    fields, data = ({"__metadata__": metadata} if metadata else {}), b""
    for key, (tag, shape, payload) in tensors.items():
        fields[key] = {"dtype": tag, "shape": list(shape), "data_offsets": [len(data), len(data) + len(payload)]}
        data += payload
    text = json.dumps(fields).encode()
    return struct.pack("<Q", len(text)) + text + data


def folder_of(files):
    storage = MemoryStorage()
    for name, content in files.items():
        storage.replace(name, content if isinstance(content, bytes) else json.dumps(content).encode(), durable=False)
    return storage


def two_files(**changes):
    """Return the files of a sound model of two files, changed."""
    return {
        "model-00001-of-00002.safetensors": file_of({"a": ("I32", (2,), struct.pack("<2i", 1, 2))}),
        "model-00002-of-00002.safetensors": file_of(
            {"b": ("U8", (3,), b"xyz"), "extra": ("U8", (1,), b"!")}, {"format": "pt"}
        ),
        "model.safetensors.index.json": {
            "metadata": {"total_size": 11},
            "weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"},
        },
    } | changes


# Round trips


@some.composite
def states(draw, max_tensors=3):
    """Draw global tensors by key, how they lie when they are saved and when they are loaded, and the size of files."""
    keys = draw(
        some.lists(some.text('ab./é"\\\n', min_size=1, max_size=3), min_size=1, max_size=max_tensors, unique=True)
    )
    kinds = {key: draw(shapes()) for key in keys}
    tensors = {
        key: random_bits(shape, draw(some.sampled_from(TAGGED + PAIRS * bool(shape))), seed=draw(some.integers(0, 99)))
        for key, shape in kinds.items()
    }
    ranks = draw(some.integers(1, 4)), draw(some.integers(1, 3))
    pair = [{key: draw(layouts(tuple(tensor.shape), n)) for key, tensor in tensors.items()} for n in ranks]
    return tensors, *pair, draw(some.sampled_from([1, 40, 10**9]))


def check_reloaded(case, save=st.save, storage=None):
    tensors, saved, loaded, max_file_bytes = case
    folder = MemoryStorage() if storage is None else storage
    options = {"strategies": table(max_file_bytes), "directory": folder, "save": save}
    check_roundtrip(GlobalState(tensors, {}, {}), saved, loaded, backend="huggingface", **options)
    assert st.verify(folder) == ()


@pytest.mark.slow
@quiet
@settings(deadline=None, max_examples=60)
@given(states())
def test_saved_in_one_layout_loads_in_another(case):
    check_reloaded(case)


@pytest.mark.slow
@quiet
def test_the_law_catches_a_save_that_drops_a_shard():
    def dropping(tree, *rest, **options):
        shards = [shard for held in tree.get("model", {}).values() for shard in held]
        kept = [shard for shard in shards if shard.global_offset == (0,) * len(shard.global_offset)]
        st.save({"model": kept}, *rest, validate_access_integrity=True, **save_keywords(**options))

    def law(save, case):
        try:
            check_reloaded(case, save)
        except IntegrityError as error:
            raise AssertionError from error

    assert_caught(law, dropping, states())


def columns_case():
    tensors = {"w": torch.arange(6 * 300, dtype=torch.int32).view(6, 300), "b": torch.arange(5).half()}
    lie = {"w": even_layout((6, 300), 4, axis=1), "b": even_layout((5,), 4, axis=None)}
    return tensors, lie, {"w": even_layout((6, 300), 3, axis=0), "b": even_layout((5,), 3, axis=None)}, 10**9


@pytest.mark.parametrize("kind", ["local", "memory", "file://"])
def test_four_ranks_write_one_file(kind, tmp_path):
    storage = STORAGES[kind](tmp_path)
    check_reloaded(columns_case(), storage=storage)
    assert storage.names() == ("model.safetensors",), "nothing else is left"


@pytest.mark.parametrize("kind", ["memory://", "objects://"])
def test_one_process_writes_to_an_object_store(kind, tmp_path):
    storage = STORAGES[kind](tmp_path)
    tensors, *_ = columns_case()
    rows = [whole("w", half, (0, number, 2)) for number, half in enumerate(tensors["w"].chunk(2))]
    rows.reverse()
    st.save({"w": rows, "b": whole("b", tensors["b"])}, storage, HF, strategies=table(100))
    found = st.load_plain_tensors(storage)
    assert all(torch.equal(found[key], tensors[key]) for key in tensors)
    assert "model.safetensors.index.json" in storage.names()
    assert st.verify(storage) == ()


@pytest.mark.parametrize("kind", ["memory://", "objects://"])
def test_ranks_cant_write_together_to_an_object_store(kind, tmp_path):
    storage = STORAGES[kind](tmp_path)

    def write(world):
        half = torch.arange(4).float() + 4 * world.rank
        st.save([whole("w", half, (0, world.rank, 2))], storage, HF, world=world)

    with pytest.raises(StorageError, match="Save from one process, in another format"):
        st.simulate(2, write)
    assert not st.is_checkpoint(storage)
    assert storage.names() == ()


def test_columns_from_one_rank_cant_go_to_an_object_store(tmp_path):
    halves = [whole("w", half, (1, side, 2)) for side, half in enumerate(torch.arange(8).view(2, 4).chunk(2, 1))]
    storage = STORAGES["objects://"](tmp_path)
    with pytest.raises(StorageError, match="a whole file in order"):
        st.save(halves, storage, HF)
    assert storage.names() == ()


# What a save leaves, and what it refuses


def test_files_and_index_have_the_names_of_the_hub():
    folder = MemoryStorage()
    st.save([whole(key, torch.zeros(2)) for key in "abc"], folder, HF, strategies=table(16))
    names = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json")
    assert folder.names() == names
    index = json.loads(folder.read(names[2]))
    assert index == {"metadata": {"total_size": 24}, "weight_map": {"a": names[0], "b": names[0], "c": names[1]}}


def test_a_file_that_is_in_the_way_stays():
    folder = folder_of({"model-00001-of-00002.safetensors": b"somebody's"})
    with pytest.raises(AlreadyACheckpoint, match="but no index of them"):
        st.save([whole(key, torch.zeros(2)) for key in "ab"], folder, HF, strategies=table(8))
    assert folder.names() == ("model-00001-of-00002.safetensors",)


# Reading what others wrote


def test_an_index_says_which_tensors_count():
    folder = folder_of(two_files())
    assert {key: tensor.tolist() for key, tensor in st.load_plain_tensors(folder).items()} == {
        "a": [1, 2],
        "b": [120, 121, 122],
    }
    assert st.verify(folder) == ()
    assert st.load_common_state_dict(folder) == {}


def test_what_is_recognised():
    one = file_of({"w": ("U8", (1,), b"1")})
    other = file_of({"w": ("U8", (1,), b"2")})

    def read(files):
        return st.load_plain_tensors(folder_of(files))["w"].item()

    assert read({"adapter_model.safetensors": one, "adapter_config.json": b"{}"}) == ord("1")
    assert read({"model.safetensors": one, "model.fp16.safetensors": other}) == ord("1")
    assert read({"diffusion_pytorch_model.safetensors": one, "x.safetensors": other}) == ord("1")
    index = {"weight_map": {"w": "part.safetensors"}}
    assert read({"x.safetensors.index.json": index, "part.safetensors": one, "y.safetensors": other}) == ord("1")
    for nothing in (
        {},
        {"a.safetensors": one, "b.safetensors": other},
        {"model-00001-of-00002.safetensors": one},
        {"config.json": b"{}"},
        {"sub/model.safetensors": one},
    ):
        assert not st.is_checkpoint(folder_of(nothing))


@pytest.mark.parametrize("backend", ["dcp", "zarr"])
def test_a_file_beside_another_programs_index_is_no_model(tmp_path, backend):
    st.save({"w": whole("w", torch.ones(2))}, tmp_path, (backend, {"dcp": 1, "zarr": 3}[backend]))
    if backend == "zarr":  # as zarr itself writes it
        (tmp_path / "metadata.json").unlink()
        (tmp_path / "zarr.json").write_text('{"zarr_format": 3, "node_type": "group", "attributes": {}}')
    before = st.load_plain_tensors(tmp_path)["w"].tolist()
    for name in ("export.safetensors", "model.safetensors"):
        (tmp_path / name).write_bytes(file_of({"w": ("U8", (1,), b"9")}))
        assert st.load_plain_tensors(tmp_path)["w"].tolist() == before == [1.0, 1.0]
    st.save({"w": whole("w", torch.zeros(2))}, tmp_path, overwrite=True)
    assert st.load_plain_tensors(tmp_path)["w"].tolist() == [0.0, 0.0]
    assert (tmp_path / "model.safetensors").is_file()


def test_a_single_file_by_its_path(tmp_path):
    path = tmp_path / "any.safetensors"
    path.write_bytes(file_of({"w": ("I16", (2,), struct.pack("<2h", 5, -6))}, {"format": "pt", "step": "7"}))
    (tmp_path / "other.safetensors").write_bytes(b"")
    (tmp_path / "notes.txt").write_bytes(b"")
    assert st.load_plain_tensors(path)["w"].tolist() == [5, -6]
    assert st.load_common_state_dict(path) == {"__metadata__": {"step": "7"}}
    right = whole("w", torch.zeros(1, dtype=torch.int16), (0, 1, 2))
    assert st.load({"w": right}, path, validate_access_integrity=False)["w"].tolist() == [-6]
    assert st.verify(path) == ()
    path.write_bytes(path.read_bytes()[:-1])
    assert "is not" in st.verify(path)[0].what or "not a valid" in st.verify(path)[0].what
    with pytest.raises(NotACheckpoint, match="a file in no format that is recognised"):
        st.load_plain_tensors(tmp_path / "notes.txt")


def test_a_pointer_of_git_lfs_says_so():
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 90868376\n"
    with pytest.raises(CorruptCheckpoint, match="git lfs pull"):
        st.load_plain_tensors(folder_of({"model.safetensors": pointer}))


INDEXES = {
    "a list": b"[]",
    "no weight_map": b"{}",
    "a list as weight_map": b'{"weight_map": []}',
    "climbing": b'{"weight_map": {"a": "../model-00001-of-00002.safetensors"}}',
    "a backslash": b'{"weight_map": {"a": "..\\\\x.safetensors"}}',
    "a missing file": b'{"weight_map": {"a": "model-00003-of-00002.safetensors"}}',
    "a missing tensor": b'{"weight_map": {"c": "model-00001-of-00002.safetensors"}}',
    "the wrong file": b'{"weight_map": {"a": "model-00002-of-00002.safetensors"}}',
}


@pytest.mark.parametrize("index", INDEXES.values(), ids=INDEXES)
def test_an_unsound_index_is_an_error_that_names_it(index):
    folder = folder_of(two_files(**{"model.safetensors.index.json": index}))
    with pytest.raises(CorruptCheckpoint, match=r"open: .*(index\.json|safetensors)'"):
        st.load_plain_tensors(folder)
    assert st.verify(folder)


def test_of_a_model_without_all_of_its_tensors_or_files_the_rest_loads():
    tied = b'{"weight_map": {"a": "model-00001-of-00002.safetensors", "lm_head": "model-00001-of-00002.safetensors"}}'
    both = two_files(**{"model.safetensors.index.json": tied})
    half = {name: data for name, data in two_files().items() if name != "model-00002-of-00002.safetensors"}
    for files, absent in ((both, "lm_head"), (half, "b")):
        folder = folder_of(files)
        assert list(st.load_plain_tensors(folder)) == ["a"] == list(st.open_checkpoint(folder))
        with pytest.raises(CheckpointingException, match=f"'{absent}': .*lists it, and"):
            st.load({"x": st.ShardedTensor.from_rank_offsets(absent, torch.zeros(2))}, folder)
        assert absent in st.verify(folder)[0].keys
        assert f"'{absent}': " in str(st.explain([st.ShardedTensor.from_rank_offsets(absent, torch.zeros(2))], folder))
        with pytest.raises(UnsupportedValue, match=f"'{absent}': .*lists it, and"):
            st.open_checkpoint(folder)[absent]
        with pytest.raises(UnsupportedValue, match=f"stored layout: .*\n  '{absent}': .*lists it, and"):
            st.open_checkpoint(folder).stored_layout(absent)
        with pytest.raises(KeyMismatch, match=f"values that cannot be converted\n  '{absent}': .*lists it, and"):
            st.convert(folder, MemoryStorage(), backend="safetensors")
        for named in ([absent], [f"{absent[:1]}*"]):
            assert st.convert(folder, MemoryStorage(), backend="safetensors", leave_out=named).left_out == (absent,)


TIED = b'{"tie_word_embeddings": true}'


@pytest.mark.parametrize(
    ("config", "absent", "is_damage"),
    [
        (TIED, "lm_head.weight", False),
        (b'{"text_config": ' + TIED + b"}", "lm_head.weight", False),
        (TIED, "encoder.embed_tokens.weight", False),
        (TIED, "layers.3.weight", True),
        (b'{"tie_word_embeddings": false}', "lm_head.weight", True),
        (b"[]", "lm_head.weight", True),
        (TIED[:-1], "lm_head.weight", True),
        (None, "lm_head.weight", True),
    ],
)
@pytest.mark.parametrize("twin", ["shared.weight", "b"])
def test_an_embedding_that_the_config_calls_tied_is_missing_and_no_damage(config, absent, is_damage, twin):
    index = {"metadata": {"total_size": 8}, "weight_map": {twin: "x.safetensors", absent: "x.safetensors"}}
    files = {"x.safetensors": file_of({twin: ("F32", (1,), bytes(4))}), "model.safetensors.index.json": index}
    folder = folder_of(files if config is None else files | {"config.json": config})
    reports = []
    damage = st.verify(folder, report=reports.append)
    assert bool(damage) is (is_damage or twin == "b")
    assert absent in (damage[0].keys if damage else {one.file for one in reports[0].unchecked})


# Floats of 4 bits, which torch has in pairs and a header counts one by one

FOUR_BITS = bytes(range(12))


def four_bits(shape=(4, 3)):
    return torch.tensor(list(FOUR_BITS), dtype=torch.uint8).view(torch.float4_e2m1fn_x2).view(shape)


def raw_bytes(tensor):
    return bytes(tensor.contiguous().view(torch.uint8).flatten().tolist())


def four_bit_folder():
    return folder_of({"model.safetensors": safetensors.torch.save({"w": four_bits()}, {"format": "pt"})})


def test_four_bit_floats_are_cut_along_their_last_axis_in_pairs():
    folder = four_bit_folder()
    assert st.verify(folder) == ()
    found = st.load_plain_tensors(folder)["w"]
    assert (found.dtype, found.shape, raw_bytes(found)) == (torch.float4_e2m1fn_x2, (4, 3), FOUR_BITS)
    for number in range(3):
        part = whole("w", torch.empty(4, 1, dtype=torch.uint8).view(torch.float4_e2m1fn_x2), (1, number, 3))
        loaded = st.load({"w": part}, folder, validate_access_integrity=False)["w"]
        assert raw_bytes(loaded) == FOUR_BITS[number::3]
    opened = st.open_checkpoint(folder)["w"]
    assert opened.global_shape == (4, 3)
    assert raw_bytes(opened.data[1:3, 1:].read()) == bytes([4, 5, 7, 8])


@pytest.mark.parametrize("backend", ["safetensors", "torch_dist", "dcp", "zarr", "huggingface"])
def test_four_bit_floats_go_through_every_format_and_come_back(backend):
    folder, between, back = four_bit_folder(), MemoryStorage(), MemoryStorage()
    st.convert(folder, between, backend=backend)
    assert raw_bytes(st.load_plain_tensors(between)["w"]) == FOUR_BITS
    assert st.verify(between) == ()
    st.convert(between, back, backend="huggingface")
    assert back.read("model.safetensors") == folder.read("model.safetensors")


def test_a_pair_of_four_bit_floats_without_an_axis_is_kept_by_the_native_format_alone():
    pair, native = whole("w", four_bits()[0, 0].clone()), MemoryStorage()
    with pytest.raises(UnsupportedValue, match=r"files do not support .*\n  'w': \(\) float4\w+\n.*reshape"):
        st.save({"w": pair}, MemoryStorage(), HF)
    st.save({"w": pair}, native)
    with pytest.raises(UnsupportedValue, match="'w'"):
        st.convert(native, MemoryStorage(), backend="huggingface")
    assert st.convert(native, MemoryStorage(), backend="huggingface", leave_out=["w"]).left_out == ("w",)


@pytest.mark.parametrize("shape", [(2, 3), (4, 1), (1, 3, 2, 1)], ids=str)
def test_an_odd_last_axis_of_four_bit_floats_is_an_error_of_that_tensor_alone(shape):
    length = torch.Size(shape).numel() // 2
    odd = {"odd": ("F4", shape, bytes(length)), "w": ("U8", (1,), b"w")}
    folder = folder_of({"model.safetensors": file_of(odd)})
    reports = []
    assert list(st.load_plain_tensors(folder)) == ["w"]
    assert st.verify(folder, report=reports.append) == ()
    assert "odd" in {one.file for one in reports[0].unchecked}
    with pytest.raises(KeyMismatch, match=r"'odd': .*'F4' needs an even last axis.*\n.*even length\n.*leave_out"):
        st.convert(folder, MemoryStorage(), backend="safetensors")
    with pytest.raises(UnsupportedValue, match="even length"):
        st.load({"odd": whole("odd", torch.zeros(2))}, folder)


def test_half_a_byte_of_four_bit_floats_is_damage():
    folder = folder_of({"model.safetensors": file_of({"odd": ("F4", (7,), bytes(4)), "w": ("U8", (1,), b"w")})})
    with pytest.raises(CorruptCheckpoint, match=r"'odd'.*fill whole bytes"):
        st.load_plain_tensors(folder)
    assert [one.file for one in st.verify(folder)] == ["model.safetensors"]


def test_axes_beyond_counting():
    many = file_of({"many": ("U8", (1,) * 100_000, b"x"), "w": ("U8", (1,), b"w")})
    assert list(st.load_plain_tensors(folder_of({"model.safetensors": many}))) == ["w"]


def test_a_tensor_without_a_name_is_left_alone():
    nameless = file_of({"": ("U8", (1,), b"x"), "w": ("U8", (1,), b"w")})
    assert list(st.load_plain_tensors(folder_of({"model.safetensors": nameless}))) == ["w"]


def test_verify_names_what_is_wrong(caplog):
    files = two_files()
    index = files["model.safetensors.index.json"]
    wrong = {**index, "metadata": {"total_size": 12}}
    (damage,) = st.verify(folder_of(two_files(**{"model.safetensors.index.json": wrong})))
    assert damage.file == "model.safetensors.index.json"
    assert damage.what == "total_size is 12, the tensors have 11 bytes"
    assert "no checksums" in caplog.text
    name = "model-00002-of-00002.safetensors"
    (damage,) = st.verify(folder_of(two_files(**{name: files[name][:-1]})))
    assert (damage.file, damage.keys) == (name, ("b",))
    folder = folder_of(files)
    folder.remove(name)
    (damage,) = st.verify(folder)
    assert "is missing" in damage.what
    for other in ({}, {"metadata": {}}, {"metadata": {"total_size": "11"}}, {"metadata": {"total_size": 11.0}}):
        sizeless = {"weight_map": index["weight_map"], **other}
        assert st.verify(folder_of(two_files(**{"model.safetensors.index.json": sizeless}))) == ()


def test_tensor_files_of_metadata_that_climb_out():
    folder = MemoryStorage()
    st.save({"w": whole("w", torch.zeros(2)), "step": 1}, folder, HF, ("safetensors", 1))
    fields = json.loads(folder.read("metadata.json"))
    for wrong in (["../x"], "model", [5], ["a", "a"]):
        plain = {name: value for name, value in fields.items() if name not in ("digest", "save_id")}
        folder.replace("metadata.json", json.dumps({**plain, "tensor_files": wrong}).encode(), durable=False)
        with pytest.raises(CorruptCheckpoint, match="tensor_files"):
            st.load_plain_tensors(folder)


# Parts of it


def test_headers_of_a_remote_model_are_in_flight_together():
    inner, all_there = MemoryStorage(), Barrier(5)

    def read_range(name, begin, end):
        all_there.wait(timeout=20)  # none is answered before all have come
        data = inner.read(name)
        return memoryview(data)[begin:end], len(data)

    storage = wrapped(inner, read_range=read_range)
    names = [f"model-{number:05}-of-00005.safetensors" for number in range(1, 6)]
    for name in names:
        storage.write(name, [memoryview(safetensors.torch.save({name: torch.zeros(2, 3)}))], durable=False)
    found = read_headers(storage, ModelListing("model.safetensors.index.json", tuple(names)))
    assert [file.name for file in found] == names == [file.entries[0].name for file in found]
