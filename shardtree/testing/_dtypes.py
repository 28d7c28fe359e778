"""Every torch dtype whose tensors can be stored bit for bit."""

from __future__ import annotations

import re

import torch
from hypothesis import strategies as st

_WITH_SCALES = {"qint8", "quint8", "qint32", "quint4x2", "quint2x4"}

STORABLE_DTYPES: tuple[torch.dtype, ...] = tuple(
    sorted(
        {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
        - {getattr(torch, name) for name in _WITH_SCALES if hasattr(torch, name)},
        key=str,
    )
)
"""All dtypes of this torch but the quantised ones, of which a scale is part."""


PRINTABLE_DTYPES: tuple[torch.dtype, ...] = tuple(
    dtype for dtype in STORABLE_DTYPES if not re.fullmatch(r"torch\.(u?int[1-7]|bits\w+|float4\w+)", str(dtype))
)
"""Those of which torch can print a tensor, which matters where Hypothesis shows a failing example."""


def dtypes() -> st.SearchStrategy[torch.dtype]:
    """Return a strategy for dtypes that can be stored; it shrinks to float32.

    Examples:
        >>> import torch
        >>> torch.bfloat16 in STORABLE_DTYPES, torch.qint8 in STORABLE_DTYPES
        (True, False)
    """
    first = torch.float32
    return st.sampled_from([first, *(dtype for dtype in STORABLE_DTYPES if dtype != first)])
