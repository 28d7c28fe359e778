"""Whether elements of a tensor may share memory, compared with where each of them lies."""

from __future__ import annotations

from collections.abc import Callable

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardtree.core.mapping.memory import _may_overlap
from tests.core.trees.samples import assert_caught

PLACES = torch.arange(128)


@st.composite
def strided(draw: st.DrawFn) -> torch.Tensor:
    """Return a tensor of any strides, each element of which is its place; many are contiguous."""
    shape = draw(st.lists(st.integers(0, 3), max_size=4))
    tensor = PLACES.as_strided(shape, torch.empty(shape).stride())
    if draw(st.booleans()):
        tensor = PLACES.as_strided(shape, draw(st.lists(st.integers(0, 7), min_size=len(shape), max_size=len(shape))))
    if tensor.ndim and draw(st.booleans()):
        tensor = tensor.permute(draw(st.permutations(range(tensor.ndim))))
    return tensor


def general_rule(tensor: torch.Tensor) -> bool:
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride <= reach:
            return True
        reach += stride * (size - 1) if size > 1 else 0
    return False


def is_told_where_elements_share_a_place(may_overlap: Callable[[torch.Tensor], bool], tensor: torch.Tensor) -> None:
    shares = tensor.unique().numel() < tensor.numel()
    assert may_overlap(tensor) or not shares
    # Where there is no element, none shares its place, whatever the strides say.
    assert may_overlap(tensor) == (tensor.numel() > 0 and general_rule(tensor))


@settings(max_examples=300)
@given(strided())
def test_overlaps_are_told_where_elements_share_a_place(tensor: torch.Tensor) -> None:
    is_told_where_elements_share_a_place(_may_overlap, tensor)


def test_the_law_catches_a_look_at_expanded_axes_alone() -> None:
    def is_expanded(tensor: torch.Tensor) -> bool:
        return any(size > 1 and not step for size, step in zip(tensor.shape, tensor.stride(), strict=True))

    assert_caught(is_told_where_elements_share_a_place, is_expanded, strided())


def test_the_law_catches_contiguous_tensors_that_are_taken_for_others() -> None:
    assert_caught(is_told_where_elements_share_a_place, lambda tensor: True, strided())
