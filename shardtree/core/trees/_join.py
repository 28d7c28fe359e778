"""The join of a stored common tree with a target's loaded values, and `Record`, a stored instance without its class.

A hole (`HOLE`) marks a missing value: a shard's in the stored tree, a plain value's in the target. Holes and empty
containers in a stored tree describe only the rank that stored it, so a join must not depend on them: every container of
the target is in the result. A `Record` replaces an instance of a class, since no file may name a class to import.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import optree
import torch

from ...errors import TreeError, TreePath, error_text, render_path
from ..mapping import LocalNonpersistentObject, refuse_subclass
from ._nodes import (
    HOLE,
    Tree,
    describe,
    drop_holes,
    entries,
    flatten,
    flatten_with_paths,
    is_dict,
    is_known_leaf,
    is_sequence,
    is_subclass,
    like,
    refusing_depth,
)

_LENIENT = "Or load with a lenient strict mode, such as 'log_unexpected': it"
_WITH_DATA = "Or give the shard data, which the load then keeps."
_SIMPLE = (str, int, bool, float, type(None))


@dataclass(frozen=True, slots=True, eq=False)
class Record:
    """A stored enum member, dataclass or named tuple, without its class.

    Records are equal if their types and fields are. A tensor or array in a field is equal only to itself.

    Attributes:
        type_name: Module and qualified name of the class.
        fields: Values by name; an enum member has `name` and `value`.

    Examples:
        >>> Record("train.Config", {"lr": 0.1}) == Record("train.Config", {"lr": 0.1})
        True
    """

    type_name: str
    fields: Mapping[str, Any]

    def __init_subclass__(cls) -> None:
        refuse_subclass(cls)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Record):
            return NotImplemented
        return self.type_name == other.type_name and _equal(dict(self.fields), dict(other.fields))

    def __hash__(self) -> int:
        simple = tuple((name, value) for name, value in self.fields.items() if type(value) in _SIMPLE)
        return hash((self.type_name, frozenset(simple)))


def _equal(one: Any, other: Any) -> bool:
    if one is other or isinstance(one, torch.Tensor | np.ndarray) or type(one) is not type(other):
        return one is other
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_equal(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_equal, one, other))
    return bool(one == other)


def stored_entries(node: Tree) -> Mapping[Any, Tree] | None:
    """Return a container's children by key, position or field; a `Record`'s values by field name; None for a leaf."""
    return node.fields if isinstance(node, Record) else entries(node)


# The join


Own = Mapping[TreePath, Any]
"""A target's own values, by path."""


@dataclass(frozen=True, slots=True, eq=False)
class _Spare:
    """A container of the target's own values, none of them stored or loaded.

    An enclosing list, tuple or instance keeps `value`, since it needs all its entries. An enclosing dict leaves it out.
    """

    value: Tree


@refusing_depth
def join(common: Tree, target: Tree, own: Own | None = None) -> Tree:
    """Return the stored common tree joined with a target's loaded values.

    A hole (`HOLE`) marks a missing value. Dicts are joined by key, lists and tuples of equal length by position, and a
    stored `Record` with the target's instance by field name. The result has the target's containers, of the target's
    types. A dict may gain stored keys, followed by the target's new keys. If a container without loaded values can't be
    joined with the stored value, it is replaced by that value, but not by an incomplete list, tuple or instance.

    A dict leaves out an entry if neither tree has its value. A list, tuple or instance can't leave out a single entry,
    so it is left out as a whole. `left_out` returns the paths of stored values that are left out.

    Args:
        common: Common tree, as `common_with_holes` returns it.
        target: The target's tree with loaded values instead of shards, and holes instead of plain values. A
            `LocalNonpersistentObject` is unwrapped here, and its value isn't entered: wrap loaded objects in one too,
            since they may be containers.
        own: Values of the target, by path, which complete lists, tuples and instances of classes: they fill the
            remaining holes. They also fill a dict in such a container if nothing of the dict is stored. If `own` is
            given, the fields of a class or named tuple may differ from the stored fields; stored fields that it lacks
            are left out. If `own` is None, no hole is filled in this way, and fields must be the same.

    Returns:
        A tree without holes; subtrees of the target without holes are shared.

    Raises:
        TreeError: A loaded value has the path of a stored value, or lies in a container that can't be joined with the
            stored one; a list, tuple or instance with a loaded value keeps a hole; or nothing remains of the tree.

    Examples:
        >>> join({"step": 3, "w": HOLE, "gone": HOLE, "mixed": [HOLE, 1]}, {"mixed": ["b", HOLE], "w": "a"})
        {'step': 3, 'w': 'a', 'mixed': ['b', 1]}
        >>> join({"model": HOLE, "ema": [HOLE, 0.9]}, {"model": {"layers": []}})
        {'model': {'layers': []}}
        >>> join({"m": [HOLE]}, {"m": ["a", HOLE]}, {("m", 1): "mine"})
        {'m': ['a', 'mine']}
    """
    tree = _join(common, target, (), own)
    if isinstance(tree, _Spare):
        return tree.value
    if tree is HOLE:
        heading = "join: the target's outermost list, tuple or instance has entries for which nothing is loaded"
        raise TreeError(error_text(heading, fix="Use a dict, which may lack entries, or the whole saved structure."))
    return tree


