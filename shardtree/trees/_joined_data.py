"""Tensors made and joined bit for bit, of any dtype: torch can't join all, but integers of every size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..errors import ShapeError, error_text

_CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of a tensor's bits as integers of the same size, which torch can join and copy on every device.

    Elements of 16 bytes stay as they are.

    Examples:
        >>> as_integers(torch.tensor([1.0, -0.0]))
        tensor([ 1065353216, -2147483648], dtype=torch.int32)
    """
    carrier = _CARRIERS.get(tensor.dtype.itemsize, tensor.dtype)
    return tensor.detach().resolve_conj().resolve_neg().view(carrier)


def empty_data(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    """Return what ``torch.empty`` does, without its warning about some dtypes.

    Examples:
        >>> empty_data((2, 3), torch.complex32, "meta").dtype
        torch.complex32
    """
    return torch.empty(tuple(shape), dtype=_CARRIERS.get(dtype.itemsize, dtype), device=device).view(dtype)


def join_data(join: Callable[..., Any], parts: Sequence[Any], axis: int) -> Any:
    """Return tensors joined along an axis, or the description of that, where they are lazy.

    Args:
        join: `torch.cat` or `torch.stack`.
        parts: tensors of one dtype, all of them lazy or none.
        axis: where they are joined.

    Raises:
        ShapeError: they are of several dtypes.

    Examples:
        >>> join_data(torch.stack, [torch.zeros(2), torch.ones(2)], 0)
        tensor([[0., 0.],
                [1., 1.]])
    """
    if not all(isinstance(part, torch.Tensor) for part in parts):
        return join(parts, dim=axis)
    if len({part.dtype for part in parts}) > 1:
        of_each = [f"{number}: {part.dtype}" for number, part in enumerate(parts)]
        fix = "Convert them to one dtype first."
        raise ShapeError(error_text("tensors of several dtypes can't be joined", offenders=of_each, fix=fix))
    return join(list(map(as_integers, parts)), dim=axis).view(parts[0].dtype)
