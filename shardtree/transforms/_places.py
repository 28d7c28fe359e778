"""Transforms of any tree: it is flattened to a dict, transformed, and rebuilt with containers like its own.

A key of that dict is called an entry. Usually it is the leaf's path, joined by dots.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any, Final

import torch

from ..core.lazy import LazyTensor
from ..core.mapping import ShardedBase, ShardedObject, ShardedTensor
from ..errors import TreeError, TreePath, error_text
from ._tree_places import Place, Places, kept_place, moved_place, named_paths, places, planted

_TENSORS: Final = (ShardedBase, torch.Tensor, LazyTensor)

Flat = Mapping[str, Any]
"""A flat tree: a dict of shards and other values. Its keys are called entries; transforms go by the shards' keys."""


class PlacedName(str):
    """An entry (a key of a flattened tree), with the path of its leaf in the tree itself.

    Attributes:
        place: Path of the leaf. A leaf that a transform made has the path of the leaf that it replaces.
        is_plain: Whether the leaf at that path is a plain value, not a shard.
        is_moved: Whether a transform has changed the entry.
        says_place: Whether a changed entry is the leaf's new path, joined by dots. If it isn't, the leaf stays at its
            path, except in a flat dict.
    """

    place: TreePath
    is_plain: bool
    is_moved: bool
    says_place: bool

    def __new__(
        cls, name: str, place: TreePath, *, is_plain: bool = False, is_moved: bool = False, says_place: bool = True
    ) -> PlacedName:
        entry = super().__new__(cls, name)
        entry.place, entry.is_plain, entry.is_moved, entry.says_place = place, is_plain, is_moved, says_place
        return entry

    def of_kind(self, other: PlacedName) -> PlacedName:
        """Return the same entry with the attribute `is_plain` of another entry."""
        how = {"is_moved": self.is_moved, "says_place": self.says_place}
        return PlacedName(self, self.place, is_plain=other.is_plain, **how)


def entry_of(name: str) -> PlacedName:
    """Return an entry as a `PlacedName`. An ordinary string, as in a caller's dict, gets the path ``(name,)``.

    Examples:
        >>> entry_of("h.0.w").place
        ('h.0.w',)
    """
    return name if isinstance(name, PlacedName) else PlacedName(name, (name,))


def name_of(entry: str, leaf: ShardedBase) -> str:
    """Return a leaf's key, or a sharded object's `unique_key`; the entry in a flat tree usually ends with this text.

    If a sharded object only stands for a plain value, the result is its key.

    Examples:
        >>> name_of("rng", ShardedObject("rng", 3, (1,), (0,)))
        'rng/shard_0_1'
    """
    return leaf.unique_key if isinstance(leaf, ShardedObject) and not entry_of(entry).is_plain else leaf.key


def renamed(entry: str, leaf: ShardedBase, new: ShardedBase) -> PlacedName:
    """Return the entry, in a flat tree, of a leaf that replaces another one.

    Usually the old entry is the old key with another prefix, such as ``model.h.3.w`` for ``h.3.w``. Then the new entry
    is the new key with its prefix exchanged in the same way. If that isn't possible, the new entry is the new key.

    Args:
        entry: Entry of the old leaf.
        leaf: The old leaf.
        new: The new leaf.

    Examples:
        >>> old, new = (ShardedTensor.from_rank_offsets(key, torch.ones(1)) for key in ("h.3.w", "h.1.w"))
        >>> renamed("model.h.3.w", old, new), renamed("v", old, new)
        ('model.h.1.w', 'h.1.w')
    """
    known = entry_of(entry)
    before, after = name_of(entry, leaf), name_of(entry, new)
    if before == after:
        return known
    lead, front = _fronts(before, known)
    says_place = front is not None and after.startswith(lead)
    name = f"{front}{after.removeprefix(lead)}" if says_place else after
    return PlacedName(name, known.place, is_plain=known.is_plain, is_moved=True, says_place=says_place)


def _fronts(key: str, entry: str) -> tuple[str, str | None]:
    """Return the parts of a key and of an entry before the end that they share; ("", None) if they share no end."""
    if entry.endswith(key):
        return "", entry.removesuffix(key)
    keys, names = key.split("."), entry.split(".")
    same = next((n for n, pair in enumerate(zip(keys[::-1], names[::-1], strict=False)) if pair[0] != pair[1]), None)
    same = min(len(keys), len(names)) if same is None else same
    if not same:
        return "", None
    return "".join(f"{part}." for part in keys[:-same]), "".join(f"{part}." for part in names[:-same])


