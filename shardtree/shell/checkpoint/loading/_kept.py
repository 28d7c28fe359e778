"""Values of a target that stay: where nothing is stored for them, and the container around needs one.

A dict of the result lacks what isn't stored. A list, tuple or instance of a class needs a value in each place: in modes
that leave out what isn't stored, that is the target's own. So it is in dicts within such a place, if nothing is loaded
there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from typing import Any

import torch

from ....core.lazy import LazyTensor
from ....core.mapping import LocalNonpersistentObject, ShardedBase, has_elements, lacks_memory
from ....core.trees import HOLE, leaves_with_paths, nodes_at
from ....errors import TreePath


def own_values(tree: Any, unexpected: Set[str], keys_of: Callable[[Any], set[str]]) -> dict[TreePath, Any]:
    """Return the values of a target that may stay, by path: of what isn't stored, and plain ones.

    Args:
        tree: A rank's target.
        unexpected: Keys that it asks for and that aren't stored.
        keys_of: Function that returns the keys that a leaf asks for.

    Examples:
        >>> from shardtree.mapping import ShardedTensor
        >>> tree = [ShardedTensor.from_rank_offsets(key, torch.ones(1)) for key in ("w", "new")]
        >>> own_values([*tree, 0.9], {"new"}, lambda leaf: {leaf.key})
        {(1,): tensor([1.]), (2,): 0.9}
    """
    values = {}
    for path, leaf in leaves_with_paths(tree):
        if not isinstance(leaf, ShardedBase):
            values[path] = HOLE if isinstance(leaf, LocalNonpersistentObject) else leaf
        elif unexpected and (keys := keys_of(leaf)) and keys <= unexpected:
            values[path] = HOLE if leaf.data is None else leaf.data
    return {path: value for path, value in values.items() if _is_value(value)}


def _is_value(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return has_elements(value) and not lacks_memory(value)
    return value is not HOLE and not isinstance(value, LazyTensor)


def kept_paths(common: Any, tree: Any, own: Mapping[TreePath, Any]) -> list[TreePath]:
    """Return the paths of a target's own values that are in the result of a load.

    Args:
        common: The stored common tree.
        tree: What its join with the target gave.
        own: The target's values by path, as `own_values` gives them.

    Examples:
        >>> kept_paths([HOLE, 0.5], ["w", 0.5, 0.9], {(1,): 0.5, (2,): 0.9})
        [(2,)]
    """
    nodes, stored = nodes_at(tree, own), nodes_at(common, own)
    return [
        path for path, value in own.items() if path in nodes and nodes[path] is value and stored.get(path, HOLE) is HOLE
    ]
