"""`encode_archive` writes archives as torch.save does, for values that can be read without running code.

`streamed_archive` writes archives of values with large tensors in bounded memory.
"""

from __future__ import annotations

import pickle
from argparse import Namespace
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from io import BytesIO
from math import prod
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from ...errors import TreeError, TreePath, UnsupportedValue, error_text
from ...kit import (
    HOLE,
    Record,
    byte_buffer,
    check_storable,
    crc32,
    is_dense,
    is_plain_array,
    plainer,
    record_of,
    row_major_bits,
    shown_path,
    type_name,
)
from ._classes import Child, named_record, save_named
from ._decode import FACTORIES, PATHS, decode_archive
from ._payload import begin_archive, finish_archive
from ._tensors import STORAGE_KINDS
from ._zip import WrittenRecord, descriptor, local_header

# This section makes plain copies of containers and tensors; leaves are stored as they are.

_NUMPY_SCALARS = [np.dtype(character).type for character in "?bBhHiIlLqQefdgFDGmM"]
_MAX_DEPTH = 100

LEAVES: frozenset[type] = frozenset(
    {
        *(type(None), bool, int, float, complex, str, bytes, bytearray, range),
        *(torch.dtype, torch.device, torch.Size, np.str_, np.bytes_, *_NUMPY_SCALARS),
        *PATHS,
    }
)


@cache
def _is_supported(dtype: torch.dtype) -> bool:
    """Return whether torch.save can write tensors of a dtype."""
    # A trial is used rather than a list: dtypes of fewer than 8 bits fail today, and each release of torch adds dtypes.
    try:
        torch.save(torch.empty(0, dtype=torch.uint8, device="cpu").view(dtype), BytesIO())
    except Exception:
        return False
    return True


def _tensor(value: torch.Tensor, child: Child) -> Any:
    if not is_dense(value) or not _is_supported(value.dtype):
        return NotImplemented
    # torch.save writes a tensor's whole storage, so a view of a row of a large tensor is copied, or the file would get
    # the large tensor.
    plain = value.detach()
    if plain.is_cpu and not plain.is_conj() and not plain.is_neg() and plain.untyped_storage().nbytes() == plain.nbytes:
        return plain
    bits = row_major_bits(plain)
    bits = bits.clone() if bits.untyped_storage().nbytes() != plain.nbytes else bits
    return bits.view(plain.dtype).reshape(plain.shape)


def _array(value: np.ndarray[Any, Any], child: Child) -> Any:
    return value if is_plain_array(value) else NotImplemented


def _items(value: Iterable[Any], child: Child) -> list[Any]:
    return [child(item, position) for position, item in enumerate(value)]


def _dict(value: dict[Any, Any], child: Child) -> Any:
    return {child(key): child(item, key) for key, item in value.items()}


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


def _buffer(value: BytesIO, child: Child) -> Any:
    if value.closed:
        return NotImplemented
    plain = BytesIO(value.getvalue())
    plain.seek(value.tell())
    return plain


_REBUILDS: dict[type, Callable[[Any, Child], Any]] = {
    torch.Tensor: _tensor,
    torch.nn.Parameter: _tensor,
    np.ndarray: _array,
    list: _items,
    tuple: lambda value, child: tuple(_items(value, child)),
    deque: lambda value, child: deque(_items(value, child), value.maxlen),
    set: lambda value, child: {child(item) for item in value},
    frozenset: lambda value, child: frozenset([child(item) for item in value]),
    dict: _dict,
    OrderedDict: lambda value, child: OrderedDict(_dict(value, child)),
    Counter: lambda value, child: Counter(_dict(value, child)),
    defaultdict: _defaultdict,
    Namespace: _namespace,
    SimpleNamespace: _namespace,
    slice: lambda value, child: slice(child(value.start), child(value.stop), child(value.step)),
    BytesIO: _buffer,
}


