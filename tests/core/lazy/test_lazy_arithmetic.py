"""Laws of computed lazy tensors: what is read is what torch computes, window by window, of the bytes it needs."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardtree.core import limits
from shardtree.core.lazy import LazyTensor, _computed, lazy_map, stored
from shardtree.errors import ShapeError, UnsupportedValue
from tests.core.lazy.test_lazy_tensor import Recorder, bits
from tests.core.trees.samples import assert_caught

FLOATS = [torch.float32, torch.bfloat16, torch.float64]
BINARY = [operator.add, operator.sub, operator.mul, operator.truediv, torch.add, torch.mul, torch.sub, torch.div]
SCALARS = st.sampled_from([2, -3, 0.5, 1e-3, np.float32(3), torch.tensor(1.5, dtype=torch.float64), torch.tensor(2)])
SHAPES = st.lists(st.sampled_from([1, 2, 3, 5]), max_size=3).map(tuple)


@pytest.fixture(params=["one window", "many"])
def windows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "many":
        monkeypatch.setattr(limits, "COMPUTED_BYTES", 400)


def numbers(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 10).to(dtype)


@st.composite
def formulas(draw: st.DrawFn) -> tuple[list[torch.Tensor], Callable[[list[Any]], Any]]:
    """Draw some tensors of one shape, and a formula of them."""
    shape = draw(SHAPES)
    tensors = [numbers(shape, draw(st.sampled_from([*FLOATS, torch.int32])), seed) for seed in range(3)]
    steps = draw(st.lists(st.tuples(st.sampled_from(BINARY), st.integers(0, 2) | SCALARS, st.booleans()), max_size=4))
    views = draw(st.booleans())

    def formula(given: list[Any]) -> Any:
        value = given[0]
        for function, other, is_left in steps:
            operand = given[other] if type(other) is int else other
            is_torchs = function in (torch.add, torch.mul, torch.sub, torch.div)
            value = function(operand, value) if is_left and not is_torchs else function(value, operand)
        value = -value
        return value.permute(*reversed(range(value.ndim)))[..., 0:2] if views and value.ndim else value

    return tensors, formula


def reads_what_torch_computes(read: Callable[[LazyTensor], torch.Tensor], drawn: Any) -> None:
    tensors, formula = drawn
    lazies = [Recorder(tensor).lazy(f"w{number}") for number, tensor in enumerate(tensors)]
    computed = formula(lazies)
    expected = formula(tensors)
    assert (computed.dtype, tuple(computed.shape)) == (expected.dtype, tuple(expected.shape))
    assert bits(read(computed)) == bits(expected)


@pytest.mark.usefixtures("windows")
@given(formulas())
def test_arithmetic_reads_what_torch_computes(drawn: Any) -> None:
    reads_what_torch_computes(LazyTensor.read, drawn)


@pytest.mark.slow
def test_the_law_of_arithmetic_catches_another_dtype() -> None:
    assert_caught(reads_what_torch_computes, lambda lazy: lazy.read().double().to(lazy.dtype) + 0, formulas())


@pytest.mark.usefixtures("windows")
def test_a_part_of_a_sum_reads_that_part_of_each_tensor() -> None:
    left, right = Recorder(numbers((4, 6), torch.float32, 0)), Recorder(numbers((6, 4), torch.float32, 1))
    total = (left.lazy() + 2 * right.lazy().T)[1:3, 4:]
    assert total.nbytes_to_read == 2 * 2 * 2 * 4 and left.boxes == right.boxes == []
    total.read()
    assert {(offset, shape) for offset, shape in left.boxes} <= {((1, 4), (2, 2)), ((1, 4), (1, 2)), ((2, 4), (1, 2))}


ELEMENTWISE = [
    torch.square,
    torch.exp,
    torch.sigmoid,
    torch.nn.functional.gelu,
    torch.abs,
    lambda x: x.to(torch.bfloat16),
]
OTHERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "norm": lambda x: x / x.norm(),
    "row mean": lambda x: x - x.mean(-1, keepdim=True),
    "column mean": lambda x: x - x.mean(0, keepdim=True),
    "turned": lambda x: x.flip(0),
    "running sum": lambda x: x.cumsum(-1),
    "position": lambda x: x + torch.arange(x.shape[-1]),
    "random": torch.nn.functional.dropout,
    "other shape": lambda x: x.sum(),
    "no tensor": lambda x: x.tolist(),
}


@pytest.mark.parametrize("function", ELEMENTWISE)
@pytest.mark.parametrize("shape", [(), (7,), (200,), (5, 7), (40, 40), (2, 3, 70)])
def test_lazy_map_reads_what_the_function_gives(function: Callable[..., Any], shape: tuple[int, ...]) -> None:
    whole = numbers(shape, torch.float32, 3)
    found, expected = lazy_map(function, Recorder(whole).lazy()), function(whole)
    assert found.dtype == expected.dtype and found.shape == expected.shape
    # Torch itself rounds some functions otherwise at the end of a row.
    torch.testing.assert_close(found.read(), expected, rtol=1e-6, atol=1e-7)


def cut_alike(lazy: LazyTensor, rows: int, columns: int) -> None:
    whole = lazy.read()
    assert bits(lazy[rows:, :columns].read()) == bits(whole[rows:, :columns])
    assert bits(lazy.T[:columns, rows:].read()) == bits(whole.T[:columns, rows:])


COMPUTED: dict[str, Callable[[LazyTensor], LazyTensor]] = {
    "sigmoid": lambda x: lazy_map(torch.sigmoid, x),
    "power": lambda x: lazy_map(lambda each: each.abs() ** 3.3, x),
    "alpha": lambda x: torch.add(x, x, alpha=0.3),
    "complex": lambda x: x.to(torch.complex64) / (x + 2j),
    "product": lambda x: x @ x.T,
}


@pytest.mark.usefixtures("windows")
@pytest.mark.slow
@pytest.mark.parametrize("name", COMPUTED)
@given(st.integers(0, 40), st.integers(0, 40), st.sampled_from([(41, 41), (64, 64), (40, 3)]))
def test_an_element_has_the_same_bits_however_it_is_cut(
    name: str, rows: int, columns: int, shape: tuple[int, int]
) -> None:
    cut_alike(COMPUTED[name](Recorder(numbers(shape, torch.float32, 4)).lazy()), rows, columns)


def test_the_law_of_cuts_catches_what_torch_rounds_by_place() -> None:
    recorder = Recorder(numbers((41, 41), torch.float32, 4).abs())
    naive = stored(lambda offset, box: recorder.read_box(offset, box) ** 3.3, (41, 41), torch.float32, name="w")
    with pytest.raises(AssertionError):
        [cut_alike(naive, rows, 40 - rows) for rows in range(40)]


def refuses_what_is_not_elementwise(map_: Callable[..., Any], name: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(UnsupportedValue, match="lazy_map"):
        map_(OTHERS[name], Recorder(numbers(shape, torch.float32, 5)).lazy()).read()


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("shape", [(9, 9), (64, 64)])
def test_a_function_that_is_not_elementwise_is_caught(name: str, shape: tuple[int, ...]) -> None:
    refuses_what_is_not_elementwise(lazy_map, name, shape)


def test_the_law_of_elementwise_functions_catches_a_map_that_does_not_try_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_computed, "check_elementwise", lambda function, values: None)
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        refuses_what_is_not_elementwise(lazy_map, "norm", (9, 9))


def test_a_function_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []
    monkeypatch.setattr(_computed, "check_elementwise", lambda function, values: tried.append(function))
    found = lazy_map(torch.abs, Recorder(numbers((8, 3), torch.float32, 0)).lazy())
    assert tried == []
    found.read(), found[2:].read(), (found * 2).read()
    assert tried == [torch.abs]


def catches_after(first: tuple[slice, slice], whole: torch.Tensor) -> None:
    found = lazy_map(OTHERS["norm"], Recorder(whole).lazy())
    found[first].read()
    with pytest.raises(UnsupportedValue, match="is not elementwise"):
        found.read()


def half_constant() -> torch.Tensor:
    return torch.cat([torch.ones(4, 6), numbers((4, 6), torch.float32, 5)])


# Windows that show nothing: one element, no elements, elements that are all alike.
FIRST = [(slice(0, 1), slice(0, 1)), (slice(0, 0), slice(0, 6)), (slice(0, 4), slice(1, 5))]


@pytest.mark.parametrize("first", FIRST, ids=["one", "none", "alike"])
def test_a_first_window_that_shows_nothing_is_not_the_last_that_is_tried(first: tuple[slice, slice]) -> None:
    catches_after(first, half_constant())


def test_the_law_of_first_windows_catches_a_map_that_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_computed, "elements_tested", lambda values: 1)
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        catches_after(FIRST[0], half_constant())


def test_a_map_of_one_number_has_the_dtype_that_it_says() -> None:
    two = torch.tensor(2.0, dtype=torch.float64)  # torch counts it for less than a tensor with axes, not without
    found = lazy_map(lambda x: x * two, Recorder(torch.tensor(3.0)).lazy())
    assert found.dtype == found.read().dtype == torch.float32


@pytest.mark.usefixtures("windows")
@given(st.integers(0, 9), st.integers(0, 12), st.integers(1, 9), st.sampled_from(FLOATS))
def test_products_round_as_sums_may(rows: int, inner: int, columns: int, dtype: torch.dtype) -> None:
    rounds_as_sums_may(lambda left, right: (left @ right).read(), rows, inner, columns, dtype)


def rounds_as_sums_may(multiply: Callable[..., Any], rows: int, inner: int, columns: int, dtype: torch.dtype) -> None:
    left, right = numbers((rows, inner), dtype, 1), numbers((inner, columns), dtype, 2)
    found = multiply(Recorder(left).lazy(), Recorder(right).lazy())
    expected = left.double() @ right.double()
    most = max(inner, 1) * torch.finfo(dtype).eps * (left.double().abs() @ right.double().abs())
    assert found.dtype == dtype and bool(((found.double() - expected).abs() <= most).all())


def test_the_law_of_products_catches_sums_in_half_precision() -> None:
    with pytest.raises(AssertionError):
        rounds_as_sums_may(
            lambda left, right: (left.read().half() @ right.read().half()).float(), 9, 9, 9, torch.float32
        )


def test_a_product_in_one_window_is_torchs_bit_for_bit() -> None:
    left, right, weight = (numbers(shape, torch.float32, 7) for shape in ((70, 8), (8, 90), (70, 90)))
    found = Recorder(weight).lazy() + 0.5 * (Recorder(left).lazy() @ Recorder(right).lazy())
    assert bits(found.read()) == bits(weight + 0.5 * (left @ right))


def test_products_take_the_operands_names() -> None:
    left, right = Recorder(numbers((3, 4), torch.float32, 1)).lazy(), Recorder(numbers((4, 2), torch.float32, 2)).lazy()
    found = [torch.matmul(input=left, other=right), torch.mm(left, mat2=right), left.matmul(other=right)]
    assert {bits(each.read()) for each in found} == {bits((left @ right).read())}


W = stored(lambda offset, shape: torch.ones(shape), (2, 3), torch.float32, name="w")


@pytest.mark.parametrize(
    "refused",
    [
        lambda: W + torch.ones(2, 3), lambda: torch.ones(2, 3) * W, lambda: W * [1], lambda: W + "a", lambda: W**2,
        lambda: W @ torch.ones(3, 2), lambda: W[0] @ W[0], lambda: torch.add(W, 1, out=torch.ones(2, 3)),
        lambda: torch.as_tensor(W), lambda: torch.tensor(W), lambda: torch.asarray(W), lambda: np.asarray(W),
        lambda: float(W[0, 0]), lambda: W[0, 0].item(), lambda: bool(W[0, 0]), lambda: len(W[0, 0]), lambda: W.add_(1),
        lambda: torch.ones(2, 3) == W, lambda: W == 1, lambda: W != 0.5, lambda: np.ones((2, 3)) == W,
        lambda: torch.matmul(W, W.T, out=torch.ones(2, 2)), lambda: W.matmul(), lambda: torch.mm(W, mat2=torch.ones(3)),
        lambda: lazy_map(torch.abs), lambda: lazy_map(torch.abs, torch.ones(2)),
    ],
)  # fmt: skip
def test_what_is_not_recorded_says_what_to_do(refused: Callable[[], Any]) -> None:
    with pytest.raises(UnsupportedValue, match=r"read\(\)|open_checkpoint"):
        refused()


@pytest.mark.parametrize("misfit", [lambda: W + W.T, lambda: W @ W, lambda: W @ W.T.double(), lambda: W * W[0]])
def test_shapes_that_do_not_fit_are_named(misfit: Callable[[], Any]) -> None:
    with pytest.raises(ShapeError, match=r"LazyTensor 'w'.*\n.*\(2, 3\)"):
        misfit()


def test_lazy_map_takes_boxes_of_one_element_with_any_stride() -> None:
    def read_box(offset: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
        return torch.tensor([-3.0, 0.0, -5.0])[::2][:1]

    assert lazy_map(torch.abs, stored(read_box, (1,), torch.float32, name="w")).read().tolist() == [3.0]
