"""A small Llama by its logical weights: as Megatron-Core's ranks hold it, as Hugging Face names it, and its logits.

Each of these is written out from the logical weights alone, with numpy or plain torch, so that they can judge a
pipeline from one to another.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.nn.functional import embedding, rms_norm, scaled_dot_product_attention, silu

import shardtree as st

LAYERS, HIDDEN, HEADS, GROUPS, FFN, VOCABULARY, PADDED = 4, 64, 16, 8, 96, 50, 56
HEAD = HIDDEN // HEADS
TENSOR, PIPELINE = 4, 2
EPSILON = 1e-5
TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6, 49, 0], [2, 7, 1, 8, 2, 8, 1, 8, 2, 8]])

Weights = dict[str, np.ndarray]


def logical_weights(seed: int = 0) -> Weights:
    """Return what the model is: each matrix whole, by a name of its own, without padding."""
    draw = np.random.default_rng(seed)
    shapes = {"embed": (VOCABULARY, HIDDEN), "head": (VOCABULARY, HIDDEN), "norm": (HIDDEN,)}
    for layer in range(LAYERS):
        shapes |= {
            f"{layer}.norm1": (HIDDEN,),
            f"{layer}.q": (HIDDEN, HIDDEN),
            f"{layer}.k": (GROUPS * HEAD, HIDDEN),
            f"{layer}.v": (GROUPS * HEAD, HIDDEN),
            f"{layer}.o": (HIDDEN, HIDDEN),
            f"{layer}.norm2": (HIDDEN,),
            f"{layer}.gate": (FFN, HIDDEN),
            f"{layer}.up": (FFN, HIDDEN),
            f"{layer}.down": (HIDDEN, FFN),
        }
    return {name: (draw.normal(size=shape) / len(shape) ** 3).astype(np.float32) for name, shape in shapes.items()}


def rounded(weights: Weights) -> Weights:
    """Return the weights as they are after a cast to bfloat16."""
    return {name: torch.from_numpy(array).bfloat16().float().numpy() for name, array in weights.items()}


def hugging_face(weights: Weights, *, fused: bool) -> dict[str, torch.Tensor]:
    """Return what `transformers` calls it, in bfloat16: as Phi-3, whose projections are fused, or as Llama."""
    found = {"model.embed_tokens.weight": "embed", "lm_head.weight": "head", "model.norm.weight": "norm"}
    tensors = {name: weights[own] for name, own in found.items()}
    for layer in range(LAYERS):
        q, k, v, gate, up = (weights[f"{layer}.{name}"] for name in ("q", "k", "v", "gate", "up"))
        together = {"self_attn.qkv_proj": np.concatenate([q, k, v]), "mlp.gate_up_proj": np.concatenate([gate, up])}
        apart = {"self_attn.q_proj": q, "self_attn.k_proj": k, "self_attn.v_proj": v}
        apart |= {"mlp.gate_proj": gate, "mlp.up_proj": up}
        others = {
            "input_layernorm": weights[f"{layer}.norm1"],
            "self_attn.o_proj": weights[f"{layer}.o"],
            "post_attention_layernorm": weights[f"{layer}.norm2"],
            "mlp.down_proj": weights[f"{layer}.down"],
        }
        every = others | (together if fused else apart)
        tensors |= {f"model.layers.{layer}.{name}.weight": array for name, array in every.items()}
    return {name: torch.from_numpy(np.ascontiguousarray(array)).bfloat16() for name, array in tensors.items()}


def interleaved(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Return Megatron-Core's QKV: group by group, the queries that share a key, the key, the value."""
    width = len(q) // (len(k) // HEAD)
    groups = [
        np.concatenate([q[number * width : (number + 1) * width], k[low : low + HEAD], v[low : low + HEAD]])
        for number, low in enumerate(range(0, len(k), HEAD))
    ]
    return np.concatenate(groups)


def padded(table: np.ndarray) -> np.ndarray:
    """Return a table with Megatron-Core's padding, which holds what training left there."""
    return np.concatenate([table, np.full((PADDED - VOCABULARY, HIDDEN), 7, np.float32)])