def encode_archive(value: Any, *, allow_pickle: bool = False) -> bytes:
    """Return the archive of a value, as torch.save writes it; `decode_archive` and torch.load read it.

    Tensors become plain tensors that need no gradient. Only a view's own elements are stored. A value that occurs
    twice is stored twice. Enum members, dataclasses and named tuples are stored under the name of their class, as
    pickle does: readers pass the class in ``types``.

    Args:
        value: Tree as for `encode_tree`, which may also contain `types.SimpleNamespace` and `Counter`, but no `HOLE`,
            and no `Record` other than those that `decode_archive` makes.
        allow_pickle: True to store other values too, which run code when they are loaded.

    Raises:
        UnsupportedValue: The tree contains a value of another type.
        TreeError: The tree is more than 100 deep, or contains itself.

    Examples:
        >>> import io
        >>> torch.load(io.BytesIO(encode_archive({"step": 7, "betas": (0.9, 0.95)})))
        {'step': 7, 'betas': (0.9, 0.95)}
    """
    classes: set[type] = set()
    plain = _plain_copy(value, (), (), allow_pickle, classes)
    file = BytesIO()
    try:
        save_named(plain, file) if Record in classes else torch.save(plain, file)
    except Exception as error:
        reason = f"{type(error).__name__}: {str(error)[:200]}"
        raise UnsupportedValue(
            error_text("encode_archive: the value cannot be pickled", found=reason, fix=plainer(value))
        ) from error
    data = file.getvalue()
    if classes - {Record} and not allow_pickle:
        # The archive is read once, since a class can define its pickling (__reduce__) in a way that can't be read.
        decode_archive(data, what="encode_archive: the encoded archive", types=classes - {Record})
    return data


def _plain_copy(
    value: Any,
    path: TreePath,
    parents: tuple[Any, ...],
    allow_pickle: bool,
    classes: set[type],
    leaves: frozenset[type] = LEAVES,
) -> Any:
    """Return a plain copy of a value for pickling.

    Args:
        value: Value to copy.
        path: Path of the value, for errors.
        parents: Containers around the value, outermost first.
        allow_pickle: Whether a value of an unknown type is kept as it is, rather than refused.
        classes: Set to which this function adds the classes of all enum members, dataclasses, named tuples and records.
        leaves: Types of values that are kept as they are.
    """
    if len(parents) > _MAX_DEPTH:
        what = f"encode_archive: the tree has more than {_MAX_DEPTH} levels, or contains itself"
        fix = "Reduce its levels; if a container contains itself, take it out of itself."
        raise TreeError(error_text(f"{what}, at {shown_path(path)}", fix=fix))
    kind = type(value)
    if kind in leaves:
        return value

    def child(inner: Any, *steps: Any) -> Any:
        return _plain_copy(inner, path + steps, (*parents, value), allow_pickle, classes, leaves)

    rebuild = _REBUILDS.get(kind)
    plain = _record(value, child, classes) if rebuild is None else rebuild(value, child)
    if plain is not NotImplemented:
        return plain
    if allow_pickle:
        return value
    what = f"encode_archive: {shown_path(path)}"
    if isinstance(value, torch.Tensor):
        check_storable(value.dtype, what)
    raise UnsupportedValue(error_text(f"{what} cannot be stored", found=type_name(kind), fix=plainer(value)))


def _record(value: Any, child: Any, classes: set[type]) -> Any:
    record = named_record(value, child)
    if record is not NotImplemented:
        classes.add(Record)
        return record
    record = record_of(value)
    if record is None or value is HOLE or isinstance(value, Record) or "." in type(value).__qualname__:
        return NotImplemented
    for name, field in record.fields.items():
        child(field, name)
    classes.add(type(value))
    return value


_STORAGES = {kind.dtype: getattr(torch, name) for (module, name), kind in STORAGE_KINDS.items() if module == "torch"}


