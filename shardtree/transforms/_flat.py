"""Flat trees, as an open checkpoint is: their tensors, and entries replaced by others under their own keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import TreeError, error_text
from ..mapping import ShardedTensor

Flat = Mapping[str, Any]
"""A dict of shards; what else is in it stays as it is. The shards' own keys count, not those of the dict."""


def flat_tensors(doing: str, tree: Flat) -> dict[str, ShardedTensor]:
    """Return the tensor shards of a flat tree by their entries.

    Raises:
        TreeError: it isn't a dict.

    Examples:
        >>> import torch
        >>> shard = ShardedTensor.from_rank_offsets("w", torch.ones(2))
        >>> list(flat_tensors("split", {"w": shard, "step": 3}))
        ['w']
    """
    if not isinstance(tree, Mapping):
        fix = "Pass {shard.key: shard, ...}, as `open_checkpoint` gives it."
        raise TreeError(error_text(f"{doing}: not a flat tree", found=type(tree).__name__, expected="a dict", fix=fix))
    return {entry: leaf for entry, leaf in tree.items() if isinstance(leaf, ShardedTensor)}


def replace_entries(doing: str, tree: Flat, new: Mapping[str, Sequence[ShardedTensor]]) -> dict[str, Any]:
    """Return a new dict in which shards, by their keys, stand in the place of entries.

    Args:
        doing: for the error.
        tree: what stays is shared.
        new: entry -> the shards that take its place, possibly none.

    Raises:
        TreeError: two entries would have one name.

    Examples:
        >>> import torch
        >>> shards = [ShardedTensor.from_rank_offsets(key, torch.ones(2)) for key in ("q", "k")]
        >>> list(replace_entries("split", {"qk": None, "step": 3}, {"qk": shards}))
        ['q', 'k', 'step']
    """
    pairs: list[tuple[str, Any]] = []
    for entry, leaf in tree.items():
        pairs += [(shard.key, shard) for shard in new[entry]] if entry in new else [(entry, leaf)]
    result = dict(pairs)
    if len(result) < len(pairs):
        names = [name for name, _ in pairs]
        twice = [repr(name) for name in dict.fromkeys(names) if names.count(name) > 1]
        fix = "Rename one of them first, or leave it out."
        raise TreeError(error_text(f"{doing}: there would be two entries of one name", offenders=twice, fix=fix))
    return result


def check_plain(doing: str, shard: ShardedTensor) -> None:
    """Raise unless a shard is a box with all its axes.

    Raises:
        TreeError: it is flat, or has prepended axes.

    Examples:
        >>> import torch
        >>> check_plain("split", ShardedTensor.from_rank_offsets("w", torch.ones(2)))
    """
    if shard.flattened_range is not None or shard.prepend_axis_num:
        found = "a flat range of a box" if shard.flattened_range is not None else "a box that lacks prepended axes"
        fix = "Do it to whole tensors, as `open_checkpoint` gives them, or to boxes."
        raise TreeError(error_text(f"{doing}: {shard.key!r}", found=found, expected="a box with all its axes", fix=fix))


def check_same(doing: str, shards: Sequence[ShardedTensor], fields: Sequence[str]) -> None:
    """Raise unless shards agree in these fields, and either all or none have data.

    Raises:
        TreeError: names each shard that differs from the first.

    Examples:
        >>> import torch
        >>> check_same("stack", [ShardedTensor.from_rank_offsets(key, torch.ones(2)) for key in "ab"], ["dtype"])
    """
    first = shards[0]
    wrong = [
        f"{shard.key!r}: {name} is {getattr(shard, name)}, not {getattr(first, name)} as of {first.key!r}"
        for shard in shards
        for name in fields
        if getattr(shard, name) != getattr(first, name)
    ]
    wrong += [
        f"{shard.key!r}: {_has(shard)}, but {first.key!r}: {_has(first)}"
        for shard in shards
        if (shard.data is None) != (first.data is None)
    ]
    if wrong:
        raise TreeError(error_text(f"{doing}: tensors that don't go together", offenders=wrong))


def _has(shard: ShardedTensor) -> str:
    return "no data" if shard.data is None else "data"
