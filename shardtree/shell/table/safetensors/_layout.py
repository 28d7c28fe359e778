"""The layout of a rank's data files: the offset of every entry, computed before a byte is written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import numpy as np
import torch
from torch._utils import _flatten_dense_tensors

from ....core import limits
from ....core.codec import HeaderEntry, bit_view, check_storable, encode_header, format_tag, is_tagged
from ....core.geometry import Column, box_column, volumes
from ....core.lazy import INTEGERS
from ....core.mapping import ShardedObject, ShardedTensor
from ...storage import Buffer, is_in_place
from .._checks import checked_data
from ..index import encoded_object

# A rank's shards as entries of its data files. They are columns because 20,000 tensors are then laid out in 28 ms
# instead of the 75 ms that an object for each entry took.

Shard: TypeAlias = ShardedTensor | ShardedObject
Source: TypeAlias = ShardedTensor | bytes


@dataclass(frozen=True, slots=True, eq=False)
class Entries:
    """Entries (named tensors) of safetensors files, one for each shard, in columns.

    Attributes:
        sources: Tensor shard, or encoded data of an object, from which each entry gets its bytes.
        number: Position of each entry's shard among the rank's shards, int64 (entries,).
        keys: Keys of tensors and unique keys of objects.
        tags: Safetensors' names of the dtypes.
        shapes: Shapes in the files' headers.
        item_size: Size of an element in bytes, to which each entry's offset is aligned, int64 (entries,).
        length: Length of each entry in bytes, int64 (entries,).
    """

    sources: tuple[Source, ...]
    number: Column
    keys: tuple[str, ...]
    tags: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    item_size: Column
    length: Column

    def __len__(self) -> int:
        return len(self.sources)


def entries_of(shards: Sequence[Shard], *, allow_pickle: bool) -> Entries:
    """Return an entry for each shard, in the same order; objects are encoded.

    Args:
        shards: Tensor shards with data, and objects.
        allow_pickle: Whether objects that the codec can't hold are pickled.

    Raises:
        UnsupportedValue: a dtype or an object can't be stored.
    """
    storable_dtypes = set[torch.dtype]()
    for shard in shards:
        if isinstance(shard, ShardedTensor) and shard.dtype not in storable_dtypes:
            check_storable(shard.dtype, f"save: {shard.key!r}")
            storable_dtypes.add(shard.dtype)
    encode = partial(encoded_object, allow_pickle=allow_pickle)
    sources = tuple([shard if isinstance(shard, ShardedTensor) else encode(shard) for shard in shards])
    # An object is stored as a tensor of its bytes.
    dtypes = [torch.uint8 if isinstance(source, bytes) else source.dtype for source in sources]
    shapes = [(len(source),) if isinstance(source, bytes) else _shape(source) for source in sources]
    keys = tuple([shard.key if isinstance(shard, ShardedTensor) else shard.unique_key for shard in shards])
    different = set(dtypes)
    tag = {dtype: format_tag(dtype) for dtype in different}
    item_size = np.array([dtype.itemsize for dtype in dtypes], dtype=np.int64)
    length = volumes(box_column(shapes, fill=1)) * item_size
    if not all(map(is_tagged, different)):
        lengths = zip(dtypes, shapes, length.tolist(), strict=True)
        shapes = [shape if is_tagged(dtype) else (nbytes,) for dtype, shape, nbytes in lengths]
    tags = tuple([tag[dtype] for dtype in dtypes])
    return Entries(sources, np.arange(len(shards)), keys, tags, tuple(shapes), item_size, length)


def select_entries(entries: Entries, rows: Column) -> Entries:
    """Return the entries at the positions `rows`, in this order."""
    numbers = rows.tolist()
    return Entries(
        sources=tuple([entries.sources[row] for row in numbers]),
        number=entries.number[rows],
        keys=tuple([entries.keys[row] for row in numbers]),
        tags=tuple([entries.tags[row] for row in numbers]),
        shapes=tuple([entries.shapes[row] for row in numbers]),
        item_size=entries.item_size[rows],
        length=entries.length[rows],
    )


def _shape(shard: ShardedTensor) -> tuple[int, ...]:
    flat = shard.flattened_range
    return (1,) * shard.prepend_axis_num + shard.local_shape if flat is None else (flat.stop - flat.start,)


FILE_BYTES = 64 * 1024 * 1024
"""Minimum size that is worth a further file, written by its own thread."""


@dataclass(frozen=True, slots=True, eq=False)
class FilePart:
    """A data file: its header, followed by its entries without gaps.

    Attributes:
        header: First bytes of the file.
        entries: Entries in the order of the file.
        byte: Offset of each entry in the file, int64 (entries,).
    """

    header: bytes
    entries: Entries
    byte: Column

    @property
    def length(self) -> int:
        """The file's length in bytes."""
        return len(self.header) + int(self.entries.length.sum())