def left_out(common: Tree, tree: Tree) -> tuple[TreePath, ...]:
    """Return the paths of stored plain values that a join left out, in the stored order.

    Args:
        common: Stored common tree.
        tree: Result of `join` for the stored tree and a target.

    Examples:
        >>> common = {"ema": [HOLE, 0.9], "step": 3}
        >>> left_out(common, join(common, {}))
        (('ema', 1),)
    """
    return tuple(_missing_paths(common, tree, ()))


def misfits(common: Tree, target: Tree) -> tuple[TreePath, ...]:
    """Return the paths at which a target's values to load don't fit the stored tree; `join` without `own` raises there.

    Such a path has a stored plain value, or a stored container that can't be joined with the target's.

    Args:
        common: Stored common tree.
        target: The target's tree, as for `join`.

    Examples:
        >>> misfits({"w": 7, "step": 3, "m": {"lr": 1}}, {"w": "a", "step": HOLE, "m": {"w": "b"}})
        (('w',),)
    """
    return tuple(_misfits(common, target, ()))


def _misfits(common: Tree, target: Tree, path: TreePath) -> Iterator[TreePath]:
    if is_hollow(common) or not _holds_any(target):
        return
    pair = _entries_by_target(common, target)
    if pair is None:
        yield path
        return
    for entry, child in pair[1].items():
        yield from _misfits(pair[0].get(entry, HOLE), child, (*path, entry))


def _missing_paths(common: Tree, tree: Tree, path: TreePath) -> Iterator[TreePath]:
    if tree is common or common is HOLE:
        return
    mine = stored_entries(common)
    if mine is None:
        # A stored leaf is in the result unless it was left out, or a container of the target replaced it.
        if tree is HOLE or stored_entries(tree) is not None:
            yield path
        return
    pair = None if tree is HOLE else _entries_by_target(common, tree) or _entries_that_differ(common, tree)
    for (entry, child), key in zip(mine.items(), (mine if pair is None else pair[0]), strict=True):
        yield from _missing_paths(child, HOLE if pair is None else pair[1].get(key, HOLE), (*path, entry))


def _join(common: Tree, target: Tree, path: TreePath, own: Own | None, *, needed: bool = False) -> Tree:
    """Return the join of two nodes; `HOLE` if both have nothing, or if the joined container would be incomplete.

    Args:
        common: Stored node.
        target: The target's node.
        path: Path of both nodes.
        own: The target's own values, by path, which fill holes; None to fill no hole.
        needed: Whether the enclosing container needs an entry at this path, as all containers but dicts do.
    """
    if common is HOLE:
        # Most of a target's entries are leaves, and optree's own lookup of types takes longer.
        return target if is_known_leaf(target) else _finish_target(target, path, own, needed=needed)
    # A Counter of the target was stored as a dict.
    if target is HOLE or (is_subclass(common) and not _holds_any(target)):
        return _keep_whole(common)
    pair = _entries_by_target(common, target)
    if pair is None and own is not None:
        pair = _entries_that_differ(common, target)
    if pair is not None:
        mine, theirs = pair
        as_dict = is_dict(target)
        new = {
            entry: _join(mine.get(entry, HOLE), theirs.get(entry, HOLE), (*path, entry), own, needed=not as_dict)
            for entry in (dict.fromkeys([*mine, *theirs]) if as_dict else theirs)
        }
        return _rebuild(target, new, path, own, named=_holds_any(target))
    # The stored tree is that of one rank: its hole or empty container here doesn't describe other ranks.
    if is_hollow(common):
        return _finish_target(target, path, own)
    if _holds_any(target):
        heading = f"join: {render_path(path, 'target')} does not fit {render_path(path, 'common')}"
        fix = _fix_of_misfit(common, target, own)
        raise TreeError(error_text(heading, found=describe(target), expected=_description(common), fix=fix))
    # Plain values of a target are ignored, as in Megatron-Core: a tuple of other defaults in it isn't an error.
    whole = _keep_whole(common)
    return _finish_target(target, path, own, needed=needed) if whole is HOLE else whole


