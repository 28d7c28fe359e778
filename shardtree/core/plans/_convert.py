"""Conversion of elements to another dtype: the allowed pairs of dtypes, and a check that integers fit."""

from __future__ import annotations

import numpy as np
import torch

from ...errors import ShapeError, error_text
from ..trees import torch_converts

_SCALES = {torch.float8_e8m0fnu} if hasattr(torch, "float8_e8m0fnu") else set()  # torch 2.6 hasn't
"""Dtypes that hold only powers of two: a conversion would lose signs, and they can't represent zero."""


def convertible(before: torch.dtype, after: torch.dtype) -> bool:
    """Return whether loads and reshards may convert elements of one dtype to another.

    Floating-point dtypes convert to each other, and complex dtypes too, as by `torch.Tensor.to`: it rounds, and turns
    numbers that are too large into infinities. In the order bool, integer, floating-point, complex, a dtype converts to
    later ones, but not to earlier ones: a fraction or an imaginary part would be lost silently. Integer dtypes convert
    to each other, but the conversion raises an error for values that do not fit.

    Examples:
        >>> convertible(torch.float32, torch.bfloat16), convertible(torch.int64, torch.int32)
        (True, True)
        >>> convertible(torch.float32, torch.int64), convertible(torch.complex64, torch.float32)
        (False, False)
    """
    # Ranks order the kinds of dtypes: a conversion to a higher kind keeps every value up to rounding.
    return before == after or (_rank(before) <= _rank(after) and after not in _SCALES and torch_converts(before, after))


def _rank(dtype: torch.dtype) -> int:
    if dtype == torch.bool:
        return 0
    return 1 if is_integer(dtype) else 3 if dtype.is_complex else 2


def is_integer(dtype: torch.dtype) -> bool:
    """Return whether a dtype holds integers; bools don't count."""
    return not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)


def convert(key: str, elements: torch.Tensor, target: torch.Tensor, *, doing: str = "load") -> None:
    """Copy elements into a tensor of another dtype, converted as by `torch.Tensor.to`.

    Args:
        key: Key of the tensor, for messages.
        elements: Source, with any strides, on any device.
        target: Destination of the same shape, written in place.
        doing: Name of the operation, for messages.

    Raises:
        ShapeError: An integer doesn't fit the target's dtype.

    Examples:
        >>> target = torch.zeros(2, dtype=torch.bfloat16)
        >>> convert("w", torch.tensor([1.0, 2.0]), target)
        >>> target
        tensor([1., 2.], dtype=torch.bfloat16)
    """
    # The check comes first, since `copy_` silently wraps integers that are too large.
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
        fix = "Load it in its stored dtype."
        raise ShapeError(error_text(f"{doing}: {key!r} cannot be converted", found=found, expected=expected, fix=fix))
