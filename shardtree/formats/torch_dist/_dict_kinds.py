"""Types of dicts in a common state that is stored flat: OrderedDicts, and defaultdicts with their factories.

torch.distributed.checkpoint stores each value by its path, and makes plain dicts of all paths. The types are in an
additional record of a value's archive; other readers ignore this record.
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
"""Name of the archive's record of the dicts around its value."""

KindsAt = tuple[tuple[int, dict[Any, Any]], ...]
"""Dicts around a value that aren't plain: the length of the path to each, and an empty dict of its type."""


def kinds_of(common: Any, paths: Mapping[str, TreePath]) -> dict[str, KindsAt]:
    """Return the depth and an empty copy of each OrderedDict and defaultdict in a common tree.

    Each is listed once, by the name of the first value in it. Its depth is the length of its path.

    Args:
        common: Common tree.
        paths: Path of each value, by its name.

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
    """Return a value's archive with an added record of the OrderedDicts and defaultdicts around the value.

    Raises:
        UnsupportedValue: The factory of a defaultdict isn't a plain type.
    """
    return add_record(data, _RECORD, encode_archive(list(kinds), allow_pickle=allow_pickle)) if kinds else data


def decode_value(data: Buffer, what: str, options: LoadOptions) -> tuple[Any, KindsAt]:
    """Return an archive's value, and the OrderedDicts and defaultdicts around it: depth and empty copy of each.

    Raises:
        CorruptCheckpoint: The bytes aren't what was saved.
        UnsafeFile: Reading the value takes pickled code, and `allow_pickle` isn't given.
    """
    value, record = decode_with_holes(data, what, options), find_record(data, _RECORD, what=what)
    if record is None:
        return value, ()
    what = f"{what}: its record of dicts"
    kinds = decode_archive(record, what=what, allow_pickle=options.allow_pickle)
    if type(kinds) is not list or not all(map(_is_kind, kinds)):
        raise CorruptCheckpoint(
            error_text(
                f"{what} is malformed",
                expected="empty OrderedDicts and defaultdicts, with their depths",
                fix="The file was damaged or edited; load another checkpoint.",
            )
        )
    return value, tuple(kinds)


def _is_kind(pair: Any) -> bool:
    if type(pair) is not tuple or [*map(type, pair)] not in ([int, OrderedDict], [int, defaultdict]):
        return False
    return pair[0] >= 0 and not pair[1]


def at_paths(paths: Iterable[tuple[TreePath, KindsAt]]) -> dict[TreePath, dict[Any, Any]]:
    """Return an empty copy of each OrderedDict and defaultdict, by its path.

    Args:
        paths: Path of each value, with the OrderedDicts and defaultdicts around it.

    Raises:
        ValueError: A dict's depth exceeds the path of its value.

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
