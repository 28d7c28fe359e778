"""Chunks that aren't plain bytes: the zarr package undoes their codecs, one chunk at a time."""

from __future__ import annotations

import json
from importlib import import_module
from typing import Any

import numpy as np
import torch

from ...codec import dtype_name
from ...errors import CheckpointingException, CorruptCheckpoint, StrategyError, UnsupportedValue, error_text
from ...storage import Storage
from ._array import Shape, StoredArray
from ._dtypes import fill_item, zarr_name
from ._expansion import check_expansion

_MOST_DECODED = 4 * 2**30
"""Bytes of memory that decoding one chunk may take. No metadata of a few bytes may ask for more."""


def decoded(storage: Storage, array: StoredArray, cell: Shape) -> torch.Tensor:
    """Return the elements of one chunk file that lie in the tensor, as row-major bytes, uint8 (bytes,).

    Raises:
        StrategyError: the zarr package isn't installed.
        CorruptCheckpoint: the chunk can't be decoded.
        UnsupportedValue: it is too large to be decoded at once, or its compressors are in no usual order.
    """
    name = array.file_name(cell)
    _check_size(array, array.file_bytes)
    package = zarr_package(array.name)
    data = storage.read(name)
    check_expansion(array, data, repr(storage.where(name)))
    try:
        values = _values(package, array, name.removeprefix(f"{array.name}/"), data, cell)
    except CheckpointingException:
        raise
    except Exception as error:  # codecs raise whatever they like
        found = f"{type(error).__name__}: {error}"[:300]
        fix = "The file was damaged, or made by a program whose codecs aren't installed."
        raise CorruptCheckpoint(
            error_text(f"load: {storage.where(name)!r} can't be decoded", found=found, fix=fix)
        ) from error
    return torch.from_numpy(values.reshape(-1).view(np.uint8).copy())


def filled(array: StoredArray, length: int) -> torch.Tensor:
    """Return so many bytes of a chunk that isn't stored, uint8 (bytes,).

    Raises:
        UnsupportedValue: it is too large to be made at once.
        CorruptCheckpoint: the fill value doesn't fit the dtype.
    """
    _check_size(array, length)
    item = torch.frombuffer(bytearray(fill_item(array.fill, array.dtype, repr(array.name))), dtype=torch.uint8)
    return item.repeat(length // item.numel())


def _check_size(array: StoredArray, length: int) -> None:
    """Raise unless a whole chunk of an array may be in memory."""
    if length > _MOST_DECODED:
        found, expected = f"{length} bytes", f"at most {_MOST_DECODED}"
        what = f"load: a chunk of array {array.name!r} is too large to be decoded"
        raise UnsupportedValue(error_text(what, found=found, expected=expected, fix="Rewrite it with smaller chunks."))


def zarr_package(what: str) -> Any:
    """Return the zarr package, imported when something needs it.

    Raises:
        StrategyError: it isn't installed.
    """
    try:
        return import_module("zarr")
    except ImportError as error:
        fix = "pip install 'shardtree[zarr]'"
        text = error_text(f"load: {what!r} is compressed, which needs the zarr package", found="none", fix=fix)
        raise StrategyError(text) from error


def _values(package: Any, array: StoredArray, name: str, data: bytes, cell: Shape) -> np.ndarray[Any, Any]:
    file = "zarr.json" if array.prefix or "codecs" in array.document else ".zarray"
    buffer = package.core.buffer.default_buffer_prototype().buffer
    document = json.dumps(_understood(array)).encode()
    store = package.storage.MemoryStore({file: buffer.from_bytes(document), name: buffer.from_bytes(data)})
    region = tuple(
        slice(at * step, min(size, (at + 1) * step))
        for at, step, size in zip(cell, array.chunk, array.shape, strict=False)
    )
    opened = package.open_array(store, mode="r", zarr_format=3 if file == "zarr.json" else 2)
    found = np.asarray(opened[region])
    expected = tuple(part.stop - part.start for part in region)
    if found.shape != expected or found.dtype.itemsize != array.dtype.itemsize:
        raise ValueError(f"decoded to {found.shape} {found.dtype}, expected {expected} {dtype_name(array.dtype)}")
    return np.ascontiguousarray(found, dtype=found.dtype.newbyteorder("<"))


def _understood(array: StoredArray) -> dict[str, Any]:
    """Return the metadata in words that zarr-python knows: unsigned integers for dtypes that numpy lacks."""
    document, name = dict(array.document), zarr_name(array.dtype)
    if name == dtype_name(array.dtype):
        return document
    fill = document.get("fill_value")
    bits = 0 if fill is None else int.from_bytes(fill_item(fill, array.dtype, repr(array.name)), "little")
    is_v3 = "codecs" in document
    words = {"data_type": name} if is_v3 else {"dtype": f"<u{array.dtype.itemsize}"}
    if is_v3 and document.get("data_type") == name:
        return document  # one of our own: its bits already count as integers
    return document | words | {"fill_value": bits}
