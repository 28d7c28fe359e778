"""NumPy's arrays, scalars and dtypes, as its pickles describe them; of numbers, dates and text only."""

from __future__ import annotations

import re
from math import prod
from sys import byteorder
from typing import Any

import numpy as np

from .._arrays import has_wrong_characters
from .._nodes import exactly
from ..pickles import Constructor

_NAME = re.compile(r"[biufcSU][0-9]{1,9}|[mM]8")
_UTF32 = {"<": "utf-32-le", ">": "utf-32-be", "=": f"utf-32-{byteorder[0]}e"}
_UNIT = re.compile(r"generic|[A-Za-z]{1,2}")


def _dtype(name: Any, align: Any = False, copy: Any = True) -> np.dtype[Any]:
    if not _NAME.fullmatch(exactly(str, name)):
        raise ValueError(f"a NumPy dtype {name[:100]!r}, which isn't of numbers, dates or text")
    # A new object each time, so that the order of its bytes can be set.
    return _checked(np.dtype(name, False, True))


def _set_order(dtype: np.dtype[Any], state: Any) -> None:
    version, order, subdtype, names, fields, size = exactly(tuple, state)[:6]
    if version not in (3, 4) or order not in ("<", ">", "|", "=") or size not in (-1, dtype.itemsize):
        raise ValueError("a NumPy dtype that contradicts itself")
    if subdtype is not None or names is not None or fields is not None:
        raise ValueError("a NumPy dtype of records")
    # Nothing of the file's but the order: wrong flags make NumPy follow bytes as if they were pointers.
    kept = (dtype.itemsize, dtype.alignment, dtype.flags) if dtype.kind in "SU" else (-1, -1, 0)
    if dtype.kind in "mM":
        _set_state(dtype, (4, order, None, None, None, *kept, _unit(state)))
    else:
        _set_state(dtype, (3, order, None, None, None, *kept))


def _set_state(value: Any, state: tuple[Any, ...]) -> None:
    value.__setstate__(state)


def _unit(state: Any) -> Any:
    """Return the unit of a date's dtype, in the form that its state has."""
    if len(state) < 9:
        return ({}, ("generic", 1, 1, 1))
    _, (unit, *numbers) = exactly(tuple, state[8])
    name = unit.decode("ascii") if type(unit) is bytes else exactly(str, unit)
    if not _UNIT.fullmatch(name) or len(numbers) != 3 or not all(0 < exactly(int, n) < 2**31 for n in numbers):
        raise ValueError("a NumPy dtype of an unknown unit")
    return ({}, (name, *numbers))


def _checked(dtype: Any) -> np.dtype[Any]:
    if not isinstance(dtype, np.dtype) or dtype.kind not in "biufcSUmM" or dtype.names:
        raise ValueError("an array or scalar that isn't of numbers, dates or text")
    return dtype


def _raw(data: Any) -> bytes:
    """Return an array's bytes, which Python 2 called text."""
    return data.encode("utf-8") if type(data) is str else bytes(exactly(bytes, data))


def _reconstruct(kind: Any, shape: Any, code: Any) -> np.ndarray[Any, Any]:
    if kind is not _NDARRAY:
        raise TypeError("a subclass of NumPy's array")
    return np.empty(0, np.int8)


def _fill(array: np.ndarray[Any, Any], state: Any) -> None:
    shape, dtype, by_column, data = exactly(tuple, state)[-4:]
    made = _array(_raw(data), dtype, shape)
    if type(by_column) is not bool:
        raise TypeError("an array of no order")
    _set_state(array, (1, made.shape, made.dtype, by_column, made.tobytes()))


def _array(data: bytes | bytearray, dtype: Any, shape: Any) -> np.ndarray[Any, Any]:
    """Return the new array of these bytes, row-major."""
    lengths = tuple(exactly(int, length) for length in exactly(tuple, shape))
    if min(lengths, default=0) < 0 or prod(lengths) * _checked(dtype).itemsize != len(data):
        raise ValueError(f"an array of shape {lengths}"[:200] + f" made from {len(data)} bytes")
    if dtype.itemsize == 0:
        raise ValueError("an array of nothing")
    array = np.empty(lengths, dtype)
    array.reshape(-1).view(np.uint8)[:] = np.frombuffer(data, np.uint8)
    if has_wrong_characters(array):
        raise ValueError("a character that Unicode doesn't have")
    return array


def _scalar(dtype: Any, data: Any) -> Any:
    raw = _raw(data)
    if _checked(dtype).itemsize != len(raw):
        raise ValueError(f"a scalar of {len(raw)} bytes, {dtype.itemsize} make one")
    # Text keeps its trailing zeros, which an array would drop.
    if dtype.kind == "S":
        return np.bytes_(raw)
    return np.str_(raw.decode(_UTF32[dtype.byteorder])) if dtype.kind == "U" else _array(raw, dtype, ())[()]


def _frombuffer(data: Any, dtype: Any, shape: Any, order: Any, axes: Any = None) -> np.ndarray[Any, Any]:
    if type(data) not in (bytes, bytearray) or order not in ("C", "F", "K"):
        raise TypeError("an array that isn't made from bytes")
    lengths = exactly(tuple, shape)
    array = _array(data, dtype, lengths)
    if order == "F":
        return array.reshape(-1).reshape(lengths, order="F")
    return array.transpose(*exactly(tuple, axes)) if order == "K" and axes is not None else array


def _uncalled(*args: Any) -> Any:
    raise TypeError("a call of NumPy's array class")


_NDARRAY = Constructor(_uncalled)
_DTYPE = Constructor(_dtype, _set_order)
_RECONSTRUCT = Constructor(_reconstruct, _fill)

NUMPY: dict[tuple[str, str], Constructor] = {
    ("numpy", "ndarray"): _NDARRAY,
    ("numpy", "dtype"): _DTYPE,
    **{
        (f"numpy.{core}.{module}", name): constructor
        for core in ("core", "_core")
        for module, name, constructor in (
            ("multiarray", "_reconstruct", _RECONSTRUCT),
            ("multiarray", "scalar", Constructor(_scalar)),
            ("numeric", "_frombuffer", Constructor(_frombuffer)),
        )
    },
}
