"""Folders as other programs write them, made of trees: for formats that shardtree only reads."""

from __future__ import annotations

import io
import json
from typing import Any

import torch
from optree import tree_leaves

from shardtree.core.codec import bit_view
from shardtree.errors import UnsupportedValue
from shardtree.formats.archives import encode_archive
from shardtree.kit import HeaderEntry, encode_header, kind_in_file, tensor_buffers
from shardtree.mapping import (
    LocalNonpersistentObject,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
    is_main_replica,
)
from shardtree.shell.storage import storage_at
from shardtree.storage import Directory, MemoryStorage, Storage
from shardtree.testing import assemble
from shardtree.trees import leaves_with_paths

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
    """Write what all ranks hold as Megatron-Core did in zarr v2, each tensor as one chunk."""
    storage = storage_at(place)
    files: dict[str, bytes] = {"common.pt": encode_archive(plain(trees[0]))}
    for key, tensor in assemble(trees).items():
        files |= array_files(key, tensor)
    for leaf in [leaf for tree in trees for _, leaf in leaves_with_paths(tree)]:
        if isinstance(leaf, ShardedObject):
            files[f"{leaf.unique_key}.pt"] = encode_archive(leaf.data)
    files["metadata.json"] = json.dumps(FIELDS).encode()
    for name, data in files.items():
        storage.write(name, [memoryview(data)], durable=False)


def write_dtensor_files(trees: Any, place: Directory) -> None:
    """Write what all ranks hold as one rank's files: plain tensors, and the common state in its own."""
    storage = storage_at(place)
    put(storage, "model_world_size_1_rank_0.pt", whole(trees))
    put(storage, "extra_state_world_size_1_rank_0.pt", plain(trees[0]))


def write_torch_checkpointing(trees: Any, place: Directory) -> None:
    """Write what all ranks hold as one rank's items: each tensor, and each member of the common state."""
    storage, items = storage_at(place), {**plain(trees[0]), **whole(trees)}
    if any("/" in key or "\\" in key for key in items):
        raise UnsupportedValue("an item's name is a file's")
    if any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(plain(trees[0]))):
        raise UnsupportedValue("tensors of an item are tensors, not part of the common state")
    put(MemoryStorage(), "all", items)  # before any file is there
    for key, value in items.items():
        put(storage, f"{key}_0.pt", value)
    put(storage, "empty_0.pt", {})


def write_deepspeed(trees: Any, place: Directory) -> None:
    """Write what all ranks hold as a model that DeepSpeed saved without an optimizer."""
    put(storage_at(place), "mp_rank_00_model_states.pt", {"module": whole(trees), **plain(trees[0])})


def write_universal(trees: Any, place: Directory) -> None:
    """Write the same as a Universal Checkpoint of a model of which nothing is trained."""
    write_deepspeed(trees, place)
    put(storage_at(place), "zero/optimizer_state.pt", {"param_groups": []})


def write_dcp_safetensors(trees: Any, place: Directory) -> None:
    """Write what all ranks hold as DCP's safetensors writer does, with a file for each shard."""
    storage = storage_at(place)
    leaves = [leaf for tree in trees for _, leaf in leaves_with_paths(tree)]
    if plain(trees[0]) or any(isinstance(leaf, ShardedObject) for leaf in leaves):
        raise UnsupportedValue("these files have no place for other values than tensors")
    shards = [leaf for leaf in leaves if isinstance(leaf, ShardedTensor) and is_main_replica(leaf.replica_id)]
    files = [part_file(shard) for shard in shards] or [encode_header([], part_texts({}), alignment=8)]
    for number, data in enumerate(files, start=1):
        name = f"shard-{number:05d}-model-00001-of-00001.safetensors"
        storage.write(name, [memoryview(data)], durable=False)


def part_file(shard: ShardedTensor) -> bytes:
    """Return a file with one shard, at its offset."""
    shape = (1,) * shard.prepend_axis_num + shard.local_shape
    kind = kind_in_file(shard.dtype, shape)
    if shard.flattened_range is not None or kind is None or shard.key in ("", "__metadata__"):
        raise UnsupportedValue(f"{shard.key!r} as a box in a safetensors file")
    data = b"".join(tensor_buffers(shard.data))
    texts = part_texts({shard.key: {"saved_offsets": list(shard.global_offset)}})
    return encode_header([HeaderEntry(shard.key, *kind, 0, len(data))], texts, alignment=8) + data


def part_texts(offsets: dict[str, Any]) -> dict[str, str]:
    return {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(offsets)}


def array_files(key: str, whole: torch.Tensor) -> dict[str, bytes]:
    """Return the files of one array of zarr v2, as one chunk."""
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


def whole(trees: Any) -> dict[str, torch.Tensor]:
    leaves = [leaf for tree in trees for _, leaf in leaves_with_paths(tree)]
    if any(isinstance(leaf, ShardedObject) for leaf in leaves):
        raise UnsupportedValue("these files have no place for sharded objects")
    return assemble(trees)


def plain(tree: Any) -> dict[str, Any]:
    """Return the common part of a tree of dicts."""
    if not isinstance(tree, dict):
        return {}
    leaves = {key: [leaf for _, leaf in leaves_with_paths(value)] for key, value in tree.items()}
    shards = (ShardedTensor, ShardedObject, ShardedTensorFactory, LocalNonpersistentObject)
    return {key: tree[key] for key, own in leaves.items() if not any(isinstance(leaf, shards) for leaf in own)}


def put(storage: Storage, name: str, value: Any) -> None:
    out = io.BytesIO()
    try:
        torch.save(value, out)
    except KeyError as error:
        raise UnsupportedValue("torch.save cannot write a dtype") from error
    storage.make_folder(name.rpartition("/")[0], durable=False)
    storage.write(name, [out.getbuffer()], durable=False)
