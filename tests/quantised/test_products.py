"""FP8 by its scales is the same bits whether it is compiled or not, and is compiled where there is much of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardtree.quantised import _products
from shardtree.quantised._codes import FP8, floats
from shardtree.quantised._products import fp8_products
from tests.core.trees.samples import assert_caught

SIDES = st.integers(1, 9)
SEEDS = st.integers(0, 2**32 - 1)
Products = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def compiled(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_products, "_WORTH", 0)
        return fp8_products(values, scale)


def same_bits(
    products: Products, rows: int, columns: int, shared: tuple[bool, bool], seed: int, matrices: int = 1
) -> None:
    """Check products of random codes, NaN among them, in a part of a larger tensor, by scales of all sizes."""
    random = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (matrices, rows + 1, columns + 3), dtype=torch.uint8, generator=random)
    values = codes.view(FP8)[:, 1:, 1 : columns + 1]
    sides = [1 if each else side for each, side in zip(shared, (rows, columns), strict=True)]
    sides = [matrices, *sides]
    scale = torch.randn(sides, generator=random) * 2.0 ** torch.randint(-130, 127, sides, generator=random)
    plain = values.to(torch.float32) * scale
    assert torch.equal(products(values, scale).view(torch.int32), plain.view(torch.int32))


SHARED = st.tuples(st.booleans(), st.booleans())


@given(SIDES, SIDES, SHARED, SEEDS, st.integers(1, 3))
def test_compiled_or_not_it_is_what_torch_says(
    rows: int, columns: int, shared: tuple[bool, bool], seed: int, matrices: int
) -> None:
    same_bits(compiled, rows, columns, shared, seed, matrices)
    same_bits(lambda values, scale: floats(values) * scale, rows, columns, shared, seed, matrices)


@pytest.mark.parametrize("scale", [torch.tensor(0.3), torch.tensor([0.3])])
def test_a_scale_for_all_may_have_no_axes(scale: torch.Tensor) -> None:
    values = torch.arange(120, dtype=torch.uint8).reshape(2, 4, 15).view(FP8)
    assert torch.equal(compiled(values, scale), floats(values) * scale)


def test_the_law_catches_a_scale_of_another_row() -> None:
    assert_caught(same_bits, lambda values, scale: compiled(values, scale.roll(1, -2)), SIDES, SIDES, SHARED, SEEDS)


def test_it_is_compiled_once_there_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_products, "_seen", [0])
    monkeypatch.setattr(_products, "_WORTH", 100)
    assert [_products._loop_for(40) is None for _ in range(3)] == [True, True, False]


def test_without_numba_nothing_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(_products, "import_module", refused)
    _products._loop.cache_clear()
    try:
        same_bits(compiled, 3, 4, (False, True), 0)
    finally:
        _products._loop.cache_clear()
