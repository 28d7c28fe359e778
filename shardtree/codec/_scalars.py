"""Nodes of numbers, strings, ranges, dtypes, devices and paths."""

from __future__ import annotations

import math
import re
import struct
from pathlib import Path, PosixPath, PurePath, PurePosixPath, PureWindowsPath, WindowsPath
from typing import Any

import torch

from ._dtypes import dtype_from_name, dtype_name
from ._nodes import Child, Decoder, Encoder, Node, Take, exactly

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
}
