"""Tensors joined bit for bit, of any dtype: torch can't join all, but integers of every size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

_CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def join_data(join: Callable[..., Any], parts: Sequence[Any], axis: int) -> Any:
    """Return tensors joined along an axis, or the description of that, where they are lazy.

    Args:
        join: `torch.cat` or `torch.stack`.
        parts: tensors of one dtype, all of them lazy or none.
        axis: where they are joined.

    Examples:
        >>> join_data(torch.stack, [torch.zeros(2), torch.ones(2)], 0)
        tensor([[0., 0.],
                [1., 1.]])
    """
    if not all(isinstance(part, torch.Tensor) for part in parts):
        return join(parts, dim=axis)
    dtype = parts[0].dtype
    carrier = _CARRIERS.get(dtype.itemsize, dtype)
    return join([part.resolve_conj().resolve_neg().view(carrier) for part in parts], dim=axis).view(dtype)
