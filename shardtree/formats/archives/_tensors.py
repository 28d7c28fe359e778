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

# This section makes tensors from a storage, an offset, a shape and strides.

# Strides of 0 make a tensor of any size from a few bytes, and a later copy needs memory for all of it.
MOST_EXPANDED_BYTES = 1 << 30
"""Upper bound of the bytes of a tensor that is larger than its storage, such as an expanded one."""


@dataclass(frozen=True, slots=True)
class StorageKind:
    """A storage class, represented by the dtype of its elements; None for untyped storages."""

    dtype: torch.dtype | None


@dataclass(frozen=True, slots=True, eq=False)
class StoredStorage:
    """A storage that was read into memory.

    Attributes:
        bits: Bytes of the storage: a tensor of one axis and dtype uint8.
        dtype: Dtype of the elements; None for an untyped storage.
    """

    bits: torch.Tensor
    dtype: torch.dtype | None


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """A tensor as a view of its storage.

    Attributes:
        dtype: Dtype of the elements.
        offset: Offset of the first element, in elements.
        shape: Shape of the tensor.
        stride: Stride of each axis, in elements.
    """

    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StorageReference:
    """Description of a storage in a persistent id.

    Attributes:
        key: Key of the storage, whose record is ``data/<key>``.
        dtype: Dtype of the elements; None for an untyped storage.
        nbytes: Length in bytes.
    """

    key: str
    dtype: torch.dtype | None
    nbytes: int


def storage_reference(persistent_id: Any) -> StorageReference:
    """Return the storage that a persistent id describes.

    Raises:
        ValueError: The id doesn't describe a storage.
    """
    if type(persistent_id) is not tuple or len(persistent_id) < 5 or persistent_id[0] != "storage":
        raise ValueError("a persistent id that is not a storage's")
    _, kind, key, _, count = persistent_id[:5]
    if type(kind) is not StorageKind or type(key) is not str or exactly(int, count) < 0:
        raise ValueError("a storage that is not described as torch does")
    return StorageReference(key, kind.dtype, count * (kind.dtype.itemsize if kind.dtype else 1))


def tensor_layout(storage_dtype: torch.dtype | None, nbytes: int, arguments: tuple[Any, ...]) -> TensorLayout:
    """Return a tensor's layout in its storage, after checking that it lies inside the storage.

    Args:
        storage_dtype: Dtype of the storage; None for an untyped storage.
        nbytes: Length of the storage in bytes.
        arguments: Offset, shape and strides, followed by the dtype if it isn't the storage's.

    Raises:
        ValueError: The tensor doesn't lie inside the storage, or is much larger than it.
    """
    # The check comes before torch gets the arguments: as_strided trusts them, and would read other memory.
    offset, shape, stride = exactly(int, arguments[0]), _ints(arguments[1]), _ints(arguments[2])
    dtype = arguments[3] if len(arguments) > 3 else storage_dtype
    if type(dtype) is not torch.dtype or is_quantised(dtype):
        raise ValueError("a tensor without a dtype, or with a quantised one")
    if len(shape) != len(stride) or offset < 0 or min(shape + stride, default=0) < 0 or len(shape) > 64:
        raise ValueError(f"a tensor of shape {shape}, strides {stride} and offset {offset}"[:200])
    # Python's integers don't overflow; lengths that don't fit 64 bits are refused below.
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
        raise TypeError("a shape or strides that are not a tuple")
    return tuple(exactly(int, item) for item in value)


