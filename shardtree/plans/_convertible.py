"""Which dtypes a load converts into which, when it is asked to."""

from __future__ import annotations

from functools import cache

import torch

_SCALES = {torch.float8_e8m0fnu}
"""Powers of two alone: a sign would be lost, and zero isn't one."""


def convertible(stored: torch.dtype, asked: torch.dtype) -> bool:
    """Return whether values of one dtype may be converted to another: by rounding at most, never by leaving parts out.

    Between floating-point dtypes, and between complex ones, as `torch.Tensor.to` does, which rounds, and makes
    infinities of what is too large. From bools to integers to floating-point to complex dtypes, not the other way:
    a fraction or an imaginary part would be lost without a word. Between integers, where each value fits.

    Examples:
        >>> convertible(torch.float32, torch.bfloat16), convertible(torch.int64, torch.int32)
        (True, True)
        >>> convertible(torch.float32, torch.int64), convertible(torch.complex64, torch.float32)
        (False, False)
    """
    return stored == asked or (
        _rank(stored) <= _rank(asked) and asked not in _SCALES and _torch_converts(stored, asked)
    )


def _rank(dtype: torch.dtype) -> int:
    if dtype == torch.bool:
        return 0
    return 3 if dtype.is_complex else 2 if dtype.is_floating_point else 1


@cache
def _torch_converts(stored: torch.dtype, asked: torch.dtype) -> bool:
    try:
        torch.zeros(stored.itemsize, dtype=torch.uint8).view(stored).to(asked)
    except (RuntimeError, TypeError):  # packed dtypes have no conversions
        return False
    return True
