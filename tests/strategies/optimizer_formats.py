"""What the tests of formats with optimizer states share: real folders, what is in them, and loads in other layouts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

import shardtree as st
from shardtree.strategies import LoadOptions

FIXTURES = Path(__file__).parents[1] / "fixtures"
Tensors = Mapping[str, torch.Tensor]
PREFIXES = {"model": "", "module": "", "fp32": "optimizer.state.param."}


def truth(name: str) -> tuple[dict[str, torch.Tensor], list[list[str]]]:
    """Return the tensors that the program itself had, by the key that they have here, and the optimizer's order."""
    with safe_open(FIXTURES / name / "truth.safetensors", "pt") as file:
        tensors = {_key(key): file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        return tensors, json.loads((file.metadata() or {}).get("optimizer_order", "[]"))


def _key(key: str) -> str:
    kind, _, name = key.partition("/")
    return PREFIXES.get(kind, f"optimizer.state.{kind}.") + name


def boxes(shape: torch.Size, axis: int, parts: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield offset and shape of uneven parts along an axis."""
    edges = [0, *(shape[axis] * (2 * number + 1) // (2 * parts) for number in range(parts - 1)), shape[axis]]
    for begin, end in pairwise(edges):
        lengths = [*shape]
        offset = [0] * len(shape)
        offset[axis], lengths[axis] = begin, end - begin
        yield tuple(offset), tuple(lengths)


def cut(key: str, like: torch.Tensor, layout: str) -> list[st.ShardedTensor]:
    """Return the shards of all ranks of a layout: uneven rows or columns, or flat ranges."""
    shape = like.shape
    if not shape or layout == "whole":
        return [st.ShardedTensor(key, None, like.dtype, tuple(shape), tuple(shape), (0,) * len(shape), None)]
    if layout == "flat":
        edges = [like.numel() * part // 3 for part in range(4)]
        return [
            st.ShardedTensor(
                key, None, like.dtype, tuple(shape), tuple(shape), (0,) * len(shape), None, flattened_range=slice(*edge)
            )
            for edge in pairwise(edges)
        ]
    axis, parts = (0, 3) if layout == "rows" else (-1, 2)
    found = boxes(shape, axis, parts)
    return [st.ShardedTensor(key, None, like.dtype, box, tuple(shape), offset, None) for offset, box in found]


LAYOUTS = ("rows", "columns", "flat")


def wrong_in_layout(folder: Any, expected: Tensors, layout: str, options: LoadOptions | None = None) -> list[str]:
    """Return the keys whose shards aren't what they should be, of a load in a layout."""
    target = {key: cut(key, tensor, layout) for key, tensor in expected.items()}
    loaded = st.load({"shards": target}, folder, options=options, validate_access_integrity=False)["shards"]
    wrong = []
    for key, tensor in expected.items():
        for shard, data in zip(target[key], loaded[key], strict=True):
            part = (
                tensor[shard.global_slice()]
                if shard.flattened_range is None
                else tensor.flatten()[shard.flattened_range]
            )
            if data.dtype != tensor.dtype or not torch.equal(data, part):
                wrong.append(key)
    return wrong


def parameters(expected: Tensors, groups: list[list[str]]) -> list[dict[str, torch.nn.Parameter]]:
    """Return fresh parameters by name, a dict for each of the optimizer's groups."""
    return [{name: torch.nn.Parameter(torch.zeros(expected[name].shape)) for name in group} for group in groups]


def resumed(folder: Any, groups: list[dict[str, torch.nn.Parameter]], options: LoadOptions) -> torch.optim.AdamW:
    """Return a fresh AdamW with the states of a checkpoint, asked for by the checkpoint's metadata alone."""
    optimizer = torch.optim.AdamW([{"params": list(group.values())} for group in groups])
    shards = {
        name: st.ShardedTensor.from_rank_offsets(name, param) for group in groups for name, param in group.items()
    }
    ids = st.optim.get_param_id_to_sharded_param_map(shards, optimizer)
    metadata = st.load_sharded_metadata(folder, options=options)
    target = st.optim.abstract_optim_state_from_metadata(optimizer.state_dict(), ids, metadata, exclude_keys=["param"])
    loaded = st.load({"optimizer": target}, folder, options=options)
    optimizer.load_state_dict(st.optim.sharding_state_to_optim_state(loaded["optimizer"]))
    return optimizer


def wrong_states(
    optimizer: torch.optim.Optimizer, groups: list[dict[str, torch.nn.Parameter]], expected: Tensors
) -> list[str]:
    """Return the states of an optimizer that aren't those of a checkpoint."""
    states = ("exp_avg", "exp_avg_sq", "step")
    named = {name: param for group in groups for name, param in group.items()}
    return [
        f"{state} of {name}"
        for name, param in named.items()
        for state in states
        if not torch.equal(optimizer.state[param][state], expected[f"optimizer.state.{state}.{name}"])
    ]
