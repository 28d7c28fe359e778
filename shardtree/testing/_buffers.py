"""Strategies for contiguous buffers: parameters' shapes, and how they are packed, as plain data."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from ._shapes import shapes

_SIZES = (1, 2, 3, 5, 4, 0)

BufferOptions = tuple[dict[str, tuple[int, ...]], dict[str, Any]]


@st.composite
def buffer_options(draw: st.DrawFn, most_ranks: int = 8) -> BufferOptions:
    """Return a strategy for what `plan_buffers` takes: shapes by name, and its options; it shrinks to no parameters.

    Scalars, parameters without elements, more ranks than elements, and none at all are among them.

    Args:
        draw: Hypothesis's own.
        most_ranks: the largest number of data-parallel ranks.

    Examples:
        >>> from hypothesis import find
        >>> find(buffer_options(), lambda drawn: len(drawn[0]) > 1)[0]
        {'p0': (), 'p1': ()}
    """
    drawn = draw(st.lists(shapes(max_axes=3, sizes=_SIZES), max_size=5))
    parameters = {f"p{number}": shape for number, shape in enumerate(drawn)}
    names = list(parameters)
    return parameters, {
        "data_parallel": draw(st.integers(1, most_ranks)),
        "bucket_size": draw(st.none() | st.integers(1, 40)),
        "align": draw(st.sampled_from([1, 2, 3, 8])),
        "bucket_align": draw(st.sampled_from([1, 2, 5, 8])),
        "order": draw(st.none() | st.permutations(names)),
        "alone": draw(st.sets(st.sampled_from(names), max_size=2)) if names else (),
    }
