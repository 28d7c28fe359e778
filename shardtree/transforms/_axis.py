"""What the functions on one axis of tensors share: that they have all of it, and shards of another length along it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..errors import ShapeError, TreeError, error_text
from ..geometry import integer
from ..mapping import ShardedTensor
from ..trees import check_stars, match_keys
from ._flat import Flat, check_plain, flat_tensors, replace_entries


def map_tensors(
    doing: str, tree: Flat, keys: Sequence[str], change: Callable[[ShardedTensor], ShardedTensor]
) -> dict[str, Any]:
    """Return the tree with the tensors that patterns name changed, each in the place of its entry.

    Raises:
        TreeError: a pattern names nothing, or two entries would have one name.

    Examples:
        >>> import torch
        >>> shard = ShardedTensor.from_rank_offsets("h.0.w", torch.ones(2))
        >>> list(map_tensors("call", {"h.0.w": shard, "step": 3}, ["h.*.w"], lambda shard: replace(shard, key="w")))
        ['w', 'step']
    """
    listed = checked_keys(doing, keys)
    shards = flat_tensors(doing, tree)
    chosen = match_keys(doing, listed, {shard.key for shard in shards.values()})
    return replace_entries(
        doing, tree, {entry: [change(shard)] for entry, shard in shards.items() if shard.key in chosen}
    )


def checked_keys(doing: str, keys: Sequence[str]) -> list[str]:
    """Return keys or patterns of keys as a list.

    Raises:
        TreeError: there are none, one is there twice, or they are one text.

    Examples:
        >>> checked_keys("split", ["h.*.q", "h.*.k"])
        ['h.*.q', 'h.*.k']
    """
    many = not isinstance(keys, str | Mapping) and hasattr(keys, "__iter__")
    listed = list(keys) if many else []
    if not listed or not all(isinstance(key, str) for key in listed) or len(set(listed)) < len(listed):
        found = repr(keys)[:200]
        raise TreeError(error_text(f"{doing}: not names of parts", found=found, expected="a list of different keys"))
    return listed


def checked_names(doing: str, key: str, names: Sequence[str]) -> list[str]:
    """Return names as a list, each with as many stars as the key.

    Raises:
        TreeError: they aren't different keys, or have other stars.

    Examples:
        >>> checked_names("split", "h.*.qk", ["h.*.q", "h.*.k"])
        ['h.*.q', 'h.*.k']
    """
    listed = checked_keys(doing, names)
    check_stars(doing, key, listed)
    return listed


def whole_axis(doing: str, shard: ShardedTensor, axis: int) -> int:
    """Return an axis counted from the front, along which the shard is the whole tensor.

    Raises:
        TreeError: the shard isn't a box with all its axes.
        ShapeError: there is no such axis, or the shard is cut along it.

    Examples:
        >>> import torch
        >>> whole_axis("split", ShardedTensor.from_rank_offsets("w", torch.ones(4, 2)), -1)
        1
    """
    check_plain(doing, shard)
    axes, number = len(shard.local_shape), integer(f"{doing}: {shard.key!r}", "axis", axis)
    if not -axes <= number < axes:
        raise ShapeError(error_text(f"{doing}: {shard.key!r} has no such axis", found=axis, expected=f"below {axes}"))
    at = number % axes
    if shard.local_shape[at] != shard.global_shape[at]:
        found, expected = f"{shard.local_shape[at]} of {shard.global_shape[at]}", "all of it"
        fix = "Do it to whole tensors, or describe it with a ShardedTensorFactory."
        raise ShapeError(
            error_text(f"{doing}: {shard.key!r} is cut along axis {at}", found=found, expected=expected, fix=fix)
        )
    return at


def resized(shard: ShardedTensor, key: str, axis: int, size: int, data: Any) -> ShardedTensor:
    """Return a shard of another length along an axis of which it has all, with these data.

    Examples:
        >>> import torch
        >>> resized(ShardedTensor.from_rank_offsets("w", torch.ones(4, 2)), "v", 0, 3, None).global_shape
        (3, 2)
    """

    def sized(shape: tuple[int, ...]) -> tuple[int, ...]:
        return (*shape[:axis], size, *shape[axis + 1 :])

    local_shape, global_shape = sized(shard.local_shape), sized(shard.global_shape)
    return replace(shard, key=key, data=data, local_shape=local_shape, global_shape=global_shape)
