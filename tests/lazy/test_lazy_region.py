"""Laws of strided views: the box that covers a view holds its elements, and no more than plain slicing needs."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardtree.lazy import _sources
from shardtree.lazy._sources import Box, Strided, covering

Covering = Callable[[Strided, tuple[int, ...]], tuple[Box, Strided]]


@st.composite
def sliced_views(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor]:
    """A dense tensor whose elements are their own flat indices, and a non-empty view of it by slices and a permute."""
    shape = draw(st.lists(st.integers(1, 4), max_size=4))
    whole = torch.arange(torch.Size(shape).numel()).reshape(shape)
    bounds = [sorted((draw(st.integers(0, length - 1)), draw(st.integers(0, length - 1)))) for length in shape]
    view = whole[tuple(slice(low, high + 1, draw(st.integers(1, 3))) for low, high in bounds)]
    return whole, view.permute(draw(st.permutations(range(view.ndim))))


@st.composite
def merged_views(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor]:
    """As above, but dimensions are merged, sliced and split again, so that steps cross the tensor's own dimensions."""
    whole, _ = draw(sliced_views())
    flat = whole.flatten(draw(st.integers(0, max(whole.ndim - 1, 0))))
    low, high = sorted((draw(st.integers(0, flat.shape[-1] - 1)), draw(st.integers(0, flat.shape[-1] - 1))))
    view = flat[..., low : high + 1 : draw(st.integers(1, 7))]
    divisor = draw(st.sampled_from([n for n in range(1, view.shape[-1] + 1) if view.shape[-1] % n == 0]))
    return whole, view.unflatten(-1, (-1, divisor)).transpose(-1, -2)


def strided(view: torch.Tensor) -> Strided:
    return Strided(view.storage_offset(), tuple(view.shape), view.stride())


def check_holds_the_elements(cover: Covering, whole: torch.Tensor, view: torch.Tensor) -> None:
    box, inner = cover(strided(view), tuple(whole.shape))
    ends = [low + length for low, length in zip(box.offset, box.shape, strict=True)]
    assert all(0 <= low < end <= n for low, end, n in zip(box.offset, ends, whole.shape, strict=True))
    held = whole[tuple(map(slice, box.offset, ends))].contiguous()
    assert inner.size == tuple(view.shape)
    places = [inner.offset + sum(map(int.__mul__, at, inner.stride)) for at in product(*map(range, inner.size))]
    assert held.flatten()[places].tolist() == view.flatten().tolist()


@pytest.mark.parametrize("views", [sliced_views(), merged_views()], ids=["sliced", "merged"])
def test_box_holds_the_elements_of_the_view(views: st.SearchStrategy[tuple[torch.Tensor, torch.Tensor]]) -> None:
    @given(views)
    def law(case: tuple[torch.Tensor, torch.Tensor]) -> None:
        check_holds_the_elements(covering, *case)

    law()


def test_box_that_forgets_the_carry_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = torch.arange(24).reshape(4, 6)
    view = whole.flatten()[5:9]

    def uncarried(start: tuple[int, ...], spans: list[int], shape: tuple[int, ...]) -> Box:
        lengths = [min(span + 1, n - low) for low, span, n in zip(start, spans, shape, strict=True)]
        return Box(start, tuple(lengths))

    check_holds_the_elements(covering, whole, view)
    monkeypatch.setattr(_sources, "_box", uncarried)
    with pytest.raises((AssertionError, IndexError)):
        check_holds_the_elements(covering, whole, view)


def check_box_is_the_smallest(cover: Covering, whole: torch.Tensor, view: torch.Tensor) -> None:
    box, _ = cover(strided(view), tuple(whole.shape))
    places = torch.stack(torch.unravel_index(view.flatten(), whole.shape)) if whole.ndim else torch.empty(0, 1)
    low = places.amin(dim=1)
    assert box == Box(tuple(low.tolist()), tuple((places.amax(dim=1) - low + 1).tolist()))


@given(sliced_views())
def test_box_of_slices_is_the_smallest(case: tuple[torch.Tensor, torch.Tensor]) -> None:
    check_box_is_the_smallest(covering, *case)


def test_box_of_everything_is_caught() -> None:
    whole = torch.arange(24).reshape(4, 6)
    check_box_is_the_smallest(covering, whole, whole[1:3])
    with pytest.raises(AssertionError):
        check_box_is_the_smallest(lambda view, shape: (Box((0, 0), shape), view), whole, whole[1:3])
