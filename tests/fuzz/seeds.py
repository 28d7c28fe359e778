"""Small checkpoints of every format: what the fuzzed files replace a part of."""

from __future__ import annotations

import argparse
import io
import json
import pickle
import struct
import zlib
from collections import OrderedDict, deque
from pathlib import Path
from typing import Any

import numpy as np
import torch

import shardtree as st
from shardtree.core.codec import HeaderEntry, encode_header
from shardtree.formats.zarr._cells import encode_shard_index

Files = dict[str, bytes]
"""A checkpoint: each file's content by its name in the folder."""

_FIXTURES = Path(__file__).parents[1] / "fixtures"
_GOLDEN = Path(__file__).parents[1] / "golden" / "v1"


def folder_files(folder: Path) -> Files:
    """Return the files in a folder, by name."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def write_files(folder: Path, files: Files) -> Path:
    """Write files into a folder, and return it."""
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


def saved(sharded: tuple[str, int], common: tuple[str, int] | None = None) -> Files:
    """Return a small checkpoint: a box, a flat range, a dtype of no tag, an object and some plain values."""
    tree: dict[str, Any] = {
        "w": st.ShardedTensor.from_rank_offsets("w", torch.arange(24.0).reshape(4, 6)),
        "h": st.ShardedTensor.from_rank_offsets("h", torch.arange(6).bfloat16()),
    }
    if sharded[0] != "huggingface":
        flat = st.ShardedTensor.from_rank_offsets_flat("f", torch.ones(6), (2, 3), flattened_range=slice(0, 6))
        tree |= {"f": flat} if sharded[0] == "safetensors" else {}
        tree |= {"rng": st.ShardedObject("rng", {"seed": 1, "state": torch.arange(3)}, (1,), (0,))}
        tree |= {"step": 7, "betas": (0.9, 0.99), "seed": torch.arange(3), "name": b"ab", "args": _values()}
    storage = st.storage.MemoryStorage()
    st.save(tree, storage, sharded, common, options=st.SaveOptions(durable=False))
    return {name: storage.read(name) for name in storage.all_names()}


def _values() -> dict[str, Any]:
    """Return a value of each kind that has a notation of its own in some format."""
    return {
        "namespace": argparse.Namespace(lr=1e-3, dtype=torch.bfloat16, size=torch.Size([2])),
        "ordered": OrderedDict([(1, None), ("b", {2, 3})]),
        "numbers": [2**70, complex(1, 2), float("inf"), True, range(3), slice(1, None)],
        "numpy": [np.arange(3, dtype="<u2"), np.float32(1.5)],
        "others": [frozenset({"x"}), bytearray(b"ab"), Path("a/b"), torch.device("cpu"), deque([1], 3)],
    }


def native() -> list[Files]:
    """Return checkpoints of the native format."""
    return [saved(("safetensors", 1)), folder_files(_GOLDEN)]


def torch_dist() -> list[Files]:
    """Return checkpoints of Megatron-Core's torch_dist."""
    return [saved(("torch_dist", 1)), folder_files(_FIXTURES / "megatron_0140_torch_dist_flat")]


def dcp() -> list[Files]:
    """Return a checkpoint of torch.distributed.checkpoint."""
    meta = io.BytesIO()
    torch.save({"epoch": 3, "loops": {"fit_loop": {}}, "score": torch.tensor(0.5)}, meta)
    files = saved(("dcp", 1))
    return [files, files | {"meta.pt": meta.getvalue()}]


def torch_common() -> list[Files]:
    """Return checkpoints whose common state is common.pt, by each of the two ways in which torch has written it."""
    newer = saved(("safetensors", 1), ("torch", 1))
    older = io.BytesIO()
    torch.save({"step": 7, "seed": torch.arange(3)}, older, _use_new_zipfile_serialization=False)
    return [newer, newer | {"common.pt": older.getvalue()}]


