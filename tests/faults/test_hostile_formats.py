"""Checkpoints of every format, made to hurt: each entry point gives an error of ours, or a right result, quickly."""

from __future__ import annotations

import bz2
import gzip
import json
import os
import pickle
import resource
import shutil
import time
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.metadata import Metadata as DcpMetadata

import shardtree as st
from shardtree.errors import CheckpointingException
from shardtree.shell.table._metadata import encode_metadata
from tests.faults.entry_points import ways_to_read
from tests.fuzz import seeds
from tests.fuzz.seeds import Files, saved, write_files
from tests.shell.table.folders import archive

FORMATS: dict[str, Callable[[], Files]] = {
    "safetensors": partial(saved, ("safetensors", 1)),
    "safetensors and common.pt": partial(saved, ("safetensors", 1), ("torch", 1)),
    "torch_dist": partial(saved, ("torch_dist", 1)),
    "dcp": partial(saved, ("dcp", 1)),
    "zarr": partial(saved, ("zarr", 3)),
    "huggingface": partial(saved, ("huggingface", 1)),
    "old zarr": lambda: seeds.zarr()[-1],
}
MOST_BYTES = 300_000_000


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("formats")
    return {name: write_files(folder / name.replace(".", "_"), files()) for name, files in FORMATS.items()}


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


def outcomes(path: Path) -> list[str]:
    """Call every entry point; what one raises must be ours, with a text. Returns those texts."""
    texts = []
    for call in (*(call for _, call in ways_to_read(path)), partial(st.remove_sharded_tensors, path, "")):
        try:
            call()
        except CheckpointingException as error:
            texts.append(str(error))
    assert all(texts) and all(len(text) < 10_000 for text in texts)
    return texts


def pipe(file: Path) -> None:
    os.mkfifo(file)


def device(file: Path) -> None:
    file.symlink_to("/dev/zero")


def folder(file: Path) -> None:
    file.mkdir()


def link_to_itself(file: Path) -> None:
    file.symlink_to(file.name)


def nothing(file: Path) -> None:
    file.write_bytes(b"")


@pytest.mark.slow
@pytest.mark.parametrize("instead", [pipe, device, folder, link_to_itself, nothing])
@pytest.mark.parametrize("name", FORMATS)
def test_whatever_stands_in_a_files_place_is_neither_waited_for_nor_read_without_end(
    name: str, instead: Callable[[Path], None], originals: dict[str, Path], tmp_path: Path
) -> None:
    files = files_of(originals[name])
    for number, original in enumerate(files if len(files) < 10 else files[::3]):
        place = tmp_path / str(number)
        shutil.copytree(originals[name], place)
        file = place / original.relative_to(originals[name])
        file.unlink()
        instead(file)
        outcomes(place)


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_a_file_of_terabytes_with_holes_is_an_error_of_ours(
    name: str, originals: dict[str, Path], tmp_path: Path
) -> None:
    files = [file.relative_to(originals[name]) for file in files_of(originals[name])]
    for number, file in enumerate(files if len(files) < 10 else files[::3]):
        place = tmp_path / str(number)
        shutil.copytree(originals[name], place)
        with (place / file).open("r+b") as opened:
            opened.truncate(2**42)
        begin = time.process_time()
        outcomes(place)
        assert time.process_time() - begin < 10


NONSENSE = (
    None,
    5,
    "x",
    [],
    {},
    {"name": 5, "length": "x", "digest": []},
    {"name": "\ud800", "length": 1, "digest": ""},
)


@pytest.mark.slow
@pytest.mark.parametrize("field", ["common", "index", "group", "save_id", "sharded_backend", "common_backend_version"])
@pytest.mark.parametrize("name", ["safetensors", "zarr", "safetensors and common.pt"])
def test_nonsense_in_metadata_json_is_an_error_of_ours(
    name: str, field: str, originals: dict[str, Path], tmp_path: Path
) -> None:
    file = tmp_path / "c" / "metadata.json"
    shutil.copytree(originals[name], file.parent)
    fields = json.loads(file.read_bytes())
    for value in (*NONSENSE, {"name": "../../x", "length": 1, "digest": "0"}, "y" * 1_000_000):
        file.write_bytes(encode_metadata(fields | {field: value}))
        outcomes(file.parent)
    file.write_bytes(encode_metadata({name: value for name, value in fields.items() if name != field}))
    outcomes(file.parent)


@pytest.mark.parametrize("value", [5, None, [torch.arange(4.0)], {"a": 1}])
def test_an_archive_that_holds_no_tensor_is_damage_where_metadata_says_one(value: Any, tmp_path: Path) -> None:
    data = archive(value)
    zero, four = torch.Size([0]), torch.Size([4])
    entry = TensorStorageMetadata(TensorProperties(torch.float32), four, [ChunkStorageMetadata(zero, four)])
    place = {MetadataIndex("w", zero): _StorageInfo("__0_0.distcp", 0, len(data))}
    (tmp_path / ".metadata").write_bytes(pickle.dumps(DcpMetadata({"w": entry}, storage_data=place), 4))
    (tmp_path / "__0_0.distcp").write_bytes(data)
    assert len(st.verify(tmp_path)) == 1
    outcomes(tmp_path)


