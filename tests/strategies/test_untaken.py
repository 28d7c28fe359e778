"""What of a foreign checkpoint can't be read is named by loads, conversions and verify; what is malformed is damage."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import shardtree as st
from shardtree.errors import CorruptCheckpoint
from tests.options import load_keywords

zarr = pytest.importorskip("zarr")
pytestmark = pytest.mark.filterwarnings("ignore")


def zarr_group(folder: Path, zarr_format: Any) -> Path:
    root = zarr.create_group(str(folder), zarr_format=zarr_format)
    root.create_array("w", data=np.arange(6, dtype="<f4").reshape(2, 3))
    root.create_array("when", data=np.array(["2026-11-26"], dtype="datetime64[s]"))
    return folder


def two_dtypes(folder: Path, _: Any) -> Path:
    header = {"w": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}}
    header["when"] = {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [24, 27]}
    text = json.dumps(header).encode()
    data = np.arange(6, dtype="<f4").tobytes() + bytes(3)
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    return folder


Make = Callable[[Path, Any], Path]
SOURCES = [(zarr_group, 2), (zarr_group, 3), (two_dtypes, None)]


@pytest.mark.parametrize(("make", "version"), SOURCES, ids=["zarr 2", "zarr 3", "huggingface"])
def test_what_cannot_be_read_is_named_everywhere(
    make: Make, version: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source, reports, verified = make(tmp_path / "source", version), list[Any](), list[Any]()
    tensors = st.load_plain_tensors(source, **load_keywords(report=reports.append))
    assert list(tensors) == ["w"] and reports[0].left_out == ("when",)
    assert "'when'" in caplog.text
    assert st.convert(source, tmp_path / "copy", backend="safetensors").left_out == ("when",)
    assert not st.verify(source, report=verified.append)
    assert any("when" in one.file for one in verified[0].unchecked)
    target = {"x": st.ShardedTensor.from_rank_offsets("when", torch.zeros(4))}
    with pytest.raises(st.errors.CheckpointingException, match="'when'"):
        st.load(target, source)


@pytest.mark.parametrize(
    ("version", "name", "change"),
    [
        (2, ".zarray", (b'"<f4"', b'"<d4"')),
        (2, ".zarray", (b'"<f4"', b'"<f5"')),
        (2, ".zarray", (b'"<f4"', b"4")),
        (3, "zarr.json", (b'"float32"', b'"float33"')),
        (3, "zarr.json", (b'"float32"', b"[]")),
    ],
)
@pytest.mark.parametrize("use", [st.load_plain_tensors, st.open_checkpoint, st.load_tensors_metadata])
def test_a_dtype_that_is_none_is_damage(
    version: Any, name: str, change: tuple[bytes, bytes], use: Callable[[Path], Any], tmp_path: Path
) -> None:
    source = zarr_group(tmp_path / "source", version)
    file = source / "w" / name
    changed = file.read_bytes().replace(*change)
    assert changed != file.read_bytes()
    file.write_bytes(changed)
    with pytest.raises(CorruptCheckpoint, match="w"):
        use(source)
    assert st.verify(source)
    with pytest.raises(CorruptCheckpoint):
        st.convert(source, tmp_path / "copy", backend="safetensors")
