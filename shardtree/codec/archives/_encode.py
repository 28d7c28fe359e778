"""`encode_archive`: writes archives as torch.save does, of values that can be read without running code."""

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

from ...errors import TreeError, TreePath, UnsupportedValue, error_text, render_path
from ...trees import Hole, Record
from .._arrays import NUMPY_NAME, NUMPY_SCALARS
from .._dtypes import check_storable, is_dense, is_quantised, row_major_bits
from .._nodes import MAX_DEPTH, Child, path_to, plainer, record_of, step_of, type_name
from ._classes import named_record, save_named
from ._decode import FACTORIES, decode_archive

# Values that can be stored: leaves unchanged, containers and tensors as plain copies.

LEAVES: frozenset[type] = frozenset(
    {
        *(type(None), bool, int, float, complex, str, bytes, bytearray, range),
        *(torch.dtype, torch.device, torch.Size, np.str_, np.bytes_, *NUMPY_SCALARS),
        *(PurePosixPath, PureWindowsPath, PosixPath, WindowsPath),
    }
)


@cache
def _is_supported(dtype: torch.dtype) -> bool:
    """Return whether torch.save can write tensors of a dtype."""
    # Tried rather than listed: dtypes of fewer than 8 bits fail today, and torch adds dtypes with each release.
    if is_quantised(dtype):
        return False
    try:
        torch.save(torch.empty(0, dtype=torch.uint8, device="cpu").view(dtype), BytesIO())
    except Exception:
        return False
    return True


def _tensor(value: torch.Tensor, child: Child) -> Any:
    if not is_dense(value) or not _is_supported(value.dtype):
        return NotImplemented
    # torch.save writes a tensor's whole storage: a view of one row of a large tensor must be copied, or all of it goes
    # into the file.
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


def encode_archive(value: Any, *, allow_pickle: bool = False) -> bytes:
    """Return the bytes that torch.save writes for a value, which `decode_archive` and torch.load read.

    Tensors are stored as plain ones that need no gradient, each without the rest of its storage; a value that occurs
    twice is stored twice. Enum members, dataclasses and named tuples are stored as pickle does, by the name of their
    class: readers pass the class in ``types``.

    Args:
        value: what `encode_tree` takes except `HOLE`, of `Record`s only those that `decode_archive` makes; and
            `types.SimpleNamespace` and `Counter`.
        allow_pickle: store other values too, which run code when they are loaded.

    Raises:
        UnsupportedValue: a value is none of these.
        TreeError: it is more than 100 deep, or contains itself.

    Examples:
        >>> import io
        >>> torch.load(io.BytesIO(encode_archive({"step": 7, "betas": (0.9, 0.95)})))
        {'step': 7, 'betas': (0.9, 0.95)}
    """
    classes: set[type] = set()
    plain = plain_copy(value, (), (), allow_pickle, classes)
    file = BytesIO()
    try:
        save_named(plain, file) if Record in classes else torch.save(plain, file)
    except Exception as error:
        reason = f"{type(error).__name__}: {str(error)[:200]}"
        raise UnsupportedValue(
            error_text("encode_archive: the value can't be pickled", found=reason, fix=plainer(value))
        ) from error
    data = file.getvalue()
    if classes - {Record} and not allow_pickle:
        # Read it once: a class can define how it is pickled (__reduce__), and the result may not be readable.
        decode_archive(data, what="encode_archive: what was just encoded", types=classes - {Record})
    return data


def plain_copy(
    value: Any,
    path: TreePath,
    parents: tuple[Any, ...],
    allow_pickle: bool,
    classes: set[type],
    leaves: frozenset[type] = LEAVES,
) -> Any:
    """Return a plain copy of a value for pickling; `parents` are the values that contain it, outermost first."""
    if len(parents) > MAX_DEPTH:
        what = f"encode_archive: more than {MAX_DEPTH} deep, or a value that contains itself"
        raise TreeError(error_text(f"{what}, at {render_path(path_to(path))}", fix="Flatten it, and break cycles."))
    kind = type(value)
    if kind in leaves:
        return value

    def child(inner: Any, *steps: Any) -> Any:
        return plain_copy(inner, path + steps, (*parents, value), allow_pickle, classes, leaves)

    rebuild = REBUILDS.get(kind)
    plain = _record(value, child, classes) if rebuild is None else rebuild(value, child)
    if plain is not NotImplemented:
        return plain
    if allow_pickle:
        return value
    what = f"encode_archive: {render_path(path_to(path))}"
    if isinstance(value, torch.Tensor):
        check_storable(value.dtype, what)
    raise UnsupportedValue(error_text(f"{what} can't be stored", found=type_name(kind), fix=plainer(value)))


def _record(value: Any, child: Any, classes: set[type]) -> Any:
    named = named_record(value, child)
    if named is not NotImplemented:
        classes.add(Record)
        return named
    record = record_of(value)
    if record is None or isinstance(value, Record | Hole) or "." in type(value).__qualname__:
        return NotImplemented
    for name, field in record.fields.items():
        child(field, name)
    classes.add(type(value))
    return value
