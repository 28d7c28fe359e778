"""Tolerances are those of torch.testing.assert_close, by dtype and size; what is exact is compared bit for bit."""

from __future__ import annotations

import re
from math import inf, isfinite
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as draws

from shardtree.testing import _tolerances, bits
from shardtree.testing._tolerances import DEFAULTS, Tolerances, deviation

# What torch says, once, when it makes a tensor of half-precision complex numbers.
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


def torch_tolerances(dtype: torch.dtype) -> tuple[float, float]:
    """Return the tolerances that torch.testing shows for a dtype, relative and absolute."""
    with pytest.raises(AssertionError) as caught:
        torch.testing.assert_close(torch.zeros(2, dtype=dtype), torch.ones(2, dtype=dtype))
    rows = [
        re.search(rf"{kind} difference: .*\(up to ([0-9.e+-]+) allowed\)", str(caught.value))
        for kind in ("relative", "absolute")
    ]
    relative, absolute = (float(row.group(1)) for row in rows if row is not None)
    return relative, absolute


@pytest.mark.parametrize("dtype", DEFAULTS)
def test_defaults_are_those_of_torch_testing(dtype: torch.dtype) -> None:
    assert Tolerances().of(dtype) == torch_tolerances(dtype)


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool, torch.float8_e4m3fn, torch.float8_e8m0fnu])
def test_other_dtypes_are_exact(dtype: torch.dtype) -> None:
    assert Tolerances().of(dtype) == (0, 0)
    assert (Tolerances(0.1, 0.1).of(dtype) == (0, 0)) == (not dtype.is_floating_point)


@pytest.mark.parametrize("dtype", DEFAULTS)
def test_all_of_a_small_tensor_is_never_within_the_defaults(dtype: torch.dtype) -> None:
    small = torch.tensor([3e-6, 1e-6, 0.0], dtype=dtype)
    assert deviation(torch.zeros_like(small), small, Tolerances()) is not None
    assert deviation(torch.zeros_like(small), small, Tolerances(atol=1e-5)) is None
    assert deviation(small, small.clone(), Tolerances()) is None


def test_a_shard_has_the_tolerance_of_its_whole_tensor() -> None:
    noise, zeros = torch.tensor([1e-9, 0.0]), torch.zeros(2)
    assert deviation(noise, zeros, Tolerances(), 1.0) is None
    alone = deviation(noise, zeros, Tolerances())
    assert alone is not None
    assert alone.excess == inf
    assert deviation(-zeros, zeros, Tolerances()) is None


NUMBERS = draws.sampled_from(
    [0.0, -0.0, 1.0, 1.0000011, 1.00002, -3.5, 1e-5, 1.1e-5, 1e30, float("inf"), -float("inf"), float("nan")]
)
PAIRS = draws.lists(draws.tuples(NUMBERS, NUMBERS), min_size=1, max_size=4)
ARGUMENTS = draws.sampled_from(
    [{}, {"rtol": 0.1, "atol": 0.0}, {"rtol": 0.0, "atol": 1e-5}, {"rtol": 1e-4, "atol": 5.0}]
)


def agrees_with_torch(dtype: torch.dtype, pairs: list[tuple[float, float]], options: dict[str, Any]) -> None:
    """Raise unless torch.testing finds two tensors close where nothing deviates."""
    found, expected = (torch.tensor(column, dtype=dtype) for column in zip(*pairs, strict=True))
    given = options
    if not given:  # no more than the relative tolerance of the largest element
        rtol, atol = torch_tolerances(dtype)
        numbers = [abs(number) for number in expected.tolist()]
        options = {"rtol": rtol, "atol": min(atol, rtol * max(filter(isfinite, numbers), default=0.0))}
    try:
        torch.testing.assert_close(found, expected, equal_nan=True, **options)
        close = True
    except AssertionError:
        close = False
    assert (deviation(found, expected, Tolerances(**given)) is None) == close


@settings(max_examples=150)
@given(
    draws.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64]), PAIRS, ARGUMENTS
)
def test_elements_are_within_tolerance_where_torch_testing_says_so(
    dtype: torch.dtype, pairs: list[tuple[float, float]], options: dict[str, Any]
) -> None:
    agrees_with_torch(dtype, pairs, options)


def test_the_law_catches_defaults_of_another_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    agrees_with_torch(torch.float64, [(1.0, 1.00001)], {})
    monkeypatch.setattr(_tolerances, "DEFAULTS", dict.fromkeys(DEFAULTS, DEFAULTS[torch.bfloat16]))
    with pytest.raises(AssertionError):
        agrees_with_torch(torch.float64, [(1.0, 1.00001)], {})


@given(PAIRS)
def test_without_tolerance_bits_are_compared(pairs: list[tuple[float, float]]) -> None:
    found, expected = (torch.tensor(column) for column in zip(*pairs, strict=True))
    assert (deviation(found, expected, Tolerances(0, 0)) is None) == (bits(found) == bits(expected))


@pytest.mark.parametrize("tolerances", [Tolerances(), Tolerances(0, 0), Tolerances(1, 1)])
def test_other_dtypes_and_shapes_are_no_rounding(tolerances: Tolerances) -> None:
    one = torch.ones(2)
    for other in (one.double(), one[:1], one.int()):
        wrong = deviation(other, one, tolerances)
        assert wrong is not None
        assert "expected (2,) torch.float32" in wrong.text


def test_the_worst_element_is_named() -> None:
    expected = torch.tensor([[1.0, 100.0], [1.0, 1.0]])
    wrong = deviation(expected + torch.tensor([[0.0, 20.0], [0.5, 0.0]]), expected, Tolerances(rtol=0.1, atol=0))
    assert wrong is not None
    assert wrong.text.startswith(
        "2 of 4 elements differ by more than rtol=0.1, atol=0; the worst at (1, 0): found 1.5,"
    )
    scalar = deviation(torch.tensor(float("nan")), torch.tensor(2.0), Tolerances())
    assert scalar is not None
    assert "1 of 1 elements differ" in scalar.text
    assert "the worst at (): found nan, expected 2, error nan" in scalar.text
