"""Elements converted to another dtype, after a check that integers fit it."""

from __future__ import annotations

import numpy as np
import torch

from ...errors import ShapeError, error_text
from ._fit import is_integer


def convert(key: str, elements: torch.Tensor, target: torch.Tensor, *, doing: str = "load") -> None:
    """Copy elements into others of another dtype, as `torch.Tensor.to` would convert them.

    Args:
        key: the tensor's, for messages.
        elements: strided in any way, on any device.
        target: as many, written in place.
        doing: for messages.

    Raises:
        ShapeError: an integer doesn't fit the target's dtype.

    Examples:
        >>> target = torch.zeros(2, dtype=torch.bfloat16)
        >>> convert("w", torch.tensor([1.0, 2.0]), target)
        >>> target
        tensor([1., 2.], dtype=torch.bfloat16)
    """
    # Checked beforehand, since `copy_` wraps integers that are too large around without an error.
    if is_integer(elements.dtype) and is_integer(target.dtype) and elements.numel():
        _check_range(key, elements, target.dtype, doing)
    with torch.no_grad():
        target.copy_(elements)


def _check_range(key: str, elements: torch.Tensor, dtype: torch.dtype, doing: str) -> None:
    most = torch.iinfo(dtype)
    values = elements.cpu().numpy()  # torch has no min and max for uint16, uint32 and uint64
    low, high = int(np.min(values)), int(np.max(values))
    if low < most.min or high > most.max:
        found, expected = f"values from {low} to {high}", f"{most.min} to {most.max}, which {dtype} can hold"
        fix = "Ask for it in the dtype that it has."
        raise ShapeError(error_text(f"{doing}: {key!r} can't be converted", found=found, expected=expected, fix=fix))
