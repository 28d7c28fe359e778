"""Nodes of containers: lists, tuples, sets, dicts and similar ones."""

from __future__ import annotations

import json
from argparse import Namespace
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Hashable, Iterable
from typing import Any, TypeVar

from ._nodes import Blob, Child, Decoder, Encoder, Node, Take, exactly, step_of
from ._scalars import is_unicode

# Guard against hash collisions: hashes of numbers, and of tuples of them, are predictable, so that a file can choose
# keys that all collide.

_COLLISIONS = 1_000


def check_collisions(keys: Iterable[Hashable]) -> None:
    """Raise ValueError if so many different keys have the same hash that each look-up becomes a search.

    Examples:
        >>> check_collisions([1, 1.5, (2, "a")])
        >>> check_collisions(number * (2**61 - 1) for number in range(2000))
        Traceback (most recent call last):
        ...
        ValueError: too many different keys have the same hash
    """
    first: dict[int, Hashable] = {}
    collisions = 0
    for key in keys:
        known = first.setdefault(hash(key), key)
        if known is not key and known != key:
            collisions += 1
            if collisions > _COLLISIONS:
                raise ValueError("too many different keys have the same hash")


A = TypeVar("A", set[Any], frozenset[Any])
D = TypeVar("D", bound=dict[Any, Any])

_BUILTINS = (bool, int, float, complex, str, bytes, bytearray, list, tuple, set, frozenset, dict)
_FACTORIES: dict[str | None, type | None] = {None: None, **{kind.__name__: kind for kind in _BUILTINS}}


def _encode_items(items: Iterable[Any], child: Child) -> list[Node]:
    return [child(item, position) for position, item in enumerate(items)]


def _decode_items(fields: dict[str, Any], child: Child) -> list[Any]:
    return _encode_items(exactly(list, fields["items"]), child)


def _encode_tuple(value: tuple[Any, ...], child: Child) -> Node:
    return {"$": "tuple", "items": _encode_items(value, child)}


def _decode_tuple(fields: dict[str, Any], child: Child, take: Take) -> tuple[Any, ...]:
    return tuple(_decode_items(fields, child))


def _encode_deque(value: deque[Any], child: Child) -> Node:
    return {"$": "deque", "maxlen": value.maxlen, "items": _encode_items(value, child)}


def _decode_deque(fields: dict[str, Any], child: Child, take: Take) -> deque[Any]:
    items, limit = _decode_items(fields, child), fields["maxlen"]
    if limit is not None and exactly(int, limit) < len(items):
        raise ValueError(f"{len(items)} items in a deque of at most {limit}")
    return deque(items, limit)


def _encode_set(value: set[Any] | frozenset[Any], child: Child) -> Node:
    # Sorted: a set's order differs from process to process, and ranks compare their common states by hash.
    items = sorted((child(item) for item in value), key=_text)
    return {"$": type(value).__name__, "items": items}


def _text(node: Node) -> str:
    return json.dumps(node, default=_blob_text)


def _blob_text(blob: Blob) -> str:
    return bytes(memoryview(blob.data)).hex()


def _decode_set_of(kind: type[A]) -> Callable[[dict[str, Any], Child, Take], A]:
    def decode(fields: dict[str, Any], child: Child, take: Take) -> A:
        items = [child(item) for item in exactly(list, fields["items"])]
        check_collisions(items)
        value = kind(items)
        if len(value) != len(items):
            raise ValueError("an item occurs twice in a set")
        return value

    return decode


def _encode_dict(value: dict[Any, Any], child: Child) -> Node:
    if "$" not in value and all(type(key) is str and is_unicode(key) for key in value):
        return {key: child(item, step_of(key)) for key, item in value.items()}
    return {"$": "dict", "items": _encode_pairs(value, child)}


def _encode_ordered(value: OrderedDict[Any, Any], child: Child) -> Node:
    return {"$": "OrderedDict", "items": _encode_pairs(value, child)}


def _encode_defaultdict(value: defaultdict[Any, Any], child: Child) -> Node:
    factory = value.default_factory
    if factory is not None and factory not in _BUILTINS:
        return NotImplemented
    name = factory.__name__ if isinstance(factory, type) else None
    return {"$": "defaultdict", "factory": name, "items": _encode_pairs(value, child)}


def _encode_pairs(value: dict[Any, Any], child: Child) -> list[Node]:
    return [[child(key), child(item, step_of(key))] for key, item in value.items()]


def _fill(value: D, fields: dict[str, Any], child: Child) -> D:
    """Fill the empty dict `value` with a node's items, and return it."""
    pairs = [_pair(*exactly(list, pair)) for pair in exactly(list, fields["items"])]
    keys = [child(key) for key, _ in pairs]
    check_collisions(keys)
    for key, (_, item) in zip(keys, pairs, strict=True):
        value[key] = child(item, step_of(key))
    if len(value) != len(pairs):
        raise ValueError("a key occurs twice in a dict")
    return value


def _pair(key: Node, item: Node) -> tuple[Node, Node]:
    return key, item


def _decode_dict(fields: dict[str, Any], child: Child, take: Take) -> dict[Any, Any]:
    return _fill({}, fields, child)


def _decode_ordered(fields: dict[str, Any], child: Child, take: Take) -> OrderedDict[Any, Any]:
    return _fill(OrderedDict(), fields, child)


def _decode_defaultdict(fields: dict[str, Any], child: Child, take: Take) -> defaultdict[Any, Any]:
    return _fill(defaultdict(_FACTORIES[fields["factory"]]), fields, child)


def _encode_namespace(value: Namespace, child: Child) -> Node:
    return {"$": "argparse.Namespace", "fields": child(vars(value))}


def _decode_namespace(fields: dict[str, Any], child: Child, take: Take) -> Namespace:
    value = Namespace()
    vars(value).update(decode_fields(fields["fields"], child))  # not as keyword arguments: a name may be "self"
    return value


def decode_fields(node: Node, child: Child) -> dict[str, Any]:
    """Decode the fields of an object, whose names must be strings.

    Raises:
        TypeError: they aren't; `decode_tree` adds where.

    Examples:
        >>> decode_fields({"lr": 0.1}, lambda node: node)
        {'lr': 0.1}
    """
    fields = exactly(dict, child(node))
    return {exactly(str, name): value for name, value in fields.items()}


ENCODERS: dict[type, Encoder] = {
    list: _encode_items,
    tuple: _encode_tuple,
    deque: _encode_deque,
    set: _encode_set,
    frozenset: _encode_set,
    dict: _encode_dict,
    OrderedDict: _encode_ordered,
    defaultdict: _encode_defaultdict,
    Namespace: _encode_namespace,
}

DECODERS: dict[str, Decoder] = {
    "tuple": (("items",), _decode_tuple),
    "deque": (("maxlen", "items"), _decode_deque),
    "set": (("items",), _decode_set_of(set)),
    "frozenset": (("items",), _decode_set_of(frozenset)),
    "dict": (("items",), _decode_dict),
    "OrderedDict": (("items",), _decode_ordered),
    "defaultdict": (("factory", "items"), _decode_defaultdict),
    "argparse.Namespace": (("fields",), _decode_namespace),
}
