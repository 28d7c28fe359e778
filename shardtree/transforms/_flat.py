"""Flat trees, dicts whose keys are called entries: their tensors, replacement of entries, and checks of shards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..core.geometry import integer
from ..core.mapping import ShardedTensor
from ..core.trees import check_stars, checked_keys
from ..errors import ShapeError, TreeError, error_text
from ._places import Flat, renamed


def flat_tensors(tree: Flat) -> dict[str, ShardedTensor]:
    """Return the sharded tensors of a flat tree, by entry; other leaves are left out.

    Examples:
        >>> import torch
        >>> shard = ShardedTensor.from_rank_offsets("w", torch.ones(2))
        >>> list(flat_tensors({"w": shard, "step": 3}))
        ['w']
    """
    return {entry: leaf for entry, leaf in tree.items() if isinstance(leaf, ShardedTensor)}


def replace_entries(doing: str, tree: Flat, new: Mapping[str, Sequence[ShardedTensor]]) -> dict[str, Any]:
    """Return a new dict in which shards replace some entries.

    A new shard's entry (its key in the dict) is the old entry, changed to fit the shard's own key as `renamed` says.

    Args:
        doing: Name of the operation in error messages.
        tree: A flat tree; its other entries are shared.
        new: New shards by the entry that they replace; an empty list removes the entry.

    Raises:
        TreeError: Two entries would have one name.

    Examples:
        >>> import torch
        >>> shards = [ShardedTensor.from_rank_offsets(key, torch.ones(2)) for key in ("q", "k")]
        >>> whole = ShardedTensor.from_rank_offsets("qk", torch.ones(4))
        >>> list(replace_entries("split", {"model.qk": whole, "step": 3}, {"model.qk": shards}))
        ['model.q', 'model.k', 'step']
    """
    named = {entry: [(renamed(entry, tree[entry], shard), shard) for shard in new[entry]] for entry in new}
    return replace_named(doing, tree, named)


def replace_named(doing: str, tree: Flat, new: Mapping[str, Sequence[tuple[str, Any]]]) -> dict[str, Any]:
    """Return a new dict in which named leaves replace some entries.

    Args:
        doing: Name of the operation in error messages.
        tree: A flat tree; its other entries are shared.
        new: New leaves, as (entry, leaf), by the entry that they replace; an empty list removes the entry.

    Raises:
        TreeError: Two entries would have one name.

    Examples:
        >>> replace_named("keep", {"a": 1, "b": 2}, {"a": [("c", 3), ("d", 4)]})
        {'c': 3, 'd': 4, 'b': 2}
    """
    pairs: list[tuple[str, Any]] = []
    for entry, leaf in tree.items():
        pairs += new.get(entry, [(entry, leaf)])
    result = dict(pairs)
    if len(result) < len(pairs):
        names = [name for name, _ in pairs]
        twice = [repr(name) for name in dict.fromkeys(names) if names.count(name) > 1]
        fix = "Rename one of them first, or leave it out."
        raise TreeError(error_text(f"{doing}: two entries would have one name", offenders=twice, fix=fix))
    return result


def check_plain(doing: str, shard: ShardedTensor) -> None:
    """Raise an error unless a shard is a plain box, with all axes of its tensor.

    Raises:
        TreeError: The shard is flat or has prepended axes.

    Examples:
        >>> import torch
        >>> check_plain("split", ShardedTensor.from_rank_offsets("w", torch.ones(2)))
    """
    if shard.flattened_range is not None or shard.prepend_axis_num:
        found = f"flattened_range={shard.flattened_range}, prepend_axis_num={shard.prepend_axis_num}"
        expected, fix = "None and 0", "Transform whole tensors, such as those of `open_checkpoint`."
        heading = f"{doing}: the shard {shard.key!r} is flat, or lacks axes that its global tensor has"
        raise TreeError(error_text(heading, found=found, expected=expected, fix=fix))


def check_same(doing: str, shards: Sequence[ShardedTensor], fields: Sequence[str]) -> None:
    """Raise an error unless shards agree in the given fields, and either all or none have data.

    Raises:
        TreeError: Some shards differ from the first; the error names each.

    Examples:
        >>> import torch
        >>> check_same("stack", [ShardedTensor.from_rank_offsets(key, torch.ones(2)) for key in "ab"], ["dtype"])
    """
    first = shards[0]
    wrong = [
        f"{shard.key!r}: {name} is {getattr(shard, name)}, not {getattr(first, name)} as for {first.key!r}"
        for shard in shards
        for name in fields
        if getattr(shard, name) != getattr(first, name)
    ]
    # If only some had data, the combined tensor would have only a part of its data.
    wrong += [
        f"{shard.key!r} has {_has(shard)}, but {first.key!r} has {_has(first)}"
        for shard in shards
        if (shard.data is None) != (first.data is None)
    ]
    if wrong:
        raise TreeError(error_text(f"{doing}: tensors that cannot be combined", offenders=wrong))


def _has(shard: ShardedTensor) -> str:
    return "no data" if shard.data is None else "data"


# Functions along one axis, along which shards must be whole.


def checked_names(doing: str, key: str, names: Sequence[str]) -> list[str]:
    """Return names as a list, after checking that each has as many stars as the key.

    Raises:
        TreeError: There are no names, a name occurs twice, or one has another number of stars than the key.

    Examples:
        >>> checked_names("split", "h.*.qk", ["h.*.q", "h.*.k"])
        ['h.*.q', 'h.*.k']
    """
    keys = checked_keys(doing, names)
    check_stars(doing, key, keys)
    return keys


def whole_axis(doing: str, shard: ShardedTensor, axis: int) -> int:
    """Return an axis counted from the front, after checking that the shard is whole along it.

    Raises:
        TreeError: The shard is flat or has prepended axes.
        ShapeError: There is no such axis, or the shard is cut along it.

    Examples:
        >>> import torch
        >>> whole_axis("split", ShardedTensor.from_rank_offsets("w", torch.ones(4, 2)), -1)
        1
    """
    check_plain(doing, shard)
    axes, number = len(shard.local_shape), integer(f"{doing}: {shard.key!r}", "axis", axis)
    if not -axes <= number < axes:
        expected = f"{-axes} or more, and less than {axes}"
        raise ShapeError(error_text(f"{doing}: {shard.key!r} has no such axis", found=axis, expected=expected))
    at = number % axes
    if shard.local_shape[at] != shard.global_shape[at]:
        found, expected = f"{shard.local_shape[at]} of {shard.global_shape[at]}", f"all {shard.global_shape[at]}"
        fix = "Transform whole tensors, or describe the transform with a ShardedTensorFactory."
        raise ShapeError(
            error_text(f"{doing}: {shard.key!r} is cut along axis {at}", found=found, expected=expected, fix=fix)
        )
    return at


def resized(shard: ShardedTensor, key: str, axis: int, size: int, data: Any) -> ShardedTensor:
    """Return a shard with another key, length along one axis, and data; it must be whole along this axis.

    Examples:
        >>> import torch
        >>> resized(ShardedTensor.from_rank_offsets("w", torch.ones(4, 2)), "v", 0, 3, None).global_shape
        (3, 2)
    """

    def sized(shape: tuple[int, ...]) -> tuple[int, ...]:
        return (*shape[:axis], size, *shape[axis + 1 :])

    # Offset and fragmentation don't change, since the shard is whole along this axis.
    local_shape, global_shape = sized(shard.local_shape), sized(shard.global_shape)
    return replace(shard, key=key, data=data, local_shape=local_shape, global_shape=global_shape)
