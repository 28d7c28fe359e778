"""Holes in lists and tuples: what is stored in their place, and the record that says where they were."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...codec import add_record, decode_archive, encode_archive, find_record, read_pickle, write_pickle
from ...errors import CorruptCheckpoint, TreePath, error_text, render_path
from ...storage import Buffer
from ...trees import HOLE, leaves_with_paths, map_shards, without_holes
from .._values import LoadOptions

_HOLES = ".shardtree_holes"
"""The archive's record that says where in lists and tuples shards were."""


def filled(common: Any) -> tuple[Any, list[TreePath]]:
    """Return a common tree without holes, and the paths where an empty dict stands for one.

    Examples:
        >>> filled({"w": HOLE, "groups": [HOLE, {"lr": 0.1}]})
        ({'groups': [{}, {'lr': 0.1}]}, [('groups', 0)])
    """
    left = without_holes(common)
    paths = [path for path, leaf in leaves_with_paths(left) if leaf is HOLE]
    return (map_shards(_empty, left) if paths else left), paths


def _empty(leaf: Any) -> Any:
    return {} if leaf is HOLE else leaf


def with_holes(tree: Any, paths: Sequence[TreePath], what: str) -> Any:
    """Return the tree with holes at these paths; lists and dicts are changed in place.

    Args:
        tree: just read, and nobody else's.
        paths: as `filled` returned them.
        what: the file, for messages.

    Raises:
        CorruptCheckpoint: nothing stands at a path that a hole could be in the place of.

    Examples:
        >>> with_holes({"groups": ({}, 1)}, [("groups", 0)], "example")
        {'groups': (HOLE, 1)}
    """
    for path in paths:
        try:
            tree = _put(tree, path)
        except (LookupError, TypeError) as error:
            found = f"no empty dict at {render_path(path)}"[:200]
            raise CorruptCheckpoint(error_text(f"{what}: its record of shards contradicts it", found=found)) from error
    return tree


def _put(tree: Any, path: TreePath) -> Any:
    if not path:
        if type(tree) is not dict or tree:
            raise LookupError
        return HOLE
    entry, inner = path[0], _put(tree[path[0]], path[1:])
    if not isinstance(tree, tuple):
        tree[entry] = inner
        return tree
    return tuple.__new__(type(tree), [inner if position == entry else item for position, item in enumerate(tree)])


def encode_with_holes(tree: Any, *, allow_pickle: bool) -> bytes:
    """Return torch.save's archive of a tree, with a record beside it of where holes stood in lists and tuples.

    Raises:
        UnsupportedValue: a value would have to be pickled, and `allow_pickle` isn't given.
    """
    plain, holes = filled(tree)
    data = encode_archive(plain, allow_pickle=allow_pickle)
    return add_record(data, _HOLES, encode_holes(holes)) if holes else data


def decode_with_holes(data: Buffer, what: str, options: LoadOptions) -> Any:
    """Return the tree that `encode_with_holes` was given, or that another program saved.

    Raises:
        CorruptCheckpoint: the bytes aren't what was saved.
        UnsafeFile: reading it takes pickled code, and `allow_pickle` isn't given.
    """
    tree = decode_archive(data, what=what, types=options.types, allow_pickle=options.allow_pickle)
    holes = find_record(data, _HOLES, what=what)
    return tree if holes is None else with_holes(tree, decode_holes(holes, what), what)


def encode_holes(paths: Sequence[TreePath]) -> bytes:
    """Return paths as bytes.

    Raises:
        UnsupportedValue: a dict's key on a path isn't a number, a string or a tuple of them.
    """
    return write_pickle([tuple(path) for path in paths])


def decode_holes(data: bytes, what: str) -> list[TreePath]:
    """Return the paths that `encode_holes` was given.

    Raises:
        CorruptCheckpoint: the bytes aren't of paths.
    """
    paths = read_pickle(data, {}, what=f"{what}: its record of shards")
    if type(paths) is not list or any(type(path) is not tuple or len(path) > 200 for path in paths):
        raise CorruptCheckpoint(error_text(f"{what}: its record of shards isn't one"))
    return paths
