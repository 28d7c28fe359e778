"""Tensors as torch.save's pickles describe them: a storage, an offset, a shape and strides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from .._dtypes import is_quantised
from .._nodes import exactly
from ..pickles import Constructor

_MOST_EXPANDED = 1 << 30
"""Bytes of a tensor that is larger than its storage, as an expanded one is."""


@dataclass(frozen=True, slots=True)
class StorageKind:
    """What a storage class is to its reader: the dtype of its elements; None where tensors say it."""

    dtype: torch.dtype | None


@dataclass(frozen=True, slots=True, eq=False)
class StoredStorage:
    """A storage.

    Attributes:
        bits: uint8 (bytes,).
        dtype: of its elements, None where tensors say it.
    """

    bits: torch.Tensor
    dtype: torch.dtype | None


@dataclass(frozen=True, slots=True)
class Strided:
    """Where a tensor's elements are in a storage.

    Attributes:
        dtype: of the elements.
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
    """What a persistent id says of a storage.

    Attributes:
        key: its record is ``data/<key>``.
        dtype: of its elements, None where tensors say it.
        nbytes: how many bytes it has.
    """

    key: str
    dtype: torch.dtype | None
    nbytes: int


def storage_reference(persistent_id: Any) -> StorageReference:
    """Return what a persistent id says.

    Raises:
        ValueError: it isn't a storage's.
    """
    if type(persistent_id) is not tuple or len(persistent_id) < 5 or persistent_id[0] != "storage":
        raise ValueError("a persistent id that isn't a storage's")
    _, kind, key, _, count = persistent_id[:5]
    if type(kind) is not StorageKind or type(key) is not str or exactly(int, count) < 0:
        raise ValueError("a storage that isn't described as torch does")
    return StorageReference(key, kind.dtype, count * (kind.dtype.itemsize if kind.dtype else 1))


def strided(storage_dtype: torch.dtype | None, nbytes: int, arguments: tuple[Any, ...]) -> Strided:
    """Return where a tensor is in a storage of so many bytes.

    Args:
        storage_dtype: the storage's own.
        nbytes: the storage's.
        arguments: offset, shape, strides, and then the dtype where it isn't the storage's.

    Raises:
        ValueError: it isn't inside of the storage.
    """
    offset, shape, stride = exactly(int, arguments[0]), _ints(arguments[1]), _ints(arguments[2])
    dtype = arguments[3] if len(arguments) > 3 else storage_dtype
    if type(dtype) is not torch.dtype or is_quantised(dtype):
        raise ValueError("a tensor of no dtype, or of a quantised one")
    if len(shape) != len(stride) or offset < 0 or min(shape + stride, default=0) < 0 or len(shape) > 64:
        raise ValueError(f"a tensor of shape {shape}, strides {stride} and offset {offset}"[:200])
    count = 1
    for length in shape:
        count *= length
    last = offset + sum((length - 1) * step for length, step in zip(shape, stride, strict=True)) if count else -1
    if (last + 1) * dtype.itemsize > nbytes:
        raise ValueError(f"a tensor of {(last + 1) * dtype.itemsize} bytes in a storage of {nbytes}")
    if count * dtype.itemsize > max(nbytes, _MOST_EXPANDED) or max(shape + stride, default=0) >= 2**62:
        raise ValueError("a tensor that is much larger than its storage")
    return Strided(dtype, offset, shape, stride)


def _ints(value: Any) -> tuple[int, ...]:
    if not isinstance(value, (tuple, list)):
        raise TypeError("a shape or strides that aren't a tuple")
    return tuple(exactly(int, item) for item in value)


def _tensor(storage: Any, *arguments: Any) -> torch.Tensor:
    if type(storage) is not StoredStorage:
        raise TypeError("a tensor without a storage")
    place = strided(storage.dtype, storage.bits.numel(), arguments)
    # As uint8 first: a storage may end with part of an element.
    whole = storage.bits[: storage.bits.numel() // place.dtype.itemsize * place.dtype.itemsize]
    return whole.view(place.dtype).as_strided(place.shape, place.stride, place.offset)


def rebuild_v2(storage: Any, offset: Any, shape: Any, stride: Any, grad: Any, hooks: Any, extra: Any = None) -> Any:
    """Return the tensor of `torch._utils._rebuild_tensor_v2`; hooks and the need of a gradient are left out."""
    return _with_lazy_bits(_tensor(storage, offset, shape, stride), extra)


def rebuild_v3(
    storage: Any, offset: Any, shape: Any, stride: Any, grad: Any, hooks: Any, dtype: Any, extra: Any = None
) -> Any:
    """Return the tensor of `torch._utils._rebuild_tensor_v3`, which names its dtype itself."""
    return _with_lazy_bits(_tensor(storage, offset, shape, stride, dtype), extra)


def _with_lazy_bits(tensor: torch.Tensor, extra: Any) -> torch.Tensor:
    """Return the tensor conjugated or negated where torch has put that off, still without doing it."""
    flags = {} if extra is None else exactly(dict, extra)
    if flags.keys() - {"conj", "neg"} or any(type(flag) is not bool for flag in flags.values()):
        raise ValueError("a tensor with unknown metadata")
    conjugated = tensor.conj() if flags.get("conj") else tensor
    return torch._neg_view(conjugated) if flags.get("neg") else conjugated


def rebuild_parameter(data: Any, grad: Any, hooks: Any, state: Any = None) -> torch.Tensor:
    """Return a parameter's tensor, as a plain one."""
    return exactly(torch.Tensor, data)


REBUILDERS: dict[tuple[str, str], Constructor] = {
    ("torch._utils", "_rebuild_tensor"): Constructor(_tensor),
    ("torch._utils", "_rebuild_tensor_v2"): Constructor(rebuild_v2),
    ("torch._utils", "_rebuild_tensor_v3"): Constructor(rebuild_v3),
    ("torch._utils", "_rebuild_parameter"): Constructor(rebuild_parameter),
    ("torch._utils", "_rebuild_parameter_with_state"): Constructor(rebuild_parameter),
}

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
"""What only a tensor is made from."""


def loader(data: Callable[[str], memoryview]) -> Callable[[Any], StoredStorage]:
    """Return what makes storages from persistent ids; each record is copied once, however often it is named."""
    seen: dict[str, torch.Tensor] = {}

    def load(persistent_id: Any) -> StoredStorage:
        wanted = storage_reference(persistent_id)
        if wanted.key not in seen:
            stored = data(f"data/{wanted.key}")
            seen[wanted.key] = torch.empty(len(stored), dtype=torch.uint8, device="cpu")
            seen[wanted.key].numpy()[:] = np.asarray(stored)
        if wanted.nbytes > seen[wanted.key].numel():
            raise ValueError(f"a storage of {wanted.nbytes} bytes, {seen[wanted.key].numel()} are there")
        return StoredStorage(seen[wanted.key], wanted.dtype)

    return load
