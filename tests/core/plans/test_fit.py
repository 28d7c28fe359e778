"""What doesn't fit a checkpoint, told as data: names, kinds, gaps, and what a load may convert."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import prod

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardtree.core.plans import (
    convertible,
    find_gaps,
    find_mismatches,
    find_unexpected,
    overlaps,
    stored_elements,
)
from shardtree.layouts import TensorKind
from shardtree.mapping import ShardedTensor
from shardtree.plans import Gap, Mismatch, Unexpected
from shardtree.testing import cut, layouts, shapes
from tests.core.trees.samples import assert_caught

W = ShardedTensor.from_rank_offsets("w", torch.zeros(4, 6))
PADDED = replace(W, allow_shape_mismatch=True)


def kind(*shape: int, dtype: torch.dtype = torch.float32, prepended: int = 0) -> TensorKind:
    return TensorKind(dtype, shape, prepended)


def test_keys_that_are_not_stored_are_told_in_order_with_one_like_them() -> None:
    found = find_unexpected(["b", "weight", "wieght", "bais", "b"], ["weight", "bias"], is_object=True)
    assert found == (Unexpected("b", None, True), Unexpected("bais", "bias", True), Unexpected("wieght", None, True))
    assert find_unexpected(["wieght"], ["weight"]) == (Unexpected("wieght", "weight", False),)
    assert find_unexpected(["weight"], ["weight", "bias"]) == ()


def test_tensors_of_another_kind_are_told_once() -> None:
    stored = {"w": kind(4, 6), "v": kind(2, 2, prepended=1)}
    v = ShardedTensor.from_rank_offsets("v", torch.zeros(3, 2))
    assert find_mismatches([W, W], stored) == ()
    assert find_mismatches([v, W, v], stored) == (Mismatch("v", kind(2, 2), kind(3, 2)),)
    half = replace(W, dtype=torch.float16, data=None)
    assert find_mismatches([half], stored) == (Mismatch("w", kind(4, 6), kind(4, 6, dtype=torch.float16)),)
    assert find_mismatches([half], stored, cast=True) == ()
    whole = replace(W, dtype=torch.int64, data=None)
    assert find_mismatches([whole], stored, cast=True) == (
        Mismatch("w", kind(4, 6), kind(4, 6, dtype=torch.int64), cast=True),
    )


def test_a_padded_tensor_may_have_another_shape_of_as_many_axes() -> None:
    assert find_mismatches([PADDED], {"w": kind(3, 9)}) == ()
    assert find_mismatches([PADDED], {"w": kind(24)}) == (Mismatch("w", kind(24), kind(4, 6)),)
    assert find_mismatches([PADDED], {"w": kind(3, 9, dtype=torch.int8)}) != ()


def test_what_is_stored_in_part_is_a_gap() -> None:
    assert find_gaps([W, W], np.array([24, 23]), {"w": kind(4, 6)}) == (Gap("w", (0, 0), 23, 24),)
    assert find_gaps([PADDED], np.array([18]), {"w": kind(3, 9)}) == ()
    assert find_gaps([PADDED], np.array([17]), {"w": kind(3, 9)}) == (Gap("w", (0, 0), 17, 18),)
    half = ShardedTensor.from_rank_offsets("w", torch.zeros(2, 6), (0, 1, 2))
    assert find_gaps([half], np.array([6]), {"w": kind(4, 6)}) == (Gap("w", (2, 0), 6, 12),)


Count = Callable[[ShardedTensor, tuple[int, ...]], int]


@st.composite
def shards_and_shapes(draw: st.DrawFn) -> tuple[ShardedTensor, tuple[int, ...], torch.Tensor]:
    """Return a shard, another shape of its tensor, and its elements' own numbers."""
    layout = draw(layouts(draw(shapes(max_axes=3)), 2))
    whole = torch.arange(prod(layout.global_shape)).reshape(layout.global_shape)
    shards = [shard for rank in (0, 1) for shard in cut(layout, "w", whole, rank)]
    other = tuple(draw(st.integers(0, 6)) for _ in layout.global_shape)
    return draw(st.sampled_from(shards)), other, whole


def counts_the_common_elements(count: Count, case: tuple[ShardedTensor, tuple[int, ...], torch.Tensor]) -> None:
    shard, shape, whole = case
    kept = set(whole[tuple(slice(0, size) for size in shape)].reshape(-1).tolist())
    assert count(shard, shape) == len(kept & set(shard.data.reshape(-1).tolist()))


@given(shards_and_shapes())
def test_stored_elements_are_those_that_both_shapes_have(
    case: tuple[ShardedTensor, tuple[int, ...], torch.Tensor],
) -> None:
    counts_the_common_elements(stored_elements, case)


def test_stored_elements_catch_the_smaller_of_two_sizes() -> None:
    assert_caught(
        counts_the_common_elements, lambda shard, shape: min(shard.data.numel(), prod(shape)), shards_and_shapes()
    )


@given(shards_and_shapes())
def test_overlaps_are_views_of_those_elements(case: tuple[ShardedTensor, tuple[int, ...], torch.Tensor]) -> None:
    shard, shape, whole = case
    kept = whole[tuple(slice(0, size) for size in shape)].reshape(-1).tolist()
    views = [overlap.of(shard.data) for overlap in overlaps(shard, shape)]
    own = shard.data.reshape(-1).tolist()
    assert sorted(one for view in views for one in view.reshape(-1).tolist()) == sorted(set(own) & set(kept))
    assert all((view.numel() and view.dim() == len(shape)) or not shape for view in views)


ORDER = [torch.bool, torch.uint8, torch.int64, torch.float32, torch.complex64]


def test_values_are_converted_by_rounding_and_never_lose_a_part() -> None:
    table = [[convertible(stored, asked) for asked in ORDER] for stored in ORDER]
    assert table == [
        [True, True, True, True, True],
        [False, True, True, True, True],
        [False, True, True, True, True],
        [False, False, False, True, True],
        [False, False, False, False, True],
    ]


def test_scales_and_packed_dtypes_convert_to_themselves_alone() -> None:
    assert convertible(torch.float8_e8m0fnu, torch.float8_e8m0fnu)
    assert convertible(torch.float8_e8m0fnu, torch.float32)
    assert not convertible(torch.float32, torch.float8_e8m0fnu)
    assert convertible(torch.float4_e2m1fn_x2, torch.float4_e2m1fn_x2)
    assert not convertible(torch.float4_e2m1fn_x2, torch.float32)
