"""Types of dicts in a common state that is stored flat: OrderedDicts, and defaultdicts with their factories.

torch.distributed.checkpoint stores each value by its path, and restores every dict as a plain one. Therefore the type
of a dict is stored too, as an additional record in the archive of the dict's first value. Other readers ignore the
record.
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
"""Name of the zip record with the types of the dicts that contain the archive's value in the tree."""

KindsAt = tuple[tuple[int, dict[Any, Any]], ...]
"""Dicts that contain a value and aren't plain: depth of each (length of its path), and an empty dict of its type."""


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
    """Return a value's archive with one more zip record: the types of the dicts that contain the value in the tree.

    Args:
        data: Archive of the value.
        kinds: Depth and empty copy of each OrderedDict and defaultdict that contains the value.
        allow_pickle: Whether the factory of a defaultdict may be of any type.

    Raises:
        UnsupportedValue: The factory of a defaultdict isn't a plain type.
    """
    return add_record(data, _RECORD, encode_archive(list(kinds), allow_pickle=allow_pickle)) if kinds else data


def decode_value(data: Buffer, what: str, options: LoadOptions) -> tuple[Any, KindsAt]:
    """Return an archive's value, and the types of the dicts that contained the value in the saved tree.

    Only OrderedDicts and defaultdicts are listed, each with its depth in the tree and an empty dict of its type.

    Raises:
        CorruptCheckpoint: The bytes aren't what was saved.
        UnsafeFile: Reading the value would run pickled code, and `allow_pickle` isn't given.
    """
    value, record = decode_with_holes(data, what, options), find_record(data, _RECORD, what=what)
    if record is None:
        return value, ()
    what = f"{what}: its list of dict types"
    kinds = decode_archive(record, what=what, allow_pickle=options.allow_pickle)
    if type(kinds) is not list or not all(map(_is_kind, kinds)):
        raise CorruptCheckpoint(
            error_text(
                f"{what} is malformed",
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
        paths: Path of each value; and depth and empty copy of each OrderedDict and defaultdict that contains the value.
            The depth is the length of the dict's path.

    Raises:
        ValueError: A dict's depth is not less than the length of its value's path.

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
