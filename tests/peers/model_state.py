"""A small model's sharded state in any layout, of whichever library's leaves: shardtree's or Megatron-Core's."""

from __future__ import annotations

from argparse import Namespace
from itertools import pairwise
from math import prod
from typing import Any
from zlib import crc32

import torch

from shardtree.testing import first_difference

LAYERS = 4

KINDS: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
    "embedding.weight": ((24, 16), torch.float32),
    "norm.weight": ((16,), torch.float32),
    "layers.qkv.weight": ((LAYERS, 48, 16), torch.float32),
    "layers.fc1.weight": ((LAYERS, 64, 16), torch.float32),
    "layers.fc2.bias": ((LAYERS, 16), torch.bfloat16),
    "proj.weight": ((16, 32), torch.float16),
    "uneven.weight": ((30, 5), torch.float32),
    "optimizer.exp_avg.proj.weight": ((16, 32), torch.float32),
    "scales": ((8, 8), torch.float8_e4m3fn),
    "mask": ((6, 4), torch.bool),
    "step": ((), torch.int64),
}
UNEVEN = {1: (0, 30), 2: (0, 24, 30), 4: (0, 7, 9, 24, 30)}
"""Where the rows of the irregularly cut tensor are cut, by tensor-parallel size."""

CONTENT = {"distrib_optim_sharding_type": "fully_sharded_model_space", "version": 2}


def whole(key: str) -> torch.Tensor:
    """Return a global tensor; its values follow from its key."""
    shape, dtype = KINDS[key]
    counted = torch.arange(prod(shape)) % 251 + crc32(key.encode()) % 97
    return counted.reshape(shape).to(dtype)


def common() -> dict[str, Any]:
    return {
        "iteration": 42,
        "args": Namespace(hidden_size=16, lr=0.1, name=None),
        "optimizer_groups": {"param_groups": [{"lr": 1e-3, "betas": (0.9, 0.95)}]},
        "lst": [1, {"a": 2}, [3, None]],
        "common_tensor": torch.arange(5),
        "empty_dict": {},
    }


