"""Encoding of tensors, NumPy arrays and scalars, bytes and buffers as JSON nodes with entries of bytes, and back.

A value whose dtype safetensors supports becomes an entry of that dtype and shape, which other readers understand too.
Other values become entries of plain bytes, with dtype and shape in the node.
"""

from __future__ import annotations

import re
from io import BytesIO
from typing import Any

import numpy as np
import torch

from ._dtypes import (
    dtype_from_name,
    dtype_from_tag,
    dtype_name,
    format_tag,
    is_dense,
    is_quantised,
    is_tagged,
    row_major_bits,
)
from ._header import MAX_INT, element_count
from ._nodes import Blob, Child, Decoder, Encoder, Node, Take, exactly, plain_blob

_NUMPY_TAGS = {
    "|b1": "BOOL",
    "|u1": "U8",
    "|i1": "I8",
    "<u2": "U16",
    "<i2": "I16",
    "<u4": "U32",
    "<i4": "I32",
    "<u8": "U64",
    "<i8": "I64",
    "<f2": "F16",
    "<f4": "F32",
    "<f8": "F64",
    "<c8": "C64",
}
_NUMPY_BY_TAG = {tag: name for name, tag in _NUMPY_TAGS.items()}
_NUMPY_NAME = re.compile(r"\|[biuS][0-9]{1,9}|[<>][iufcU][0-9]{1,9}|[<>][mM]8(\[[0-9]{0,9}[A-Za-z]{1,2}\])?")
_NUMPY_SCALARS = [np.dtype(character).type for character in "?bBhHiIlLqQefdgFDGmM"]


def _encode_tensor(value: torch.Tensor, child: Child) -> Node:
    if not is_dense(value):
        return NotImplemented
    bits = row_major_bits(value).numpy()
    if is_tagged(value.dtype):
        return {"$": "tensor", "entry": Blob(bits, format_tag(value.dtype), tuple(value.shape), value.itemsize)}
    entry = Blob(bits, "U8", (len(bits),), value.itemsize)
    return {"$": "tensor of bytes", "dtype": dtype_name(value.dtype), "shape": list(value.shape), "entry": entry}


def _decode_tensor(fields: dict[str, Any], child: Child, take: Take) -> torch.Tensor:
    tag, shape, data = take(fields["entry"])
    return _tensor(dtype_from_tag(tag), shape, data)


def _decode_tensor_of_bytes(fields: dict[str, Any], child: Child, take: Take) -> torch.Tensor:
    dtype, shape = dtype_from_name(exactly(str, fields["dtype"])), _shape(fields)
    if is_quantised(dtype):
        raise ValueError("the dtype is quantised")
    return _tensor(dtype, shape, _take_bytes(fields, take, element_count(shape) * dtype.itemsize))


def _tensor(dtype: torch.dtype, shape: tuple[int, ...], data: memoryview) -> torch.Tensor:
    """Return a new tensor with a copy of the bytes."""
    bits = torch.empty(len(data), dtype=torch.uint8, device="cpu")
    bits.numpy()[:] = np.asarray(data)
    return bits.view(dtype).reshape(shape)


def is_plain_array(value: np.ndarray[Any, Any]) -> bool:
    """Return whether an array's items are numbers, dates or text of a positive size.

    Examples:
        >>> is_plain_array(np.zeros(3)), is_plain_array(np.array([{}]))
        (True, False)
    """
    dtype = value.dtype
    return bool(_NUMPY_NAME.fullmatch(dtype.str)) and dtype.itemsize > 0 and not dtype.names


def _encode_array(value: np.ndarray[Any, Any], child: Child) -> Node:
    if not is_plain_array(value):
        return NotImplemented
    name, data = value.dtype.str, value.tobytes()
    if name in _NUMPY_TAGS:
        return {"$": "ndarray", "entry": Blob(data, _NUMPY_TAGS[name], value.shape, value.itemsize)}
    return {"$": "ndarray of bytes", "dtype": name, "shape": list(value.shape), "entry": plain_blob(data)}


def _decode_array(fields: dict[str, Any], child: Child, take: Take) -> np.ndarray[Any, Any]:
    tag, shape, data = take(fields["entry"])
    return _array(np.dtype(_NUMPY_BY_TAG[tag]), shape, data)


def _decode_array_of_bytes(fields: dict[str, Any], child: Child, take: Take) -> np.ndarray[Any, Any]:
    dtype, shape = _numpy_dtype(fields), _shape(fields)
    return _array(dtype, shape, _take_bytes(fields, take, element_count(shape) * dtype.itemsize))


