"""Encoders and decoders of plain values (numbers, strings, ranges, dtypes, devices, paths) and of containers."""

from __future__ import annotations

import json
import math
import re
import struct
from argparse import Namespace
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Hashable, Iterable
from pathlib import Path, PosixPath, PurePath, PurePosixPath, PureWindowsPath, WindowsPath
from typing import Any, TypeVar

import torch

from ._dtypes import dtype_from_name, dtype_name
from ._nodes import Child, Decoder, Encoder, Node, Take, exactly

_BOUNDS = ("start", "stop", "step")

_PATHS: dict[str, type[PurePath]] = {
    kind.__name__: kind for kind in (PurePosixPath, PureWindowsPath, PosixPath, WindowsPath)
}


def _itself(value: Any, child: Child) -> Node:
    return value


def _encode_int(value: int, child: Child) -> Node:
    # Many JSON readers support only 64 bits; and long decimal numbers take quadratic time to parse, unlike hexadecimal
    # ones.
    return value if -(2**63) <= value < 2**63 else {"$": "int", "hex": f"{value:x}"}


def _decode_int(fields: dict[str, Any], child: Child, take: Take) -> int:
    if not re.fullmatch(r"-?[0-9a-f]+", exactly(str, fields["hex"])):
        raise ValueError("not a hexadecimal number")
    return int(fields["hex"], 16)


def _encode_float(value: float, child: Child) -> Node:
    # JSON has no infinities and NaNs, and the bits keep a NaN's payload.
    return value if math.isfinite(value) else {"$": "float", "bits": struct.pack(">d", value).hex()}


def _doubles(bits: Any, count: int) -> tuple[float, ...]:
    data = _unhex(bits)
    if len(data) != 8 * count:
        raise ValueError(f"found {len(data)} bytes of floats, expected {8 * count}")
    return struct.unpack(f">{count}d", data)


def _encode_str(value: str, child: Child) -> Node:
    return value if is_unicode(value) else {"$": "str", "hex": value.encode("utf-8", "surrogatepass").hex()}


def is_unicode(text: str) -> bool:
    """Return whether a string is valid Unicode, without lone surrogates.

    Other strings are stored in hexadecimal, since a JSON reader could join two lone surrogates into one character.

    Examples:
        >>> is_unicode("π"), is_unicode(chr(0xD800))
        (True, False)
    """
    try:
        return text.isascii() or bool(text.encode("utf-8"))
    except UnicodeEncodeError:
        return False


def _unhex(text: Any) -> bytes:
    return bytes.fromhex(exactly(str, text))


def _encode_bounds(value: range | slice, child: Child) -> Node:
    return {"$": type(value).__name__, **{name: child(getattr(value, name)) for name in _BOUNDS}}


def device_of(name: str) -> torch.device:
    """Return the torch device of this name, which may come from an untrusted file.

    Raises:
        ValueError: The text doesn't have the form of a device's name.
        RuntimeError: torch knows no such device.

    Examples:
        >>> device_of("cuda:1")
        device(type='cuda', index=1)
    """
    if not re.fullmatch(r"[a-z]{1,20}(:[0-9]{1,3})?", name):
        raise ValueError("not the name of a device")
    return torch.device(name)


def path_of(kind: type[PurePath], *segments: Any) -> PurePath:
    """Return a path of the given class, made of its segments.

    The class of another platform, which can't be instantiated on this one, is replaced by its pure class.

    Raises:
        TypeError: A segment isn't a string.

    Examples:
        >>> path_of(WindowsPath, "runs", "step_10")
        PureWindowsPath('runs/step_10')
    """
    if issubclass(kind, Path) and kind is not type(Path()):
        kind = PurePosixPath if issubclass(kind, PurePosixPath) else PureWindowsPath
    return kind(*(exactly(str, segment) for segment in segments))


# Containers: lists, tuples, sets, dicts and similar ones

# The limit guards against hash collisions: hashes of numbers, and of tuples of them, are predictable, so that a file
# can choose keys that all collide.

_COLLISIONS = 1_000


