"""The layout of a model's files, computed before a byte is written; the safetensors library has the same layout."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from ...errors import MetadataError, UnsupportedValue, error_text
from ...kit import (
    Buffer,
    Column,
    HeaderEntry,
    ShardedTensor,
    TensorKind,
    box_column,
    checked_data,
    encode_header,
    flat_boxes,
    kind_in_file,
    limits,
    row_major_strides,
    tensor_buffers,
    volumes,
)
from ._texts import TEXTS, header_texts

# This is the library's order: larger items come first, so that each is aligned to its size.
_TAGS = (
    "U64 I64 F64 C64 F32 U32 I32 BF16 F16 U16 I16 "
    "F8_E5M2FNUZ F8_E4M3FNUZ F8_E8M0 F8_E4M3 F8_E5M2 I8 U8 F6_E3M2 F6_E2M3 F4 BOOL"
).split()
_ORDER = {tag: position for position, tag in enumerate(_TAGS)}

Kinds = Mapping[str, TensorKind]

_TORCH = header_texts(None)


@dataclass(frozen=True, slots=True)
class ModelFile:
    """A file of a model.

    Attributes:
        header: Bytes of the file's header, which come first.
        length: Length of the file in bytes, header included.
        bytes_before: Offset of each tensor in the file, in bytes.
    """

    header: bytes
    length: int
    bytes_before: Mapping[str, int]


def model_files(
    kinds: Kinds,
    *,
    max_file_bytes: int,
    header_bytes: int = limits.HEADER_BYTES,
    writers: Mapping[str, int] | None = None,
    texts: Mapping[str, str] = _TORCH,
) -> tuple[ModelFile, ...]:
    """Return the layout of each file of a model. A model without tensors has one file.

    Args:
        kinds: Dtype and shape of each tensor by name; files are filled in this order.
        max_file_bytes: Upper bound of the bytes of tensors in a file; a single tensor may exceed it.
        header_bytes: Upper bound of the bytes of a header.
        writers: Rank that writes each tensor, by name, if each file must be written by a single rank; None if several
            ranks may write one file.
        texts: Strings by name for the headers, the same in every file, since a program may open any file alone.

    Raises:
        UnsupportedValue: safetensors files do not support a dtype, a packed dtype without an axis, or a name.
        MetadataError: The strings leave no room for tensors in a header.

    Examples:
        >>> import torch
        >>> kinds = {"a": TensorKind(torch.int8, (3,), 0), "b": TensorKind(torch.int64, (), 0)}
        >>> [dict(file.bytes_before) for file in model_files(kinds, max_file_bytes=100)]
        [{'b': 152, 'a': 160}]
        >>> len(model_files(kinds, max_file_bytes=8))
        2
    """
    _check_storable(kinds)
    room = header_bytes - sum(_text_bytes(name) + _text_bytes(text) for name, text in texts.items())
    if room < 0:
        heading, expected = f"save: strings of {TEXTS!r} are too long", f"at most {header_bytes} bytes"
        found, fix = f"{header_bytes - room} bytes", "Shorten them, or leave some out of the tree."
        raise MetadataError(error_text(heading, found=found, expected=expected, fix=fix))
    return tuple(_file(names, kinds, texts) for names in _groups(kinds, max_file_bytes, room, writers or {}))


def _text_bytes(text: str) -> int:
    return 6 * len(text)  # A character takes at most 6 bytes in JSON.


def tensor_bytes(kind: TensorKind) -> int:
    """Return the number of bytes of a whole tensor."""
    return prod(kind.global_shape) * kind.dtype.itemsize


def _check_storable(kinds: Kinds) -> None:
    wrong = [f"{key!r}: {kind}" for key, kind in kinds.items() if kind_in_file(kind.dtype, kind.global_shape) is None]
    if wrong:
        heading = "save: safetensors files do not support the dtype or the shape of these tensors"
        fix = "Cast or reshape the tensors, or save in the native format."
        raise UnsupportedValue(error_text(heading, offenders=wrong, fix=fix))
    if TEXTS in kinds:
        heading = f"save: a tensor in a safetensors file cannot be named {TEXTS!r}"
        raise UnsupportedValue(error_text(heading, fix="Rename the tensor."))


def _groups(kinds: Kinds, max_file_bytes: int, header_bytes: int, writers: Mapping[str, int]) -> Iterator[list[str]]:
    group, size, header = list[str](), 0, 0
    for name, kind in kinds.items():
        # 200 leaves room for the numbers of a shape and the offsets.
        nbytes, more = tensor_bytes(kind), _text_bytes(name) + 24 * len(kind.global_shape) + 200
        is_full = size + nbytes > max_file_bytes or header + more > header_bytes
        if group and (is_full or writers.get(name) != writers.get(group[0])):
            yield group
            group, size, header = [], 0, 0
        group.append(name)
        size, header = size + nbytes, header + more
    if group or not kinds:
        yield group


def _file(names: Sequence[str], kinds: Kinds, texts: Mapping[str, str]) -> ModelFile:
    entries, end = list[HeaderEntry](), 0
    in_file = {name: kind_in_file(kinds[name].dtype, kinds[name].global_shape) for name in names}
    tagged = [(name, *kind) for name, kind in in_file.items() if kind is not None]
    for name, tag, shape in sorted(tagged, key=lambda row: (_ORDER[row[1]], row[0])):
        start, end = end, end + tensor_bytes(kinds[name])
        entries.append(HeaderEntry(name, tag, shape, start, end))
    header = encode_header(entries, texts, alignment=8)
    return ModelFile(header, len(header) + end, {entry.name: len(header) + entry.start for entry in entries})


# This section cuts a shard's bytes into runs that are contiguous in the whole tensor, each with its offset in the file.

_PIECE_BYTES = 1024 * 1024

_STEP = 4096
"""Number of runs computed at a time: a shard of columns has one for each row, which may be millions."""


def shard_pieces(shard: ShardedTensor, begin: int) -> Iterator[tuple[int, Buffer]]:
    r"""Yield a shard's bytes in pieces of at most 1 MB that are contiguous in the file, each after its offset there.

    Args:
        shard: Shard with data.
        begin: Offset of the whole tensor in the file, in bytes.

    Raises:
        ShapeError: The data no longer has the dtype or shape of the shard.

    Examples:
        >>> import torch
        >>> right = ShardedTensor.from_rank_offsets("w", torch.tensor([[1], [2]], dtype=torch.int8), (1, 1, 2))
        >>> [(byte, bytes(piece)) for byte, piece in shard_pieces(right, 100)]
        [(101, b'\x01'), (103, b'\x02')]
    """
    buffers = tensor_buffers(checked_data(shard))
    buffer, at = memoryview(b""), 0
    for byte, length in shard_runs(shard):
        place, end = begin + byte, begin + byte + length
        while place < end:
            if at == buffer.nbytes:
                buffer, at = next(buffers), 0
            size = min(end - place, buffer.nbytes - at, _PIECE_BYTES)
            yield place, buffer[at : at + size]
            place, at = place + size, at + size


def shard_runs(shard: ShardedTensor) -> Iterator[tuple[int, int]]:
    """Yield the contiguous byte ranges of a whole tensor that a shard has, each as offset and length in bytes.

    The ranges come in the order of the shard's own bytes.

    Examples:
        >>> import torch
        >>> list(shard_runs(ShardedTensor.from_rank_offsets("w", torch.zeros(2, 2), (1, 1, 2))))
        [(8, 8), (24, 8)]
    """
    whole = box_column([shard.global_shape], fill=1)
    offset = box_column([shard.global_offset], fill=0)
    shape = box_column([(1,) * shard.prepend_axis_num + shard.local_shape], fill=1)
    if shard.flattened_range is not None:
        start, stop = (np.array([edge]) for edge in (shard.flattened_range.start, shard.flattened_range.stop))
        _, inside, shapes, _ = flat_boxes(shape, start, stop)
        offsets = offset + inside
    else:
        offsets, shapes = offset, shape
    for row in range(len(offsets)):
        yield from _box_runs(whole, offsets[row : row + 1], shapes[row : row + 1], shard.dtype.itemsize)


def _box_runs(whole: Column, offset: Column, shape: Column, item_size: int) -> Iterator[tuple[int, int]]:
    """Yield the byte ranges of a box as `shard_runs` does; the columns have one row, for this box and its tensor."""
    if not volumes(shape)[0]:
        return
    strides = row_major_strides(whole)[0]
    axes = shape.shape[1]
    # A run spans an axis if all axes below it are whole.
    whole_below = [bool((shape[0, axis + 1 :] == whole[0, axis + 1 :]).all()) for axis in range(axes)]
    outer = whole_below.index(True)
    length = int(shape[0, outer:].prod()) * item_size
    first = int((offset[0] * strides).sum()) * item_size
    rows = shape[:, :outer]
    row_strides = row_major_strides(rows) if outer else rows
    count = int(volumes(rows)[0])
    for start in range(0, count, _STEP):
        number = np.arange(start, min(start + _STEP, count))
        at = number[:, None] // row_strides % rows if outer else np.zeros((number.size, 0), dtype=np.int64)
        for byte in (first + (at * strides[:outer]).sum(axis=1) * item_size).tolist():
            yield byte, length
