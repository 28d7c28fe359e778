"""Copies boxes that lie in small pieces out of a mapping of the file: that is faster than a read for each piece."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from ..geometry import Column
from ..plans import Strided
from ._blocks import BlockHasher
from ._storage import Buffer

_CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def copy_strided(
    mapped: Buffer,
    strided: Strided,
    memories: Sequence[torch.Tensor],
    *,
    hashes: dict[int, int] | None,
    progress: Callable[[int], None],
) -> int:
    """Copy a file's strided pieces, and return how many bytes these were.

    Args:
        mapped: the whole file.
        strided: all of that file.
        memories: for each requested shard its bytes, uint8 (bytes,).
        hashes: gets the hash of each block that a contiguous piece holds whole, by number; None to hash nothing.
        progress: is told how many bytes were copied since the last time.
    """
    total = 0
    last = last_byte(strided)
    hasher = BlockHasher(mapped.nbytes)
    for row in np.argsort(strided.byte, kind="stable").tolist():
        shape, size = strided.shape[row].tolist(), int(strided.item_size[row])
        byte, end, target_byte = int(strided.byte[row]), int(last[row]), int(strided.target_byte[row])
        carrier = _CARRIERS[size]
        stored = torch.frombuffer(mapped, dtype=carrier, count=(end - byte) // size, offset=byte)
        memory = memories[int(strided.target[row])][target_byte:]
        target = memory[: memory.numel() // size * size].view(carrier)
        piece = stored.as_strided(shape, strided.stride[row].tolist())
        if hashes is not None and piece.is_contiguous():
            hasher.update(mapped[byte:end], byte)
        target.as_strided(shape, strided.target_stride[row].tolist()).copy_(piece)
        total += piece.numel() * size
        progress(piece.numel() * size)
    if hashes is not None:
        hashes.update(hasher.hashes)
    return total


def last_byte(strided: Strided) -> Column:
    """Return one past the last byte of each piece in its file."""
    items: Column = ((strided.shape - 1) * strided.stride).sum(axis=1) + 1
    return strided.byte + items * strided.item_size
