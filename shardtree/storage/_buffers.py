"""A tensor's row-major bytes as buffers, without a copy of the whole wherever its memory isn't already that."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import torch

from ..codec import byte_buffer, row_major_bits
from ..lazy import LazyTensor
from ._staging import copies_of, staged_buffers
from ._storage import Buffer

STAGED_BYTES = 4 * 1024 * 1024
"""The most that is copied at once of a tensor whose memory can't be written as it is."""


def tensor_buffers(tensor: torch.Tensor | LazyTensor) -> Iterator[Buffer]:
    r"""Yield the bytes of a tensor, in row-major order.

    A contiguous tensor in the CPU's memory is yielded in place. Another (transposed, on an accelerator, lazy) is staged
    in parts of at most `STAGED_BYTES`; on CUDA, one part is on its way while the one before is used.

    Examples:
        >>> b"".join(tensor_buffers(torch.tensor([[1, 2], [3, 4]], dtype=torch.uint8).T))
        b'\x01\x03\x02\x04'
    """
    if not tensor.numel():
        return
    copies = copies_of(tensor.device) if isinstance(tensor, torch.Tensor) else None
    if copies is not None:
        yield from staged_buffers(cast(Iterator[torch.Tensor], _parts(tensor)), copies)
    elif isinstance(tensor, torch.Tensor) and is_in_place(tensor):
        yield byte_buffer(tensor)
    else:
        for part in _parts(tensor):
            yield memoryview(row_major_bits(part.read() if isinstance(part, LazyTensor) else part).numpy())


def _parts(tensor: torch.Tensor | LazyTensor) -> Iterator[torch.Tensor | LazyTensor]:
    """Yield a tensor in parts of at most `STAGED_BYTES`, or single elements, in row-major order."""
    if tensor.nbytes <= STAGED_BYTES or not tensor.ndim:
        yield tensor
        return
    rows = max(1, STAGED_BYTES * tensor.shape[0] // tensor.nbytes)
    for start in range(0, tensor.shape[0], rows):
        stop = min(start + rows, tensor.shape[0])
        # A single row may still be too much: it loses its axis and is taken apart along the next.
        yield from _parts(tensor[start] if rows == 1 else tensor[start:stop])


def is_in_place(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's memory is its row-major bytes, where the CPU can read them.

    Examples:
        >>> is_in_place(torch.ones(2, 3)), is_in_place(torch.ones(2, 3).T)
        (True, False)
    """
    return tensor.is_cpu and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
