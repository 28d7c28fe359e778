"""A tensor's bits, viewed as integers, which torch can copy on every device, or as bytes in row-major order."""

from __future__ import annotations

import torch

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Dtypes by item size; unlike some others, torch can join, fill and copy them bit for bit on every device."""


def as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of a tensor's bits as integers of the same size, which torch can join and copy on every device.

    A tensor with elements of 16 bytes keeps its dtype.

    Examples:
        >>> as_integers(torch.tensor([1.0, -0.0]))
        tensor([ 1065353216, -2147483648], dtype=torch.int32)
    """
    return tensor.detach().resolve_conj().resolve_neg().view(INTEGERS.get(tensor.itemsize, tensor.dtype))


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's bytes in row-major order: a view if its memory holds them in this order, else a copy.

    Args:
        tensor: Dense tensor of any shape and strides, on any device; not conjugated or negated lazily. If it isn't
            contiguous, torch must be able to copy its dtype, as it can for integers.

    Returns:
        The bytes, uint8 (bytes,), with stride 1.

    Examples:
        >>> flat_bytes(torch.tensor([1, 256, 2], dtype=torch.int16)[::2])
        tensor([1, 0, 2, 0], dtype=torch.uint8)
    """
    row_major = tensor.contiguous()
    # For torch a tensor is contiguous whatever its strides along axes of one element, and if it is empty. `view` may
    # refuse another item size for such a tensor, and for its `reshape(-1)`, `clone()` and `contiguous()`.
    return row_major.as_strided((row_major.numel(),), (1,)).view(torch.uint8)
