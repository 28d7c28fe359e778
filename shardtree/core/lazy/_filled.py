"""Tensors that are only memory to fill. While a load builds its target, no tensor's elements may be read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from math import prod

import torch

# A context variable, since an argument would have to pass through every lens that a user has written. A tensor
# subclass instead, which views inherit, made loads through lenses 30 % slower.
_is_filled: ContextVar[bool] = ContextVar("is_filled", default=False)


@contextmanager
def only_filled() -> Iterator[None]:
    """Return a context in which tensors are only memory to fill, so that their elements must not be read.

    In this context `has_no_elements` returns True for every tensor. Other threads aren't affected.

    Examples:
        >>> with only_filled():
        ...     has_no_elements(torch.zeros(2))
        True
    """
    token = _is_filled.set(True)
    try:
        yield
    finally:
        _is_filled.reset(token)


def has_no_elements(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's elements must not be read: it is on the meta device, or inside of `only_filled`.

    Examples:
        >>> has_no_elements(torch.zeros(2)), has_no_elements(torch.zeros(2, device="meta"))
        (False, True)
    """
    return tensor.is_meta or _is_filled.get()


def memory_beside(data: torch.Tensor, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return uninitialised memory on the device of `data`, for values computed from it.

    Examples:
        >>> memory_beside(torch.zeros(2, device="meta"), (3,), torch.bfloat16)
        tensor(..., device='meta', size=(3,), dtype=torch.bfloat16)
    """
    # The memory is made as bytes: with deterministic algorithms torch fills new memory, which it can't for some dtypes.
    nbytes = prod(shape) * dtype.itemsize
    return torch.empty(nbytes, dtype=torch.uint8, device=data.device).view(dtype).view(tuple(shape))
