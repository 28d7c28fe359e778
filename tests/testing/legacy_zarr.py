"""Checkpoints as Megatron-Core wrote them in zarr v2, made of trees: for a format that shardtree only reads."""

from __future__ import annotations

import json
from typing import Any

import torch

from shardtree.codec import bit_view
from shardtree.codec.archives import encode_archive
from shardtree.errors import UnsupportedValue
from shardtree.mapping import ShardedObject, ShardedTensor
from shardtree.storage import Directory, storage_at
from shardtree.testing import assemble
from shardtree.trees import leaves_with_paths, partition

KINDS = {
    torch.bool: "|b1",
    torch.uint8: "|u1",
    torch.int8: "|i1",
    torch.int16: "<i2",
    torch.int32: "<i4",
    torch.int64: "<i8",
    torch.float16: "<f2",
    torch.bfloat16: "bfloat16",
    torch.float32: "<f4",
    torch.float64: "<f8",
}
FIELDS = {
    "sharded_backend": "zarr",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}


def write_legacy(trees: Any, place: Directory) -> None:
    """Write what all ranks hold, each tensor as one chunk."""
    storage = storage_at(place)
    leaves = [leaf for tree in trees for _, leaf in leaves_with_paths(tree)]
    files: dict[str, bytes] = {"common.pt": encode_archive(plain(trees[0]))}
    for key, whole in assemble(trees).items():
        files |= array(key, whole)
    for leaf in leaves:
        if isinstance(leaf, ShardedObject):
            files[f"{leaf.unique_key}.pt"] = encode_archive(leaf.data)
    files["metadata.json"] = json.dumps(FIELDS).encode()
    for name, data in files.items():
        storage.write(name, [memoryview(data)], durable=False)


def plain(tree: Any) -> Any:
    """Return the common part of a tree of dicts."""
    _, rest = partition(tree, lambda leaf: isinstance(leaf, (ShardedTensor, ShardedObject)))
    return {key: value for key, value in rest.items() if key in ("common", "value")} if isinstance(rest, dict) else {}


def array(key: str, whole: torch.Tensor) -> dict[str, bytes]:
    """Return the files of one array."""
    if whole.dtype not in KINDS or set(key) & {"/", "%"} or len(key) > 200:
        raise UnsupportedValue(f"{key!r} of {whole.dtype} in zarr v2")
    document = {
        "zarr_format": 2,
        "shape": list(whole.shape),
        "chunks": [max(size, 1) for size in whole.shape],
        "dtype": KINDS[whole.dtype],
        "compressor": None,
        "fill_value": None,
        "filters": None,
        "order": "C",
    }
    chunk = {f"{key}/{'.'.join('0' * whole.ndim) or '0'}": bit_view(whole.contiguous()).numpy().tobytes()}
    return {f"{key}/.zarray": json.dumps(document).encode()} | (chunk if whole.numel() else {})