def test_a_file_name_that_no_file_system_takes_is_an_error_of_ours(tmp_path: Path) -> None:
    for name in ("\ud800", "a\0b", "../x", "/etc/passwd", ".", "", 5, []):
        index = {"weight_map": {"w": name}}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
        assert outcomes(tmp_path)


@pytest.mark.slow
def test_an_index_of_many_files_that_are_missing_is_checked_in_linear_time(tmp_path: Path) -> None:
    index = {"weight_map": {f"w{number}": f"f{number}" for number in range(20_000)}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    damage = st.verify(tmp_path)
    assert len(damage) == 20_000 and damage[0].keys == ("w0",)


def zarr_v2(folder: Path, chunk: bytes | None = None, **fields: Any) -> Path:
    """Write a zarr group of one array."""
    array = {"zarr_format": 2, "shape": [4], "chunks": [4], "dtype": "<f4", "order": "C", "fill_value": 0}
    (folder / "w").mkdir(parents=True)
    (folder / ".zgroup").write_text('{"zarr_format": 2}')
    (folder / "w" / ".zarray").write_text(json.dumps(array | {"compressor": None, "filters": None} | fields))
    if chunk is not None:
        (folder / "w" / "0").write_bytes(chunk)
    return folder


BOMBS: dict[str, tuple[dict[str, Any], Callable[[], bytes]]] = {
    "zlib": ({"compressor": {"id": "zlib"}}, lambda: zlib.compress(bytes(2**29))),
    "gzip": ({"compressor": {"id": "gzip"}}, lambda: gzip.compress(bytes(2**29), 1)),
    "bz2": ({"compressor": {"id": "bz2"}}, lambda: bz2.compress(bytes(2**25)) * 20),
    "zlib in zlib": (
        {"compressor": {"id": "zlib"}, "filters": [{"id": "zlib"}]},
        lambda: zlib.compress(zlib.compress(bytes(2**29))),
    ),
    "zstd": ({"compressor": {"id": "zstd"}}, lambda: bytes.fromhex("28b52ffde0") + (2**40).to_bytes(8, "little")),
    # One block after the other, each the same byte many times.
    "zstd of unknown length": (
        {"compressor": {"id": "zstd"}},
        lambda: (
            bytes.fromhex("28b52ffd0058")
            + ((131072 << 3) | 2).to_bytes(3, "little") * 1
            + b"\0"
            + (((131072 << 3) | 2).to_bytes(3, "little") + b"\0") * 4096
            + bytes.fromhex("010000")
        ),
    ),
    "blosc": ({"compressor": {"id": "blosc"}}, lambda: bytes([2, 1, 1, 4]) + b"\xff\xff\xff\x7f" + bytes(64)),
    "lz4": ({"compressor": {"id": "lz4"}}, lambda: b"\xff\xff\xff\x7f" + bytes(64)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BOMBS)
def test_a_chunk_that_would_fill_the_memory_is_refused(name: str, tmp_path: Path) -> None:
    pytest.importorskip("zarr")
    fields, chunk = BOMBS[name]
    place = zarr_v2(tmp_path / "z", chunk(), **fields)
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(
        CheckpointingException, match=r"more bytes than a chunk has|a compressor before|cannot be decoded"
    ):
        st.load_plain_tensors(place)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - most < MOST_BYTES / 1024


@pytest.mark.parametrize(
    "codec", [{"id": "pickle"}, {"name": "zlib", "id": "pickle"}, {"id": "zlib", "name": "pickle"}]
)
@pytest.mark.parametrize("field", ["compressor", "filters"])
def test_a_codec_is_known_by_one_name_and_that_is_a_harmless_one(
    codec: dict[str, Any], field: str, tmp_path: Path
) -> None:
    place = zarr_v2(tmp_path / "z", pickle.dumps(1), **{field: [codec] if field == "filters" else codec})
    with pytest.raises(CheckpointingException, match="codec"):
        st.load_plain_tensors(place)


@pytest.mark.parametrize("axes", [1, 3, 64])
@pytest.mark.parametrize("count", [2**22, 10**12])
@pytest.mark.parametrize("fill", [0, None])
def test_an_array_of_very_many_chunks_that_arent_there_takes_little_memory(
    axes: int, count: int, fill: int | None, tmp_path: Path
) -> None:
    ones = [1] * (axes - 1)
    place = zarr_v2(tmp_path / "z", shape=[count, *ones], chunks=[1, *ones], fill_value=fill)
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert outcomes(place) or st.verify(place)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - most < MOST_BYTES / 1024


@pytest.mark.parametrize("shape", [[2**44, 6], [6, 2**44], [2**22, 2**21]])
def test_an_array_of_one_chunk_that_isnt_there_is_no_tensor_of_tebibytes(shape: list[int], tmp_path: Path) -> None:
    place = zarr_v2(tmp_path / "z", shape=shape, chunks=shape)
    with pytest.raises(CheckpointingException, match="are too large to fill with its fill value"):
        st.compare(place, place)


def test_links_in_a_circle_are_walked_once(tmp_path: Path) -> None:
    place = zarr_v2(tmp_path / "z", bytes(16))
    for name in ("a", "b", "c"):
        (place / name).symlink_to(".")
    (place / "w2").symlink_to("w")
    assert sorted(st.load_plain_tensors(place)) == ["w", "w2"]
