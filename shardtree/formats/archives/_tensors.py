"""Constructors for the tensors and NumPy arrays in torch.save's pickles."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from sys import byteorder
from typing import Any, TypeVar

import numpy as np
import torch

from ...kit import exactly, has_wrong_characters, is_quantised
from ..pickles import Constructor

# Tensors: a storage, an offset, a shape and strides.

# Guard: strides of 0 make a tensor of any size from a few bytes, and whatever copies it later needs memory for all.
MOST_EXPANDED_BYTES = 1 << 30
"""The most bytes that a tensor larger than its storage, such as an expanded one, may have."""


@dataclass(frozen=True, slots=True)
class StorageKind:
    """A storage class, represented by the dtype of its elements; None if each tensor names its own."""

    dtype: torch.dtype | None


@dataclass(frozen=True, slots=True, eq=False)
class StoredStorage:
    """A storage.

    Attributes:
        bits: uint8 (bytes,).
        dtype: Dtype of its elements, None if each tensor names its own.
    """

    bits: torch.Tensor
    dtype: torch.dtype | None


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """Where a tensor's elements are in a storage.

    Attributes:
        dtype: Dtype of the elements.
        offset: elements before the first one.
        shape: lengths.
        stride: elements from one to the next, by axis.
    """

    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StorageReference:
    """A persistent id, which describes a storage.

    Attributes:
        key: Key of the storage, whose record is ``data/<key>``.
        dtype: Dtype of its elements, None if each tensor names its own.
        nbytes: Length in bytes.
    """

    key: str
    dtype: torch.dtype | None
    nbytes: int


def storage_reference(persistent_id: Any) -> StorageReference:
    """Decode a persistent id.

    Raises:
        ValueError: it isn't a storage's.
    """
    if type(persistent_id) is not tuple or len(persistent_id) < 5 or persistent_id[0] != "storage":
        raise ValueError("a persistent id that isn't a storage's")
    _, kind, key, _, count = persistent_id[:5]
    if type(kind) is not StorageKind or type(key) is not str or exactly(int, count) < 0:
        raise ValueError("a storage that isn't described as torch does")
    return StorageReference(key, kind.dtype, count * (kind.dtype.itemsize if kind.dtype else 1))


def tensor_layout(storage_dtype: torch.dtype | None, nbytes: int, arguments: tuple[Any, ...]) -> TensorLayout:
    """Return where a tensor's elements are in its storage.

    Args:
        storage_dtype: Dtype of the storage.
        nbytes: Bytes of the storage.
        arguments: offset, shape, strides, and then the dtype if it isn't the storage's.

    Raises:
        ValueError: the tensor doesn't lie inside the storage.
    """
    # Everything is checked here, before torch sees it: as_strided trusts its arguments, and would read other memory.
    offset, shape, stride = exactly(int, arguments[0]), _ints(arguments[1]), _ints(arguments[2])
    dtype = arguments[3] if len(arguments) > 3 else storage_dtype
    if type(dtype) is not torch.dtype or is_quantised(dtype):
        raise ValueError("a tensor without a dtype, or of a quantised one")
    if len(shape) != len(stride) or offset < 0 or min(shape + stride, default=0) < 0 or len(shape) > 64:
        raise ValueError(f"a tensor of shape {shape}, strides {stride} and offset {offset}"[:200])
    # In Python's integers, which don't overflow; the lengths are checked to fit 64 bits below.
    count = 1
    for length in shape:
        count *= length
    last = offset + sum((length - 1) * step for length, step in zip(shape, stride, strict=True)) if count else -1
    if (last + 1) * dtype.itemsize > nbytes:
        raise ValueError(f"a tensor of {(last + 1) * dtype.itemsize} bytes in a storage of {nbytes}")
    if count * dtype.itemsize > max(nbytes, MOST_EXPANDED_BYTES) or max(shape + stride, default=0) >= 2**62:
        raise ValueError("a tensor that is much larger than its storage")
    return TensorLayout(dtype, offset, shape, stride)


def _ints(value: Any) -> tuple[int, ...]:
    if not isinstance(value, (tuple, list)):
        raise TypeError("a shape or strides that aren't a tuple")
    return tuple(exactly(int, item) for item in value)


def _tensor(storage: Any, *arguments: Any) -> torch.Tensor:
    if type(storage) is not StoredStorage:
        raise TypeError("a tensor without a storage")
    place = tensor_layout(storage.dtype, storage.bits.numel(), arguments)
    # Cut to whole elements: a storage may end with part of one, and a view as the dtype would refuse that.
    whole = storage.bits[: storage.bits.numel() // place.dtype.itemsize * place.dtype.itemsize]
    return whole.view(place.dtype).as_strided(place.shape, place.stride, place.offset)


def lazy_bits(dtype: torch.dtype, extra: Any) -> tuple[bool, bool]:
    """Return torch's bits for lazy conjugation and negation.

    Args:
        dtype: Dtype of the tensor.
        extra: the pickle's mapping of them, None for none.

    Raises:
        ValueError: the mapping has something else, or a bit that tensors of this dtype don't have.
    """
    flags = {} if extra is None else exactly(dict, extra)
    if flags.keys() - {"conj", "neg"} or any(type(flag) is not bool for flag in flags.values()):
        raise ValueError("a tensor with unknown metadata")
    conj, neg = flags.get("conj", False), flags.get("neg", False)
    if (conj and not dtype.is_complex) or (neg and not (dtype.is_complex or dtype in _NEGATED)):
        raise ValueError(f"a tensor of {dtype} that is conjugated or negated lazily")
    return conj, neg


_NEGATED = (torch.float16, torch.float32, torch.float64)  # parts of complex numbers


def _with_lazy_bits(tensor: torch.Tensor, extra: Any) -> torch.Tensor:
    """Return the tensor with torch's bits for lazy conjugation and negation set as they were."""
    conj, neg = lazy_bits(tensor.dtype, extra)
    tensor = tensor.conj() if conj else tensor
    return torch._neg_view(tensor) if neg else tensor


