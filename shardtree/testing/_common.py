"""Common states: what is stored beside shards."""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from functools import cache
from typing import Any

from hypothesis import strategies as st

from ._dtypes import PRINTABLE_DTYPES
from ._tensors import tensors


@cache  # it takes longer to make than to draw from
def common_states() -> st.SearchStrategy[dict[str, Any]]:
    """Return a strategy for what a common state holds: nested containers of numbers, text, bytes and tensors.

    Examples:
        >>> from hypothesis import find
        >>> find(common_states(), lambda state: "a" in state)
        {'a': None}
    """
    return st.dictionaries(_names(), st.recursive(_values(), _containers, max_leaves=6), max_size=3)


def _names() -> st.SearchStrategy[str]:
    return st.text("abc/._é", min_size=1, max_size=3)


def _values() -> st.SearchStrategy[Any]:
    numbers = st.integers() | st.floats() | st.complex_numbers() | st.just(math.nan)
    text = st.text(max_size=4) | st.binary(max_size=4)
    return st.none() | st.booleans() | numbers | text | tensors(dtype=st.sampled_from(PRINTABLE_DTYPES))


def _containers(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    many = st.lists(children, max_size=3)
    named = st.dictionaries(_names() | st.integers(0, 9), children, max_size=3)
    return st.one_of(many, named, many.map(tuple), named.map(OrderedDict), many.map(deque))
