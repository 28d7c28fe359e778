"""Megatron-Core's old zarr checkpoints, and zarr v2 arrays in general: read in any layout, or refused."""

from __future__ import annotations

import json
import shutil
import sys
import time
import zlib
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some

import shardtree as st
from shardtree.core.codec import bit_view
from shardtree.errors import CorruptCheckpoint, KeyMismatch, ShapeError, StrategyError, UnsafeFile, UnsupportedValue
from shardtree.formats.archives import encode_archive
from shardtree.storage import MemoryStorage
from shardtree.testing import Layout, even_layout, layouts, random_bits
from tests.formats.zarr_nodes import encoded, load_cut, v2_node
from tests.shell.table import folders

FIXTURE = Path(__file__).parents[1] / "fixtures" / "megatron_old_zarr"
QUICK = 10.0  # seconds of processors, which other work on the machine doesn't change

LEGACY = {
    "sharded_backend": "zarr",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}


def test_what_an_edge_chunk_has_beyond_the_tensor_is_never_read() -> None:
    storage = folder_of(v2_files("w", torch.arange(42).reshape(7, 6), (4, 4)) | {".zgroup": b"{}"})
    storage.remove("metadata.json")
    shard = st.ShardedTensor(
        "w", torch.full((9, 8), -1), torch.int64, (9, 8), (9, 8), (0, 0), (1, 1), allow_shape_mismatch=True
    )
    loaded = st.load({"w": shard}, storage, donate=True)["w"]
    assert torch.equal(loaded[:7, :6], torch.arange(42).reshape(7, 6))
    assert set(loaded[7:].unique().tolist()) | set(loaded[:, 6:].unique().tolist()) <= {0, -1}


@pytest.mark.parametrize("key", ["../megatron_old_zarr/layer.weight", "/layer.weight", "layer.weight/../layer.weight"])
def test_a_key_is_no_path(key: str) -> None:
    with pytest.raises(KeyMismatch, match="not stored"):
        st.load({"w": st.ShardedTensor.from_rank_offsets(key, torch.zeros(8, 6))}, FIXTURE)


def copy_of_fixture(folder: Path) -> Path:
    shutil.copytree(FIXTURE, folder / "copy")
    return folder / "copy"


def test_a_missing_chunk_is_an_error(tmp_path: Path) -> None:
    copy = copy_of_fixture(tmp_path)
    (copy / "layer.weight" / "1.0").unlink()
    with pytest.raises(ShapeError, match=r"'layer.weight' at \(0, 0\): 24 of 48 elements are stored"):
        st.load_plain_tensors(copy)
    (damage,) = st.verify(copy)
    assert (damage.file, damage.what, damage.keys) == ("layer.weight/1.0", "no such file", ("layer.weight",))


def test_objects_with_the_names_of_old_releases(tmp_path: Path) -> None:
    copy = copy_of_fixture(tmp_path)
    for name in ("shard_0.0_1.2.pt", "shard_0.1_1.2.pt"):
        file = copy / "rng_state" / name
        file.rename(file.with_name(name.replace(".2.pt", ".pt")))
    objects = [st.ShardedObject("rng_state", None, (1, 2), (0, rank)) for rank in range(2)]
    loaded = st.load({"rng": objects}, copy)
    assert loaded["rng"] == [{"tp": 0}, {"tp": 1}]
    assert {"rng_state/shard_0.0_1.2", "rng_state/shard_0.1_1.2"} <= set(st.open_checkpoint(copy))
    fewer = [st.ShardedObject("rng_state", None, (1, 1), (0, 0))]
    with pytest.raises(ShapeError, match=r"'rng_state': objects of shape \(1, 2\), asked for in shape \(1, 1\)"):
        st.load({"rng": fewer}, copy)
    rules = {"rng_state": st.objects.replicate_cell((0, 1))}
    assert st.load({"rng": fewer}, copy, options=st.LoadOptions(object_rules=rules))["rng"] == [{"tp": 1}]
    st.convert(copy, tmp_path / "today", backend="torch_dist")
    assert st.load({"rng": objects}, tmp_path / "today")["rng"] == loaded["rng"]
    (copy / "rng_state" / "shard_0.0_1.pt").unlink()
    (one,) = (leaf for leaf in st.load_sharded_metadata(copy).values() if leaf.key == "rng_state")
    assert one.global_shape == (1, -1)  # who knows how many there were
    assert st.load({"rng": objects[1]}, copy, validate_access_integrity=False)["rng"] == {"tp": 1}


# Arrays that the tests write themselves.


def folder_of(files: Mapping[str, bytes]) -> MemoryStorage:
    return folders.folder_of({"metadata.json": json.dumps(LEGACY).encode(), **files})