def zarr() -> list[Files]:
    """Return zarr folders: ours, another program's of version 3 and of version 2, and Megatron-Core's old one."""
    old = folder_files(_FIXTURES / "megatron_old_zarr")
    wanted = ("metadata.json", "common.pt", "layer.weight/", "layer.bias_bf16/", "layer._extra_state/")
    old = {name: data for name, data in old.items() if name.startswith(wanted)}
    return [saved(("zarr", 3)), _others_v3(), _others_v2(), old]


def _others_v3() -> Files:
    node: dict[str, Any] = {
        "zarr_format": 3,
        "node_type": "array",
        "shape": [4, 6],
        "data_type": "float32",
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [4, 6]}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": 0,
        "attributes": {},
    }
    plain = {"name": "bytes", "configuration": {"endian": "little"}}
    inner = {"chunk_shape": [2, 6], "codecs": [plain], "index_codecs": [plain, {"name": "crc32c"}]}
    sharding = {"name": "sharding_indexed", "configuration": inner | {"index_location": "end"}}
    blosc = [plain, {"name": "blosc", "configuration": {"cname": "lz4", "clevel": 1, "shuffle": "noshuffle"}}]
    packed = sharding | {"configuration": inner | {"chunk_shape": [4], "codecs": blosc}}
    grid = {"name": "regular", "configuration": {"chunk_shape": [4]}}
    turned = {"name": "transpose", "configuration": {"order": [1, 0]}}
    ignored = {"name": "x", "must_understand": False}
    gzip = [plain, {"name": "gzip", "configuration": {"level": 1}}, ignored]
    data = torch.arange(24.0).numpy().tobytes()
    zipped = zlib.compressobj(wbits=31)
    return {
        "zarr.json": b'{"zarr_format":3,"node_type":"group","attributes":{}}',
        "s/zarr.json": json.dumps(node | {"codecs": [sharding]}).encode(),
        "s/c/0/0": data + encode_shard_index(np.array([0, 48]), np.array([48, 48])),
        "z/zarr.json": json.dumps(node | {"codecs": gzip, "x": ignored}).encode(),
        "z/c/0/0": zipped.compress(data) + zipped.flush(),
        "b/zarr.json": json.dumps(node | {"codecs": [packed], "shape": [4], "chunk_grid": grid}).encode(),
        "b/c/0": _RAW["blosc"] + encode_shard_index(np.array([0]), np.array([32])),
        "t/zarr.json": json.dumps(node | {"codecs": [turned, plain]}).encode(),
        "t/c/0/0": data,
    }


def _others_v2() -> Files:
    node = {"zarr_format": 2, "shape": [4], "chunks": [4], "dtype": "<f4", "order": "C", "fill_value": 0}
    zipped = {"compressor": {"id": "zlib", "level": 1}, "filters": [{"id": "shuffle", "elementsize": 4}]}
    return {
        ".zgroup": b'{"zarr_format":2}',
        "p/.zarray": json.dumps(node | {"compressor": None, "filters": None}).encode(),
        "p/0": bytes(16),
        "z/.zarray": json.dumps(node | zipped | {"filters": None}).encode(),
        "z/0": zlib.compress(bytes(16)),
        **{
            f"{name}/.zarray": json.dumps(node | {"compressor": {"id": name}, "filters": None}).encode()
            for name in _RAW
        },
        **{f"{name}/0": chunk for name, chunk in _RAW.items()},
    }


def deepspeed() -> list[Files]:
    """Return checkpoints of ZeRO-1 and of ZeRO-3."""
    return [folder_files(_FIXTURES / name) for name in ("deepspeed_zero1_dp2", "deepspeed_zero3_dp4")]


def universal() -> list[Files]:
    """Return a Universal Checkpoint."""
    return [folder_files(_FIXTURES / "deepspeed_universal" / "global_step3_universal")]


