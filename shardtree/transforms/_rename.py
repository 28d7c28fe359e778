"""Keys renamed by patterns, so that one line renames a tensor of every layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from ..geometry import check_type
from ..mapping import ShardedBase
from ..trees import check_stars, fill_key, leaves_with_paths, match_keys, rename

SameTree = TypeVar("SameTree")


def partial_rename(tree: SameTree, names: Mapping[str, str]) -> SameTree:
    """Return the tree with other shard keys, by patterns; keys that none fits stay, and so does the tree's structure.

    Args:
        tree: any tree.
        names: old key -> new key. Each ``*`` stands for one part between dots, and is filled in again in order. The
            first pattern that fits a key counts.

    Raises:
        MetadataError: `names` isn't a mapping.
        TreeError: a pattern fits no key, patterns have different numbers of stars, or two keys would become one.

    Examples:
        >>> import torch
        >>> from shardtree.mapping import ShardedTensor
        >>> shard = ShardedTensor.from_rank_offsets("decoder.layers.3.linear_fc2.weight", torch.ones(2))
        >>> partial_rename([shard], {"decoder.layers.*.linear_fc2.weight": "model.layers.*.down_proj.weight"})[0].key
        'model.layers.3.down_proj.weight'
    """
    check_type("partial_rename", "names", names, Mapping, "Pass {old pattern: new pattern}; `rename` takes functions.")
    for old, new in names.items():
        check_stars("partial_rename", old, [new])
    keys = {leaf.key for _, leaf in leaves_with_paths(tree) if isinstance(leaf, ShardedBase)}
    chosen = match_keys("partial_rename", names, keys)
    return rename(tree, {key: fill_key(names[pattern], parts) for key, (pattern, parts) in chosen.items()})