def v2_files(key: str, whole: torch.Tensor, chunk: tuple[int, ...], **changes: Any) -> dict[str, bytes]:
    """Return the files of an array, its chunks cut by slicing; those at an edge are filled up with ones."""
    size = whole.dtype.itemsize
    plain = f"<i{size}" if size > 1 else "|i1"
    document = v2_node(whole.shape, chunk, plain) | changes
    files = {f"{key}/.zarray": encoded(document)}
    separator = document.get("dimension_separator", ".")
    counts = [-(-size // step) for size, step in zip(whole.shape, chunk, strict=True)]
    for cell in product(*map(range, counts)):
        room = torch.ones(chunk, dtype=whole.dtype)
        part = whole[tuple(slice(at * step, (at + 1) * step) for at, step in zip(cell, chunk, strict=True))]
        room[tuple(slice(0, size) for size in part.shape)] = part
        files[f"{key}/{separator.join(map(str, cell)) or '0'}"] = bit_view(room).numpy().tobytes()
    return files


@some.composite
def arrays(draw: some.DrawFn) -> tuple[torch.Tensor, tuple[int, ...], str, Layout]:
    shape = draw(some.lists(some.integers(0, 7), max_size=3).map(tuple))
    chunk = tuple(draw(some.integers(1, 9)) for _ in shape)
    dtype = draw(some.sampled_from([torch.int8, torch.int16, torch.int64]))
    return random_bits(shape, dtype, 1), chunk, draw(some.sampled_from("./")), draw(layouts(shape, 3))


def check_array(case: tuple[torch.Tensor, tuple[int, ...], str, Layout], cut: Any = v2_files) -> None:
    whole, chunk, separator, layout = case
    storage = folder_of(cut("w", whole, chunk, dimension_separator=separator))
    assert torch.equal(load_cut(storage, "w", whole, layout, common_strategy=lambda checkpoint: {}), whole)


@pytest.mark.slow
@given(arrays())
def test_any_grid_loads_in_any_layout(case: tuple[torch.Tensor, tuple[int, ...], str, Layout]) -> None:
    check_array(case)


def transposed(key: str, whole: torch.Tensor, chunk: tuple[int, ...], **changes: Any) -> dict[str, bytes]:
    """Return the files of an array whose chunks were written along the wrong axis."""
    return v2_files(key, whole, chunk, **changes) | {
        name: bit_view(torch.frombuffer(bytearray(data), dtype=whole.dtype).reshape(chunk).T.contiguous())
        .numpy()
        .tobytes()
        for name, data in v2_files(key, whole, chunk, **changes).items()
        if not name.endswith(".zarray")
    }


def test_the_law_of_grids_catches_chunks_in_another_order() -> None:
    case = (torch.arange(12).reshape(3, 4), (2, 3), ".", even_layout((3, 4), 1))
    check_array(case)
    with pytest.raises(AssertionError):
        check_array(case, transposed)


def plain_tensors(files: Mapping[str, bytes]) -> dict[str, torch.Tensor]:
    return st.load_plain_tensors(folder_of(files))


@pytest.mark.parametrize("dtype", ["<V2", "|V2", "bfloat16"])
def test_two_raw_bytes_are_a_bfloat16(dtype: str) -> None:
    whole = torch.arange(6, dtype=torch.bfloat16)
    files = v2_files("w", whole.view(torch.int16), (4,), dtype=dtype)
    assert torch.equal(plain_tensors(files)["w"], whole)


FILLS = {"0": 0.0, "1.5": 1.5, '"NaN"': float("nan"), '"-Infinity"': float("-inf"), "false": 0.0}


@pytest.mark.parametrize("fill", FILLS)
def test_chunks_that_are_not_stored_have_the_fill_value(fill: str) -> None:
    whole = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    files = v2_files("w", whole.view(torch.int32), (2, 3), dtype="<f4", fill_value=json.loads(fill))
    del files["w/0.1"], files["w/1.0"]
    expected = whole.clone()
    expected[:2, 3:], expected[2:, :3] = FILLS[fill], FILLS[fill]
    assert torch.equal(plain_tensors(files)["w"].nan_to_num(9.0), expected.nan_to_num(9.0))


def test_arrays_in_folders_and_locks() -> None:
    inner = v2_files("a/b/w", torch.arange(4), (2,))
    lock = {"a/b/w.sync/.zarray": b"", "a/b/w.sync/0": b""}
    other = {"x/notes.txt": b"", "common.pt": b"", "t/.zarray": encoded(v2_node((2,), (2,), "<M8[ns]"))}
    assert list(plain_tensors(inner | lock | other)) == ["a/b/w"]


def test_chunks_that_are_not_stored_are_zeros_in_a_group_without_fill_value() -> None:
    whole = torch.arange(1, 13, dtype=torch.float32).reshape(3, 4)
    files = v2_files("w", whole.view(torch.int32), (2, 3), dtype="<f4", fill_value=None) | {".zgroup": b"{}"}
    del files["w/0.1"]
    storage = folder_of(files)
    with pytest.raises(ShapeError, match="10 of 12 elements"):
        st.load_plain_tensors(storage)
    storage.remove("metadata.json")
    expected = whole.clone()
    expected[:2, 3:] = 0
    assert torch.equal(st.load_plain_tensors(storage)["w"], expected)
    assert st.verify(storage) == ()


def test_an_array_of_texts_is_left_out_whatever_its_filters() -> None:
    text = v2_node((3,), (3,), "|O", filters=[{"id": "vlen-utf8"}])
    files = v2_files("w", torch.arange(4), (2,)) | {"t/.zarray": encoded(text)}
    assert list(plain_tensors(files)) == ["w"]


HUGE = 10**12
HOSTILE: dict[str, tuple[dict[str, Any], type[Exception]]] = {
    "no format": ({"zarr_format": 7}, CorruptCheckpoint),
    "negative shape": ({"shape": [-1]}, CorruptCheckpoint),
    "shape of truths": ({"shape": [True]}, CorruptCheckpoint),
    "shape of floats": ({"shape": [1.5]}, CorruptCheckpoint),
    "no shape": ({"shape": None}, CorruptCheckpoint),
    "a shape like a number": ({"shape": 3}, CorruptCheckpoint),
    "more than memory": ({"shape": [2**70]}, CorruptCheckpoint),
    "more than memory in all": ({"shape": [2**30, 2**30], "chunks": [1, 1]}, CorruptCheckpoint),
    "a thousand axes": ({"shape": [1] * 1000, "chunks": [1] * 1000}, CorruptCheckpoint),
    "chunks of nothing": ({"chunks": [0]}, CorruptCheckpoint),
    "chunks of other axes": ({"chunks": [1, 1]}, CorruptCheckpoint),
    "huge chunks": ({"chunks": [2**70]}, CorruptCheckpoint),
    "a wrong order": ({"order": "Z"}, CorruptCheckpoint),
    "a wrong separator": ({"dimension_separator": "../"}, CorruptCheckpoint),
    "filters that are none": ({"filters": [3]}, CorruptCheckpoint),
    "filters in a dict": ({"filters": {"a": 1}}, CorruptCheckpoint),
    "a compressor without a name": ({"compressor": {}}, CorruptCheckpoint),
    "a codec that runs code": ({"filters": [{"id": "pickle"}]}, UnsafeFile),
    "an unknown codec": ({"compressor": {"id": "mine"}}, UnsafeFile),
    "a trillion chunks of zeros": ({"shape": [HUGE], "chunks": [1], "fill_value": 0}, UnsupportedValue),
    "a chunk of a terabyte": ({"shape": [4], "chunks": [HUGE]}, CorruptCheckpoint),
    "a compressed chunk of a terabyte": (
        {"shape": [4], "chunks": [HUGE], "compressor": {"id": "zlib"}},
        UnsupportedValue,
    ),
    "a terabyte of ones": ({"shape": [8], "chunks": [HUGE], "fill_value": 1}, CorruptCheckpoint),
    "a fill value that is none": ({"shape": [8], "fill_value": "red"}, CorruptCheckpoint),
    "a fill value like a list": ({"shape": [8], "fill_value": [1]}, CorruptCheckpoint),
    "a fill value out of range": ({"shape": [8], "fill_value": 2**80}, CorruptCheckpoint),
    "a shape that was cut": ({"shape": [9]}, ShapeError),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_metadata_is_refused_quickly(name: str) -> None:
    changes, error = HOSTILE[name]
    files = v2_files("w", torch.arange(4), (4,))
    files["w/.zarray"] = json.dumps(json.loads(files["w/.zarray"]) | changes).encode()
    started = time.process_time()
    with pytest.raises(error, match="w"):
        plain_tensors(files)
    assert time.process_time() - started < QUICK


def test_without_the_zarr_package(monkeypatch: pytest.MonkeyPatch) -> None:
    files = v2_files("w", torch.arange(4), (4,), compressor={"id": "zlib", "level": 1})
    files["w/0"] = zlib.compress(files["w/0"])
    assert torch.equal(plain_tensors(files)["w"], torch.arange(4))
    monkeypatch.setitem(sys.modules, "zarr", None)
    with pytest.raises(StrategyError, match=r"pip install 'shardtree\[zarr\]'"):
        plain_tensors(files)


def test_objects_lie_beside_arrays() -> None:
    objects = {"w/shard_0.1_1.2.pt": encode_archive([1, "a"]), "w/other.pt": b"", "w/shard_x_1.pt": b""}
    storage = folder_of(v2_files("w", torch.arange(4), (4,)) | objects)
    assert list(st.load_sharded_metadata(storage)) == ["w", "w/shard_0.1_1.2"]
    assert st.open_checkpoint(storage)["w/shard_0.1_1.2"].data == [1, "a"]