def _fix_of_misfit(common: Tree, target: Tree, own: Own | None) -> str:
    if _entries_that_differ(common, target) is None and is_sequence(common) and is_sequence(target):
        return (
            "Give it the stored length, or take it out of the target. Save optional entries in a dict, by name:\n"
            "  a shard is found by its key, but a plain value only by its position, which may have changed."
        )
    fix = "Give the target the structure that was saved, or take this entry out of it."
    is_joined_there = own is None and _entries_that_differ(common, target) is not None
    return f"{fix}\n  {_LENIENT} joins the common fields." if is_joined_there else fix


def _finish_target(target: Tree, path: TreePath, own: Own | None, *, needed: bool = False) -> Tree:
    """Return a subtree of the target for which nothing is stored, with local objects unwrapped.

    `_rebuild` fills its holes (marks of missing values) from `own`, or leaves them out. Arguments are those of `_join`.
    """
    children = entries(target)
    if children is None:
        return target.unwrap() if isinstance(target, LocalNonpersistentObject) else target
    as_dict = is_dict(target)
    spared = needed and own is not None and as_dict and not _holds_any(target)
    new = {
        entry: _finish_target(child, (*path, entry), own, needed=spared or not as_dict)
        for entry, child in children.items()
    }
    if all(new[entry] is child is not HOLE for entry, child in children.items()):
        return target
    if spared:
        return _Spare(like(target, drop_holes(new | _spares(new, path, own))))
    return _rebuild(target, new, path, own, named=_holds_any(target))


def _keep_whole(common: Tree) -> Tree:
    """Return a stored subtree without its holes, for a path at which the target has nothing to load.

    A dict leaves out its holes (marks of missing values). Another container that has a hole is replaced by a hole.
    """
    children = stored_entries(common)
    if children is None:
        return common
    new = {entry: _keep_whole(child) for entry, child in children.items()}
    if all(new[entry] is child is not HOLE for entry, child in children.items()):
        return common
    return _rebuild(common, new, (), None, named=False)


def _rebuild(node: Tree, new: Mapping[Any, Tree], path: TreePath, own: Own | None, *, named: bool) -> Tree:
    """Return a container like `node` with new children; holes, the marks of missing values, are filled or left out.

    A dict leaves out its holes. In another container, which needs all entries, holes are filled from `own`. If a hole
    remains, the result is a hole in place of the container. If all values are from `own`, the result is a `_Spare`.

    Args:
        node: Container to rebuild.
        new: New children by entry; a child may be a hole or a `_Spare`.
        path: Path of the container.
        own: The target's own values, by path; None to fill no hole.
        named: Whether the target has something to load in the container, which then must not be left out.

    Raises:
        TreeError: `named` is set, but a hole remains.
    """
    # A dict with holes is complete: its keys are simply absent, as in formats that store no holes.
    if is_dict(node):
        return like(node, {entry: child for entry, child in drop_holes(new).items() if not isinstance(child, _Spare)})
    spares = _spares(new, path, own)
    holes = [entry for entry, child in new.items() if child is HOLE and entry not in spares]
    if holes and not named:
        return HOLE
    if holes:
        heading = f"join: a {type(node).__name__} cannot be completed: the target lacks values for some entries"
        fix = "Put shards at these paths of the target, or take the whole container out of it."
        of_mode = f"{_LENIENT} keeps the target's own value there." if own is None else _WITH_DATA
        fix += f"\n  {of_mode}"
        places = [(*path, entry, *below) for entry in holes for below in _holes_in(node, entry)]
        places = [place for place in places if place not in (own or {})]
        raise TreeError(error_text(heading, fix=fix, offenders=map(render_path, places)))
    whole = {**new, **spares}
    tree = replace(node, fields=whole) if isinstance(node, Record) else like(node, whole)
    if named or not spares or any(entry not in spares and not is_hollow(child) for entry, child in new.items()):
        return tree
    return _Spare(tree)