@dataclass(frozen=True, slots=True, eq=False)
class StreamedTensor:
    """A tensor whose bytes are requested when they are written.

    Attributes:
        dtype: Dtype of the elements.
        shape: Shape of the tensor.
        buffers: Function that returns the row-major bytes, in order.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    buffers: Callable[[], Iterator[memoryview]]

    @property
    def nbytes(self) -> int:
        """Length in bytes."""
        return prod(self.shape) * self.dtype.itemsize


def streamed_archive(value: Any) -> Iterator[memoryview]:
    """Return the archive of a value with streamed tensors, as an iterator of its bytes; `torch.load` reads it.

    Args:
        value: Tree as for `encode_archive`, without instances of the caller's classes; may contain `StreamedTensor`s.

    Raises:
        UnsupportedValue: A value can't be stored. It is raised by the call, not by the iterator.

    Examples:
        >>> import io
        >>> ones = StreamedTensor(torch.uint8, (2,), lambda: iter([memoryview(bytes([1, 1]))]))
        >>> torch.load(io.BytesIO(b"".join(streamed_archive({"param": ones, "cat_dim": 0}))), weights_only=True)
        {'param': tensor([1, 1], dtype=torch.uint8), 'cat_dim': 0}
    """
    classes: set[type] = set()
    plain = _plain_copy(value, (), (), False, classes, LEAVES | {StreamedTensor})
    if classes:
        names = ", ".join(sorted(kind.__name__ for kind in classes))
        fix = "Convert these values to plain ones, such as dicts, lists and numbers."
        raise UnsupportedValue(
            error_text("streamed_archive: values of these classes cannot be stored", found=names, fix=fix)
        )
    file = BytesIO()
    pickler = _TensorPickler(file)
    pickler.dump(plain)
    return _buffers(file.getvalue(), pickler.tensors)


def _buffers(data: bytes, tensors: list[StreamedTensor]) -> Iterator[memoryview]:
    (out, records), at = begin_archive(data), 0
    for number, tensor in enumerate(tensors):
        begin = at + len(out)
        record = WrittenRecord(f"archive/data/{number}", 0, tensor.nbytes, begin)
        out += local_header(record)
        yield memoryview(bytes(out))
        at, checksum, nbytes = at + len(out), 0, 0
        for buffer in tensor.buffers():
            checksum = crc32(buffer, checksum)
            yield buffer
            nbytes += buffer.nbytes
        if nbytes != tensor.nbytes:
            heading = f"streamed_archive: the buffers of a tensor {tensor.shape} {tensor.dtype} do not have its length"
            found, expected = f"{nbytes} bytes", f"{tensor.nbytes} bytes"
            raise UnsupportedValue(error_text(heading, found=found, expected=expected))
        at += nbytes
        # The CRC32 follows the bytes in a descriptor, so that nothing is written twice.
        records.append(WrittenRecord(record.name, checksum, nbytes, begin))
        out = bytearray(descriptor(records[-1]))
    yield memoryview(finish_archive(out, at, records))


@dataclass(frozen=True, slots=True, eq=False)
class _Storage:
    """The storage of a tensor, represented by its persistent id."""

    id: tuple[Any, ...]


class _TensorPickler(pickle.Pickler):
    """A pickler that refers to tensors as torch.save does, and collects them instead of writing their bytes."""

    def __init__(self, file: BytesIO) -> None:
        super().__init__(file, protocol=2)
        self.tensors: list[StreamedTensor] = []

    def persistent_id(self, value: Any) -> Any:
        return value.id if isinstance(value, _Storage) else None

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            bits = byte_buffer(row_major_bits(value))
            value = StreamedTensor(value.dtype, tuple(value.shape), lambda: iter([bits] if bits.nbytes else []))
        if not isinstance(value, StreamedTensor):
            return NotImplemented
        number, kind = len(self.tensors), _STORAGES.get(value.dtype)
        self.tensors.append(value)
        count = value.nbytes if kind is None else prod(value.shape)
        storage = _Storage(("storage", torch.UntypedStorage if kind is None else kind, str(number), "cpu", count))
        shape = value.shape
        strides = tuple(prod(max(length, 1) for length in shape[axis + 1 :]) for axis in range(len(shape)))
        hooks: OrderedDict[Any, Any] = OrderedDict()
        arguments = (storage, 0, shape, strides, False, hooks)
        if kind is None:
            return torch._utils._rebuild_tensor_v3, (*arguments, value.dtype)
        return torch._utils._rebuild_tensor_v2, arguments