def check_collisions(keys: Iterable[Hashable]) -> None:
    """Raise ValueError if over 1,000 keys have the same hash as another, different key: look-ups would be slow.

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
        other = first.setdefault(hash(key), key)
        if other is not key and other != key:
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


def _decode_deque(fields: dict[str, Any], child: Child, take: Take) -> deque[Any]:
    items, limit = _decode_items(fields, child), fields["maxlen"]
    if limit is not None and exactly(int, limit) < len(items):
        raise ValueError(f"{len(items)} items in a deque of at most {limit}")
    return deque(items, limit)


def _encode_set(value: set[Any] | frozenset[Any], child: Child) -> Node:
    # Items are sorted, since a set's order differs between processes, and ranks compare common states by hash.
    items = sorted((child(item) for item in value), key=_text)
    return {"$": type(value).__name__, "items": items}


def _text(node: Node) -> str:
    return json.dumps(node, default=lambda blob: bytes(memoryview(blob.data)).hex())


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
        return {key: child(item, key) for key, item in value.items()}
    return {"$": "dict", "items": _encode_pairs(value, child)}


def _encode_by_name(value: dict[Any, Any], child: Child) -> Node:
    return {"$": type(value).__name__, "items": _encode_pairs(value, child)}


def _encode_defaultdict(value: defaultdict[Any, Any], child: Child) -> Node:
    factory = value.default_factory
    if factory is not None and factory not in _BUILTINS:
        return NotImplemented
    name = factory.__name__ if isinstance(factory, type) else None
    return {"$": "defaultdict", "factory": name, "items": _encode_pairs(value, child)}


def _encode_pairs(value: dict[Any, Any], child: Child) -> list[Node]:
    return [[child(key), child(item, key)] for key, item in value.items()]


def _fill(value: D, fields: dict[str, Any], child: Child) -> D:
    """Fill the empty dict `value` with the decoded items of a node, and return it."""
    pairs = [_pair(*exactly(list, pair)) for pair in exactly(list, fields["items"])]
    keys = [child(key) for key, _ in pairs]
    check_collisions(keys)
    for key, (_, item) in zip(keys, pairs, strict=True):
        value[key] = child(item, key)
    if len(value) != len(pairs):
        raise ValueError("a key occurs twice in a dict")
    return value


def _pair(key: Node, item: Node) -> tuple[Node, Node]:
    return key, item


def _decode_namespace(fields: dict[str, Any], child: Child, take: Take) -> Namespace:
    value = Namespace()
    vars(value).update(decode_fields(fields["fields"], child))  # no keyword arguments, since a name may be "self"
    return value


def decode_fields(node: Node, child: Child) -> dict[str, Any]:
    """Decode a node to a dict of an object's fields; their names must be strings.

    Raises:
        TypeError: A name isn't a string; `decode_tree` adds the path.

    Examples:
        >>> decode_fields({"lr": 0.1}, lambda node: node)
        {'lr': 0.1}
    """
    fields = exactly(dict, child(node))
    return {exactly(str, name): value for name, value in fields.items()}


ENCODERS: dict[type, Encoder] = {
    type(None): _itself,
    bool: _itself,
    int: _encode_int,
    float: _encode_float,
    complex: lambda value, child: {"$": "complex", "bits": struct.pack(">dd", value.real, value.imag).hex()},
    str: _encode_str,
    range: _encode_bounds,
    slice: _encode_bounds,
    torch.dtype: lambda value, child: {"$": "torch.dtype", "name": dtype_name(value)},
    torch.device: lambda value, child: {"$": "torch.device", "name": str(value)},
    torch.Size: lambda value, child: {"$": "torch.Size", "lengths": [child(length) for length in value]},
    **dict.fromkeys(
        _PATHS.values(), lambda value, child: {"$": "path", "type": type(value).__name__, "text": child(str(value))}
    ),
    list: _encode_items,
    tuple: lambda value, child: {"$": "tuple", "items": _encode_items(value, child)},
    deque: lambda value, child: {"$": "deque", "maxlen": value.maxlen, "items": _encode_items(value, child)},
    set: _encode_set,
    frozenset: _encode_set,
    dict: _encode_dict,
    OrderedDict: _encode_by_name,
    Counter: _encode_by_name,
    defaultdict: _encode_defaultdict,
    Namespace: lambda value, child: {"$": "argparse.Namespace", "fields": child(vars(value))},
}

DECODERS: dict[str, Decoder] = {
    "int": (("hex",), _decode_int),
    "float": (("bits",), lambda fields, child, take: _doubles(fields["bits"], 1)[0]),
    "complex": (("bits",), lambda fields, child, take: complex(*_doubles(fields["bits"], 2))),
    "str": (("hex",), lambda fields, child, take: _unhex(fields["hex"]).decode("utf-8", "surrogatepass")),
    "range": (_BOUNDS, lambda fields, child, take: range(*(exactly(int, child(fields[name])) for name in _BOUNDS))),
    "slice": (_BOUNDS, lambda fields, child, take: slice(*(child(fields[name]) for name in _BOUNDS))),
    "torch.dtype": (("name",), lambda fields, child, take: dtype_from_name(exactly(str, fields["name"]))),
    "torch.device": (("name",), lambda fields, child, take: device_of(exactly(str, fields["name"]))),
    "torch.Size": (
        ("lengths",),
        lambda fields, child, take: torch.Size(
            [exactly(int, child(each)) for each in exactly(list, fields["lengths"])]
        ),
    ),
    "path": (
        ("type", "text"),
        lambda fields, child, take: path_of(_PATHS[exactly(str, fields["type"])], child(fields["text"])),
    ),
    "tuple": (("items",), lambda fields, child, take: tuple(_decode_items(fields, child))),
    "deque": (("maxlen", "items"), _decode_deque),
    "set": (("items",), _decode_set_of(set)),
    "frozenset": (("items",), _decode_set_of(frozenset)),
    "dict": (("items",), lambda fields, child, take: _fill({}, fields, child)),
    "OrderedDict": (("items",), lambda fields, child, take: _fill(OrderedDict(), fields, child)),
    "Counter": (("items",), lambda fields, child, take: _fill(Counter(), fields, child)),
    "defaultdict": (
        ("factory", "items"),
        lambda fields, child, take: _fill(defaultdict(_FACTORIES[fields["factory"]]), fields, child),
    ),
    "argparse.Namespace": (("fields",), _decode_namespace),
}
