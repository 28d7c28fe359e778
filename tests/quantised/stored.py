"""Quantised weights to test with: of each form, with every code that it has."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import torch

import shardtree as st
from shardtree.quantised import FORMS, Form

SHAPES = {  # of what is stored as matrices: edges within blocks where a form can have them
    "fp8_blocks": (300, 200),
    "fp8_blocks_ue8m0": (140, 130),
    "fp8_rows": (12, 10),
    "mxfp8": (5, 96),
    "mxfp4": (2, 6, 96),
    "nvfp4": (7, 64),
    "awq": (256, 24),
    "nvfp4_packed": (7, 64),
    "fp8_blocks_scale": (300, 200),
    **dict.fromkeys(("fp8_tensor", "fp8_tensor_1"), (12, 10)),
    "mxfp4_packed": (7, 96),
    **dict.fromkeys(("int4_packed", "int4_packed_zeros"), (20, 256)),
    **dict.fromkeys(("int4_packed_rows", "int4_packed_rows_zeros"), (20, 136)),
    **dict.fromkeys(("gptq", "gptq_v2", "gptq_in_order", "gptq_v2_in_order"), (384, 24)),
}


def stored(name: str, seed: int = 0, key: str = "mlp.weight") -> dict[str, torch.Tensor]:
    """Return the tensors of a weight: bytes of every kind, and scales that are numbers, with float32's range kept."""
    form, shape = FORMS[name], SHAPES[name]
    random, made = torch.Generator().manual_seed(seed), {}
    for part_key, part in zip(form.keys(key), form.parts, strict=True):
        size, dtype = part.of(shape).box((0,) * len(shape), shape).shape, part.dtypes[0]
        if part.shape:
            made[part_key] = torch.tensor(shape)
        elif dtype in (torch.float32, torch.float16, torch.bfloat16):
            made[part_key] = (torch.rand(size, generator=random) + 0.1).to(dtype)
        elif part is not form.parts[0] and dtype.itemsize == 1:
            made[part_key] = torch.randint(60, 120, size, generator=random, dtype=torch.uint8).view(dtype)
        elif part.name == "g_idx":
            groups = torch.arange(size[0]) // 128
            made[part_key] = (groups if part.group > 0 else groups[torch.randperm(size[0], generator=random)]).int()
        elif dtype is torch.int32:
            made[part_key] = torch.randint(-(2**31), 2**31, size, generator=random).to(dtype)
        else:
            codes = torch.randint(0, 256, size, generator=random, dtype=torch.uint8)
            made[part_key] = torch.where((codes & 127) == 127, codes - 1, codes).view(dtype)  # no NaN
    return made


def boxes_of(form: Form, shape: tuple[int, ...], axis: int, ranks: int) -> list[st.ShardedTensor]:
    """Return descriptions of ranks' boxes of a weight, cut along an axis anywhere that isn't within a packed value."""
    turned = (
        {len(shape) - 1: len(shape) - 2, len(shape) - 2: len(shape) - 1}.get(axis, axis) if form.is_turned else axis
    )
    packed = form.parts[0].steps[turned - len(shape)] if turned >= len(shape) - 2 else 1
    edges = [shape[axis] * rank // ranks // packed * packed for rank in range(ranks)] + [shape[axis]]
    shards = []
    for low, high in pairwise(edges):
        local = tuple(high - low if each == axis else size for each, size in enumerate(shape))
        offset = tuple(low if each == axis else 0 for each in range(len(shape)))
        shards.append(st.ShardedTensor("mlp.weight", None, torch.bfloat16, local, shape, offset, None))
    return shards


def held(form: Form, shard: st.ShardedTensor, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return what a rank that holds a weight quantised has of its tensors."""
    offset, shape, whole = list(shard.global_offset), list(shard.local_shape), list(shard.global_shape)
    if form.is_turned:
        offset[-2:], shape[-2:], whole[-2:] = offset[:-3:-1], shape[:-3:-1], whole[:-3:-1]
    found = {}
    for name, part in zip(form.keys(shard.key), form.parts, strict=True):
        low, size = part.of(whole).box(offset, shape)
        found[name] = tensors[name][tuple(slice(at, at + count) for at, count in zip(low, size, strict=True))]
    return found


def integers(*shape: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype)


_INT32, _INT8 = torch.int32, torch.int8
_POWERS = getattr(torch, "float8_e8m0fnu", torch.float16)  # torch 2.6 hasn't
UNKNOWN = {
    "compressed-tensors' integers, columns of which belong to any group": {
        "up.weight_packed": integers(8, 32, dtype=_INT32),
        "up.weight_scale": torch.ones(8, 2).bfloat16(),
        "up.weight_shape": torch.tensor([8, 256]),
        "up.weight_g_idx": torch.zeros(256, dtype=_INT32),
    },
    "compressed-tensors' INT8": {"up.weight": integers(8, 32, dtype=_INT8), "up.weight_scale": torch.ones(8, 1)},
    "bitsandbytes' NF4": {
        "up.weight": integers(128, 1),
        "up.weight.absmax": torch.ones(4),
        "up.weight.quant_map": torch.ones(16),
        "up.weight.quant_state.bitsandbytes__nf4": integers(90),
    },
    "bitsandbytes' NF4 whose values are stored as bfloat16": {
        "up.weight.quant_state.bitsandbytes__nf4": integers(90),
        "up.weight": torch.ones(64, 1).bfloat16(),
        "up.weight.absmax": integers(4),
    },
    "bitsandbytes' INT8": {
        "up.weight": integers(8, 16, dtype=_INT8),
        "up.SCB": torch.ones(8),
        "up.weight_format": integers(),
    },
    "HQQ": {"up.W_q": integers(8, 64), "up.scale": torch.ones(16, 1).half(), "up.zero": torch.ones(16, 1).half()},
    "symmetric GPTQ": {
        "up.qweight": integers(16, 24, dtype=_INT32),
        "up.scales": torch.ones(1, 24).half(),
        "up.g_idx": torch.zeros(128, dtype=_INT32),
    },
    "symmetric GPTQ without groups": {"up.qweight": integers(16, 24, dtype=_INT32), "up.scales": torch.ones(1, 24)},
    "DeepSeek-V4": {
        "up.weight": integers(8, 64, dtype=_INT8),
        "up.scale": integers(8, 4).view(_POWERS),
    },
    "Quanto": {"up.weight._data": integers(8, 16, dtype=_INT8), "up.weight._scale": torch.ones(8, 1)},
    "torchao": {"up._weight_qdata": integers(8, 16, dtype=_INT8), "up._weight_scale": torch.ones(8, 1)},
    "MLX": {"up.weight": integers(8, 8).to(torch.uint32), "up.scales": torch.ones(8, 1), "up.biases": torch.ones(8, 1)},
}
"""By program, tensors that no form explains, whose values come first."""