def _tensor(storage: Any, *arguments: Any) -> torch.Tensor:
    if type(storage) is not StoredStorage:
        raise TypeError("a tensor without a storage")
    place = tensor_layout(storage.dtype, storage.bits.numel(), arguments)
    # The storage is cut to whole elements, since it may end with part of an element, which torch's view refuses.
    whole = storage.bits[: storage.bits.numel() // place.dtype.itemsize * place.dtype.itemsize]
    return whole.view(place.dtype).as_strided(place.shape, place.stride, place.offset)


def lazy_bits(dtype: torch.dtype, extra: Any) -> tuple[bool, bool]:
    """Return two flags of a pickled tensor: whether it is lazily conjugated, and whether it is lazily negated.

    Args:
        dtype: Dtype of the tensor.
        extra: Dict of the flags in the pickle; None if it has none.

    Raises:
        ValueError: The dict has another key or value, or a flag that the dtype cannot have.
    """
    flags = {} if extra is None else exactly(dict, extra)
    if flags.keys() - {"conj", "neg"} or any(type(flag) is not bool for flag in flags.values()):
        raise ValueError("a tensor with unknown metadata")
    conj, neg = flags.get("conj", False), flags.get("neg", False)
    if (conj and not dtype.is_complex) or (neg and not (dtype.is_complex or dtype in _NEGATED)):
        raise ValueError(f"a tensor of {dtype} that is conjugated or negated lazily")
    return conj, neg


_NEGATED = (torch.float16, torch.float32, torch.float64)  # These are the dtypes of parts of complex numbers.


def _with_lazy_bits(tensor: torch.Tensor, extra: Any) -> torch.Tensor:
    """Return a view of the tensor that is lazily conjugated or negated if the pickle's flags `extra` say so."""
    conj, neg = lazy_bits(tensor.dtype, extra)
    tensor = tensor.conj() if conj else tensor
    return torch._neg_view(tensor) if neg else tensor


T = TypeVar("T")


def rebuilders(
    tensor: Callable[..., T], set_bits: Callable[[T, Any], T], *kinds: type
) -> dict[tuple[str, str], Constructor]:
    """Return constructors in place of torch's functions that rebuild tensors, by module and name.

    Hooks and `requires_grad` are ignored, and a parameter becomes its tensor.

    Args:
        tensor: Function that returns a tensor; called with a storage, an offset, a shape, strides, and the dtype if it
            is not the storage's.
        set_bits: Function that returns the tensor after applying flags for lazy conjugation and negation; called with
            the tensor, and the dict of flags or None.
        kinds: Types of the tensors that a pickled parameter may wrap.
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
"""Types that are only arguments of tensors' constructors, and never part of a value."""


def loader(data: Callable[[str], memoryview]) -> Callable[[Any], StoredStorage]:
    """Return a function from a persistent id to its storage, which copies each record into memory only once.

    Args:
        data: Function that returns a record's bytes by the record's name.
    """
    # Each record is copied once, however often it is named: so tensors share memory as they did when they were saved,
    # and a pickle that names one record a million times takes no more memory.
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


# This section makes NumPy's arrays, scalars and dtypes: only of numbers, dates and text.

_NAME = re.compile(r"[biufcSU][0-9]{1,9}|[mM]8")
_UTF32 = {"<": "utf-32-le", ">": "utf-32-be", "=": f"utf-32-{byteorder[0]}e"}
_UNIT = re.compile(r"generic|[A-Za-z]{1,2}")


def _dtype(name: Any, align: Any = False, copy: Any = True) -> np.dtype[Any]:
    if not _NAME.fullmatch(exactly(str, name)):
        raise ValueError(f"a NumPy dtype {name[:100]!r}, which is not of numbers, dates or text")
    # The dtype is a copy, since the pickle may set its byte order, and the whole process shares NumPy's own objects.
    return _check_dtype(np.dtype(name, False, True))


def _set_order(dtype: np.dtype[Any], state: Any) -> None:
    version, order, subdtype, names, fields, size = exactly(tuple, state)[:6]
    if version not in (3, 4) or order not in ("<", ">", "|", "=") or size not in (-1, dtype.itemsize):
        raise ValueError("a NumPy dtype whose fields contradict each other")
    if subdtype is not None or names is not None or fields is not None:
        raise ValueError("a NumPy dtype of records")
    # Only the byte order comes from the file: wrong flags would make NumPy use the array's bytes as pointers.
    layout = (dtype.itemsize, dtype.alignment, dtype.flags) if dtype.kind in "SU" else (-1, -1, 0)
    if dtype.kind in "mM":
        _set_state(dtype, (4, order, None, None, None, *layout, _unit(state)))
    else:
        _set_state(dtype, (3, order, None, None, None, *layout))


def _set_state(value: Any, state: tuple[Any, ...]) -> None:
    value.__setstate__(state)


def _unit(state: Any) -> Any:
    """Return the time unit in a date dtype's pickled state, checked, in the form that NumPy's `__setstate__` takes."""
    if len(state) < 9:
        return ({}, ("generic", 1, 1, 1))
    _, (unit, *numbers) = exactly(tuple, state[8])
    name = unit.decode("ascii") if type(unit) is bytes else exactly(str, unit)
    if not _UNIT.fullmatch(name) or len(numbers) != 3 or not all(0 < exactly(int, n) < 2**31 for n in numbers):
        raise ValueError("a NumPy dtype with an unknown unit")
    return ({}, (name, *numbers))


def _check_dtype(dtype: Any) -> np.dtype[Any]:
    if not isinstance(dtype, np.dtype) or dtype.kind not in "biufcSUmM" or dtype.names:
        raise ValueError("an array or scalar that is not of numbers, dates or text")
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
        raise TypeError("an array whose order is not a bool")
    _set_state(array, (1, elements.shape, elements.dtype, by_column, elements.tobytes()))


def _array(data: bytes | bytearray, dtype: Any, shape: Any) -> np.ndarray[Any, Any]:
    """Return a new row-major array that holds a copy of `data`; raise ValueError if the lengths do not fit."""
    lengths = tuple(exactly(int, length) for length in exactly(tuple, shape))
    if min(lengths, default=0) < 0 or prod(lengths) * _check_dtype(dtype).itemsize != len(data):
        raise ValueError(f"an array of shape {lengths}"[:200] + f" made from {len(data)} bytes")
    if dtype.itemsize == 0:
        raise ValueError("an array whose items have no bytes")  # Such items make arrays of any shape from no data.
    array = np.empty(lengths, dtype)
    array.reshape(-1).view(np.uint8)[:] = np.frombuffer(data, np.uint8)
    if has_wrong_characters(array):
        raise ValueError("a code point beyond Unicode's last")
    return array


def _scalar(dtype: Any, data: Any) -> Any:
    raw = _raw(data)
    if _check_dtype(dtype).itemsize != len(raw):
        raise ValueError(f"a scalar of {len(raw)} bytes, where its dtype has {dtype.itemsize}")
    # Text isn't read through an array, which would drop its trailing zeros.
    if dtype.kind == "S":
        return np.bytes_(raw)
    return np.str_(raw.decode(_UTF32[dtype.byteorder])) if dtype.kind == "U" else _array(raw, dtype, ())[()]


def _frombuffer(data: Any, dtype: Any, shape: Any, order: Any, axes: Any = None) -> np.ndarray[Any, Any]:
    if type(data) not in (bytes, bytearray) or order not in ("C", "F", "K"):
        raise TypeError("an array that is not made from bytes")
    lengths = exactly(tuple, shape)
    array = _array(data, dtype, lengths)
    if order == "F":
        return array.reshape(-1).reshape(lengths, order="F")
    return array.transpose(*exactly(tuple, axes)) if order == "K" and axes is not None else array


def _not_callable(*args: Any) -> Any:
    raise TypeError("a call of NumPy's array class")  # Pickles only pass the class, as an argument of _reconstruct.


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
