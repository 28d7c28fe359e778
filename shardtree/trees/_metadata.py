"""A tree's metadata by shard key: what a checkpoint of it will hold."""

from __future__ import annotations

from typing import Any

from ..errors import IntegrityError, error_text, render_path
from ..mapping import ShardedObject, ShardedTensor
from ._edit import without_data
from ._factories import apply_factories
from ._nodes import Tree
from ._paths import leaves_with_paths


def extract_metadata(tree: Tree) -> dict[str, ShardedTensor | ShardedObject]:
    """Return a tree's first shard of each tensor and every sharded object, without data, flat by key.

    Factories are applied first. Sharded objects stand under their `unique_key`.

    Raises:
        IntegrityError: two shards of one key say different global shapes or dtypes; every such pair is named.

    Examples:
        >>> import torch
        >>> from shardtree.mapping import ShardedTensor
        >>> w = ShardedTensor.from_rank_offsets("layers.0.w", torch.ones(2), (0, 1, 2))
        >>> metadata = extract_metadata({"model": {"w": w}, "step": 3})
        >>> metadata["layers.0.w"].global_shape, metadata["layers.0.w"].data
        ((4,), None)
    """
    found: dict[str, ShardedTensor | ShardedObject] = {}
    conflicts: list[str] = []
    for path, leaf in leaves_with_paths(apply_factories(tree)):
        if not isinstance(leaf, (ShardedTensor, ShardedObject)):
            continue
        key = leaf.unique_key if isinstance(leaf, ShardedObject) else leaf.key
        first = found.setdefault(key, leaf)
        if _whole(first) != _whole(leaf):
            conflicts.append(f"{key!r} at {render_path(path)}: found {_outline(leaf)}, before {_outline(first)}")
    if conflicts:
        fix = "Give each global tensor a key of its own."
        raise IntegrityError(error_text("shards of one key describe different tensors", offenders=conflicts, fix=fix))
    return dict(without_data(found))


def _whole(leaf: ShardedTensor | ShardedObject) -> tuple[Any, ...]:
    return leaf.global_shape, leaf.dtype if isinstance(leaf, ShardedTensor) else None


def _outline(leaf: ShardedTensor | ShardedObject) -> str:
    shape, dtype = _whole(leaf)
    return f"{shape} {dtype or 'object'}"
