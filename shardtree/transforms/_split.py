"""Splitting one tensor into several named ones, and merging several into one: QKV, gate and up."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch

from ..core.geometry import integer, integers
from ..core.mapping import ShardedTensor
from ..core.trees import fill_key, join_data, match_key
from ..errors import ShapeError, TreeError, error_text
from ._flat import check_same, checked_names, flat_tensors, replace_entries, resized, whole_axis
from ._places import Flat, on_tree
from ._states import StateChange, carry_states

# Groups of equal length along an axis.


def checked_groups(doing: str, groups: int) -> int:
    """Return the number of groups, after checking it.

    Raises:
        MetadataError: The number isn't an int.
        ShapeError: The number is less than 1.

    Examples:
        >>> checked_groups("split_tensor", 4)
        4
    """
    count = integer(doing, "groups", groups)
    if count < 1:
        raise ShapeError(error_text(f"{doing}: too few groups", found=count, expected="1 or more"))
    return count


def group_starts(length: int, groups: int) -> list[int]:
    """Return the starts of equal groups along an axis of the given length.

    Examples:
        >>> group_starts(12, 3), group_starts(0, 2)
        ([0, 4, 8], [0, 0])
    """
    return [number * (length // groups) for number in range(groups)]


# Splitting.


def split_tensor(
    tree: Any,
    key: str,
    names: Sequence[str],
    *,
    sizes: Sequence[int] | None = None,
    axis: int = 0,
    groups: int = 1,
) -> Any:
    """Return the tree with a tensor cut along an axis into several; undone by `merge_tensors`.

    The new tensors are views; with several groups, tensors in memory are copied. Lazy tensors aren't read. Moments of
    an optimizer, found as in `keep_layers`, are cut too; each part gets a copy of values such as the number of steps.

    Args:
        tree: Any tree; a plain tensor's key is its path.
        key: Pattern of the tensor's key; each ``*`` matches one part between dots, so that all layers are cut at once.
        names: Patterns of the new keys, in order, with as many ``*`` as `key`.
        sizes: Length of each new tensor along the axis; equal by default.
        axis: Axis of the tensor; other axes may be sharded.
        groups: Number of equal groups along the axis, each with a part of every new tensor. Megatron-Core's QKV has
            one for each query group: ``[q q k v, q q k v, ...]``.

    Raises:
        TreeError: No key matches, patterns have different numbers of stars, or states can't follow their parameters.
        ShapeError: The sizes don't add up or aren't divisible into groups, or the shard isn't whole along the axis.

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

    def cuts(tree: Flat) -> dict[str, list[ShardedTensor]]:
        return {
            entry: _cut(shard, [fill_key(name, parts) for name in names], sizes, axis, count)
            for entry, shard in flat_tensors(tree).items()
            if (parts := match_key(key, shard.key)) is not None
        }

    def split(flat: Flat) -> dict[str, Any]:
        new = cuts(flat)
        if not new:
            raise TreeError(error_text("split_tensor: no key matches", expected=repr(key)))
        in_states = StateChange(lambda states: replace_entries("split_tensor", states, cuts(states)), others="copy")
        return carry_states("split_tensor", flat, replace_entries("split_tensor", flat, new), new, in_states)

    return on_tree("split_tensor", tree, split)


