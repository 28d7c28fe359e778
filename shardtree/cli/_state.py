"""An encoder's training state as a sharded tree, and whether a loaded one is the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import TreePath, render_path
from ..mapping import ShardedTensor
from ..trees import leaves_with_paths, map_data, prefix
from ._layout import Layout, piece, rule_for

GROUPS = ("weights", "exp_avg", "exp_avg_sq")
_PREFIXES = {"exp_avg": "optimizer.exp_avg.", "exp_avg_sq": "optimizer.exp_avg_sq."}
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

_COMMON = {"step": 1, "param_groups": [{"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}]}


def training_state(
    weights: Mapping[str, Tensor], layout: Layout, rank: int, count: int, *, head_size: int
) -> dict[str, Any]:
    """Return what one rank holds: its shards of the weights and of Adam's moments, and the common state.

    The moments are what Adam has after one step on the loss ½‖weights‖², whose gradient is the weights themselves.

    Args:
        weights: whole tensors by name; meta tensors for a state without data.
        layout: how they are cut.
        rank: which rank's state.
        count: how many ranks there are.
        head_size: indices that belong to one attention head.
    """
    model = {
        name: piece(name, whole, rule_for(layout, name), rank, count, head_size=head_size)
        for name, whole in weights.items()
    }
    parameters = {name: shard for name, shard in model.items() if shard.dtype.is_floating_point}
    return {
        "model": model,
        "optimizer": {
            "exp_avg": prefix(map_data(lambda weight: weight * 0.1, parameters), _PREFIXES["exp_avg"]),
            "exp_avg_sq": prefix(map_data(lambda weight: weight * weight * 0.001, parameters), _PREFIXES["exp_avg_sq"]),
            "param_groups": _COMMON["param_groups"],
        },
        "step": _COMMON["step"],
    }


def meta(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors of the same shapes that hold no memory."""
    return {name: whole.to("meta") for name, whole in weights.items()}


def shards_of(state: Any) -> list[ShardedTensor]:
    """Return a state's shards, in the tree's order."""
    return [leaf for _, leaf in leaves_with_paths(state) if isinstance(leaf, ShardedTensor)]


def held_bytes(state: Any) -> int:
    """Return how many bytes the tensors of a state have."""
    return sum(shard.data.numel() * shard.dtype.itemsize for shard in shards_of(state))


def held_elements(state: Any) -> dict[str, int]:
    """Return how many elements the tensors of each group have."""
    counts = dict.fromkeys(GROUPS, 0)
    for shard in shards_of(state):
        counts[group_of(shard.key)] += shard.data.numel()
    return counts


def group_of(key: str) -> str:
    """Return what a shard belongs to.

    Examples:
        >>> group_of("pooler.dense.bias"), group_of("optimizer.exp_avg.pooler.dense.bias")
        ('weights', 'exp_avg')
    """
    return next((group for group, start in _PREFIXES.items() if key.startswith(start)), "weights")


@dataclass(frozen=True, slots=True)
class Comparison:
    """How a rank's loaded state compares with what it should be.

    Attributes:
        same: per group, elements that are the same bit for bit, on this rank.
        own: per group, those of them that no other rank counts: of its main replicas.
        different: keys of tensors with other elements.
        different_common: places of common values that are others, or on one side only.
    """

    same: Mapping[str, int]
    own: Mapping[str, int]
    different: tuple[str, ...]
    different_common: tuple[str, ...]


def compare(loaded: Any, expected: Any) -> Comparison:
    """Return how a loaded tree compares with the sharded tree that it should be equal to.

    Args:
        loaded: what `load` returned: tensors where the expected tree has shards.
        expected: the rank's true state.
    """
    same, own = dict.fromkeys(GROUPS, 0), dict.fromkeys(GROUPS, 0)
    different, different_common = list[str](), list[TreePath]()
    found = dict(leaves_with_paths(loaded))
    for path, leaf in leaves_with_paths(expected):
        value = found.pop(path, None)
        if isinstance(leaf, ShardedTensor):
            count = equal_elements(value, leaf.data)
            same[group_of(leaf.key)] += count
            own[group_of(leaf.key)] += count if leaf.replica_id == 0 else 0
            different += [leaf.key] if count < leaf.data.numel() else []
        elif value != leaf:
            different_common.append(path)
    return Comparison(same, own, tuple(different), tuple(map(render_path, (*different_common, *found))))


def equal_elements(found: Any, expected: Tensor) -> int:
    """Return how many elements are the same bit for bit; none if dtype or shape differ.

    Examples:
        >>> equal_elements(torch.tensor([1.0, -0.0, torch.nan]), torch.tensor([1.0, 0.0, torch.nan]))
        2
    """
    if not isinstance(found, Tensor) or found.dtype != expected.dtype or found.shape != expected.shape:
        return 0
    bits = _BITS[expected.dtype.itemsize]
    return int((found.view(bits) == expected.view(bits)).sum())