def rank_tree(lib: Any, tp: int, pp: int, t: int, p: int, *, flat: bool = False) -> dict[str, Any]:
    """Return what the rank at place t of tp and stage p of pp holds, with data."""
    make = lib.ShardedTensor.from_rank_offsets
    layers = range(p * LAYERS // pp, (p + 1) * LAYERS // pp)
    return {
        "embedding": make(
            "embedding.weight", part("embedding.weight", 0, t, tp), (0, t, tp), replica_id=p, allow_shape_mismatch=True
        ),
        "norm": make("norm.weight", whole("norm.weight"), replica_id=(p, t)),
        "step": make("step", whole("step"), replica_id=(p, t)),
        "scales": make("scales", part("scales", 0, t, tp), (0, t, tp), replica_id=p),
        "mask": make("mask", part("mask", 1, t, tp), (1, t, tp), replica_id=p),
        "proj": make("proj.weight", part("proj.weight", 1, t, tp), (1, t, tp), replica_id=p),
        "exp_avg": exp_avg(lib, tp, t, p, flat=flat),
        "uneven": uneven(lib, tp, t, p),
        "layers": {str(layer): layer_tree(lib, tp, t, layer) for layer in layers},
        "rng": lib.ShardedObject("rng_state", [{"seed": 1000 + t + tp * p}], (pp, tp), (p, t)),
    }


def part(key: str, axis: int, place: int, places: int) -> torch.Tensor:
    return whole(key).chunk(places, axis)[place].contiguous()


def layer_tree(lib: Any, tp: int, t: int, layer: int) -> dict[str, Any]:
    make = lib.ShardedTensor.from_rank_offsets
    qkv = whole("layers.qkv.weight")[layer].chunk(tp)[t].contiguous()
    bias = whole("layers.fc2.bias")[layer].clone()
    return {
        "qkv": make("layers.qkv.weight", qkv, (0, layer, LAYERS), (1, t, tp), prepend_axis_num=1),
        "bias": make("layers.fc2.bias", bias, (0, layer, LAYERS), prepend_axis_num=1, replica_id=t),
        "fc1": swiglu(lib, tp, t, layer),
        "extra": lib.ShardedObject("layers.extra_state", {"layer": layer}, (LAYERS,), (layer,), replica_id=t),
    }


def swiglu(lib: Any, tp: int, t: int, layer: int) -> Any:
    """Return the factory of a gated layer: its halves are cut apart, so that chunks t and t + tp are this rank's."""
    gate, value = whole("layers.fc1.weight")[layer].chunk(2)

    def build(key: str, data: torch.Tensor, replica_id: Any, flattened_range: Any) -> list[Any]:
        halves = zip(data.chunk(2), (t, t + tp), strict=True)
        return [
            lib.ShardedTensor.from_rank_offsets(
                key, half, (0, layer, LAYERS), (1, place, 2 * tp), prepend_axis_num=1, replica_id=replica_id
            )
            for half, place in halves
        ]

    data = torch.cat([gate.chunk(tp)[t], value.chunk(tp)[t]])
    return lib.ShardedTensorFactory("layers.fc1.weight", data, build, torch.cat)


def exp_avg(lib: Any, tp: int, t: int, p: int, *, flat: bool) -> Any:
    """Return an optimizer state, either a box or, as a distributed optimizer has it, cut flat into three."""
    key = "optimizer.exp_avg.proj.weight"
    data = part(key, 1, t, tp)
    if not flat:
        return lib.ShardedTensor.from_rank_offsets(key, data, (1, t, tp), replica_id=p)
    cuts = [0, data.numel() // 3 + 1, data.numel() // 3 + 1, data.numel() * 2 // 3, data.numel()]
    return [
        lib.ShardedTensor.from_rank_offsets_flat(
            key,
            data.flatten()[begin:end],
            tuple(data.shape),
            (1, t, tp),
            flattened_range=slice(begin, end),
            replica_id=p,
        )
        for begin, end in pairwise(cuts)
    ]


def uneven(lib: Any, tp: int, t: int, p: int) -> Any:
    key = "uneven.weight"
    begin, end = UNEVEN[tp][t : t + 2]
    data = whole(key)[begin:end].clone()
    return lib.ShardedTensor(
        key=key,
        data=data,
        dtype=data.dtype,
        local_shape=tuple(data.shape),
        global_shape=KINDS[key][0],
        global_offset=(begin, 0),
        axis_fragmentations=None,
        replica_id=p,
    )


def cleared(lib: Any, node: Any, *, objects: bool = False) -> Any:
    """Return a tree to load into: each tensor zeroed; `objects` keeps those whose grid is that of one layout only."""
    if isinstance(node, dict):
        kept = {key: cleared(lib, value, objects=objects) for key, value in node.items()}
        return {key: value for key, value in kept.items() if value is not None}
    if isinstance(node, lib.ShardedObject):
        return None if node.key == "rng_state" and not objects else type(node)(**{**fields(node), "data": None})
    if isinstance(node, (lib.ShardedTensor, lib.ShardedTensorFactory)):
        return type(node)(**{**fields(node), "data": torch.zeros_like(node.data)})
    return node


def fields(node: Any) -> dict[str, Any]:
    return {name: getattr(node, name) for name in type(node).__dataclass_fields__}


def differences(expected: Any, found: Any, path: str = "tree") -> list[str]:
    """Return where what was loaded differs from a tree with data; data of leaves counts, and nothing else of them."""
    if hasattr(expected, "data") and not isinstance(expected, torch.Tensor):
        return differences(expected.data, found, f"{path} ({getattr(expected, 'key', '')})")
    if type(expected) is not type(found):
        return [f"{path}: {type(found).__name__}, not {type(expected).__name__}"]
    if isinstance(expected, dict):
        return [
            line
            for name in sorted(expected.keys() | found.keys())
            for line in differences(expected.get(name), found.get(name), f"{path}[{name!r}]")
        ]
    if isinstance(expected, (list, tuple)) and len(expected) == len(found):
        pairs = enumerate(zip(expected, found, strict=True))
        return [line for at, (one, other) in pairs for line in differences(one, other, f"{path}[{at}]")]
    if isinstance(expected, torch.Tensor):
        return [f"{path}: other elements"] * (first_difference(expected, found) is not None)
    return [] if expected == found else [f"{path}: {found!r}, not {expected!r}"]
