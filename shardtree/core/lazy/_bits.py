"""A tensor's bits: as integers, which torch can copy whatever they stand for, and as bytes in row-major order."""

from __future__ import annotations

import torch

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By item size, dtypes that torch joins, fills and copies bit for bit on every device, as it can't all others."""


def as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of a tensor's bits as integers of the same size, which torch can join and copy on every device.

    Elements of 16 bytes stay as they are.

    Examples:
        >>> as_integers(torch.tensor([1.0, -0.0]))
        tensor([ 1065353216, -2147483648], dtype=torch.int32)
    """
    return tensor.detach().resolve_conj().resolve_neg().view(INTEGERS.get(tensor.itemsize, tensor.dtype))


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's bytes in row-major order: a view if its memory holds them so, else a copy.

    Args:
        tensor: a dense tensor of any shape and strides, on any device; not conjugated or negated lazily. One that isn't
            contiguous is of a dtype that torch copies, as integers are.

    Returns:
        uint8 (bytes,), of stride 1.

    Examples:
        >>> flat_bytes(torch.tensor([1, 256, 2], dtype=torch.int16)[::2])
        tensor([1, 0, 2, 0], dtype=torch.uint8)
    """
    row_major = tensor.contiguous()
    # A tensor is contiguous with any strides along axes of one element, and all of them if it has none; `view` then
    # refuses another item size. That holds for `reshape(-1)`, `clone()` and `contiguous()` of such a tensor too.
    return row_major.as_strided((row_major.numel(),), (1,)).view(torch.uint8)
