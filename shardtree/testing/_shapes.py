"""Shapes of global tensors."""

from __future__ import annotations

from hypothesis import strategies as st

_SIZES = (1, 2, 3, 4, 6, 8, 5, 7, 12, 0)


def shapes(*, max_axes: int = 4, sizes: tuple[int, ...] = _SIZES) -> st.SearchStrategy[tuple[int, ...]]:
    """Return a strategy for global shapes, scalars and shapes without elements included.

    Args:
        max_axes: the most axes.
        sizes: what an axis may measure; the first one is what it shrinks to.

    Examples:
        >>> from hypothesis import find
        >>> find(shapes(), lambda shape: len(shape) == 2 and 0 not in shape)
        (1, 1)
    """
    return st.lists(st.sampled_from(sizes), max_size=max_axes).map(tuple)
