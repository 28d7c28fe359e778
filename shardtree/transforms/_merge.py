"""Several tensors joined to one: Q, K and V, or the gate and the up projection."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..errors import ShapeError, TreeError, error_text
from ..mapping import ShardedTensor
from ..trees import fill_key, join_data, match_key
from ._axis import checked_names, resized, whole_axis
from ._flat import Flat, check_same, flat_tensors, replace_entries
from ._groups import checked_groups, group_starts

_ALIKE = ("dtype", "replica_id", "allow_shape_mismatch", "prepend_axis_num")


def merge_tensors(tree: Flat, names: Sequence[str], key: str, *, axis: int = 0, groups: int = 1) -> dict[str, Any]:
    """Return the tree with several tensors joined along an axis to one; undone by `split_tensor`.

    Tensors in memory are copied; lazy ones aren't read.

    Args:
        tree: shards by key.
        names: the keys of the tensors, in the order in which they are joined; each ``*`` stands for one part between
            dots, so that all layers are joined at once.
        key: the new one, with as many ``*``.
        axis: of the tensors; other axes may be sharded, all alike.
        groups: into how many equal groups each tensor falls along the axis; the first ones of all come first, then the
            second ones, as in Megatron-Core's QKV.

    Raises:
        TreeError: no keys are like that, some are missing, or tensors don't go together.
        ShapeError: a shard isn't whole along the axis, or doesn't fall into groups.

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
    found: dict[tuple[str, ...], dict[str, tuple[str, ShardedTensor]]] = {}
    for entry, shard in flat_tensors("merge_tensors", tree).items():
        for name in names:
            parts = match_key(name, shard.key)
            if parts is not None:
                _put(found.setdefault(parts, {}), name, entry, shard)
    if not found:
        raise TreeError(error_text("merge_tensors: no keys are like that", expected=", ".join(map(repr, names))))
    new: dict[str, list[ShardedTensor]] = {}
    for parts, own in found.items():
        named = _complete(fill_key(key, parts), {name: fill_key(name, parts) for name in names}, own)
        new |= {entry: [] for entry, _ in own.values()}
        new[next(iter(own.values()))[0]] = [_joined(fill_key(key, parts), named, axis, count)]
    return replace_entries("merge_tensors", tree, new)


def _put(own: dict[str, tuple[str, ShardedTensor]], name: str, entry: str, shard: ShardedTensor) -> None:
    if name in own:
        fix = "Join whole tensors: several boxes of one tensor can't be told apart."
        raise TreeError(error_text(f"merge_tensors: {shard.key!r} is there twice", fix=fix))
    own[name] = entry, shard


def _complete(key: str, keys: dict[str, str], own: dict[str, tuple[str, ShardedTensor]]) -> list[ShardedTensor]:
    missing = [repr(wanted) for name, wanted in keys.items() if name not in own]
    if missing:
        raise TreeError(error_text(f"merge_tensors: parts of {key!r} are missing", offenders=missing))
    return [own[name][1] for name in keys]


def _joined(key: str, shards: Sequence[ShardedTensor], axis: int, groups: int) -> ShardedTensor:
    at = {whole_axis("merge_tensors", shard, axis) for shard in shards}.pop()
    check_same("merge_tensors", shards, _ALIKE)
    size = sum(shard.local_shape[at] for shard in shards)
    alike = [resized(shard, shard.key, at, size, None) for shard in shards]
    check_same("merge_tensors", alike, ("local_shape", "global_shape", "global_offset", "axis_fragmentations"))
    uneven = [f"{shard.key!r}: {shard.local_shape[at]}" for shard in shards if shard.local_shape[at] % groups]
    if uneven:
        expected = f"a multiple of {groups}, the number of groups"
        raise ShapeError(error_text(f"merge_tensors: lengths along axis {at}", expected=expected, offenders=uneven))
    pieces = None if shards[0].data is None else _pieces([shard.data for shard in shards], at, groups)
    return resized(shards[0], key, at, size, None if pieces is None else join_data(torch.cat, pieces, at))


def _pieces(datas: Sequence[Any], at: int, groups: int) -> list[Any]:
    """Return what is joined, in order: of each group, every tensor's part."""
    if groups == 1:
        return list(datas)
    lengths = [data.shape[at] // groups for data in datas]
    starts = [group_starts(data.shape[at], groups) for data in datas]
    return [
        data.narrow(at, start[number], length)
        for number in range(groups)
        for data, start, length in zip(datas, starts, lengths, strict=True)
    ]