def _cut(
    shard: ShardedTensor, names: Sequence[str], sizes: Sequence[int] | None, axis: int, groups: int
) -> list[ShardedTensor]:
    at = whole_axis("split_tensor", shard, axis)
    lengths = _lengths(shard, len(names), sizes, at, groups)
    # Sizes are those of the whole new tensors, as a model's config has them; each is divided by the number of groups.
    starts = accumulate((size // groups for size in lengths), initial=0)
    return [
        resized(shard, name, at, size, None if shard.data is None else _gather(shard.data, at, start, size, groups))
        for name, start, size in zip(names, starts, lengths, strict=False)
    ]


def _lengths(shard: ShardedTensor, count: int, sizes: Sequence[int] | None, at: int, groups: int) -> list[int]:
    length = shard.local_shape[at]
    equal = [length // count] * count
    lengths = equal if sizes is None else list(integers(f"split_tensor: {shard.key!r}", "sizes", sizes))
    in_groups = all(size % groups == 0 for size in (length, *lengths))
    if len(lengths) != count or sum(lengths) != length or any(size < 0 for size in lengths) or not in_groups:
        expected = f"{count} sizes that add up to {length}" + (f", all divisible by {groups}" if groups > 1 else "")
        fix = "Pass sizes=[...], one for each name." if sizes is None else None
        heading = f"split_tensor: {shard.key!r}, {shard.local_shape}, cannot be split into these sizes along axis {at}"
        raise ShapeError(error_text(heading, found=lengths, expected=expected, fix=fix))
    return lengths


def _gather(data: Any, at: int, start: int, size: int, groups: int) -> Any:
    """Return the data of one new tensor: its intervals from all groups along axis `at`, joined.

    Args:
        data: Tensor to split.
        at: Axis.
        start: Start of the new tensor's interval in every group.
        size: Length of the new tensor along the axis.
        groups: Number of equal groups along the axis.
    """
    # Intervals are concatenated instead of reshaped: lazy tensors record concatenation, and read each element once.
    pieces = [data.narrow(at, first + start, size // groups) for first in group_starts(data.shape[at], groups)]
    return pieces[0] if groups == 1 else join_data(torch.cat, pieces, at)


# Merging.

_ALIKE = ("dtype", "replica_id", "allow_shape_mismatch", "prepend_axis_num")


def merge_tensors(tree: Any, names: Sequence[str], key: str, *, axis: int = 0, groups: int = 1) -> Any:
    """Return the tree with several tensors joined along an axis into one; undone by `split_tensor`.

    Tensors in memory are copied; lazy ones aren't read. Moments of an optimizer, found as in `keep_layers`, are joined
    too; a state with a single value for each tensor, such as a number of steps, can't be joined and raises a TreeError.

    Args:
        tree: Any tree; a plain tensor's key is its path.
        names: Patterns of the tensors' keys, in the order in which they are joined; each ``*`` matches one part between
            dots, so that all layers are joined at once.
        key: Pattern of the new key, with as many ``*`` as each of `names`.
        axis: Axis of the tensors; other axes may be sharded, all alike.
        groups: Number of equal groups of each tensor along the axis; the first groups of all tensors come first, then
            the second ones, as in Megatron-Core's QKV.

    Raises:
        TreeError: No keys match, some are missing, tensors can't be combined, or states can't follow their parameters.
        ShapeError: A shard isn't whole along the axis, or isn't divisible into groups.

    Examples:
        >>> from shardtree.mapping import ShardedTensor
        >>> def shards(**data):
        ...     return {name: ShardedTensor.from_rank_offsets(name, torch.tensor(some)) for name, some in data.items()}
        >>> merge_tensors(shards(gate=[0, 1], up=[2, 3]), ["gate", "up"], "gate_up")["gate_up"].data
        tensor([0, 1, 2, 3])
        >>> merge_tensors(shards(q=[0, 1, 2, 3], k=[4, 5], v=[6, 7]), ["q", "k", "v"], "qkv", groups=2)["qkv"].data
        tensor([0, 1, 4, 6, 2, 3, 5, 7])
    """
    names = checked_names("merge_tensors", key, names)
    count = checked_groups("merge_tensors", groups)

    def joined(tree: Flat) -> dict[str, list[ShardedTensor]]:
        new: dict[str, list[ShardedTensor]] = {}
        for parts, tensors in _members(tree, names).items():
            members = _complete(fill_key(key, parts), {name: fill_key(name, parts) for name in names}, tensors)
            new |= {entry: [] for entry, _ in tensors.values()}
            new[next(iter(tensors.values()))[0]] = [_merge(fill_key(key, parts), members, axis, count)]
        return new

    def merged(flat: Flat) -> dict[str, Any]:
        new = joined(flat)
        if not new:
            raise TreeError(error_text("merge_tensors: no keys match", expected=", ".join(map(repr, names))))
        change = StateChange(lambda states: replace_entries("merge_tensors", states, joined(states)), others="refuse")
        return carry_states("merge_tensors", flat, replace_entries("merge_tensors", flat, new), new, change)

    return on_tree("merge_tensors", tree, merged)


def _members(tree: Flat, names: Sequence[str]) -> dict[tuple[str, ...], dict[str, tuple[str, ShardedTensor]]]:
    """Return the tensors to join, by the texts that the stars in the patterns `names` match.

    Tensors with the same texts are a group, which is joined into one tensor. A group is a dict by pattern. Its values
    are pairs (entry, tensor); the entry is the tensor's key in `tree`.
    """
    matches: dict[tuple[str, ...], dict[str, tuple[str, ShardedTensor]]] = {}
    for entry, shard in flat_tensors(tree).items():
        for name in names:
            parts = match_key(name, shard.key)
            if parts is not None:
                _add(matches.setdefault(parts, {}), name, entry, shard)
    return matches


def _add(own: dict[str, tuple[str, ShardedTensor]], name: str, entry: str, shard: ShardedTensor) -> None:
    if name in own:
        fix = "Pass a tree with one shard of each tensor, such as the whole tensors of `open_checkpoint`."
        raise TreeError(error_text(f"merge_tensors: two shards have the key {shard.key!r}", fix=fix))
    own[name] = entry, shard


def _complete(key: str, keys: dict[str, str], own: dict[str, tuple[str, ShardedTensor]]) -> list[ShardedTensor]:
    missing = [repr(part) for name, part in keys.items() if name not in own]
    if missing:
        raise TreeError(error_text(f"merge_tensors: parts of {key!r} are missing", offenders=missing))
    return [own[name][1] for name in keys]


def _merge(key: str, shards: Sequence[ShardedTensor], axis: int, groups: int) -> ShardedTensor:
    at = {whole_axis("merge_tensors", shard, axis) for shard in shards}.pop()
    check_same("merge_tensors", shards, _ALIKE)
    size = sum(shard.local_shape[at] for shard in shards)
    alike = [resized(shard, shard.key, at, size, None) for shard in shards]
    check_same("merge_tensors", alike, ("local_shape", "global_shape", "global_offset", "axis_fragmentations"))
    uneven = [f"{shard.key!r}: {shard.local_shape[at]}" for shard in shards if shard.local_shape[at] % groups]
    if uneven:
        expected = f"a multiple of {groups}, the number of groups"
        raise ShapeError(
            error_text(
                f"merge_tensors: lengths along axis {at} do not divide into groups", expected=expected, offenders=uneven
            )
        )
    pieces = None if shards[0].data is None else _pieces([shard.data for shard in shards], at, groups)
    return resized(shards[0], key, at, size, None if pieces is None else join_data(torch.cat, pieces, at))


def _pieces(datas: Sequence[Any], at: int, groups: int) -> list[Any]:
    """Return the slices to concatenate, in order: the first group of every tensor, then the second group, and so on."""
    if groups == 1:
        return list(datas)
    lengths = [data.shape[at] // groups for data in datas]
    starts = [group_starts(data.shape[at], groups) for data in datas]
    return [
        data.narrow(at, start[number], length)
        for number in range(groups)
        for data, start, length in zip(datas, starts, lengths, strict=True)
    ]