def rank_matrices(weights: Weights, layer: int, rank: int, ranks: int) -> Weights:
    """Return what a rank of tensor parallelism holds of a layer's matrices, by the names of its modules."""

    def rows(name: str) -> np.ndarray:
        return np.split(weights[f"{layer}.{name}"], ranks)[rank]

    def columns(name: str) -> np.ndarray:
        return np.split(weights[f"{layer}.{name}"], ranks, axis=1)[rank]

    return {
        "self_attention.linear_qkv.weight": interleaved(rows("q"), rows("k"), rows("v")),
        "self_attention.linear_proj.weight": columns("o"),
        "mlp.linear_fc1.weight": np.concatenate([rows("gate"), rows("up")]),
        "mlp.linear_fc2.weight": columns("down"),
    }


def global_tensor(weights: Weights, key: str) -> np.ndarray:
    """Return a stored tensor of Megatron-Core's, whole, by its key: of one layer, or stacked over all."""
    tables = {"embedding.word_embeddings.weight": "embed", "output_layer.weight": "head"}
    if key in tables:
        return padded(weights[tables[key]])
    if key == "decoder.final_layernorm.weight":
        return weights["norm"]
    first, _, rest = key.removeprefix("decoder.layers.").partition(".")
    if not first.isdecimal():
        own = key.removeprefix("decoder.layers.")
        return np.stack([global_tensor(weights, f"decoder.layers.{layer}.{own}") for layer in range(LAYERS)])
    norms = {"self_attention.linear_qkv.layer_norm_weight": "norm1", "mlp.linear_fc1.layer_norm_weight": "norm2"}
    norms |= {"mlp.linear_fc1.weight_w": "gate", "mlp.linear_fc1.weight_v": "up"}
    if rest in norms:
        return weights[f"{first}.{norms[rest]}"]
    return rank_matrices(weights, int(first), 0, 1)[rest]


def rank_tree(weights: Weights, rank: int, *, stacked: bool, tensor: int = TENSOR, pipeline: int = PIPELINE) -> Any:
    """Return a rank's state as Megatron-Core describes it: the model, a moment for each parameter, extra states.

    Args:
        weights: the logical ones.
        rank: of tensor x pipeline.
        stacked: whether layers are one tensor with a prepended axis; otherwise each has keys of its own, and gate
            and up projection too.
        tensor: ranks of tensor parallelism.
        pipeline: stages of pipeline parallelism.
    """
    stage, own = divmod(rank, tensor)
    leaves = list(_ends(weights, stage == 0, stage == pipeline - 1, own, tensor))
    for layer in np.array_split(range(LAYERS), pipeline)[stage].tolist():
        leaves += _layer(weights, layer, own, tensor, stacked=stacked)
    moments = [_moment(leaf) for leaf in leaves if not isinstance(leaf, st.ShardedObject)]
    return {"model": leaves, "optimizer": moments, "iteration": 42_000, "args": {"hidden_size": HIDDEN}}


def _moment(leaf: Any) -> Any:
    return replace(leaf, key=f"optimizer.state.exp_avg.{leaf.key}", data=torch.full_like(leaf.data, -1))


def _ends(weights: Weights, first: bool, last: bool, own: int, tensor: int) -> Iterator[Any]:
    tables = [("embedding.word_embeddings.weight", "embed")] * first + [("output_layer.weight", "head")] * last
    for key, name in tables:
        rows = torch.from_numpy(np.split(padded(weights[name]), tensor)[own])
        yield st.ShardedTensor.from_rank_offsets(key, rows, (0, own, tensor), allow_shape_mismatch=True)
    if last:
        norm = torch.from_numpy(weights["norm"])
        yield st.ShardedTensor.from_rank_offsets("decoder.final_layernorm.weight", norm, replica_id=(0, own, 0))


