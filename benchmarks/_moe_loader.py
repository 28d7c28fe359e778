"""An engine's loader as engines write it: a `weight_loader` on each parameter, shard ids, experts in one tensor.

In the manner of vLLM's Qwen3-MoE: query, key and value in one parameter, gate and up of all experts in one, and each
stored tensor is narrowed to the rank's part by the function that its parameter has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

import shardtree as st

RANK, RANKS = 1, 2
HIDDEN, INTERMEDIATE, QUERIES, KEYS = 64, 32, 64, 16
STACKED = {"q_proj": "q", "k_proj": "k", "v_proj": "v"}
EXPERTS = {"gate_proj": ("w13_weight", "w1"), "up_proj": ("w13_weight", "w3"), "down_proj": ("w2_weight", "w2")}

Shapes = dict[str, tuple[int, ...]]


def stored_shapes(layers: int, experts: int) -> Shapes:
    """Return the shapes of the stored tensors, by name."""
    shapes: Shapes = {}
    for layer in range(layers):
        place = f"model.layers.{layer}."
        shapes |= {
            f"{place}self_attn.q_proj.weight": (QUERIES, HIDDEN),
            f"{place}self_attn.k_proj.weight": (KEYS, HIDDEN),
            f"{place}self_attn.v_proj.weight": (KEYS, HIDDEN),
            f"{place}self_attn.o_proj.weight": (HIDDEN, QUERIES),
            f"{place}input_layernorm.weight": (HIDDEN,),
            f"{place}mlp.gate.weight": (experts, HIDDEN),
        }
        for expert in range(experts):
            own = f"{place}mlp.experts.{expert}."
            shapes |= {f"{own}{kind}.weight": (INTERMEDIATE, HIDDEN) for kind in ("gate_proj", "up_proj")}
            shapes[f"{own}down_proj.weight"] = (HIDDEN, INTERMEDIATE)
    return shapes


def engine_parameters(layers: int, experts: int, device: str) -> dict[str, torch.nn.Parameter]:
    """Return the parameters of one rank, each with its `weight_loader`."""
    parameters: dict[str, torch.nn.Parameter] = {}

    def add(name: str, loader: Callable[..., None], *shape: int) -> None:
        data = torch.empty(shape, dtype=torch.bfloat16, device=device)
        parameters[name] = torch.nn.Parameter(data, requires_grad=False)
        parameters[name].weight_loader = loader  # type: ignore[attr-defined]

    for layer in range(layers):
        place = f"model.layers.{layer}."
        add(f"{place}self_attn.qkv_proj.weight", _load_qkv, (QUERIES + 2 * KEYS) // RANKS, HIDDEN)
        add(f"{place}self_attn.o_proj.weight", _load_columns, HIDDEN, QUERIES // RANKS)
        add(f"{place}input_layernorm.weight", _load_whole, HIDDEN)
        add(f"{place}mlp.gate.weight", _load_whole, experts, HIDDEN)
        add(f"{place}mlp.experts.w13_weight", _load_expert, experts, 2 * INTERMEDIATE // RANKS, HIDDEN)
        add(f"{place}mlp.experts.w2_weight", _load_expert, experts, HIDDEN, INTERMEDIATE // RANKS)
    return parameters


def _load_qkv(parameter: torch.nn.Parameter, weight: torch.Tensor, shard_id: str) -> None:
    size = (QUERIES if shard_id == "q" else KEYS) // RANKS
    offset = {"q": 0, "k": QUERIES, "v": QUERIES + KEYS}[shard_id] // RANKS
    into, weight = parameter.data.narrow(0, offset, size), weight.narrow(0, RANK * size, size)
    assert into.shape == weight.shape
    into.copy_(weight)


def _load_columns(parameter: torch.nn.Parameter, weight: torch.Tensor) -> None:
    size = parameter.data.shape[1]
    weight = weight.narrow(1, RANK * size, size)
    weight = weight if weight.ndim else weight.reshape(1)
    assert parameter.data.shape == weight.shape
    parameter.data.copy_(weight)


def _load_whole(parameter: torch.nn.Parameter, weight: torch.Tensor) -> None:
    assert parameter.size() == weight.size()
    parameter.data.copy_(weight)


def _load_expert(parameter: torch.nn.Parameter, weight: torch.Tensor, shard_id: str, expert: int) -> None:
    dim, into = int(shard_id == "w2"), parameter.data[expert]
    size = into.shape[dim] // (1 if shard_id == "w2" else 2)
    weight = weight.narrow(dim, size * RANK, size)
    if shard_id != "w2":
        into = into.narrow(0, size * (shard_id == "w3"), size)
    into.copy_(weight)


def load_weights(parameters: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
    """Load all stored tensors, each by the function that its parameter has."""
    for name, weight in tensors.items():
        place, _, kind = name.removesuffix(".weight").rpartition(".")
        if ".experts." in name:
            place, _, number = place.rpartition(".")
            to, shard_id = EXPERTS[kind]
            parameter = parameters[f"{place}.{to}"]
            parameter.weight_loader(parameter, weight, shard_id, int(number))
        elif kind in STACKED:
            parameter = parameters[f"{place}.qkv_proj.weight"]
            parameter.weight_loader(parameter, weight, STACKED[kind])
        else:
            parameters[name].weight_loader(parameters[name], weight)


def traced_loader(layers: int, experts: int) -> tuple[st.Trace, int]:
    """Return the trace of the loader, and the number of stored tensors."""
    shapes, parameters = stored_shapes(layers, experts), engine_parameters(layers, experts, "meta")
    sources = {name: torch.empty(shape, dtype=torch.bfloat16, device="meta") for name, shape in shapes.items()}
    return st.trace(partial(load_weights, parameters), sources, into=lambda: parameters), len(shapes)
