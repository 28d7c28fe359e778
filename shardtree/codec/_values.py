"""Nodes of plain values: numbers, strings, ranges, dtypes, devices and paths; and of their containers."""

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
from ._nodes import Blob, Child, Decoder, Encoder, Node, Take, exactly, step_of

_PATHS: dict[str, type[PurePath]] = {
    kind.__name__: kind for kind in (PurePosixPath, PureWindowsPath, PosixPath, WindowsPath)
}


def _itself(value: Any, child: Child) -> Node:
    return value


def _encode_int(value: int, child: Child) -> Node:
    # Many JSON readers support 64 bits only; and parsing long decimal numbers takes quadratic time, hexadecimal
    # doesn't.
    return value if -(2**63) <= value < 2**63 else {"$": "int", "hex": f"{value:x}"}


def _decode_int(fields: dict[str, Any], child: Child, take: Take) -> int:
    if not re.fullmatch(r"-?[0-9a-f]+", exactly(str, fields["hex"])):
        raise ValueError("not a hexadecimal number")
    return int(fields["hex"], 16)


def _encode_float(value: float, child: Child) -> Node:
    # JSON has no infinities and NaNs, and the bits keep a NaN's payload.
    return value if math.isfinite(value) else {"$": "float", "bits": struct.pack(">d", value).hex()}


def _decode_float(fields: dict[str, Any], child: Child, take: Take) -> float:
    (value,) = _doubles(fields["bits"], 1)
    return value


def _encode_complex(value: complex, child: Child) -> Node:
    return {"$": "complex", "bits": struct.pack(">dd", value.real, value.imag).hex()}


def _decode_complex(fields: dict[str, Any], child: Child, take: Take) -> complex:
    return complex(*_doubles(fields["bits"], 2))


def _doubles(bits: Any, count: int) -> tuple[float, ...]:
    data = _unhex(bits)
    if len(data) != 8 * count:
        raise ValueError(f"{len(data)} bytes, where {8 * count} make {count} floats")
    return struct.unpack(f">{count}d", data)


def _encode_str(value: str, child: Child) -> Node:
    return value if is_unicode(value) else {"$": "str", "hex": value.encode("utf-8", "surrogatepass").hex()}


def _decode_str(fields: dict[str, Any], child: Child, take: Take) -> str:
    return _unhex(fields["hex"]).decode("utf-8", "surrogatepass")


def is_unicode(text: str) -> bool:
    """Return whether a string has no lone surrogates; two of them in a row could become one character in JSON.

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


def _encode_range(value: range, child: Child) -> Node:
    return {"$": "range", "start": child(value.start), "stop": child(value.stop), "step": child(value.step)}


def _decode_range(fields: dict[str, Any], child: Child, take: Take) -> range:
    return range(*(exactly(int, child(fields[name])) for name in ("start", "stop", "step")))


def _encode_slice(value: slice, child: Child) -> Node:
    return {"$": "slice", "start": child(value.start), "stop": child(value.stop), "step": child(value.step)}


def _decode_slice(fields: dict[str, Any], child: Child, take: Take) -> slice:
    return slice(*(child(fields[name]) for name in ("start", "stop", "step")))


def _encode_dtype(value: torch.dtype, child: Child) -> Node:
    return {"$": "torch.dtype", "name": dtype_name(value)}


def _decode_dtype(fields: dict[str, Any], child: Child, take: Take) -> torch.dtype:
    return dtype_from_name(exactly(str, fields["name"]))


def _encode_device(value: torch.device, child: Child) -> Node:
    return {"$": "torch.device", "name": str(value)}


def _decode_device(fields: dict[str, Any], child: Child, take: Take) -> torch.device:
    return device_of(exactly(str, fields["name"]))


def device_of(name: str) -> torch.device:
    """Return the device of an untrusted name.

    Raises:
        ValueError: it isn't the name of a device.

    Examples:
        >>> device_of("cuda:1")
        device(type='cuda', index=1)
    """
    if not re.fullmatch(r"[a-z]{1,20}(:[0-9]{1,3})?", name):
        raise ValueError("not a device")
    return torch.device(name)


def _encode_size(value: torch.Size, child: Child) -> Node:
    return {"$": "torch.Size", "lengths": [child(length) for length in value]}


def _decode_size(fields: dict[str, Any], child: Child, take: Take) -> torch.Size:
    return torch.Size([exactly(int, child(length)) for length in exactly(list, fields["lengths"])])


def _encode_path(value: PurePath, child: Child) -> Node:
    return {"$": "path", "type": type(value).__name__, "text": child(str(value))}


def _decode_path(fields: dict[str, Any], child: Child, take: Take) -> PurePath:
    kind = _PATHS[exactly(str, fields["type"])]
    if issubclass(kind, Path) and kind is not type(Path()):  # a path of another platform can't be made
        kind = PurePosixPath if issubclass(kind, PurePosixPath) else PureWindowsPath
    return kind(exactly(str, child(fields["text"])))


# Containers: lists, tuples, sets, dicts and similar ones

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


def _encode_named(value: dict[Any, Any], child: Child) -> Node:
    return {"$": type(value).__name__, "items": _encode_pairs(value, child)}


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


def _decode_counter(fields: dict[str, Any], child: Child, take: Take) -> Counter[Any]:
    return _fill(Counter(), fields, child)


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
    type(None): _itself,
    bool: _itself,
    int: _encode_int,
    float: _encode_float,
    complex: _encode_complex,
    str: _encode_str,
    range: _encode_range,
    slice: _encode_slice,
    torch.dtype: _encode_dtype,
    torch.device: _encode_device,
    torch.Size: _encode_size,
    **dict.fromkeys(_PATHS.values(), _encode_path),
    list: _encode_items,
    tuple: _encode_tuple,
    deque: _encode_deque,
    set: _encode_set,
    frozenset: _encode_set,
    dict: _encode_dict,
    OrderedDict: _encode_named,
    Counter: _encode_named,
    defaultdict: _encode_defaultdict,
    Namespace: _encode_namespace,
}

DECODERS: dict[str, Decoder] = {
    "int": (("hex",), _decode_int),
    "float": (("bits",), _decode_float),
    "complex": (("bits",), _decode_complex),
    "str": (("hex",), _decode_str),
    "range": (("start", "stop", "step"), _decode_range),
    "slice": (("start", "stop", "step"), _decode_slice),
    "torch.dtype": (("name",), _decode_dtype),
    "torch.device": (("name",), _decode_device),
    "torch.Size": (("lengths",), _decode_size),
    "path": (("type", "text"), _decode_path),
    "tuple": (("items",), _decode_tuple),
    "deque": (("maxlen", "items"), _decode_deque),
    "set": (("items",), _decode_set_of(set)),
    "frozenset": (("items",), _decode_set_of(frozenset)),
    "dict": (("items",), _decode_dict),
    "OrderedDict": (("items",), _decode_ordered),
    "Counter": (("items",), _decode_counter),
    "defaultdict": (("factory", "items"), _decode_defaultdict),
    "argparse.Namespace": (("fields",), _decode_namespace),
}
