"""A load's target, taken apart: the shards that it asks for, and the way back to a tree."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ...errors import KeyMismatch, error_text, render_path
from ...mapping import ShardedObject, ShardedTensor, ShardedTensorFactory
from ...storage import collector_paused
from ...trees import (
    HOLE,
    apply_factories,
    build_factories,
    check_is_tree,
    leaves_with_paths,
    map_shards,
    namedtuple_types,
    refuse_dtensors,
    refuse_hidden,
    shard_leaves,
    told_of_depth,
)


@dataclass(frozen=True, slots=True, eq=False)
class Target:
    """A load's target, taken apart.

    Attributes:
        leaves: of the tree with factories applied.
        tensors: the tensor shards among them.
        objects: the sharded objects among them.
        rebuild: from new leaves to a tree of the same structure.
        merge: from the joined tree to one with the factories merged.
        types: the namedtuple classes that it is made of.
    """

    leaves: tuple[Any, ...]
    tensors: tuple[ShardedTensor, ...]
    objects: tuple[ShardedObject, ...]
    rebuild: Callable[[Sequence[Any]], Any]
    merge: Callable[[Any], Any]
    types: tuple[type, ...]

    @property
    def keys(self) -> set[str]:
        """The keys of what is asked for."""
        return {leaf.key for leaf in (*self.tensors, *self.objects)}


@collector_paused()
def take_apart(tree: Any) -> Target:
    """Return a target taken apart.

    Raises:
        TreeError: it isn't a tree, or too deep.
        UnsupportedValue: a shard is hidden in a value that isn't entered.
    """
    check_is_tree("load", tree)
    with told_of_depth("load"):
        built = tree
        merge: Callable[[Any], Any] = _as_it_is
        pairs, rebuild = shard_leaves(tree)
        if any(issubclass(kind, ShardedTensorFactory) for kind in {type(leaf) for _, leaf in pairs}):
            built, merge = build_factories(tree)
            pairs, rebuild = shard_leaves(built)
        types = namedtuple_types(built)
    others = [pair for pair in pairs if type(pair[1]) is not ShardedTensor]
    refuse_hidden("load", others)
    refuse_dtensors("load", others)
    leaves = tuple([leaf for _, leaf in pairs])
    tensors = tuple([leaf for leaf in leaves if isinstance(leaf, ShardedTensor)])
    objects = tuple([leaf for _, leaf in others if isinstance(leaf, ShardedObject)])
    return Target(leaves, tensors, objects, rebuild, merge, types)


def _as_it_is(loaded: Any) -> Any:
    return loaded


def without_unexpected(target: Target, tree: Any, unexpected: set[str]) -> Target:
    """Return the target without the shards, and the factories of such shards alone, that aren't stored.

    Raises:
        KeyMismatch: of a factory's shards some are stored, and some aren't, so that it can't be merged.
    """
    if not unexpected:
        return target
    lacking = ((path, leaf, _keys(leaf) & unexpected) for path, leaf in shard_leaves(tree)[0])
    partly = [
        f"{leaf.key!r} at {render_path(path)} lacks {', '.join(map(repr, sorted(keys)))}"
        for path, leaf, keys in lacking
        if keys and keys < _keys(leaf)
    ]
    if partly:
        what, fix = "load: factories that are stored in part", "Leave them out of the target, or build what is stored."
        raise KeyMismatch(error_text(what, offenders=partly, fix=fix))
    return take_apart(map_shards(lambda leaf: HOLE if _keys(leaf) and _keys(leaf) <= unexpected else leaf, tree))


def _keys(leaf: Any) -> set[str]:
    if isinstance(leaf, ShardedTensorFactory):
        return {shard.key for _, shard in leaves_with_paths(apply_factories(leaf)) if is_sharded(shard)}
    return {leaf.key} if is_sharded(leaf) else set()


def is_sharded(leaf: Any) -> bool:
    """Return whether a leaf is loaded."""
    return isinstance(leaf, (ShardedTensor, ShardedObject))
