"""Small tensors on their way to a file: copied together, so that they are hashed and written as one buffer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch._utils import _flatten_dense_tensors

from ...codec import bit_view
from ...errors import ShapeError, error_text
from ...mapping import ShardedTensor
from ...storage import Buffer, is_in_place
from .._checks import misfit
from ._entries import Entries, Source

_SMALL_BYTES = 64 * 1024
"""Of larger tensors the copy would cost more than a buffer of their own."""
_TOGETHER_BYTES = 256 * 1024
"""So few that the processor still has them in its cache when they are hashed and written."""

# Bits are copied as integers, which have no NaN to be changed on the way.
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def together(entries: Entries) -> Iterator[slice]:
    """Yield rows of entries, in order: small tensors with items of one size together, each other entry by itself."""
    start, size, joined = 0, 0, 0  # what may be joined is told by its item size, what may not by 0
    columns = (entries.sources, entries.item_size.tolist(), entries.length.tolist())
    for row, (source, item_size, length) in enumerate(zip(*columns, strict=True)):
        joins = item_size if length <= _SMALL_BYTES and _is_plain(source, item_size) else 0
        if row and not (joins and joins == joined and size + length <= _TOGETHER_BYTES):
            yield slice(start, row)
            start, size = row, 0
        joined = joins
        size += length
    if len(entries):
        yield slice(start, len(entries))


def _is_plain(source: Source, item_size: int) -> bool:
    """Return whether an entry is a tensor whose memory is its bytes; `tensor_buffers` knows those of others."""
    if isinstance(source, bytes) or item_size not in _INTEGERS:
        return False
    data = source.data
    return type(data) in (torch.Tensor, torch.nn.Parameter) and is_in_place(data)


def gathered(shards: Sequence[ShardedTensor]) -> Buffer:
    """Return the bytes of small tensors, one after the other.

    Raises:
        ShapeError: one was changed since the save began.
    """
    integer = _INTEGERS[shards[0].dtype.itemsize]
    with torch.no_grad():
        bits = [checked_data(shard).view(integer) for shard in shards]
        # Half the calls that views and `cat` are.
        return memoryview(bit_view(_flatten_dense_tensors(bits)).numpy())  # type: ignore[no-untyped-call]


def checked_data(shard: ShardedTensor) -> Any:
    """Return a shard's data, which may be lazy.

    Raises:
        ShapeError: it was changed since the save began.
    """
    if found := misfit(shard):
        raise ShapeError(error_text("save: a tensor was changed while it waited to be written", found=found))
    return shard.data
