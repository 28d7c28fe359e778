"""Comparison of tensors that may differ by the rounding of sums: within tolerances by dtype, or bit for bit."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite, prod
from typing import Final

import torch

from ..core.geometry import refuse
from ..core.trees import torch_converts
from ..errors import MetadataError
from ..transforms import worst_element
from ._bits import first_difference

DEFAULTS: Final = {
    torch.float16: (1e-3, 1e-5),
    torch.bfloat16: (1.6e-2, 1e-5),
    torch.float32: (1.3e-6, 1e-5),
    torch.float64: (1e-7, 1e-7),
    torch.complex32: (1e-3, 1e-5),
    torch.complex64: (1.3e-6, 1e-5),
    torch.complex128: (1e-7, 1e-7),
}
"""Relative and absolute tolerance by dtype, as in `torch.testing.assert_close`; any other dtype is compared exactly.

The absolute tolerance is an upper bound: see `Tolerances`.
"""


@dataclass(frozen=True, slots=True)
class Tolerances:
    """Allowed deviation of elements from the expected ones: ``atol + rtol * abs(expected)``.

    Attributes:
        rtol: Relative tolerance; None for the default of each dtype.
        atol: Absolute tolerance; None for the default of each dtype, but at most the relative tolerance times the
            tensor's largest element. A higher tolerance would accept any values in a tensor of small elements, such as
            an optimizer's second moments.

    Raises:
        MetadataError: A tolerance isn't a finite number of at least 0.

    Examples:
        >>> Tolerances().of(torch.bfloat16), Tolerances(0, 0).of(torch.bfloat16), Tolerances(rtol=0.1).of(torch.int64)
        ((0.016, 1e-05), (0.0, 0.0), (0.0, 0.0))
        >>> Tolerances().of(torch.bfloat16, largest=1e-6)
        (0.016, 1.6e-08)
    """

    rtol: float | None = None
    atol: float | None = None

    def __post_init__(self) -> None:
        for name in ("rtol", "atol"):
            value = getattr(self, name)
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if value is not None and not (is_number and isfinite(value) and value >= 0):
                found, fix = repr(value)[:100], "Pass 0 for equal bits, or leave it out for the dtype's own tolerance."
                refuse("tolerances", name, found, "a finite number of at least 0", fix, error=MetadataError)

    def of(self, dtype: torch.dtype, largest: float | None = None) -> tuple[float, float]:
        """Return the tolerances of a dtype, relative and absolute: both 0 where bits must be equal.

        Args:
            dtype: The dtype of the elements.
            largest: Largest absolute value in the whole tensor. The dtype's default absolute tolerance is reduced to
                the default relative tolerance times this value, if that is less; None for no reduction.
        """
        if not (dtype.is_floating_point or dtype.is_complex) or not torch_converts(dtype, _wide(dtype)):
            return 0.0, 0.0
        rtol, atol = DEFAULTS.get(dtype, (0.0, 0.0))
        if largest is not None:
            atol = min(atol, rtol * largest)
        return float(rtol if self.rtol is None else self.rtol), float(atol if self.atol is None else self.atol)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which differences of elements are computed: float64 or complex128."""
    return torch.complex128 if dtype.is_complex else torch.float64


def largest_element(tensor: torch.Tensor) -> float:
    """Return the largest finite absolute value of a tensor; 0 if it has none, or if its dtype isn't in `DEFAULTS`.

    Examples:
        >>> largest_element(torch.tensor([1.5, -2, float("inf"), float("nan")])), largest_element(torch.tensor([3]))
        (2.0, 0.0)
    """
    if tensor.dtype not in DEFAULTS:
        return 0.0
    values = tensor.detach().cpu().to(_wide(tensor.dtype)).abs()
    return float(values.where(values.isfinite(), 0.0).max()) if values.numel() else 0.0


@dataclass(frozen=True, slots=True)
class Deviation:
    """Deviation of a tensor from the expected one.

    Attributes:
        excess: The largest error, as a multiple of the allowed one; infinite where none is allowed.
        text: A description for messages.
    """

    excess: float
    text: str


def deviation(
    found: torch.Tensor, expected: torch.Tensor, tolerances: Tolerances, largest: float | None = None
) -> Deviation | None:
    """Return the largest deviation of a tensor from the expected one, or None if all elements are within tolerance.

    Where both tolerances are 0, bits must be equal. Elsewhere NaN equals NaN, infinities equal themselves alone, and
    0.0 equals -0.0.

    Args:
        found: The tensor under test.
        expected: The reference, of the same dtype and shape.
        tolerances: Allowed deviation of each element.
        largest: Largest finite absolute value of the whole tensor, if `expected` is a shard of it; it limits the
            absolute tolerance. By default it is taken from `expected`.

    Examples:
        >>> one = torch.tensor([1.0, 2.0])
        >>> deviation(one + 1e-6, one, Tolerances())
        >>> print(deviation(torch.tensor([1.5, 2.1]), one, Tolerances(rtol=0, atol=0.2)).text)
        1 of 2 elements differ by more than rtol=0, atol=0.2; the worst at (0,): found 1.5, expected 1, error 0.5, ...
    """
    rtol, atol = tolerances.of(expected.dtype)
    if not (rtol or atol) or (found.dtype, found.shape) != (expected.dtype, expected.shape):
        difference = first_difference(found, expected)
        return None if difference is None else Deviation(float("inf"), difference)
    _, atol = tolerances.of(expected.dtype, largest_element(expected) if largest is None else largest)
    worst = worst_element(found, expected, rtol, atol)
    if worst is None:
        return None
    count = f"{worst.count} of {prod(expected.shape)} elements differ by more than rtol={rtol:g}, atol={atol:g}"
    pair = f"found {worst.left:.9g}, expected {worst.right:.9g}"
    distance = f"error {worst.error:.3g}, allowed {worst.allowed:.3g}"
    return Deviation(worst.excess, f"{count}; the worst at {worst.index}: {pair}, {distance}")
