"""Small tensors on their way to a file: copied together, so that they are hashed and written as one buffer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from ...codec import bit_view
from ...errors import ShapeError, error_text
from ...storage import Buffer, is_in_place
from .._checks import misfit
from ._layout import Item

_SMALL_BYTES = 64 * 1024
"""Of larger tensors the copy would cost more than a buffer of their own."""
_TOGETHER_BYTES = 256 * 1024
"""So few that the processor still has them in its cache when they are hashed and written."""

# Bits are copied as integers, which have no NaN to be changed on the way.
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def together(items: Iterable[Item]) -> Iterator[list[Item]]:
    """Yield items in order: small tensors with items of one size together, each other item by itself."""
    group: list[Item] = []
    size = 0
    for item in items:
        small = _is_small(item)
        if group and not (small and item.item_size == group[0].item_size and size + item.length <= _TOGETHER_BYTES):
            yield group
            group, size = [], 0
        if small:
            group.append(item)
            size += item.length
        else:
            yield [item]
    if group:
        yield group


def _is_small(item: Item) -> bool:
    if item.length > _SMALL_BYTES or item.shard is None:
        return False
    data = item.shard.data
    # Of other kinds of tensor, only `tensor_buffers` knows what their bytes are.
    if type(data) not in (torch.Tensor, torch.nn.Parameter) or item.item_size not in _INTEGERS:
        return False
    return is_in_place(data)


def gathered(items: Sequence[Item]) -> Buffer:
    """Return the bytes of small tensors, one after the other.

    Raises:
        ShapeError: one was changed since the save began.
    """
    integer = _INTEGERS[items[0].item_size]
    with torch.no_grad():
        flat = [checked_data(item).view(-1).view(integer) for item in items]
        room = torch.empty(sum(map(torch.Tensor.numel, flat)), dtype=integer, device="cpu")
        return memoryview(bit_view(torch.cat(flat, out=room)).numpy())


def checked_data(item: Item) -> Any:
    """Return a tensor item's data, which may be lazy.

    Raises:
        ShapeError: it was changed since the save began.
    """
    if item.shard is None:
        raise TypeError("an object has no tensor")
    if found := misfit(item.shard):
        raise ShapeError(error_text("save: a tensor was changed while it waited to be written", found=found))
    return item.shard.data
