"""Archives of one tensor: the offset of the tensor's bytes, and the bytes before and after them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any, TypeVar

import torch

from ...errors import CheckpointingException, CorruptCheckpoint, error_text
from ...kit import Reader, check_storable, crc32, dtype_name
from ..pickles import Constructor, Global, Persistent, Reduced, read_pickle, write_pickle
from ._tensors import (
    DTYPES,
    STORAGE_KINDS,
    StorageReference,
    TensorLayout,
    rebuilders,
    storage_reference,
    tensor_layout,
)
from ._zip import (
    ALIGNMENT,
    Archive,
    Read,
    WrittenRecord,
    append,
    descriptor,
    directory,
    local_header,
    open_archive,
    read_directory,
)
from ._zip import Record as ZipRecord

# This section finds the tensor's bytes.

# These lengths suffice for the pickle at the beginning and the zip directory at the end of an archive of one tensor:
# two small reads replace one of the whole archive, and the payload can then be read straight into its destination.
_HEAD, _TAIL = 1024, 2048
_MOST_CACHED = 1000
"""Upper bound of the length of pickles that are cached, in bytes; that of one tensor is usually shorter."""


@dataclass(frozen=True, slots=True, eq=False)
class StoredTensor:
    """Description of an archive's tensor, without its elements.

    Attributes:
        file: Name of the archive, as the caller gave it.
        dtype: Dtype of the elements.
        shape: Shape of the tensor.
        stride: Stride of each axis, in elements.
        begin: Offset of the first element in the file, in bytes.
        record: Record that has the elements.
        conj: True if the elements are the conjugates of the stored ones.
        neg: True if the elements are the negatives of the stored ones.
    """

    file: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    begin: int
    record: ZipRecord
    conj: bool = False
    neg: bool = False

    @property
    def is_row_major(self) -> bool:
        """True if the elements are stored contiguously in row-major order."""
        if self.conj or self.neg:
            return False
        size = 1
        for length, step in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if length not in (0, 1) and step != size:
                return False
            size *= max(length, 1)
        return True

    @property
    def fills_record(self) -> bool:
        """True if the record consists of the elements in row-major order."""
        nbytes = prod(self.shape) * self.dtype.itemsize
        return self.is_row_major and (self.begin, nbytes) == (self.record.begin, self.record.nbytes)


def tensor_place(read: Read, length: int, *, what: str) -> StoredTensor:
    """Return the description of an archive's only tensor; only the archive's beginning and end are read.

    The tensor may be a parameter. Archives of other values, such as two tensors, a list, or a lazily conjugated
    tensor, need `decode_archive`.

    Args:
        read: Function that returns a byte range of the archive, by its first byte and one past its last.
        length: Length of the archive in bytes.
        what: Description of the archive, for errors.

    Raises:
        CorruptCheckpoint: The bytes aren't such an archive.
        UnsafeFile: The archive names something that doesn't belong to a tensor.

    Examples:
        >>> import io
        >>> file = io.BytesIO()
        >>> torch.save(torch.arange(6.0).reshape(2, 3), file)
        >>> data = file.getvalue()
        >>> place = tensor_place(lambda begin, end: data[begin:end], len(data), what="example")
        >>> place.shape, place.record.nbytes, place.fills_record
        ((2, 3), 24, True)
    """
    archive = open_archive(_cached_ends(read, length), length, what)
    value = _read_description(bytes(archive.checked_data("data.pkl")), what)
    if type(value) is not DescribedTensor:
        raise CorruptCheckpoint(error_text(f"{what}: not an archive of one tensor", found=type(value).__name__))
    try:
        return stored_tensor(value, archive, what)
    except ValueError as error:
        raise CorruptCheckpoint(error_text(f"{what}: {error}")) from None


def archive_ends(length: int) -> list[tuple[int, int]]:
    """Return the byte ranges at an archive's ends: first byte and one past the last of each; one range if they meet.

    An archive of one tensor usually has its pickle and directory there, all that `tensor_place` reads.

    Examples:
        >>> archive_ends(1_000_000), archive_ends(2000)
        ([(0, 1024), (997952, 1000000)], [(0, 2000)])
    """
    return [(0, length)] if length <= _HEAD + _TAIL else [(0, _HEAD), (length - _TAIL, length)]


def archive_records(read: Read, length: int, *, what: str) -> tuple[ZipRecord, ...]:
    """Return the records of an archive, in the order of their bytes; payloads aren't read.

    Args:
        read: Function that returns a byte range of the archive, by its first byte and one past its last.
        length: Length of the archive in bytes.
        what: Description of the archive, for errors.

    Raises:
        CorruptCheckpoint: The bytes aren't a zip, or its records are compressed, encrypted or overlap.

    Examples:
        >>> import io
        >>> file = io.BytesIO()
        >>> torch.save(7, file)
        >>> data = file.getvalue()
        >>> archive_records(lambda begin, end: data[begin:end], len(data), what="example")[0].name
        'archive/data.pkl'
    """
    return read_directory(_cached_ends(read, length), length, what)


def _read_description(data: bytes, what: str) -> Any:
    if len(data) > _MOST_CACHED:
        return _parse(data, what)
    try:
        return _cached_parse(data)
    except CheckpointingException:
        return _parse(data, what)  # This raises the same error, with the name of the archive.


@lru_cache(maxsize=1024)
def _cached_parse(data: bytes) -> Any:
    return _parse(data, "")  # The cache helps since most archives of a checkpoint differ only in their elements.


def _parse(data: bytes, what: str) -> Any:
    return read_pickle(data, _CLASSES, what=what, persistent_load=storage_reference)


@dataclass(frozen=True, slots=True, eq=False)
class DescribedTensor:
    """A tensor as a pickle describes it; its storage has not been looked up.

    Attributes:
        storage: Reference to the storage.
        place: Dtype, offset, shape and strides in the storage.
    """

    storage: StorageReference
    place: TensorLayout


def describe_tensor(storage: Any, *arguments: Any) -> DescribedTensor:
    """Return the description of a tensor in a pickle.

    Args:
        storage: `StorageReference` of the tensor's storage; other values are refused.
        arguments: Offset, shape and strides in the storage, followed by the dtype if it is not the storage's.
    """
    if type(storage) is not StorageReference:
        raise TypeError("a tensor without a storage")
    return DescribedTensor(storage, tensor_layout(storage.dtype, storage.nbytes, arguments))


T = TypeVar("T")


def not_lazy(tensor: T, extra: Any) -> T:
    """Return a tensor unchanged; raise ValueError if the flags `extra` mark it as lazily conjugated or negated."""
    if extra and (type(extra) is not dict or any(extra.values())):
        raise ValueError("a tensor that is conjugated or negated lazily")
    return tensor


def stored_tensor(tensor: DescribedTensor, archive: Archive, file: str) -> StoredTensor:
    """Return a described tensor as a `StoredTensor`, after looking up its storage's record in the archive.

    Raises:
        ValueError: The archive lacks the tensor's storage.
    """
    record, place = archive.records.get(f"data/{tensor.storage.key}"), tensor.place
    if record is None or record.nbytes < tensor.storage.nbytes:
        raise ValueError(f"the bytes of storage {tensor.storage.key[:100]!r} are missing")
    begin = record.begin + place.offset * place.dtype.itemsize
    return StoredTensor(file, place.dtype, place.shape, place.stride, begin, record)


_CLASSES: dict[tuple[str, str], Any] = {
    **STORAGE_KINDS,
    **DTYPES,
    **rebuilders(describe_tensor, not_lazy, DescribedTensor),
    ("collections", "OrderedDict"): Constructor(dict),
}


def _cached_ends(read: Read, length: int) -> Read:
    """Return a `Read` that serves both ends of the archive from memory, and calls `read` for other bytes."""
    spans = archive_ends(length)
    parts = [memoryview(read(begin, end)).cast("B") for begin, end in spans]
    head, tail, start = parts[0], parts[-1], spans[-1][0]

    def from_ends(begin: int, end: int) -> Any:
        if end <= len(head):
            return head[begin:end]
        return tail[begin - start : end - start] if begin >= start else read(begin, end)

    return from_ends


# This section writes an archive around a tensor's row-major bytes, byte for byte as torch.save of torch 2.13 does.

_NAMES_HASH = 15728199511854643026  # This is torch's hash of the records' names, which never change.
_STORAGE_NAMES = {kind.dtype: name for (module, name), kind in STORAGE_KINDS.items() if kind.dtype is not None}


def archive_head(dtype: torch.dtype, shape: Sequence[int]) -> bytes:
    """Return the bytes before the tensor's bytes, in an archive of one tensor.

    Head, row-major little-endian bytes and tail together are an archive that `torch.load` reads.

    Args:
        dtype: Dtype of the elements.
        shape: Shape of the tensor.

    Returns:
        The head, whose length is a multiple of 64 bytes.

    Raises:
        UnsupportedValue: The dtype is quantised.

    Examples:
        >>> import io, zlib
        >>> from shardtree.formats.archives import archive_tail
        >>> payload = bytes([1, 2, 3, 4, 5, 6])
        >>> head = archive_head(torch.uint8, (2, 3))
        >>> data = head + payload + archive_tail(torch.uint8, (2, 3), zlib.crc32(payload))
        >>> torch.load(io.BytesIO(data), weights_only=True)
        tensor([[1, 2, 3],
                [4, 5, 6]], dtype=torch.uint8)
    """
    return _head(dtype, tuple(shape))[0]


def archive_tail(dtype: torch.dtype, shape: Sequence[int], crc32: int) -> bytes:
    """Return the bytes after the tensor's bytes, in an archive of one tensor.

    Args:
        dtype: Dtype of the elements.
        shape: Shape of the tensor.
        crc32: CRC32 of the tensor's bytes, as `zlib.crc32` returns it.

    Examples:
        >>> len(archive_tail(torch.uint8, (2, 3), 0)) == len(archive_tail(torch.uint8, (2, 3), 2**32 - 1))
        True
    """
    # The CRC32 is only in the tail, in a descriptor and in the directory. So a writer can hash the bytes while it
    # writes them, and never seeks back.
    head, before = _head(dtype, tuple(shape))
    nbytes = _nbytes(dtype, shape)
    records = [*before[:-1], WrittenRecord(before[-1].name, crc32, nbytes, before[-1].at)]
    return finish_archive(bytearray(descriptor(records[-1])), len(head) + nbytes, records)


def archive_length(dtype: torch.dtype, shape: Sequence[int]) -> int:
    """Return the length of an archive of one tensor: head, the tensor's bytes and tail.

    Examples:
        >>> archive_length(torch.uint8, (2, 3)) == len(archive_head(torch.uint8, (2, 3))) + 6 + len(
        ...     archive_tail(torch.uint8, (2, 3), 0)
        ... )
        True
    """
    return _framing_length(dtype, tuple(shape)) + _nbytes(dtype, shape)


@lru_cache(maxsize=4096)
def _framing_length(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    return len(archive_head(dtype, shape)) + len(archive_tail(dtype, shape, 0))


def _nbytes(dtype: torch.dtype, shape: Sequence[int]) -> int:
    return prod(shape) * dtype.itemsize


@lru_cache(maxsize=4096)
def _head(dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[bytes, tuple[WrittenRecord, ...]]:
    """Return an archive's bytes up to its tensor, and its records so far.

    The last record is that of the tensor; its CRC32 is still 0.
    """
    check_storable(dtype, "archive_head")
    out, records = begin_archive(_pickle(dtype, shape))
    payload = WrittenRecord("archive/data/0", 0, _nbytes(dtype, shape), len(out))
    out += local_header(payload)
    return bytes(out), (*records, payload)


def _pickle(dtype: torch.dtype, shape: tuple[int, ...]) -> bytes:
    # Newer dtypes have no storage class: torch writes an untyped storage, whose length is in bytes, and the dtype.
    name = _STORAGE_NAMES.get(dtype)
    kind = Global("torch.storage", "UntypedStorage") if name is None else Global("torch", name)
    count = _nbytes(dtype, shape) if name is None else prod(shape)
    strides = tuple(prod(max(length, 1) for length in shape[axis + 1 :]) for axis in range(len(shape)))
    hooks = Reduced(Global("collections", "OrderedDict"), ())
    arguments = (Persistent(("storage", kind, "0", "cpu", count)), 0, shape, strides, False, hooks)
    if name is not None:
        return write_pickle(Reduced(Global("torch._utils", "_rebuild_tensor_v2"), arguments), protocol=2)
    with_dtype = (*arguments, Global("torch", dtype_name(dtype)))
    return write_pickle(Reduced(Global("torch._utils", "_rebuild_tensor_v3"), with_dtype), protocol=2)


def begin_archive(content: bytes) -> tuple[bytearray, list[WrittenRecord]]:
    """Return the bytes of an archive up to its tensors, and the list of the records in these bytes.

    Args:
        content: Bytes of the pickle, which become the record ``data.pkl``.
    """
    out, records = bytearray(), list[WrittenRecord]()
    append(out, 0, records, "data.pkl", content)
    append(out, 0, records, ".format_version", b"1")
    append(out, 0, records, ".storage_alignment", b"%d" % ALIGNMENT)
    append(out, 0, records, "byteorder", b"little")
    return out, records


def finish_archive(out: bytearray, at: int, records: list[WrittenRecord]) -> bytes:
    """Return the end of an archive: `out`, torch's two last records, and the directory.

    Args:
        out: Bytes after the last tensor, extended in place.
        at: Offset of `out` in the archive.
        records: All records written so far; the two last ones are added.
    """
    append(out, at, records, "version", b"3\n")
    append(out, at, records, ".data/serialization_id", _serialization_id(records))
    return bytes(out + directory(records, at + len(out)))


def _serialization_id(records: Sequence[WrittenRecord]) -> bytes:
    """Return the id of an archive: torch's hash of its records' names, followed by a hash of their CRC32s."""
    seed = 0
    for record in records:
        seed ^= (record.crc32 + 0x9E3779B9 + (seed << 6) + (seed >> 2)) % 2**64
    return b"%020d%020d" % (_NAMES_HASH, seed)


_STEP_BYTES = 1024 * 1024


def read_crc32(reader: Reader, begin: int, end: int) -> int:
    """Read a byte range of a file and return its CRC32."""
    scratch = memoryview(bytearray(min(_STEP_BYTES, end - begin)))
    checksum = 0
    for byte in range(begin, end, _STEP_BYTES):
        part = scratch[: min(_STEP_BYTES, end - byte)]
        reader.read_into(byte, [part])
        checksum = crc32(part, checksum)
    return checksum
