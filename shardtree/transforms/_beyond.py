"""Leaves that differ by more than tolerances, the worst first, each with its worst element.

An element is the worse, the larger the ratio of its error to its tolerance.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, Final, Literal

import numpy as np
import torch
from torch.nn.parameter import is_lazy

from ..core.mapping import ShardedTensor, ShardedTensorFactory, has_elements
from ..core.trees import WorstElement, torch_converts, with_data
from ..errors import TreePath

_BOXED: Final = (ShardedTensor, ShardedTensorFactory)


def beyond_tolerances(
    pairs: Sequence[tuple[TreePath, Any, Any]], rtol: float, atol: float, same: Callable[[Any, Any], bool]
) -> tuple[tuple[TreePath, ...], tuple[WorstElement, ...]]:
    """Return the paths of leaves that differ by more than tolerances, the worst first, and their worst elements.

    Leaves that can't be compared element by element come first among the paths, and have no worst element.

    Args:
        pairs: (path, left leaf, right leaf) of leaves that aren't equal bit for bit.
        rtol: The tolerance relative to the right leaf.
        atol: The absolute tolerance.
        same: Function that compares the metadata of shards exactly.

    Examples:
        >>> pairs = [(("a",), 1.0, 1.5), (("b",), 1.0, 3.0), (("c",), 1, 2)]
        >>> beyond_tolerances(pairs, 0, 0.1, lambda left, right: left == right)[0]
        (('c',), ('b',), ('a',))
    """
    judged = [(path, _worst(path, left, right, rtol, atol, same)) for path, left, right in pairs]
    errors = [worst for _, worst in judged if isinstance(worst, WorstElement)]
    errors.sort(key=attrgetter("excess"), reverse=True)
    others = (path for path, worst in judged if worst is False)
    return (*others, *(worst.path for worst in errors)), tuple(errors)


def _worst(
    path: TreePath, left: Any, right: Any, rtol: float, atol: float, same: Callable[[Any, Any], bool]
) -> WorstElement | Literal[False] | None:
    """Return the worst element of differing leaves; None if all are within tolerance, False if not comparable."""
    if isinstance(left, _BOXED) and isinstance(right, _BOXED):
        if not same(with_data(left, None), with_data(right, None)):
            return False
        left, right = left.data, right.data
    left, right = _as_tensor(left), _as_tensor(right)
    is_number = isinstance(right, torch.Tensor) and (right.is_floating_point() or right.is_complex())
    if not is_number or not isinstance(left, torch.Tensor) or not _is_same_dense(left, right):
        return False
    return worst_element(left, right, rtol, atol, path)


def _as_tensor(value: Any) -> Any:
    """Return a float16, float32 or float64 NumPy value, a float or a complex as a tensor; any other value unchanged."""
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype.name in ("float16", "float32", "float64"):
        return torch.as_tensor(np.asarray(value), device="cpu")
    return torch.tensor(value, device="cpu") if type(value) in (float, complex) else value


def _is_same_dense(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Return whether two tensors are of one dtype and shape, and torch can subtract their elements."""
    both = (left, right)
    if any(is_lazy(tensor) or tensor.is_nested or tensor.layout != torch.strided for tensor in both):
        return False
    is_alike = left.dtype == right.dtype and left.shape == right.shape and all(map(has_elements, both))
    return is_alike and torch_converts(left.dtype, torch.float64 if left.is_floating_point() else torch.complex128)


def worst_element(
    left: torch.Tensor, right: torch.Tensor, rtol: float, atol: float, path: TreePath = ()
) -> WorstElement | None:
    """Return the worst element of two tensors of one shape, or None if all are within tolerance.

    The worst element has the largest ratio of error to tolerance. NaN equals NaN, infinities equal themselves alone,
    and 0.0 equals -0.0.

    Args:
        left: The tensor under test, of a floating-point or complex dtype.
        right: The reference.
        rtol: The tolerance relative to elements of the reference.
        atol: The absolute tolerance.
        path: Path of the two tensors in their trees.

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
