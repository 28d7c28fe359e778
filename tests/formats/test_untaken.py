"""What a reader doesn't take of another program's files is named by load, convert and verify; nonsense is damage."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
import torch

import shardtree as st
from shardtree.core.codec import HeaderEntry, encode_header
from shardtree.errors import CorruptCheckpoint, KeyMismatch, UnsupportedValue
from shardtree.storage import MemoryStorage, ReadReport
from tests.formats.test_torch_dist_read import Writer
from tests.formats.zarr_nodes import V2_GROUP, V3_GROUP, encoded, v2_node, v3_node
from tests.shell.table.folders import Files, archive, folder_of


def v2(dtype: Any) -> Files:
    """Return a group of two arrays, w of float32 and x of that dtype."""
    nodes = {f"{key}/.zarray": encoded(v2_node([4], [4], each)) for key, each in (("w", "<f4"), ("x", dtype))}
    return {".zgroup": V2_GROUP, **nodes, "w/0": bytes(16), "x/0": bytes(16)}


def v3(data_type: Any) -> Files:
    nodes = {"w": v3_node([4], [4], "float32"), "x": v3_node([4], [4], data_type)}
    chunks = {f"{key}/c/0": bytes(16) for key in nodes}
    return {"zarr.json": V3_GROUP, **chunks} | {f"{key}/zarr.json": encoded(node) for key, node in nodes.items()}


def old_zarr(dtype: str) -> Files:
    fields = {"sharded_backend": "zarr", "sharded_backend_version": 1}
    common = {"common_backend": "torch", "common_backend_version": 1}
    return v2(dtype) | {"metadata.json": json.dumps(fields | common).encode(), "common.pt": archive({})}


def huggingface() -> Files:
    entries = [HeaderEntry("w", "F32", (4,), 0, 16), HeaderEntry("x", "F6_E2M3", (4,), 16, 19)]
    return {"model.safetensors": encode_header(entries, {}) + bytes(19)}


def dcp() -> Files:
    """Return a folder of DCP of which one tensor has a quantised dtype."""
    writer: Any = Writer()
    for key in ("w", "x"):
        writer.add(key, (4,), (0,), torch.zeros(4))
    writer.metadata.state_dict_metadata["x"].properties.dtype = torch.qint8
    files: Files = writer.files()
    return files


FOREIGN = {
    "zarr v2 texts": v2("<U8"),
    "zarr v2 dates": v2("<M8[ns]"),
    "zarr v2 records": v2([["a", "<f4"]]),
    "zarr v3 texts": v3("string"),
    "zarr v3 of an extension": v3({"name": "numpy.datetime64", "configuration": {"unit": "s"}}),
    "old zarr": old_zarr("<f16"),
    "huggingface": huggingface(),
    "dcp": dcp(),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_what_is_not_taken_is_named_everywhere(name: str, caplog: pytest.LogCaptureFixture) -> None:
    folder, reads, checks = folder_of(FOREIGN[name]), list[ReadReport](), list[Any]()
    with caplog.at_level(logging.WARNING, "shardtree"):
        assert list(st.load_plain_tensors(folder, options=st.LoadOptions(report=reads.append))) == ["w"]
    assert reads[0].left_out == ("x",) and "'x': " in caplog.text
    with pytest.raises(KeyMismatch, match=r"the source has values that cannot be converted\n  'x': "):
        st.convert(folder, MemoryStorage(), backend=("safetensors", 1))
    for agreed in ({"leave_out": ["x"]}, {"prune": True}):
        assert st.convert(folder, MemoryStorage(), backend=("safetensors", 1), **agreed).left_out == ("x",)
    assert st.verify(folder, report=checks.append) == ()
    assert "'x' is not taken" in str(checks[0])
    target = st.ShardedTensor.from_rank_offsets("x", torch.zeros(4))
    with pytest.raises(UnsupportedValue, match="'x'"):
        st.load([target], folder)


FLIPPED: list[Any] = ["<f5", "<f0", "<v4", "<d4", "8f4", "<F4", "<f", "<i5", "|b2", "", None, 4, [], {}]
UNNAMED: list[Any] = ["float33", "int9", "", None, 4, [], {}, {"name": 3}]
MANGLED = {
    **{f"zarr v2 {dtype!r}": v2(dtype) for dtype in FLIPPED},
    **{f"zarr v3 {dtype!r}": v3(dtype) for dtype in UNNAMED},
    "old zarr": old_zarr("<f5"),
}


@pytest.mark.parametrize("name", MANGLED)
def test_a_dtype_that_is_none_is_damage(name: str) -> None:
    folder = folder_of(MANGLED[name])
    with pytest.raises(CorruptCheckpoint, match=r"(?s)x/.*expected a d"):
        st.load_plain_tensors(folder)
    with pytest.raises(CorruptCheckpoint, match=r"(?s)x/.*expected a d"):
        st.convert(folder, MemoryStorage(), backend=("safetensors", 1))
    assert "x/" in st.verify(folder)[0].what


def test_a_file_that_is_named_like_no_object_is_named_too() -> None:
    folder = folder_of(old_zarr("<f4") | {"x/notes.pt": b"nothing"})
    with pytest.raises(KeyMismatch, match=r"'x/notes\.pt': its name is not that of a sharded object"):
        st.convert(folder, MemoryStorage(), backend=("safetensors", 1))
    report = st.convert(folder, MemoryStorage(), backend=("safetensors", 1), leave_out=["x/notes.pt"])
    assert (report.tensors, report.left_out) == (2, ("x/notes.pt",))
