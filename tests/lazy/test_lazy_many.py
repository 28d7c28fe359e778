"""Many lazy tensors at once are what each is by itself, and frozen values made by columns are like any others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import FrozenInstanceError

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardtree.lazy import LazyTensor, _make, stored, stored_each
from shardtree.lazy._sources import Stored, dense

Row = tuple[tuple[int, ...], torch.dtype, str]
rows = st.lists(
    st.tuples(
        st.lists(st.integers(0, 4), max_size=3).map(tuple), st.sampled_from([torch.int8, torch.float32]), st.text()
    ),
    max_size=6,
)


def nothing(offset: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int8)


def parts(lazy: LazyTensor) -> tuple[object, ...]:
    source = lazy.source
    assert isinstance(source, Stored)
    return lazy.place, lazy.casts, source.reader, source.shape, source.dtype, source.name


def check_each_is_what_it_is_alone(each: Callable[..., list[LazyTensor]], cases: list[Row]) -> None:
    shapes, dtypes, names = ([case[at] for case in cases] for at in range(3))
    together = each([nothing] * len(cases), shapes, dtypes, names)
    alone = [stored(nothing, shape, dtype, name=name) for shape, dtype, name in cases]
    assert [*map(parts, together)] == [*map(parts, alone)]


@given(rows)
def test_each_is_what_it_is_alone(cases: list[Row]) -> None:
    check_each_is_what_it_is_alone(stored_each, cases)


def test_the_law_catches_a_place_of_another_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_make, "dense", lambda shape: dense(tuple(reversed(shape))))
    with pytest.raises(AssertionError):
        check_each_is_what_it_is_alone(stored_each, [((2, 3), torch.int8, "w")])


def test_what_is_made_by_columns_is_frozen() -> None:
    (lazy,) = stored_each([nothing], [(2,)], [torch.int8], ["w"])
    with pytest.raises(FrozenInstanceError):
        lazy.casts = (torch.float32,)  # type: ignore[misc]
    assert lazy[1:].read().tolist() == [0]
