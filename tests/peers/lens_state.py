"""A model's tensors behind lenses, and its optimizer's states as Megatron-Core makes factories of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

import shardtree as st
from shardtree.interop.megatron import to_megatron

LENSES: dict[str, tuple[tuple[int, ...], st.lenses.Lens]] = {
    "layers.0.fc1.weight": ((8, 3), st.lenses.gate_and_up(tensor_parallel=2, part="fc1", names=("gate", "up"))),
    "layers.0.qkv.weight": ((16, 3), st.lenses.attention_qkv(heads=4, head_size=2, query_groups=2)),
    "layers.0.experts.fc2": ((24, 2), st.lenses.expert_keys("experts", experts=12)),
    "embedding.weight": ((6, 3), st.lenses.padded_axis(6)),
    "proj.weight": ((4, 3), st.lenses.transposed()),
}
STORED = {
    "layers.0.gate.weight",
    "layers.0.up.weight",
    "layers.0.qkv.weight",
    *(f"layers.0.experts.{number}.fc2" for number in range(12)),
    "embedding.weight",
    "proj.weight",
}
"""The parameters' keys; each has two states."""


def lens_tree(*, zeros: bool = False) -> dict[str, Any]:
    """Return Megatron-Core's factories: parameters, a moment of each, and one in two flat ranges."""
    from megatron.core.dist_checkpointing.optimizer import make_sharded_optimizer_tensor

    model = to_megatron({key: st.lenses.as_factory(_shard(key), lens) for key, (_, lens) in LENSES.items()})
    tree = {**model}
    for key, factory in model.items():
        tree[f"exp_avg.{key}"] = make_sharded_optimizer_tensor(factory, 2 * factory.data, "optimizer.state.exp_avg")
        flat = 3 * factory.data.double().reshape(-1)
        for cut in (slice(0, 5), slice(5, len(flat))):
            tree[f"exp_avg_sq.{key}.{cut.start}"] = replace(
                factory, key=f"optimizer.state.exp_avg_sq.{key}", data=flat[cut], flattened_range=cut
            )
    if not zeros:
        return tree
    return {name: replace(factory, data=torch.zeros_like(factory.data)) for name, factory in tree.items()}


def _shard(key: str) -> st.ShardedTensor:
    shape = LENSES[key][0]
    return st.ShardedTensor.from_rank_offsets(key, 1 + torch.arange(float(torch.Size(shape).numel())).view(shape))
