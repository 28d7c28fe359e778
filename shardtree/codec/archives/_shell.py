"""What goes around a tensor's row-major bytes to make an archive of it: as torch.save writes it, torch 2.13 at that."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod

import torch

from .._dtypes import check_storable, dtype_name
from ..pickles import Global, Persistent, Reduced, write_pickle
from ._storages import STORAGE_KINDS
from ._write import ALIGNMENT, Written, append, descriptor, directory, local_header

_NAMES_HASH = 15728199511854643026  # what torch makes of these records' names
_STORAGE_NAMES = {kind.dtype: name for (module, name), kind in STORAGE_KINDS.items() if kind.dtype is not None}


def archive_head(dtype: torch.dtype, shape: Sequence[int]) -> bytes:
    """Return the bytes of an archive of one tensor that come before the tensor's own.

    Head, row-major little-endian bytes and tail together are an archive that `torch.load` reads.

    Args:
        dtype: of the elements.
        shape: lengths.

    Returns:
        A multiple of 64 bytes.

    Raises:
        UnsupportedValue: the dtype is quantised.

    Examples:
        >>> import io, zlib
        >>> from shardtree.codec import archive_tail
        >>> payload = bytes([1, 2, 3, 4, 5, 6])
        >>> head = archive_head(torch.uint8, (2, 3))
        >>> data = head + payload + archive_tail(torch.uint8, (2, 3), zlib.crc32(payload))
        >>> torch.load(io.BytesIO(data), weights_only=True)
        tensor([[1, 2, 3],
                [4, 5, 6]], dtype=torch.uint8)
    """
    return _head(dtype, tuple(shape))[0]


def archive_tail(dtype: torch.dtype, shape: Sequence[int], crc32: int) -> bytes:
    """Return the bytes of an archive of one tensor that come after the tensor's own.

    Args:
        dtype: of the elements.
        shape: lengths.
        crc32: of the tensor's bytes, as `zlib.crc32` gives it.

    Examples:
        >>> len(archive_tail(torch.uint8, (2, 3), 0)) == len(archive_tail(torch.uint8, (2, 3), 2**32 - 1))
        True
    """
    head, before = _head(dtype, tuple(shape))
    nbytes = _nbytes(dtype, shape)
    records = [*before[:-1], Written(before[-1].name, crc32, nbytes, before[-1].at)]
    out = bytearray(descriptor(records[-1]))
    start = len(head) + nbytes
    append(out, start, records, "version", b"3\n")
    append(out, start, records, ".data/serialization_id", _serialization_id(records))
    return bytes(out + directory(records, start + len(out)))


def archive_length(dtype: torch.dtype, shape: Sequence[int]) -> int:
    """Return how many bytes an archive of one tensor has: head, the tensor's own, and tail.

    Examples:
        >>> archive_length(torch.uint8, (2, 3)) == len(archive_head(torch.uint8, (2, 3))) + 6 + len(
        ...     archive_tail(torch.uint8, (2, 3), 0)
        ... )
        True
    """
    return _around(dtype, tuple(shape)) + _nbytes(dtype, shape)


@lru_cache(maxsize=4096)
def _around(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    return len(archive_head(dtype, shape)) + len(archive_tail(dtype, shape, 0))


def _nbytes(dtype: torch.dtype, shape: Sequence[int]) -> int:
    return prod(shape) * dtype.itemsize


@lru_cache(maxsize=4096)
def _head(dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[bytes, tuple[Written, ...]]:
    """Return the head, and its records; the last is the tensor's, without its CRC32."""
    check_storable(dtype, "archive_head")
    out, records = bytearray(), list[Written]()
    append(out, 0, records, "data.pkl", _pickle(dtype, shape))
    append(out, 0, records, ".format_version", b"1")
    append(out, 0, records, ".storage_alignment", b"%d" % ALIGNMENT)
    append(out, 0, records, "byteorder", b"little")
    payload = Written("archive/data/0", 0, _nbytes(dtype, shape), len(out))
    out += local_header(payload)
    return bytes(out), (*records, payload)


def _pickle(dtype: torch.dtype, shape: tuple[int, ...]) -> bytes:
    name = _STORAGE_NAMES.get(dtype)
    kind = Global("torch.storage", "UntypedStorage") if name is None else Global("torch", name)
    count = _nbytes(dtype, shape) if name is None else prod(shape)
    strides = tuple(prod(max(length, 1) for length in shape[axis + 1 :]) for axis in range(len(shape)))
    hooks = Reduced(Global("collections", "OrderedDict"), ())
    arguments = (Persistent(("storage", kind, "0", "cpu", count)), 0, shape, strides, False, hooks)
    if name is not None:
        return write_pickle(Reduced(Global("torch._utils", "_rebuild_tensor_v2"), arguments), protocol=2)
    typed = (*arguments, Global("torch", dtype_name(dtype)))
    return write_pickle(Reduced(Global("torch._utils", "_rebuild_tensor_v3"), typed), protocol=2)


def _serialization_id(records: Sequence[Written]) -> bytes:
    """Return the digits by which torch tells archives apart."""
    seed = 0
    for record in records:
        seed ^= (record.crc32 + 0x9E3779B9 + (seed << 6) + (seed >> 2)) % 2**64
    return b"%020d%020d" % (_NAMES_HASH, seed)