def on_tree(doing: str, tree: Any, change: Callable[[Flat], Flat]) -> Any:
    """Flatten a tree, transform the flat form, and return the result in containers like the tree's own.

    In the flat form, a plain tensor is a whole shard and any other plain value a sharded object; their keys are their
    paths. In a tree with shards, plain tensors are sharded objects too, so that no change affects their elements.

    Args:
        doing: Name of the transform in error messages.
        tree: Any tree, or a mapping such as an open checkpoint.
        change: The transform of a flat tree.

    Raises:
        TreeError: The argument isn't a tree, or the result doesn't fit into containers like the tree's.
        UnsupportedValue: Shards lie in values that aren't nodes, such as instances of unregistered classes.

    Examples:
        >>> on_tree("keep", {"h": [1, torch.ones(2)]}, lambda flat: {name: flat[name] for name in flat if "0" in name})
        {'h': [1]}
    """
    tree = dict(tree) if isinstance(tree, Mapping) and not isinstance(tree, dict) else tree
    old = places(tree)
    if () in old.leaves:
        found, expected = type(tree).__name__, "a dict, list or tuple of tensors or shards"
        raise TreeError(error_text(f"{doing}: not a tree", found=found, expected=expected))
    flat: dict[str, Any] = {}
    has_shards = any(isinstance(leaf, ShardedBase) for leaf in old.leaves.values())
    for name, path in _named(doing, old).items():
        leaf = old.leaves[path] if path in old.leaves else old.containers[path]
        box = leaf if isinstance(leaf, ShardedBase) else _boxed(name, leaf, has_shards)
        flat[PlacedName(name, path, is_plain=box is not None and box is not leaf)] = leaf if box is None else box
    return planted(doing, tree, [_placed(old, entry_of(name), leaf) for name, leaf in change(flat).items()])


def _named(doing: str, old: Places) -> dict[str, TreePath]:
    """Return the paths of a transform's leaves, by name; some containers of plain values count as one leaf.

    In a flat tree, each container without tensors is one leaf. In any other tree, such a container is one leaf only if
    a value in it would have the same name as another value, since names must be unique.
    """
    tensors = [path for path, leaf in old.leaves.items() if isinstance(leaf, _TENSORS)]
    above = {path[:depth] for path in tensors for depth in range(len(path) + 1)}
    whole = {path: _outermost(path, above) for path in old.leaves}
    counts = Counter(map(_name, old.leaves))
    together = {whole[path] for path in old.leaves if old.is_flat or counts[_name(path)] > 1}
    paths = dict.fromkeys(whole[path] if whole[path] in together else path for path in old.leaves)
    counts = Counter(map(_name, paths))
    # Plain values directly in the tree whose keys look alike, such as 0 and "0", get no name of their own.
    unseen = {path for path in paths if counts[_name(path)] > 1 and len(path) == 1 and path not in above}
    seen = named_paths(doing, replace(old, leaves={path: None for path in paths if path not in unseen}))
    names = {path: name for name, path in seen.items()}
    return {names.get(path, f"{_name(path)}\0{number}"): path for number, path in enumerate(paths)}


def _name(path: TreePath) -> str:
    return ".".join(map(str, path))


def _outermost(path: TreePath, above: Collection[TreePath]) -> TreePath:
    """Return the path of the outermost container that holds a leaf and no tensors; the leaf's path if there is none.

    Args:
        path: Path of the leaf.
        above: Paths of all containers that hold tensors.
    """
    return next((path[:depth] for depth in range(1, len(path)) if path[:depth] not in above), path)


def _boxed(key: str, leaf: Any, has_shards: bool) -> ShardedBase | None:
    """Return a plain value as a shard or sharded object with the given key.

    A dense or lazy tensor becomes a shard if the tree itself has no shards (`has_shards`). The result is None if `key`
    is empty, isn't valid Unicode, or contains a NUL character.
    """
    try:
        key.encode()
    except UnicodeEncodeError:
        return None
    if not key or "\0" in key:
        return None
    if not has_shards and (isinstance(leaf, LazyTensor) or (isinstance(leaf, torch.Tensor) and _is_dense(leaf))):
        return ShardedTensor.from_rank_offsets(key, leaf)
    return ShardedObject(key, leaf, (), ())


def _is_dense(tensor: torch.Tensor) -> bool:
    is_lazy: bool = torch.nn.parameter.is_lazy(tensor)
    return tensor.layout is torch.strided and not tensor.is_nested and not is_lazy


def _placed(old: Places, entry: PlacedName, leaf: Any) -> tuple[Place, Any]:
    value = leaf.data if entry.is_plain else leaf
    if not entry.is_moved:
        return kept_place(old, entry.place), value
    if entry.says_place or old.is_flat:
        return moved_place(old, entry.place, str(entry)), value
    # If a leaf's key has nothing to do with its path, the new leaf stays at that path.
    return replace(kept_place(old, entry.place), is_old=False), value