T = TypeVar("T")


def rebuilders(
    tensor: Callable[..., T], set_bits: Callable[[T, Any], T], *kinds: type
) -> dict[tuple[str, str], Constructor]:
    """Return the constructors that stand for torch's functions which rebuild tensors.

    Hooks and `requires_grad` are ignored, and a parameter is its tensor.

    Args:
        tensor: called with a storage, an offset, a shape, strides, and the dtype if it isn't the storage's.
        set_bits: called with what `tensor` returned, and torch's bits for lazy conjugation and negation, None for none.
        kinds: Kinds of tensors that parameters may hold.
    """

    def rebuild_v2(storage: Any, offset: Any, shape: Any, stride: Any, grad: Any, hooks: Any, extra: Any = None) -> T:
        return set_bits(tensor(storage, offset, shape, stride), extra)

    def rebuild_v3(
        storage: Any, offset: Any, shape: Any, stride: Any, grad: Any, hooks: Any, dtype: Any, extra: Any = None
    ) -> T:
        return set_bits(tensor(storage, offset, shape, stride, dtype), extra)

    def rebuild_parameter(data: Any, grad: Any, hooks: Any, state: Any = None) -> Any:
        if type(data) not in kinds:
            raise TypeError(f"a parameter that holds a {type(data).__name__}")
        return data

    functions: dict[str, Callable[..., Any]] = {
        "_rebuild_tensor": tensor,
        "_rebuild_tensor_v2": rebuild_v2,
        "_rebuild_tensor_v3": rebuild_v3,
        "_rebuild_parameter": rebuild_parameter,
        "_rebuild_parameter_with_state": rebuild_parameter,
    }
    return {("torch._utils", name): Constructor(function) for name, function in functions.items()}


REBUILDERS = rebuilders(_tensor, _with_lazy_bits, torch.Tensor)

STORAGE_KINDS: dict[tuple[str, str], StorageKind] = {
    ("torch", "DoubleStorage"): StorageKind(torch.float64),
    ("torch", "FloatStorage"): StorageKind(torch.float32),
    ("torch", "HalfStorage"): StorageKind(torch.float16),
    ("torch", "BFloat16Storage"): StorageKind(torch.bfloat16),
    ("torch", "LongStorage"): StorageKind(torch.int64),
    ("torch", "IntStorage"): StorageKind(torch.int32),
    ("torch", "ShortStorage"): StorageKind(torch.int16),
    ("torch", "CharStorage"): StorageKind(torch.int8),
    ("torch", "ByteStorage"): StorageKind(torch.uint8),
    ("torch", "BoolStorage"): StorageKind(torch.bool),
    ("torch", "ComplexDoubleStorage"): StorageKind(torch.complex128),
    ("torch", "ComplexFloatStorage"): StorageKind(torch.complex64),
    ("torch", "QInt8Storage"): StorageKind(torch.qint8),
    ("torch", "QUInt8Storage"): StorageKind(torch.quint8),
    ("torch", "QInt32Storage"): StorageKind(torch.qint32),
    ("torch", "QUInt4x2Storage"): StorageKind(torch.quint4x2),
    ("torch", "QUInt2x4Storage"): StorageKind(torch.quint2x4),
    ("torch", "UntypedStorage"): StorageKind(None),
    ("torch.storage", "UntypedStorage"): StorageKind(None),
    ("torch.storage", "_UntypedStorage"): StorageKind(None),
}

DTYPES: dict[tuple[str, str], torch.dtype] = {
    ("torch", name): value for name, value in vars(torch).items() if isinstance(value, torch.dtype)
}


NO_VALUES: frozenset[type] = frozenset({StorageKind, StoredStorage})
"""Types that are arguments of tensors' constructors only, and never values themselves."""


