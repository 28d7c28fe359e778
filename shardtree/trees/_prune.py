"""Trees without their holes."""

from __future__ import annotations

from ._hole import HOLE
from ._nodes import Tree, depth_error, entries, like


def prune(tree: Tree) -> Tree:
    """Return the tree without its holes, and without the containers that hold nothing else.

    They are left out of dicts; in a list or tuple a hole stays, so that positions don't shift. A container that was
    empty before stays, and so does the outermost one.

    Examples:
        >>> prune({"a": HOLE, "b": {"c": HOLE}, "d": [{"e": HOLE}, 1], "f": {}})
        {'d': [HOLE, 1], 'f': {}}
    """
    try:
        pruned, children = _pruned(tree), entries(tree)
    except RecursionError as error:
        raise depth_error(error, tree) from None
    if pruned is not HOLE or children is None:
        return pruned
    return like(tree, {} if isinstance(tree, dict) else dict.fromkeys(children, HOLE))


def _pruned(tree: Tree) -> Tree:
    children = entries(tree)
    if children is None:
        return tree
    new = {entry: _pruned(child) for entry, child in children.items()}
    if new and all(child is HOLE for child in new.values()):
        return HOLE
    if all(new[entry] is child is not HOLE for entry, child in children.items()):
        return tree
    return like(tree, _filled(new) if isinstance(tree, dict) else new)


def _filled(children: dict[object, Tree]) -> dict[object, Tree]:
    return {entry: child for entry, child in children.items() if child is not HOLE}
