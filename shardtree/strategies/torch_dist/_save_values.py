"""The common state as torch.distributed.checkpoint's entries: each plain value with its name and its path."""

from __future__ import annotations

from collections.abc import Iterator, Set
from typing import Any

from ...errors import TreeError, TreePath, error_text, render_path
from ...trees import HOLE, is_hollow, leaves_with_paths, path_key, without_holes
from ._listing import is_object

Value = tuple[TreePath, Any]


def named_values(common: Any) -> dict[str, Value]:
    """Return the plain values of a common tree by name, each with its path: the name is the path, joined by dots.

    Dicts are taken apart, and lists that hold such dicts; anything else is one value, stored whole. That is how
    torch.distributed.checkpoint does it, with three exceptions: an empty dict and a dict whose keys aren't all texts
    are stored whole, since there the one is lost and the other's keys become texts; so is a list of tensors, since
    there the names of plain values in it aren't found again when a checkpoint is converted, and a list that shards
    stood in, since there the places before a value are lost.

    Args:
        common: as `common_with_holes` gives it.

    Raises:
        TreeError: it isn't a dict, or two values have one name.

    Examples:
        >>> for name, value in named_values({"step": 3, "groups": [{"lr": 0.1}, {"lr": 0.2}]}).items():
        ...     print(name, *value)
        step ('step',) 3
        groups.0.lr ('groups', 0, 'lr') 0.1
        groups.1.lr ('groups', 1, 'lr') 0.2
    """
    named: dict[str, Value] = {}
    for path, value in _top_values(common):
        name = path_key(path)
        if name in named:
            offenders = [render_path(other) for other in (named[name][0], path)]
            fix = "Rename one of them; torch.distributed.checkpoint names a value by its path, joined by dots."
            raise TreeError(error_text(f"save: two values named {name!r}", offenders=offenders, fix=fix))
        named[name] = (path, value)
    return named


def _top_values(common: Any) -> Iterator[Value]:
    plain = without_holes(common)
    if isinstance(plain, dict) and _has_texts(plain):
        for key, value in plain.items():
            yield from _values((key,), value)
    elif any(leaf is not HOLE for _, leaf in leaves_with_paths(plain)):
        what = "save: torch.distributed.checkpoint keeps plain values in a dict with texts as keys"
        raise TreeError(
            error_text(what, found=f"{type(common).__name__} around them", fix="Put the tree in such a dict.")
        )


def _values(path: TreePath, node: Any) -> Iterator[Value]:
    if isinstance(node, dict) and not _is_one_value(node):
        for key, value in node.items():
            yield from _values((*path, key), value)
    elif isinstance(node, list) and not _is_one_value(node):
        for position, value in enumerate(node):
            yield from _values((*path, position), value)
    else:
        yield path, node


def _has_texts(node: dict[Any, Any]) -> bool:
    return all(isinstance(key, str) for key in node)


def _is_one_value(node: Any) -> bool:
    """Return whether a node is stored whole: it is no dict to take apart, nor a list that such a dict lies in."""
    if isinstance(node, dict):
        return not node or not _has_texts(node)
    return not isinstance(node, list) or any(child is HOLE for child in node) or all(map(_is_one_value, node))


def without_hollow(named: dict[str, Value], taken: Set[str]) -> dict[str, Value]:
    """Return values by name without the empty containers in the place of a tensor or an object.

    Where one rank has no shards at all, its container of them is an empty one.

    Examples:
        >>> without_hollow({"w": (("w",), []), "step": (("step",), 3)}, {"w"})
        {'step': (('step',), 3)}
    """
    return {
        name: (path, value)
        for name, (path, value) in named.items()
        if taken.isdisjoint((name, path[0])) or not is_hollow(value)
    }


def check_names(named: dict[str, Value], taken: Set[str]) -> None:
    """Raise unless values, tensors and objects can lie in one checkpoint.

    Args:
        named: values by name, with their paths.
        taken: keys of the stored tensors and unique keys of the stored objects.

    Raises:
        TreeError: a value is named like a tensor or an object, or lies in a dict that is named like one.

    Examples:
        >>> check_names({"w.lr": (("w", "lr"), 0.1)}, {"w"})
        Traceback (most recent call last):
        ...
        shardtree.errors.TreeError: save: plain values in the places of tensors or objects
          tree['w']['lr'] is in the place of 'w'
          Rename the shards or the values: torch.distributed.checkpoint keeps all of them in one dict.
    """
    wrong = [
        f"{render_path(path)} is in the place of {place!r}"
        for name, (path, _) in named.items()
        for place in dict.fromkeys((name, path[0]))
        if place in taken
    ]
    wrong += [f"{render_path(path)} is named like an object" for name, (path, _) in named.items() if is_object(name)]
    if wrong:
        fix = "Rename the shards or the values: torch.distributed.checkpoint keeps all of them in one dict."
        raise TreeError(error_text("save: plain values in the places of tensors or objects", offenders=wrong, fix=fix))