def _array(dtype: np.dtype[Any], shape: tuple[int, ...], data: memoryview) -> np.ndarray[Any, Any]:
    """Return a new array with a copy of the bytes."""
    array = np.empty(shape, dtype)
    array.reshape(-1).view(np.uint8)[:] = np.asarray(data)
    if has_wrong_characters(array):
        raise ValueError("the text has a code point beyond Unicode")
    return array


def has_wrong_characters(array: np.ndarray[Any, Any]) -> bool:
    """Return whether a row-major array of text has a code point beyond Unicode, which no Python string can hold.

    Examples:
        >>> has_wrong_characters(np.array(["a"])), has_wrong_characters(np.array([2**32 - 1], "u4").view("U1"))
        (False, True)
    """
    if array.dtype.kind != "U" or not array.size:
        return False
    return bool(array.reshape(-1).view(array.dtype.str[0] + "u4").max() > 0x10FFFF)


def _encode_scalar(value: np.generic, child: Child) -> Node:
    return {"$": "numpy scalar", "dtype": value.dtype.str, "bits": value.tobytes().hex()}


def _decode_scalar(fields: dict[str, Any], child: Child, take: Take) -> Any:
    (value,) = np.frombuffer(bytes.fromhex(exactly(str, fields["bits"])), _numpy_dtype(fields))
    return value


def _encode_text(value: np.str_ | np.bytes_, child: Child) -> Node:
    # The bits of these strings aren't stored, since reading them as an array would drop trailing zeros.
    return {
        "$": f"numpy.{type(value).__name__}",
        "value": child(str.__str__(value) if isinstance(value, str) else bytes(value)),
    }


def _numpy_dtype(fields: dict[str, Any]) -> np.dtype[Any]:
    name = exactly(str, fields["dtype"])
    # The pattern comes first: NumPy's own parser also accepts objects (pointers), records and old names.
    if not _NUMPY_NAME.fullmatch(name) or np.dtype(name).str != name or np.dtype(name).itemsize == 0:
        raise ValueError("not a NumPy dtype of numbers, dates or text")
    return np.dtype(name)


def _shape(fields: dict[str, Any]) -> tuple[int, ...]:
    return tuple(exactly(int, length) for length in exactly(list, fields["shape"]))


def _encode_buffer(value: BytesIO, child: Child) -> Node:
    if value.closed:
        return NotImplemented
    return {"$": "io.BytesIO", "position": value.tell(), "entry": plain_blob(value.getvalue())}


def _decode_buffer(fields: dict[str, Any], child: Child, take: Take) -> BytesIO:
    if not 0 <= exactly(int, fields["position"]) <= MAX_INT:
        raise ValueError("the position is negative or exceeds 64 bits")
    value = BytesIO(_take_bytes(fields, take))
    value.seek(fields["position"])
    return value


def _take_bytes(fields: dict[str, Any], take: Take, length: int | None = None) -> memoryview:
    tag, shape, data = take(fields["entry"])
    if tag != "U8" or len(shape) != 1 or (length is not None and len(data) != length):
        raise ValueError("the entry is not plain bytes of the expected length")
    return data


ENCODERS: dict[type, Encoder] = {
    torch.Tensor: _encode_tensor,
    torch.nn.Parameter: _encode_tensor,
    np.ndarray: _encode_array,
    **dict.fromkeys(_NUMPY_SCALARS, _encode_scalar),
    np.str_: _encode_text,
    np.bytes_: _encode_text,
    **dict.fromkeys((bytes, bytearray), lambda value, child: {"$": type(value).__name__, "entry": plain_blob(value)}),
    BytesIO: _encode_buffer,
}

DECODERS: dict[str, Decoder] = {
    "tensor": (("entry",), _decode_tensor),
    "tensor of bytes": (("dtype", "shape", "entry"), _decode_tensor_of_bytes),
    "ndarray": (("entry",), _decode_array),
    "ndarray of bytes": (("dtype", "shape", "entry"), _decode_array_of_bytes),
    "numpy scalar": (("dtype", "bits"), _decode_scalar),
    "numpy.str_": (("value",), lambda fields, child, take: np.str_(exactly(str, child(fields["value"])))),
    "numpy.bytes_": (("value",), lambda fields, child, take: np.bytes_(exactly(bytes, child(fields["value"])))),
    "bytes": (("entry",), lambda fields, child, take: bytes(_take_bytes(fields, take))),
    "bytearray": (("entry",), lambda fields, child, take: bytearray(_take_bytes(fields, take))),
    "io.BytesIO": (("position", "entry"), _decode_buffer),
}
