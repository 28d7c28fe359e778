"""Cuts of an axis: what each holder gets, beside a list of indices that torch.chunk cuts."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from shardtree.core.geometry import Spans, cut_spans
from tests.core.trees.samples import assert_caught

CUTS = st.lists(st.tuples(st.integers(1, 4), st.integers(0, 3), st.integers(1, 4)), min_size=1, max_size=3)


def chunked(indices: list[int], parts: int, index: int, factor: int) -> list[int]:
    """Return what is in piece `index` of each block."""
    found: list[int] = []
    for block in torch.tensor(indices).chunk(factor) if indices else ():
        pieces = block.chunk(parts)
        found += pieces[index].tolist() if index < len(pieces) else []
    return found


def check_cuts(cut: Callable[..., Spans], size: int, cuts: list[tuple[int, int, int]]) -> None:
    spans: Spans = ((0, size),) if size else ()
    indices = list(range(size))
    for parts, index, factor in cuts:
        spans = cut(spans, parts, index % parts, factor)
        indices = chunked(indices, parts, index % parts, factor)
        assert [number for start, stop in spans for number in range(start, stop)] == indices
        assert all(start < stop for start, stop in spans), "spans have elements"
        assert all(left[1] != right[0] for left, right in pairwise(spans)), "and are joined"


@given(st.integers(0, 40), CUTS)
def test_cuts_are_those_of_a_list(size: int, cuts: list[tuple[int, int, int]]) -> None:
    check_cuts(cut_spans, size, cuts)


def test_the_law_catches_interleaving_that_is_forgotten() -> None:
    def without_factor(spans: Spans, parts: int, index: int, factor: int) -> Spans:
        return cut_spans(spans, parts, index)

    assert_caught(check_cuts, without_factor, st.integers(0, 40), CUTS)