def _layer(weights: Weights, layer: int, own: int, tensor: int, *, stacked: bool) -> Iterator[Any]:
    prefix = "decoder.layers." if stacked else f"decoder.layers.{layer}."
    before: list[tuple[int, int, int]] = [(0, layer, LAYERS)] if stacked else []
    axes = len(before)
    for name in ("self_attention.linear_qkv", "mlp.linear_fc1"):
        norm = torch.from_numpy(global_tensor(weights, f"decoder.layers.{layer}.{name}.layer_norm_weight"))
        yield st.ShardedTensor.from_rank_offsets(
            f"{prefix}{name}.layer_norm_weight", norm, *before, replica_id=(0, own, 0), prepend_axis_num=axes
        )
    for name, matrix in rank_matrices(weights, layer, own, tensor).items():
        axis = axes + (1 if name in ("self_attention.linear_proj.weight", "mlp.linear_fc2.weight") else 0)
        data = torch.from_numpy(np.ascontiguousarray(matrix))
        if name == "mlp.linear_fc1.weight":
            yield _gated(prefix + name, data, before, own, tensor, apart=not stacked)
            continue
        yield st.ShardedTensor.from_rank_offsets(
            prefix + name, data, *before, (axis, own, tensor), prepend_axis_num=axes
        )
        extra = prefix + name.replace("weight", "_extra_state")
        place = ((LAYERS,), (layer,)) if stacked else ((1,), (0,))
        yield st.ShardedObject(extra, {"scale": 1.0}, *place, replica_id=(0, own, 0))


def _gated(
    key: str, data: torch.Tensor, before: list[tuple[int, int, int]], own: int, tensor: int, *, apart: bool
) -> st.ShardedTensorFactory:
    """Return Megatron-Core's factory for SwiGLU: gate and up in the two halves of one tensor, or under two keys."""
    axes = len(before)

    def build(key: str, data: Any, replica_id: Any, flattened_range: Any) -> list[st.ShardedTensor]:
        places = [(axes, own, tensor)] * 2 if apart else [(axes, own, 2 * tensor), (axes, tensor + own, 2 * tensor)]
        keys = [f"{key}_w", f"{key}_v"] if apart else [key, key]
        halves = zip(keys, data.chunk(2), places, strict=True)
        return [
            st.ShardedTensor.from_rank_offsets(name, half, *before, place, replica_id=replica_id, prepend_axis_num=axes)
            for name, half, place in halves
        ]

    return st.ShardedTensorFactory(key, data, build, torch.cat)


def logits(weights: Weights, tokens: torch.Tensor) -> torch.Tensor:
    """Return the model's logits for (batch, length) tokens: the forward pass, written out in float32."""
    w = {name: torch.from_numpy(array) for name, array in weights.items()}
    hidden = embedding(tokens, w["embed"])
    for layer in range(LAYERS):
        hidden = hidden + _attention(rms_norm(hidden, (HIDDEN,), w[f"{layer}.norm1"], EPSILON), w, layer)
        normed = rms_norm(hidden, (HIDDEN,), w[f"{layer}.norm2"], EPSILON)
        gated = silu(normed @ w[f"{layer}.gate"].T) * (normed @ w[f"{layer}.up"].T)
        hidden = hidden + gated @ w[f"{layer}.down"].T
    return rms_norm(hidden, (HIDDEN,), w["norm"], EPSILON) @ w["head"].T


def _attention(hidden: torch.Tensor, w: dict[str, torch.Tensor], layer: int) -> torch.Tensor:
    def heads(name: str) -> torch.Tensor:
        return (hidden @ w[f"{layer}.{name}"].T).unflatten(-1, (-1, HEAD)).transpose(1, 2)

    shared = [part.repeat_interleave(HEADS // GROUPS, dim=1) for part in (_rotated(heads("k")), heads("v"))]
    found = scaled_dot_product_attention(_rotated(heads("q")), *shared, is_causal=True)
    return found.transpose(1, 2).flatten(-2) @ w[f"{layer}.o"].T


def _rotated(heads: torch.Tensor) -> torch.Tensor:
    """Return heads turned by their positions, the first half of each with the second."""
    angles = torch.arange(heads.shape[-2])[:, None] / 10_000 ** (torch.arange(0, HEAD, 2) / HEAD)
    first, second = heads.chunk(2, dim=-1)
    return torch.cat(
        [first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], dim=-1
    )
