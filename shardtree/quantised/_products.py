"""Products of FP8 values and their scales, in one compiled loop if numba is installed."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any, no_type_check

import numpy as np
import torch

from ._codes import FP8, floats, is_plain

_WORTH = 1 << 29  # elements: torch takes a second for them, as long as compiling takes
_seen = [0]

Loop = Callable[..., None]


def as_stored(values: torch.Tensor) -> torch.Tensor:
    """Return stored values unchanged: `fp8_products` decodes them itself."""
    return values


def fp8_products(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return matrices of FP8 values, multiplied by a scale that is broadcast to their shape, as float32."""
    loop = _loop_for(values.numel()) if values.dtype is FP8 and is_plain(values) else None
    if loop is None:
        return floats(values) * scale
    products = torch.empty(values.shape, device="cpu", dtype=torch.float32)
    # A window's scale is usually one row for all. For several matrices with a row each, it is repeated for all rows.
    scale = scale if scale.ndim > 1 else scale.reshape(1, -1)  # a single number has no axes, or one
    above = scale.shape[:-1] if scale.shape[:-1].numel() == 1 else values.shape[:-1]
    wide = scale.expand(*above, values.shape[-1]).contiguous()
    rows = [tensor.flatten(0, -2).numpy() for tensor in (values.view(torch.uint8), wide, products)]
    loop(rows[0], _table(), *rows[1:])
    return products


def _loop_for(elements: int) -> Loop | None:
    """Return the compiled loop once enough elements were decoded to repay compiling; None before, and without numba.

    Args:
        elements: Number of elements of this call, which is added to the count.
    """
    _seen[0] += elements  # concurrent threads may lose a count, which doesn't matter
    return _loop() if _seen[0] >= _WORTH else None


@cache
def _loop() -> Loop | None:
    try:
        numba = import_module("numba")
    except ImportError:
        return None
    array = numba.types.Array
    codes, table = array(numba.uint8, 2, "A", readonly=True), array(numba.float32, 1, "C", readonly=True)
    scales, products = array(numba.float32, 2, "C", readonly=True), array(numba.float32, 2, "C")
    loop: Loop = numba.njit(numba.void(codes, table, scales, products), nogil=True)(_multiply)
    return loop


@cache
def _table() -> np.ndarray[Any, Any]:
    return floats(torch.arange(256, dtype=torch.uint8, device="cpu").view(FP8)).numpy()


@no_type_check
def _multiply(codes, table, scales, products):  # compiled: no checker of types may wrap it
    for row in range(codes.shape[0]):
        scale = scales[row % scales.shape[0]]
        for column in range(codes.shape[1]):
            products[row, column] = table[codes[row, column]] * scale[column]
