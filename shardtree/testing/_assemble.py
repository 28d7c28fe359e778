"""All ranks' shards put together again, element by element: slow, simple, and independent of what it checks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch

from ..mapping import ShardedTensor
from ..trees import leaves_with_paths, map_shards
from ._bits import carried, first_difference


def assemble(trees: Iterable[Any]) -> dict[str, torch.Tensor]:
    """Return the global tensors, by key, that all ranks' shards make up.

    Raises:
        AssertionError: an element is held by none, or copies of one differ in a bit.

    Examples:
        >>> shards = [ShardedTensor.from_rank_offsets("w", torch.full((2,), rank), (0, rank, 2)) for rank in (0, 1)]
        >>> assemble([{"w": shard} for shard in shards])
        {'w': tensor([0, 0, 1, 1])}
    """
    shards: dict[str, list[ShardedTensor]] = {}
    for tree in trees:
        for _, leaf in leaves_with_paths(tree):
            if isinstance(leaf, ShardedTensor):
                shards.setdefault(leaf.key, []).append(leaf)
    return {key: _whole(key, held) for key, held in shards.items()}


def _whole(key: str, shards: list[ShardedTensor]) -> torch.Tensor:
    shape, dtype = shards[0].global_shape, shards[0].dtype
    number = torch.arange(torch.Size(shape).numel()).view(shape)
    whole = carried(torch.empty(number.numel(), dtype=dtype)).zero_()
    held = torch.zeros(number.numel(), dtype=torch.bool)
    for shard in shards:
        at = number[shard.global_slice()].reshape(-1)[shard.flattened_range or slice(None)]
        new, known = carried(shard.data).reshape(-1), held[at]
        differ = first_difference(new[known], whole[at][known])
        assert differ is None, f"copies of {key!r} differ: {differ}"
        whole[at], held[at] = new, True
    missing = int((~held).sum())
    assert not missing, f"{missing} of {held.numel()} elements of {key!r} are on no rank"
    return whole.view(dtype).view(shape)


def refilled(target: Any, loaded: Any) -> Any:
    """Return the target with each shard's data replaced by what was loaded at its path.

    Args:
        target: a tree of shards.
        loaded: what `load` gave for it.

    Examples:
        >>> target = {"w": [ShardedTensor("w", None, torch.int64, (2,), (2,), (0,), None)]}
        >>> refilled(target, {"step": 3, "w": [torch.tensor([4, 5])]})["w"][0].data
        tensor([4, 5])
    """
    found = dict(leaves_with_paths(loaded))
    places = {id(leaf): path for path, leaf in leaves_with_paths(target)}

    def fill(leaf: Any) -> Any:
        return replace(leaf, data=found[places[id(leaf)]]) if isinstance(leaf, ShardedTensor) else leaf

    return map_shards(fill, target)
