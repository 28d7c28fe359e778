"""The element of two tensors that is furthest beyond a tolerance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ...errors import TreePath


@dataclass(frozen=True, slots=True)
class WorstElement:
    """The element of two tensors that is furthest beyond its tolerance, and the number of those that are beyond it.

    Attributes:
        path: Path of the tensor in its tree; of a shard, the tensor that this rank holds.
        index: Index of the element.
        left: Value in the left tree; complex values too are Python numbers.
        right: Value in the right tree.
        error: Absolute difference of the two.
        allowed: Tolerance of the element, ``atol + rtol * abs(right)``.
        count: Number of elements beyond their tolerance.
    """

    path: TreePath
    index: tuple[int, ...]
    left: Any
    right: Any
    error: float
    allowed: float
    count: int

    @property
    def excess(self) -> float:
        """The error as a multiple of what is allowed; infinite where nothing is, or where the error isn't finite."""
        return self.error / self.allowed if self.allowed and self.error < float("inf") else float("inf")


def worst_element(
    left: torch.Tensor, right: torch.Tensor, rtol: float, atol: float, path: TreePath = ()
) -> WorstElement | None:
    """Return the worst element of two tensors of one shape, or None if all are within tolerance.

    NaN equals NaN, infinities equal themselves alone, and 0.0 equals -0.0.

    Args:
        left: The tensor under test, of a floating-point or complex dtype.
        right: The reference.
        rtol: The tolerance relative to elements of the reference.
        atol: The absolute tolerance.
        path: Path of the two in their trees.

    Examples:
        >>> worst_element(torch.tensor([1.0, 2.5]), torch.tensor([1.0, 2.0]), 0, 0.25)
        WorstElement(path=(), index=(1,), left=2.5, right=2.0, error=0.5, allowed=0.25, count=1)
    """
    wide = torch.complex128 if right.dtype.is_complex else torch.float64
    ours, theirs = (tensor.detach().cpu().to(wide).reshape(-1) for tensor in (left, right))
    errors, allowed = (ours - theirs).abs(), atol + rtol * theirs.abs()
    # An infinite error isn't within an infinite tolerance: infinities and NaN are equal to themselves, or wrong.
    equal = (ours == theirs) | (ours.isnan() & theirs.isnan())
    wrong = ~(equal | (errors.isfinite() & (errors <= allowed)))
    if not bool(wrong.any()):
        return None
    excess = torch.where(wrong, (errors / allowed).nan_to_num(nan=float("inf"), posinf=float("inf")), 0.0)
    worst = int(excess.argmax())
    index = tuple(map(int, np.unravel_index(worst, right.shape or (1,))))[: right.ndim]
    values = ours[worst].item(), theirs[worst].item(), errors[worst].item(), allowed[worst].item()
    return WorstElement(path, index, *values, count=int(wrong.sum()))
