"""Instances of classes as they were stored, and the entries of a stored tree that has some.

Records replace instances of classes, since no file may name a class to import.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..errors import TreePath
from ._nodes import Tree, entries

_SIMPLE = (str, int, bool, float, type(None))


@dataclass(frozen=True, slots=True, eq=False)
class Record:
    """An enum member, dataclass or named tuple as it was stored.

    Two records are equal if their types and fields are; tensors and arrays in them are equal if they are the same
    object.

    Attributes:
        type_name: module and qualified name of its class.
        fields: name -> value; of an enum member its `name` and `value`.

    Examples:
        >>> Record("train.Config", {"lr": 0.1}) == Record("train.Config", {"lr": 0.1})
        True
    """

    type_name: str
    fields: Mapping[str, Any]

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
    """Return a container's entries, those of a record by field."""
    return node.fields if isinstance(node, Record) else entries(node)


def deepest(tree: Tree, path: TreePath) -> tuple[Tree, int]:
    """Return the last node on a path that a tree has, and how many of the path's entries lead to it.

    Args:
        tree: a stored common tree, or what `join` made of one.
        path: of a target's leaf. Stored records have fields where the target's namedtuples have positions.

    Examples:
        >>> from shardtree.trees import HOLE
        >>> deepest({"model": HOLE}, ("model", "w")), deepest({"step": [3]}, ("step", 0))
        ((HOLE, 1), (3, 2))
    """
    for depth, entry in enumerate(path):
        children = stored_entries(tree)
        if isinstance(tree, Record) and isinstance(entry, int) and entry < len(tree.fields):
            entry = [*tree.fields][entry]
        if children is None or entry not in children:
            return tree, depth
        tree = children[entry]
    return tree, len(path)
