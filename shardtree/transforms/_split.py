"""One tensor cut into several with names of their own, such as QKV and the gate above the up projection."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch

from ..errors import ShapeError, TreeError, error_text
from ..geometry import integers
from ..mapping import ShardedTensor
from ..trees import fill_key, join_data, match_key
from ._axis import checked_names, resized, whole_axis
from ._flat import Flat, flat_tensors, replace_entries
from ._groups import checked_groups, group_starts


def split_tensor(
    tree: Flat,
    key: str,
    names: Sequence[str],
    *,
    sizes: Sequence[int] | None = None,
    axis: int = 0,
    groups: int = 1,
) -> dict[str, Any]:
    """Return the tree with a tensor cut along an axis into several; undone by `merge_tensors`.

    The new tensors are views. With several groups, tensors in memory are copied; lazy ones aren't read.

    Args:
        tree: shards by key.
        key: of the tensor; each ``*`` in it stands for one part between dots, so that all layers are cut at once.
        names: the new keys, in order, with as many ``*``.
        sizes: how long each new tensor is along the axis; equal by default.
        axis: of the tensor; other axes may be sharded.
        groups: into how many equal groups the axis falls, each with its part of every new tensor. Megatron-Core's QKV
            has one for each query group: ``[q q k v, q q k v, ...]``.

    Raises:
        TreeError: no key is like that, or patterns have different numbers of stars.
        ShapeError: the sizes don't add up or don't fall into groups, or the shard isn't whole along the axis.

    Examples:
        >>> from shardtree.mapping import ShardedTensor
        >>> qkv = ShardedTensor.from_rank_offsets("h.0.qkv", torch.arange(8))
        >>> def split(**options):
        ...     parts = split_tensor({"h.0.qkv": qkv}, "h.*.qkv", ["h.*.q", "h.*.k", "h.*.v"], **options)
        ...     return {name: shard.data.tolist() for name, shard in parts.items()}
        >>> split(sizes=[4, 2, 2])
        {'h.0.q': [0, 1, 2, 3], 'h.0.k': [4, 5], 'h.0.v': [6, 7]}
        >>> split(sizes=[4, 2, 2], groups=2)
        {'h.0.q': [0, 1, 4, 5], 'h.0.k': [2, 6], 'h.0.v': [3, 7]}
    """
    names = checked_names("split_tensor", key, names)
    count = checked_groups("split_tensor", groups)
    new: dict[str, list[ShardedTensor]] = {}
    for entry, shard in flat_tensors("split_tensor", tree).items():
        parts = match_key(key, shard.key)
        if parts is not None:
            new[entry] = _cut(shard, [fill_key(name, parts) for name in names], sizes, axis, count)
    if not new:
        raise TreeError(error_text("split_tensor: no key is like that", expected=repr(key)))
    return replace_entries("split_tensor", tree, new)


def _cut(
    shard: ShardedTensor, names: Sequence[str], sizes: Sequence[int] | None, axis: int, groups: int
) -> list[ShardedTensor]:
    at = whole_axis("split_tensor", shard, axis)
    lengths = _lengths(shard, len(names), sizes, at, groups)
    starts = accumulate((size // groups for size in lengths), initial=0)
    return [
        resized(shard, name, at, size, None if shard.data is None else _taken(shard.data, at, start, size, groups))
        for name, start, size in zip(names, starts, lengths, strict=False)
    ]


def _lengths(shard: ShardedTensor, count: int, sizes: Sequence[int] | None, at: int, groups: int) -> list[int]:
    length = shard.local_shape[at]
    equal = [length // count] * count
    lengths = equal if sizes is None else list(integers(f"split_tensor: {shard.key!r}", "sizes", sizes))
    in_groups = all(size % groups == 0 for size in (length, *lengths))
    if len(lengths) != count or sum(lengths) != length or any(size < 0 for size in lengths) or not in_groups:
        expected = f"{count} sizes that add up to {length}" + (f", each of {groups} equal groups" if groups > 1 else "")
        fix = "Pass sizes=[...], one for each name." if sizes is None else None
        what = f"split_tensor: {shard.key!r}, {shard.local_shape}, can't be cut like that along axis {at}"
        raise ShapeError(error_text(what, found=lengths, expected=expected, fix=fix))
    return lengths


def _taken(data: Any, at: int, start: int, size: int, groups: int) -> Any:
    """Return what one new tensor holds: of each group, the elements from a start on."""
    pieces = [data.narrow(at, first + start, size // groups) for first in group_starts(data.shape[at], groups)]
    return pieces[0] if groups == 1 else join_data(torch.cat, pieces, at)
