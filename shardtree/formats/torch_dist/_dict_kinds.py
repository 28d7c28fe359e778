"""Dicts of other kinds in a common state that is stored flat: which are OrderedDicts, and defaultdicts of what.

torch.distributed.checkpoint stores each value by its path, and makes dicts of all paths. It goes on doing so: the kinds
are in a record of a value's archive, which other readers pass over.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from ...errors import CorruptCheckpoint, TreePath, error_text
from ...kit import Buffer, LoadOptions
from ..archives import add_record, decode_archive, encode_archive, find_record
from ..torch import decode_with_holes

_RECORD = ".shardtree_dicts"
"""The archive's record of dicts around its value."""

KindsAt = tuple[tuple[int, dict[Any, Any]], ...]
"""Dicts around a value that are no plain ones: how many entries of the value's path lead to each, and an empty one."""


def kinds_of(common: Any, paths: Mapping[str, TreePath]) -> dict[str, KindsAt]:
    """Return the dicts of other kinds around values, by the name of the first value in each.

    Args:
        common: The tree.
        paths: The path of each value, by its name.

    Examples:
        >>> kinds_of({"a": defaultdict(list, {"b": 1, "c": 2})}, {"a.b": ("a", "b"), "a.c": ("a", "c")})
        {'a.b': ((1, defaultdict(<class 'list'>, {})),)}
    """
    kinds, seen = dict[str, KindsAt](), set[TreePath]()
    for name, path in paths.items():
        node, around = common, list[tuple[int, dict[Any, Any]]]()
        for depth, entry in enumerate(path):
            if isinstance(node, (OrderedDict, defaultdict)) and path[:depth] not in seen:
                seen.add(path[:depth])
                around.append((depth, _emptied(node)))
            node = node[entry]
        if around:
            kinds[name] = tuple(around)
    return kinds


def _emptied(node: OrderedDict[Any, Any] | defaultdict[Any, Any]) -> dict[Any, Any]:
    return defaultdict(node.default_factory) if isinstance(node, defaultdict) else OrderedDict()


def with_kinds(data: bytes, kinds: KindsAt, *, allow_pickle: bool) -> bytes:
    """Return a value's archive with the dicts around the value.

    Raises:
        UnsupportedValue: a defaultdict's items are made by what isn't a plain type.
    """
    return add_record(data, _RECORD, encode_archive(list(kinds), allow_pickle=allow_pickle)) if kinds else data


def decode_value(data: Buffer, what: str, options: LoadOptions) -> tuple[Any, KindsAt]:
    """Return a value, and the dicts around it that aren't plain ones.

    Raises:
        CorruptCheckpoint: the bytes aren't what was saved.
        UnsafeFile: reading it takes pickled code, and `allow_pickle` isn't given.
    """
    value, record = decode_with_holes(data, what, options), find_record(data, _RECORD, what=what)
    if record is None:
        return value, ()
    what = f"{what}: its record of dicts"
    kinds = decode_archive(record, what=what, allow_pickle=options.allow_pickle)
    if type(kinds) is not list or not all(map(_is_kind, kinds)):
        raise CorruptCheckpoint(
            error_text(f"{what} is malformed", expected="empty dicts of other kinds, and their depths")
        )
    return value, tuple(kinds)


def _is_kind(pair: Any) -> bool:
    if type(pair) is not tuple or [*map(type, pair)] not in ([int, OrderedDict], [int, defaultdict]):
        return False
    return pair[0] >= 0 and not pair[1]


def at_paths(paths: Iterable[tuple[TreePath, KindsAt]]) -> dict[TreePath, dict[Any, Any]]:
    """Return the dicts of other kinds by their own paths.

    Args:
        paths: The path of each value, with the dicts around it.

    Raises:
        ValueError: there is none so deep around a value.

    Examples:
        >>> at_paths([(("a", "b"), ((1, OrderedDict()),))])
        {('a',): OrderedDict()}
    """
    kinds: dict[TreePath, dict[Any, Any]] = {}
    for path, around in paths:
        for depth, kind in around:
            if depth >= len(path):
                raise ValueError(f"a record of a dict {depth} entries down a path of {len(path)}")
            kinds[path[:depth]] = kind
    return kinds
