"""Archives of values that hold large tensors, written as streams: as `torch.save` has them, in bounded memory."""

from __future__ import annotations

import pickle
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from io import BytesIO
from math import prod
from typing import Any

import torch

from ...errors import UnsupportedValue, error_text
from .._crc32 import crc32
from .._dtypes import byte_buffer, row_major_bits
from ._encode import LEAVES, plain_copy
from ._payload import serialization_id
from ._tensors import STORAGE_KINDS
from ._zip import ALIGNMENT, WrittenRecord, append, descriptor, directory, local_header

_STORAGES = {kind.dtype: getattr(torch, name) for (module, name), kind in STORAGE_KINDS.items() if module == "torch"}


@dataclass(frozen=True, slots=True, eq=False)
class StreamedTensor:
    """A tensor in a value, whose bytes are asked for when they are written.

    Attributes:
        dtype: of the elements.
        shape: lengths.
        buffers: returns the row-major bytes, in order.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    buffers: Callable[[], Iterator[memoryview]]

    @property
    def nbytes(self) -> int:
        """The length in bytes."""
        return prod(self.shape) * self.dtype.itemsize


def streamed_archive(value: Any) -> Iterator[memoryview]:
    """Return the bytes of an archive of a value, in which tensors may be streamed; `torch.load` reads it.

    Args:
        value: what `encode_archive` takes, without instances of the caller's classes, and `StreamedTensor`s.

    Raises:
        UnsupportedValue: at once, if something in it can't be stored.

    Examples:
        >>> import io
        >>> ones = StreamedTensor(torch.uint8, (2,), lambda: iter([memoryview(bytes([1, 1]))]))
        >>> torch.load(io.BytesIO(b"".join(streamed_archive({"param": ones, "cat_dim": 0}))), weights_only=True)
        {'param': tensor([1, 1], dtype=torch.uint8), 'cat_dim': 0}
    """
    classes: set[type] = set()
    plain = plain_copy(value, (), (), False, classes, LEAVES | {StreamedTensor})
    if classes:
        found = ", ".join(sorted(kind.__name__ for kind in classes))
        fix = "Store plain values made from it."
        raise UnsupportedValue(
            error_text("streamed_archive: instances of classes can't be stored", found=found, fix=fix)
        )
    file = BytesIO()
    pickler = _Pickler(file)
    pickler.dump(plain)
    return _buffers(file.getvalue(), pickler.tensors)


def _buffers(data: bytes, tensors: list[StreamedTensor]) -> Iterator[memoryview]:
    out, at, records = bytearray(), 0, list[WrittenRecord]()
    append(out, at, records, "data.pkl", data)
    append(out, at, records, ".format_version", b"1")
    append(out, at, records, ".storage_alignment", b"%d" % ALIGNMENT)
    append(out, at, records, "byteorder", b"little")
    for number, tensor in enumerate(tensors):
        begin = at + len(out)
        record = WrittenRecord(f"archive/data/{number}", 0, tensor.nbytes, begin)
        out += local_header(record)
        yield memoryview(bytes(out))
        at, checksum, done = at + len(out), 0, 0
        for buffer in tensor.buffers():
            checksum = crc32(buffer, checksum)
            yield buffer
            done += buffer.nbytes
        if done != tensor.nbytes:
            what = f"streamed_archive: a tensor {tensor.shape} {tensor.dtype} came with another number of bytes"
            raise UnsupportedValue(error_text(what, found=done, expected=tensor.nbytes))
        at += done
        # The CRC32 follows the bytes, in a descriptor, so that nothing is written twice.
        records.append(WrittenRecord(record.name, checksum, done, begin))
        out = bytearray(descriptor(records[-1]))
    append(out, at, records, "version", b"3\n")
    append(out, at, records, ".data/serialization_id", serialization_id(records))
    yield memoryview(bytes(out + directory(records, at + len(out))))


@dataclass(frozen=True, slots=True, eq=False)
class _Storage:
    """The storage of a tensor, as its persistent id."""

    id: tuple[Any, ...]


class _Pickler(pickle.Pickler):
    """Writes tensors as torch.save does, and notes them instead of their bytes."""

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