def parts(
    shards: Sequence[Shard], *, allow_pickle: bool, most_files: int = 1, header_bytes: int = limits.HEADER_BYTES
) -> tuple[FilePart, ...]:
    """Divide a rank's shards among data files, and return the layout of each; empty if it has no shards.

    Args:
        shards: Tensor shards with data, and objects.
        allow_pickle: Whether objects that the codec can't hold are pickled.
        most_files: Maximum number of files of about equal length among which shards are divided; long headers may
            require more.
        header_bytes: Maximum length of a header, in bytes.

    Raises:
        UnsupportedValue: a dtype or an object can't be stored.
    """
    entries = entries_of(shards, allow_pickle=allow_pickle)
    position = {key: number for number, key in enumerate(sorted(dict.fromkeys(entries.keys)))}
    by_key = np.array([position[key] for key in entries.keys], dtype=np.int64)
    # In the order of decreasing item sizes, every entry is aligned without gaps, which the format forbids.
    order = np.lexsort((by_key, -entries.item_size))
    # Threads that write the same file wait for each other in the kernel; with a file each, two take half the time.
    files = min(most_files, int(entries.length.sum()) // FILE_BYTES)
    # A character takes at most six bytes in JSON; 200 leaves room for the rest of an entry, such as its offsets.
    most = [6 * len(key) + 24 * len(shape) + 200 for key, shape in zip(entries.keys, entries.shapes, strict=True)]
    length, header_length = entries.length[order], np.array(most, dtype=np.int64)[order]
    return tuple(
        _part(select_entries(entries, order[group]))
        for share in _shares(length, files)
        for group in _groups(share, header_length[share], header_bytes)
    )


def _shares(length: Column, files: int) -> list[Column]:
    """Divide consecutive entries into at most `files` groups of about equal length; return each group's positions."""
    rows = np.arange(len(length))
    if files < 2 or not len(length):
        return [rows] if len(length) else []
    ends = np.cumsum(length)
    middles = 2 * ends - length
    file = np.minimum(middles * files // max(1, 2 * int(ends[-1])), files - 1)
    return np.split(rows, np.flatnonzero(np.diff(file)) + 1)


def _groups(rows: Column, length: Column, most: int) -> Iterator[Column]:
    """Divide `rows` into consecutive groups with a total length up to `most`; a single longer row is a group."""
    ends = np.cumsum(length)
    start = 0
    while start < len(rows):
        before = ends[start - 1] if start else 0
        stop = max(start + 1, int(np.searchsorted(ends, before + most, side="right")))
        yield rows[start:stop]
        start = stop


def _part(entries: Entries) -> FilePart:
    ends = np.cumsum(entries.length)
    starts = ends - entries.length
    columns = (_names(entries.keys), entries.tags, entries.shapes, starts.tolist(), ends.tolist())
    header = encode_header(list(map(HeaderEntry, *columns)), {"format": "pt"})
    return FilePart(header, entries, len(header) + starts)


def _names(keys: Sequence[str]) -> Sequence[str]:
    """Return a unique name for each entry of a file: its key, or the key with a suffix if that is taken."""
    # The names serve people and other programs; our own loads use only the index.
    in_use = {"__metadata__"}
    if len(in_use.union(keys)) == len(keys) + 1:
        return keys
    names = []
    for position, key in enumerate(keys):
        names.append(_free_name(key, position, in_use))
        in_use.add(names[-1])
    return names


def _free_name(key: str, position: int, in_use: set[str]) -> str:
    name, number = key, position
    while name in in_use:
        name, number = f"{key}#{number}", number + 1
    return name


# Small tensors are gathered, so that a group is copied by one call, and hashed and written as one buffer.

_SMALL_BYTES = 64 * 1024
"""Size limit of gathered tensors: copying larger ones costs more than separate buffers."""
_GATHERED_BYTES = 256 * 1024
"""Size limit of a group, so that it is still in the processor's cache when it is hashed and written."""


def together(entries: Entries) -> Iterator[slice]:
    """Yield slices of entries to write together: each is a run of small tensors of one item size, or a single entry."""
    start, size, before = 0, 0, 0  # `before` is the item size of the previous row, 0 if that can't be joined
    columns = (entries.sources, entries.item_size.tolist(), entries.length.tolist())
    for row, (source, item_size, length) in enumerate(zip(*columns, strict=True)):
        joins = item_size if length <= _SMALL_BYTES and _is_plain(source, item_size) else 0
        if row and not (joins and joins == before and size + length <= _GATHERED_BYTES):
            yield slice(start, row)
            start, size = row, 0
        before = joins
        size += length
    if len(entries):
        yield slice(start, len(entries))


def _is_plain(source: Source, item_size: int) -> bool:
    """Return whether a file's entry is a tensor that `gathered` can copy: its memory is its row-major bytes.

    Args:
        source: The entry's shard, or the encoded bytes of an object.
        item_size: Bytes of an element; `gathered` copies only elements of 1, 2, 4 or 8 bytes.
    """
    if isinstance(source, bytes) or item_size not in INTEGERS:
        return False
    data = source.data
    return type(data) in (torch.Tensor, torch.nn.Parameter) and is_in_place(data)


def gathered(shards: Sequence[ShardedTensor]) -> Buffer:
    """Return the concatenated bytes of small tensors of one item size.

    Raises:
        ShapeError: a tensor was changed since the save began.
    """
    # Values are copied as integers, since copying floats may change the bits of a NaN.
    integer = INTEGERS[shards[0].dtype.itemsize]
    with torch.no_grad():
        bits = [checked_data(shard).view(integer) for shard in shards]
        # This takes half as many calls as views and `cat`.
        return memoryview(bit_view(_flatten_dense_tensors(bits)).numpy())  # type: ignore[no-untyped-call]