def loader(data: Callable[[str], memoryview]) -> Callable[[Any], StoredStorage]:
    """Return the function that loads the storage of a persistent id."""
    # Each record is copied once, however often it is named: tensors share memory as they did, and a pickle that names
    # one record a million times takes no more of it.
    tensors: dict[str, torch.Tensor] = {}

    def load(persistent_id: Any) -> StoredStorage:
        reference = storage_reference(persistent_id)
        if reference.key not in tensors:
            content = data(f"data/{reference.key}")
            tensors[reference.key] = torch.empty(len(content), dtype=torch.uint8, device="cpu")
            tensors[reference.key].numpy()[:] = np.asarray(content)
        if reference.nbytes > (size := tensors[reference.key].numel()):
            raise ValueError(f"a storage of {reference.nbytes} bytes, but its record has {size}")
        return StoredStorage(tensors[reference.key], reference.dtype)

    return load


# NumPy's arrays, scalars and dtypes, of numbers, dates and text only.

_NAME = re.compile(r"[biufcSU][0-9]{1,9}|[mM]8")
_UTF32 = {"<": "utf-32-le", ">": "utf-32-be", "=": f"utf-32-{byteorder[0]}e"}
_UNIT = re.compile(r"generic|[A-Za-z]{1,2}")


def _dtype(name: Any, align: Any = False, copy: Any = True) -> np.dtype[Any]:
    if not _NAME.fullmatch(exactly(str, name)):
        raise ValueError(f"a NumPy dtype {name[:100]!r}, which isn't of numbers, dates or text")
    # A copy, whose byte order the pickle may then set: NumPy's own dtype objects are shared by the whole process.
    return _check_dtype(np.dtype(name, False, True))


def _set_order(dtype: np.dtype[Any], state: Any) -> None:
    version, order, subdtype, names, fields, size = exactly(tuple, state)[:6]
    if version not in (3, 4) or order not in ("<", ">", "|", "=") or size not in (-1, dtype.itemsize):
        raise ValueError("a NumPy dtype whose fields contradict each other")
    if subdtype is not None or names is not None or fields is not None:
        raise ValueError("a NumPy dtype of records")
    # Only the byte order is taken from the file: wrong flags would make NumPy use the array's bytes as pointers.
    layout = (dtype.itemsize, dtype.alignment, dtype.flags) if dtype.kind in "SU" else (-1, -1, 0)
    if dtype.kind in "mM":
        _set_state(dtype, (4, order, None, None, None, *layout, _unit(state)))
    else:
        _set_state(dtype, (3, order, None, None, None, *layout))


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


def _check_dtype(dtype: Any) -> np.dtype[Any]:
    if not isinstance(dtype, np.dtype) or dtype.kind not in "biufcSUmM" or dtype.names:
        raise ValueError("an array or scalar that isn't of numbers, dates or text")
    return dtype


def _raw(data: Any) -> bytes:
    """Return an array's bytes, which pickles of Python 2 store as text."""
    return data.encode("utf-8") if type(data) is str else bytes(exactly(bytes, data))


def _reconstruct(kind: Any, shape: Any, code: Any) -> np.ndarray[Any, Any]:
    if kind is not _NDARRAY:
        raise TypeError("a subclass of NumPy's array")
    return np.empty(0, np.int8)


def _fill(array: np.ndarray[Any, Any], state: Any) -> None:
    shape, dtype, by_column, data = exactly(tuple, state)[-4:]
    elements = _array(_raw(data), dtype, shape)
    if type(by_column) is not bool:
        raise TypeError("an array whose order isn't a bool")
    _set_state(array, (1, elements.shape, elements.dtype, by_column, elements.tobytes()))


def _array(data: bytes | bytearray, dtype: Any, shape: Any) -> np.ndarray[Any, Any]:
    """Return a new row-major array with a copy of these bytes."""
    lengths = tuple(exactly(int, length) for length in exactly(tuple, shape))
    if min(lengths, default=0) < 0 or prod(lengths) * _check_dtype(dtype).itemsize != len(data):
        raise ValueError(f"an array of shape {lengths}"[:200] + f" made from {len(data)} bytes")
    if dtype.itemsize == 0:
        raise ValueError("an array whose items have no bytes")  # such items make arrays of any shape from no data
    array = np.empty(lengths, dtype)
    array.reshape(-1).view(np.uint8)[:] = np.frombuffer(data, np.uint8)
    if has_wrong_characters(array):
        raise ValueError("a code point beyond Unicode's last")
    return array


def _scalar(dtype: Any, data: Any) -> Any:
    raw = _raw(data)
    if _check_dtype(dtype).itemsize != len(raw):
        raise ValueError(f"a scalar of {len(raw)} bytes, where its dtype has {dtype.itemsize}")
    # Not through an array, which drops trailing zeros of text.
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


def _not_callable(*args: Any) -> Any:
    raise TypeError("a call of NumPy's array class")  # pickles only pass it, as the first argument of _reconstruct


_NDARRAY = Constructor(_not_callable)
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