def dtensor_files() -> list[Files]:
    """Return checkpoints of verl's: a file of DTensors for each rank, and one of tensors in every other order."""
    pairs = torch.tensor([[1 + 2j, 3 - 4j, 5j], [0j, -1j, 2 + 0j]])
    tensors = {
        "transposed": torch.arange(12.0).view(3, 4).t(),
        "expanded": torch.arange(4.0).expand(3, 4),
        "overlapping": torch.arange(10.0).as_strided((4, 3), (2, 1)),
        "conjugated": pairs.conj(),
        "negated": pairs.clone().conj().imag,
    }
    return [folder_files(_FIXTURES / "dtensor_fsdp2_w4"), {"model_world_size_1_rank_0.pt": _archive(tensors)}]


def torch_checkpointing() -> list[Files]:
    """Return a folder of torch_checkpointing's: rows of a tensor on two ranks, and a value that one has alone."""
    whole, layout = torch.arange(8.0).reshape(4, 2), {"serialization_format": {"type": "TorchSerialization"}}
    rows = {0: [0, 3], 1: [1, 2]}
    boxes = {0: [([0, 0], [0, 0], [1, 2]), ([3, 0], [1, 0], [1, 2])], 1: [([1, 0], [0, 0], [2, 2])]}
    names = ("global_offsets", "local_offsets", "local_sizes")
    data = {rank: dict(zip(names, map(list, zip(*own, strict=True)), strict=True)) for rank, own in boxes.items()}
    kinds = {
        rank: {"type": "default_tensor_v1", "data": own | {"global_shape": (4, 2), "dtype": "torch.float32"}}
        for rank, own in data.items()
    }
    model = {
        "nested_path_to_metadata": {
            '["w"]': [{"sharding_metadata": kinds[rank], "ranks": [rank]} for rank in kinds],
        },
        "rank_to_layout_info": {0: None, 1: layout | {"file_path": "model_1.pt"}},
    }
    step = {"nested_path_to_metadata": {}, "rank_to_layout_info": {0: None}}
    metadata = {"metadata": {"model": model, "step": step}, "world_size": 2, "version": "2.0"}
    values = {f"model_{rank}.pt": {"w": whole[own]} for rank, own in rows.items()} | {"step_0.pt": {"step": 7}}
    return [{name: _archive(value) for name, value in values.items()} | {"metadata.pkl": pickle.dumps(metadata)}]


def _archive(value: Any) -> bytes:
    out = io.BytesIO()
    torch.save(value, out)
    return out.getvalue()


_RAW = {
    "blosc": struct.pack("<BBBBIII", 2, 1, 2, 4, 16, 16, 32) + bytes(16),
    "lz4": struct.pack("<I", 16) + b"\xf0\x01" + bytes(16),
    "zstd": b"\x28\xb5\x2f\xfd\x20\x10" + struct.pack("<I", 16 << 3 | 1)[:3] + bytes(16),
}
"""Sixteen zeros as each of these stores what doesn't get shorter."""


def dcp_safetensors() -> list[Files]:
    """Return two ranks' parts of a model, as transformers saved them under FSDP2 and under tensor parallelism."""
    return [folder_files(_FIXTURES / f"transformers_parts_{name}") for name in ("fsdp2", "tp2")]


def huggingface() -> list[Files]:
    """Return a model in one file, one in two files with an index, and one of 4-bit floats, which torch has in pairs."""
    one = saved(("huggingface", 1))
    entries = [HeaderEntry("a", "F32", (2, 3), 0, 24)]
    part = encode_header(entries, {"format": "pt"}) + bytes(24)
    names = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    index = {"metadata": {"total_size": 48}, "weight_map": names}
    other = part.replace(b'"a"', b'"b"')
    two = {"model.safetensors.index.json": json.dumps(index).encode(), names["a"]: part, names["b"]: other}
    entries = [HeaderEntry("b", "F32", (1,), 0, 4), HeaderEntry("a", "F4", (2, 6), 4, 10)]
    pairs = encode_header(entries, {"format": "pt"}) + bytes(10)
    return [one, two, {"model.safetensors": pairs}]