def _spares(new: Mapping[Any, Tree], path: TreePath, own: Own | None) -> dict[Any, Tree]:
    """Return the target's own values for those entries of a container that nothing else fills, by entry."""
    spares = {entry: child.value for entry, child in new.items() if isinstance(child, _Spare)}
    holes = (entry for entry, child in new.items() if child is HOLE)
    return spares | {entry: own[*path, entry] for entry in holes if own and (*path, entry) in own}


def _holes_in(target: Tree, entry: Any) -> list[TreePath]:
    """Return the paths of the holes below one entry of a target's container, relative to that entry."""
    return [path for path, leaf in flatten_with_paths((entries(target) or {})[entry])[0] if leaf is HOLE] or [()]


def _entries_by_target(common: Tree, target: Tree) -> tuple[Mapping[Any, Tree], Mapping[Any, Tree]] | None:
    """Return the children of a stored container and those of the target's; None if the containers don't fit.

    A child has the same entry in both dicts: the key, position or field in the target's container.
    """
    mine, theirs = stored_entries(common), stored_entries(target)
    if mine is None or theirs is None:
        return None
    if is_dict(target):
        return (mine, theirs) if isinstance(common, dict) else None
    if is_sequence(target) and is_sequence(common):
        return (mine, theirs) if len(mine) == len(theirs) else None
    # Registered nodes, and namedtuples of classes that the save didn't know, are stored by field names.
    if type(common) is not type(target) and not isinstance(common, (Record, dict)):
        return None
    names = dict(zip(target._fields if optree.is_namedtuple(target) else theirs, theirs, strict=True))
    if isinstance(common, dict) and not is_sequence(target):
        # Formats may leave holes out of a dict, or have a hole for each tensor.
        fits = all(name in names or child is HOLE for name, child in mine.items())
    else:
        fits = mine.keys() == names.keys()
    return ({names.get(name, name): child for name, child in mine.items()}, theirs) if fits else None


def _entries_that_differ(common: Tree, target: Tree) -> tuple[Mapping[Any, Tree], Mapping[Any, Tree]] | None:
    """Return the children of a stored instance and those of the target's, by field, although their fields differ.

    The result is None for other containers. Among these are lists of different lengths: if positions have changed,
    joining the lists would mix the tensors of one item with the plain values of another.
    """
    mine, theirs = stored_entries(common), stored_entries(target)
    if mine is None or theirs is None or is_dict(target) or (is_sequence(target) and not optree.is_namedtuple(target)):
        return None
    if optree.is_namedtuple(common):
        mine = dict(zip(common._fields, mine.values(), strict=True))
    elif not isinstance(common, (Record, dict)):
        return None
    names = {str(entry): entry for entry in theirs}
    return {names.get(name, name): child for name, child in mine.items()}, theirs


def is_hollow(tree: Tree) -> bool:
    """Return whether a stored tree has nothing but holes and empty containers; other ranks may have shards there.

    Examples:
        >>> is_hollow([HOLE, {"w": []}]), is_hollow([HOLE, 1])
        (True, False)
    """
    children = stored_entries(tree)
    return tree is HOLE if children is None else all(map(is_hollow, children.values()))


def _holds_any(target: Tree) -> bool:
    """Return whether a target's tree has a leaf that isn't a hole: a loaded value or a `LocalNonpersistentObject`."""
    return any(leaf is not HOLE for leaf in flatten(target)[0])


def _description(common: Tree) -> str:
    return f"a record of {common.type_name[:200]}" if isinstance(common, Record) else describe(common)
