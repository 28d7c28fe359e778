"""One tensor cut into several with names of their own, and several joined to one: QKV, gate and up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch

from ..errors import ShapeError, TreeError, error_text
from ..mapping import ShardedTensor
from ..trees import check_stars, fill_key, join_data, match_key
from ._flat import Flat, check_plain, check_same, flat_tensors, replace_entries

_ALIKE = ("dtype", "replica_id", "allow_shape_mismatch", "prepend_axis_num")


def split_tensor(
    tree: Flat, key: str, names: Sequence[str], *, sizes: Sequence[int] | None = None, axis: int = 0
) -> dict[str, Any]:
    """Return the tree with a tensor cut along an axis into several, as views; undone by `merge_tensors`.

    Args:
        tree: shards by key.
        key: of the tensor; each ``*`` in it stands for one part between dots, so that all layers are cut at once.
        names: the new keys, in order, with as many ``*``.
        sizes: how long each new tensor is along the axis; equal by default.
        axis: of the tensor; other axes may be sharded.

    Raises:
        TreeError: no key is like that, or patterns have different numbers of stars.
        ShapeError: the sizes don't add up, or the shard isn't whole along the axis.

    Examples:
        >>> from shardtree.mapping import ShardedTensor
        >>> qkv = ShardedTensor.from_rank_offsets("h.0.qkv", torch.arange(8))
        >>> parts = split_tensor({"h.0.qkv": qkv}, "h.*.qkv", ["h.*.q", "h.*.k", "h.*.v"], sizes=[4, 2, 2])
        >>> {name: shard.data.tolist() for name, shard in parts.items()}
        {'h.0.q': [0, 1, 2, 3], 'h.0.k': [4, 5], 'h.0.v': [6, 7]}
    """
    names = _checked_names("split_tensor", key, names)
    new: dict[str, list[ShardedTensor]] = {}
    for entry, shard in flat_tensors("split_tensor", tree).items():
        parts = match_key(key, shard.key)
        if parts is not None:
            new[entry] = _cut(shard, [fill_key(name, parts) for name in names], sizes, axis)
    if not new:
        raise TreeError(error_text("split_tensor: no key is like that", expected=repr(key)))
    return replace_entries("split_tensor", tree, new)


def _cut(shard: ShardedTensor, names: Sequence[str], sizes: Sequence[int] | None, axis: int) -> list[ShardedTensor]:
    at = _whole_axis("split_tensor", shard, axis)
    length = shard.local_shape[at]
    equal = [length // len(names)] * len(names)
    lengths = equal if sizes is None else list(sizes)
    if len(lengths) != len(names) or sum(lengths) != length or any(size < 0 for size in lengths):
        expected = f"{len(names)} sizes that add up to {length}"
        fix = "Pass sizes=[...], one for each name." if sizes is None else None
        what = f"split_tensor: {shard.key!r}, {shard.local_shape}, can't be cut like that along axis {at}"
        raise ShapeError(error_text(what, found=lengths, expected=expected, fix=fix))
    starts = accumulate(lengths, initial=0)
    return [
        _resized(shard, name, at, size, None if shard.data is None else shard.data.narrow(at, start, size))
        for name, start, size in zip(names, starts, lengths, strict=False)
    ]


def merge_tensors(tree: Flat, names: Sequence[str], key: str, *, axis: int = 0) -> dict[str, Any]:
    """Return the tree with several tensors joined along an axis to one; undone by `split_tensor`.

    Tensors in memory are copied; lazy ones aren't read.

    Args:
        tree: shards by key.
        names: the keys of the tensors, in the order in which they are joined; each ``*`` stands for one part between
            dots, so that all layers are joined at once.
        key: the new one, with as many ``*``.
        axis: of the tensors; other axes may be sharded, all alike.

    Raises:
        TreeError: no keys are like that, some are missing, or tensors don't go together.
        ShapeError: a shard isn't whole along the axis.

    Examples:
        >>> from shardtree.mapping import ShardedTensor
        >>> shards = {name: ShardedTensor.from_rank_offsets(name, torch.ones(2)) for name in ("h.0.gate", "h.0.up")}
        >>> merge_tensors(shards, ["h.*.gate", "h.*.up"], "h.*.gate_up")["h.0.gate_up"].global_shape
        (4,)
    """
    names = _checked_names("merge_tensors", key, names)
    groups: dict[tuple[str, ...], dict[str, tuple[str, ShardedTensor]]] = {}
    for entry, shard in flat_tensors("merge_tensors", tree).items():
        for name in names:
            parts = match_key(name, shard.key)
            if parts is not None:
                _put(groups.setdefault(parts, {}), name, entry, shard)
    if not groups:
        raise TreeError(error_text("merge_tensors: no keys are like that", expected=", ".join(map(repr, names))))
    new: dict[str, list[ShardedTensor]] = {}
    for parts, group in groups.items():
        joined = _joined(fill_key(key, parts), [fill_key(name, parts) for name in names], names, group, axis)
        new |= {entry: [] for entry, _ in group.values()}
        new[next(iter(group.values()))[0]] = [joined]
    return replace_entries("merge_tensors", tree, new)


def _put(group: dict[str, tuple[str, ShardedTensor]], name: str, entry: str, shard: ShardedTensor) -> None:
    if name in group:
        fix = "Join whole tensors: several boxes of one tensor can't be told apart."
        raise TreeError(error_text(f"merge_tensors: {shard.key!r} is there twice", fix=fix))
    group[name] = entry, shard


def _joined(
    key: str, keys: Sequence[str], names: Sequence[str], group: dict[str, tuple[str, ShardedTensor]], axis: int
) -> ShardedTensor:
    missing = [repr(own) for own, name in zip(keys, names, strict=True) if name not in group]
    if missing:
        raise TreeError(error_text(f"merge_tensors: parts of {key!r} are missing", offenders=missing))
    shards = [group[name][1] for name in names]
    at = {_whole_axis("merge_tensors", shard, axis) for shard in shards}.pop()
    check_same("merge_tensors", shards, _ALIKE)
    size = sum(shard.local_shape[at] for shard in shards)
    resized = [_resized(shard, shard.key, at, size, None) for shard in shards]
    check_same("merge_tensors", resized, ("local_shape", "global_shape", "global_offset", "axis_fragmentations"))
    none = any(shard.data is None for shard in shards)
    check_same("merge_tensors", shards, ())
    return _resized(
        shards[0], key, at, size, None if none else join_data(torch.cat, [shard.data for shard in shards], at)
    )


def _whole_axis(doing: str, shard: ShardedTensor, axis: int) -> int:
    """Return the axis counted from the front, along which the shard is the whole tensor."""
    check_plain(doing, shard)
    axes = len(shard.local_shape)
    if not -axes <= axis < axes:
        raise ShapeError(error_text(f"{doing}: {shard.key!r} has no such axis", found=axis, expected=f"below {axes}"))
    at = axis % axes
    if shard.local_shape[at] != shard.global_shape[at]:
        found, expected = f"{shard.local_shape[at]} of {shard.global_shape[at]}", "all of it"
        fix = "Do it to whole tensors, or describe it with a ShardedTensorFactory."
        raise ShapeError(
            error_text(f"{doing}: {shard.key!r} is cut along axis {at}", found=found, expected=expected, fix=fix)
        )
    return at


def _resized(shard: ShardedTensor, key: str, axis: int, size: int, data: Any) -> ShardedTensor:
    def sized(shape: tuple[int, ...]) -> tuple[int, ...]:
        return (*shape[:axis], size, *shape[axis + 1 :])

    local_shape, global_shape = sized(shard.local_shape), sized(shard.global_shape)
    return replace(shard, key=key, data=data, local_shape=local_shape, global_shape=global_shape)


def _checked_names(doing: str, key: str, names: Sequence[str]) -> list[str]:
    listed = [names] if isinstance(names, str) else list(names)
    if isinstance(names, str) or not listed or len(set(listed)) < len(listed):
        found = repr(names)[:200]
        raise TreeError(error_text(f"{doing}: not names of parts", found=found, expected="a list of different keys"))
    check_stars(doing, key, listed)
    return listed
