"""The values that an archive holds without pickled code: leaves as they are, containers and tensors as plain copies."""

from __future__ import annotations

from argparse import Namespace
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from functools import cache
from io import BytesIO
from pathlib import PosixPath, PurePosixPath, PureWindowsPath, WindowsPath
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from .._arrays import NUMPY_NAME, NUMPY_SCALARS
from .._dtypes import is_quantised, row_major_bits
from .._nodes import Child, step_of
from ._values import FACTORIES

LEAVES: frozenset[type] = frozenset(
    {
        *(type(None), bool, int, float, complex, str, bytes, bytearray, range),
        *(torch.dtype, torch.device, torch.Size, np.str_, np.bytes_, *NUMPY_SCALARS),
        *(PurePosixPath, PureWindowsPath, PosixPath, WindowsPath),
    }
)


@cache
def _is_saved(dtype: torch.dtype) -> bool:
    """Return whether torch.save writes tensors of a dtype; it has none of fewer than 8 bits, for one."""
    if is_quantised(dtype):
        return False
    try:
        torch.save(torch.empty(0, dtype=torch.uint8, device="cpu").view(dtype), BytesIO())
    except Exception:
        return False
    return True


def _tensor(value: torch.Tensor, child: Child) -> Any:
    if value.layout is not torch.strided or value.is_meta or value.is_nested or not _is_saved(value.dtype):
        return NotImplemented
    plain = value.detach()
    if plain.is_cpu and not plain.is_conj() and not plain.is_neg() and plain.untyped_storage().nbytes() == plain.nbytes:
        return plain
    bits = row_major_bits(plain)
    bits = bits.clone() if bits.untyped_storage().nbytes() != plain.nbytes else bits
    return bits.view(plain.dtype).reshape(plain.shape)


def _array(value: np.ndarray[Any, Any], child: Child) -> Any:
    if not NUMPY_NAME.fullmatch(value.dtype.str) or value.dtype.itemsize == 0 or value.dtype.names:
        return NotImplemented
    return value


def _list(value: list[Any], child: Child) -> Any:
    return [child(item, position) for position, item in enumerate(value)]


def _tuple(value: tuple[Any, ...], child: Child) -> Any:
    return tuple([child(item, position) for position, item in enumerate(value)])


def _deque(value: deque[Any], child: Child) -> Any:
    return deque([child(item, position) for position, item in enumerate(value)], value.maxlen)


def _set(value: set[Any] | frozenset[Any], child: Child) -> Any:
    return type(value)([child(item) for item in value])


def _dict(value: dict[Any, Any], child: Child) -> Any:
    return {child(key): child(item, step_of(key)) for key, item in value.items()}


def _ordered(value: OrderedDict[Any, Any], child: Child) -> Any:
    return OrderedDict(_dict(value, child))


def _counter(value: Counter[Any], child: Child) -> Any:
    return Counter(_dict(value, child))


def _defaultdict(value: defaultdict[Any, Any], child: Child) -> Any:
    if value.default_factory is not None and value.default_factory not in FACTORIES:
        return NotImplemented
    return defaultdict(value.default_factory, _dict(value, child))


def _namespace(value: Namespace | SimpleNamespace, child: Child) -> Any:
    if any(type(name) is not str for name in vars(value)):
        return NotImplemented
    plain = type(value)()
    vars(plain).update(_dict(vars(value), child))
    return plain


def _slice(value: slice, child: Child) -> Any:
    return slice(child(value.start), child(value.stop), child(value.step))


def _buffer(value: BytesIO, child: Child) -> Any:
    if value.closed:
        return NotImplemented
    plain = BytesIO(value.getvalue())
    plain.seek(value.tell())
    return plain


REBUILDS: dict[type, Callable[[Any, Child], Any]] = {
    torch.Tensor: _tensor,
    torch.nn.Parameter: _tensor,
    np.ndarray: _array,
    list: _list,
    tuple: _tuple,
    deque: _deque,
    set: _set,
    frozenset: _set,
    dict: _dict,
    OrderedDict: _ordered,
    Counter: _counter,
    defaultdict: _defaultdict,
    Namespace: _namespace,
    SimpleNamespace: _namespace,
    slice: _slice,
    BytesIO: _buffer,
}
