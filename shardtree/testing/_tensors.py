"""Strategies for dtypes, shapes, and tensors of random bits."""

from __future__ import annotations

import math
import re
import warnings
from functools import cache

import numpy as np
import torch
from hypothesis import strategies as st

from ..trees import empty_data

# Dtypes: all of this torch, by name, so that a new release's dtypes are tested without a change here.

_WITH_SCALES = {"qint8", "quint8", "qint32", "quint4x2", "quint2x4"}

STORABLE_DTYPES: tuple[torch.dtype, ...] = tuple(
    sorted(
        {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
        - {getattr(torch, name) for name in _WITH_SCALES if hasattr(torch, name)},
        key=str,
    )
)
"""All dtypes of this torch except quantised ones, whose values depend on a scale beside their bits."""


PRINTABLE_DTYPES: tuple[torch.dtype, ...] = tuple(
    dtype for dtype in STORABLE_DTYPES if not re.fullmatch(r"torch\.(u?int[1-7]|bits\w+|float4\w+)", str(dtype))
)
"""Dtypes whose tensors torch can print, which Hypothesis does for a failing example."""


def dtypes() -> st.SearchStrategy[torch.dtype]:
    """Return a strategy for dtypes that can be stored; it shrinks to float32.

    Examples:
        >>> import torch
        >>> torch.bfloat16 in STORABLE_DTYPES, torch.qint8 in STORABLE_DTYPES
        (True, False)
    """
    first = torch.float32
    return st.sampled_from([first, *(dtype for dtype in STORABLE_DTYPES if dtype != first)])


# Shapes and tensors.

_SIZES = (1, 2, 3, 4, 6, 8, 5, 7, 12, 0)


def shapes(*, max_axes: int = 4, sizes: tuple[int, ...] = _SIZES) -> st.SearchStrategy[tuple[int, ...]]:
    """Return a strategy for global shapes, scalars and shapes without elements included.

    Args:
        max_axes: the most axes.
        sizes: of an axis; it shrinks to the first one.

    Examples:
        >>> from hypothesis import find
        >>> find(shapes(), lambda shape: len(shape) == 2 and 0 not in shape)
        (1, 1)
    """
    return st.lists(st.sampled_from(sizes), max_size=max_axes).map(tuple)


def random_bits(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Return a tensor of random bits, the same for the same arguments; a quarter of floats are NaNs with payloads.

    Args:
        shape: of the tensor.
        dtype: any that isn't quantised.
        seed: with 0, bytes count up instead of being random, so that a failure is easy to read.

    Examples:
        >>> random_bits((2, 2), torch.int16)
        tensor([[ 256,  770],
                [1284, 1798]], dtype=torch.int16)
        >>> random_bits((1000,), torch.float64, seed=1).isnan().any()
        tensor(True)
    """
    _trigger_warnings(dtype)
    length = math.prod(shape) * dtype.itemsize
    generator = np.random.default_rng(seed)
    counting = bytes(number % 256 for number in range(length))
    raw = np.frombuffer(generator.bytes(length) if seed else counting, dtype=np.uint8).copy()
    if dtype == torch.bool:
        raw &= 1  # a bool with another byte is undefined behaviour
    elif seed and dtype.is_floating_point:
        high = raw.reshape(-1, dtype.itemsize)
        high[generator.random(len(high)) < 0.25, -2:] |= np.array([0xF0, 0x7F], dtype=np.uint8)[-dtype.itemsize :]
    # Some dtypes refuse a view of no elements.
    return torch.from_numpy(raw).view(dtype).view(shape) if length else empty_data(shape, dtype, "cpu")


@cache
def _trigger_warnings(dtype: torch.dtype) -> None:
    """Make a tensor, so that torch's warning about its dtype, once in each process, doesn't appear during a test."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.empty(0, dtype=dtype, device="cpu")


def tensors(
    shape: st.SearchStrategy[tuple[int, ...]] | None = None,
    *,
    dtype: st.SearchStrategy[torch.dtype] | torch.dtype | None = None,
) -> st.SearchStrategy[torch.Tensor]:
    """Return a strategy for contiguous CPU tensors of any storable dtype, NaN payloads included.

    Args:
        shape: a strategy for shapes; any by default.
        dtype: one, or a strategy for some; all that can be stored by default, some of which torch can't print.

    Examples:
        >>> from hypothesis import find
        >>> find(tensors(dtype=torch.int8), lambda tensor: tensor.numel() > 1)
        tensor([0, 1], dtype=torch.int8)
    """
    kinds = st.just(dtype) if isinstance(dtype, torch.dtype) else dtypes() if dtype is None else dtype
    sizes = shapes() if shape is None else shape
    return st.builds(random_bits, sizes, kinds, st.integers(0, 2**16))
