"""What is exact to the bit: constants, conjugated views, scales without axes, and what torch is given to write to."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as draw

import shardtree as st
from shardtree.errors import TraceError
from shardtree.traces import Trace, _steps
from shardtree.traces._steps import cast, exactly, joined
from tests.traces.programs import Tensors, bits_of
from tests.traces.test_indexing import check_like_eager

GIVEN = {
    "w": torch.arange(12.0).reshape(4, 3),
    "v": torch.arange(20.0, 24.0),
    "s": torch.tensor(2.5),
    "t": torch.tensor(0.3),
    "z": torch.complex(torch.arange(6.0), torch.arange(6.0) + 1).reshape(2, 3),
}
NAN, OTHER_NAN = (torch.tensor([each], dtype=torch.int32).view(torch.float32) for each in (0x7FC00001, 0x7FC00002))


def traced(make: Callable[[Tensors], torch.Tensor]) -> Trace:
    return st.trace(lambda tensors: {"out": make(tensors)}, GIVEN)


def check_equal(make: Callable[[Tensors], torch.Tensor]) -> None:
    assert check_like_eager(lambda tensors: {"out": make(tensors)}, GIVEN) == "equal"


# Constants, by bits.

numbers = draw.one_of(
    draw.floats(width=32), draw.integers(-4, 4), draw.booleans(), draw.sampled_from([0.0, -0.0, math.nan, math.inf])
)


@given(draw.lists(draw.sampled_from([0.0, -0.0, math.nan, -math.nan, 1.0]), min_size=1, max_size=5))
def test_elements_that_the_code_has_keep_their_bits(values: list[float]) -> None:
    check_equal(lambda tensors: torch.cat([torch.tensor(values), tensors["v"]]))
    check_equal(lambda tensors: torch.cat([torch.tensor(values)[:, None].expand(-1, 3), tensors["w"]]))


@given(numbers, numbers)
def test_two_functions_are_one_only_if_their_numbers_make_the_same_elements(one: float, other: float) -> None:
    check_numbers(one, other, _steps.exactly)


def check_numbers(one: float, other: float, key: Callable[[Any], Any]) -> None:
    made = [traced(lambda tensors, by=by: tensors["w"] * by) for by in (one, other)]
    outputs = [bits_of(each(GIVEN)["out"]) for each in made]
    if key(one) == key(other):
        assert torch.equal(*outputs)
        assert made[0] == made[1]
        assert made[0].diff(made[1]) == {}
    elif not torch.equal(*outputs):
        assert made[0] != made[1]
    halves = traced(lambda tensors: torch.cat([tensors["w"][:2] * one, tensors["w"][2:] * other]))
    eager = torch.cat([GIVEN["w"][:2] * one, GIVEN["w"][2:] * other])
    assert torch.equal(bits_of(halves(GIVEN)["out"]), bits_of(eager)), "moves are not joined where they differ"


def test_the_law_of_numbers_catches_a_comparison_by_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_steps, "exactly", lambda value: value)
    with pytest.raises(AssertionError):
        check_numbers(0.0, -0.0, lambda value: value)


@pytest.mark.parametrize(
    "make",
    [
        lambda tensors, number: tensors["w"] * number,
        lambda tensors, number: torch.where(tensors["w"] > 1, tensors["w"], number),
        lambda tensors, number: torch.add(tensors["w"], tensors["w"], alpha=number),
        lambda tensors, number: tensors["w"].clamp(number, 1),
        lambda tensors, number: tensors["w"] * torch.tensor(number),
        lambda tensors, number: torch.cat([tensors["v"], torch.tensor([1.0, number])]),
        lambda tensors, number: tensors["w"].masked_fill(torch.arange(12).reshape(4, 3) > 6, number),
    ],
)
def test_traces_with_zeros_of_two_signs_differ_and_with_nan_are_equal(make: Callable[..., torch.Tensor]) -> None:
    zeros = [traced(lambda tensors, number=number: make(tensors, number)) for number in (0.0, -0.0)]
    assert zeros[0] != zeros[1]
    assert list(zeros[0].diff(zeros[1])) == ["out"]
    assert zeros[0] == traced(lambda tensors: make(tensors, 0.0))
    nans = [traced(lambda tensors: make(tensors, math.nan)) for _ in range(2)]
    assert nans[0] == nans[1]


def test_payloads_of_nan_count() -> None:
    one, other = (traced(lambda tensors, nan=nan: torch.cat([nan, tensors["v"]])) for nan in (NAN, OTHER_NAN))
    assert one != other
    assert torch.equal(bits_of(one(GIVEN)["out"][:1]), bits_of(NAN))


def test_what_is_filled_keeps_the_sign_of_zero() -> None:
    assert math.copysign(1, traced(lambda tensors: torch.empty(1))(GIVEN, fill=-0.0)["out"].item()) == -1


def test_numbers_are_known_by_their_bits() -> None:
    assert exactly(1) == exactly(1.0) == exactly(True)
    assert exactly([0.0, 1]) != exactly([-0.0, 1])
    assert exactly(1j) == exactly(1j) != exactly(complex(-0.0, 1))
    assert exactly("a") == exactly("a") != exactly(None)


def test_a_cast_that_leaves_an_integer_s_range_is_made_as_it_is_written() -> None:
    given = {"w": (torch.arange(4) * 1_000_000_000).to(torch.uint32)}
    assert check_like_eager(lambda tensors: {"w": tensors["w"].double().to(torch.int32)}, given) == "equal"
    steps = *cast(torch.uint8, torch.float32), *cast(torch.float32, torch.int32)
    assert len(joined(steps[:1], steps[1:])) == 1, "nothing can leave it here"


# Conjugated and negated views.


def through(view: Callable[[torch.Tensor], torch.Tensor], change: Callable[[torch.Tensor, torch.Tensor], Any]) -> Any:
    """Return a program that changes an ordinary buffer through a view, and returns both."""

    def run(tensors: Tensors) -> Tensors:
        source = tensors["z"] if view is torch.conj else tensors["w"]
        buffer = torch.zeros(source.shape, dtype=source.dtype)
        buffer.copy_(source)
        change(view(buffer), source)
        return {"buffer": buffer, "view": view(buffer), "copy": view(buffer).clone() * 2}

    return run


@pytest.mark.parametrize("view", [torch.conj, torch._neg_view])
@pytest.mark.parametrize(
    "change",
    [
        lambda view, source: None,
        lambda view, source: view.copy_(source),
        lambda view, source: view[1].copy_(source[0]),
        lambda view, source: view.copy_(view.flip(0)),
        lambda view, source: view.fill_(3),
        lambda view, source: view.zero_(),
        lambda view, source: view.mul_(2),
        lambda view, source: view.__setitem__(torch.tensor([1]), source[:1]),
        lambda view, source: view.masked_fill_(torch.tensor([True, False, True]), 5),
    ],
)
def test_what_is_written_through_a_view_that_changes_signs_is_there(view: Any, change: Any) -> None:
    assert check_like_eager(through(view, change), GIVEN) == "equal"


def test_a_conjugate_has_a_way_back() -> None:
    def load(tensors: Tensors) -> Tensors:
        buffer = torch.zeros(2, 3, dtype=torch.complex64)
        buffer.conj().copy_(tensors["z"])
        return {"z": buffer}

    found = st.trace(load, {"z": GIVEN["z"]})
    assert found.then(found) == st.trace(dict, {"z": GIVEN["z"]})
    assert torch.equal(found.inverse()({"z": GIVEN["z"]})["z"], GIVEN["z"].conj())
    assert "z[a, b].conj_physical()" in str(found)


# Scales: tensors without axes.

SCALES: dict[str, Callable[[Tensors], torch.Tensor]] = {
    "a product, twice": lambda given: torch.stack([given["s"] * given["t"]] * 2),
    "with another dtype": lambda given: torch.stack([given["s"] * torch.tensor(2.0, dtype=torch.float64)] * 3),
    "of two elements": lambda given: torch.stack([given["v"][0].exp(), given["v"][1].exp()]),
    "expanded": lambda given: (given["s"] * 2).expand(3, 4).contiguous(),
    "a function of a function": lambda given: torch.stack([given["s"].exp().half() / 3] * 2).float(),
    "filled with": lambda given: given["w"].clone().fill_(given["s"].reciprocal()),
    "written twice": lambda given: given["w"].clone().index_fill_(0, torch.tensor([0, 2]), given["s"].log()),
    "by a scale, and the scale": lambda given: torch.cat(
        [given["w"] * given["s"].rsqrt(), given["s"].rsqrt().repeat(1, 3)]
    ),
    "chosen": lambda given: torch.where(given["s"] > 1, given["s"], given["t"]).expand(4, 3),
    "in two factors": lambda given: given["w"] * given["s"] * given["t"] / given["s"],
}


@pytest.mark.parametrize("make", SCALES.values(), ids=SCALES)
def test_a_scale_may_be_used_more_than_once(make: Callable[[Tensors], torch.Tensor], tmp_path: Path) -> None:
    check_equal(make)
    found, eager = traced(make), make(GIVEN)
    last = eager.shape[0] - 1
    part = found.narrow({"out": ((last, *(0,) * (eager.ndim - 1)), (1, *eager.shape[1:]))})
    assert torch.equal(part(GIVEN)["out"], eager[last:])
    with pytest.raises(TraceError, match="computed"):
        found.inverse()
    assert str(found).startswith("trace: 5 sources -> 1 output\n  out: ")
    assert found == traced(make)
    st.save({name: st.ShardedTensor.from_rank_offsets(name, each) for name, each in GIVEN.items()}, tmp_path / "saved")
    target = {"out": st.ShardedTensor.from_rank_offsets("out", torch.empty_like(eager))}
    loaded = st.load(target, tmp_path / "saved", transform=found)["out"]
    assert torch.equal(loaded, eager)
    st.convert(tmp_path / "saved", tmp_path / "made", backend="safetensors", transform=found, prune=True)
    assert torch.equal(st.load_plain_tensors(tmp_path / "made")["out"], eager)


def test_equal_functions_of_elements_and_of_all_are_one() -> None:
    assert traced(lambda given: torch.stack([given["v"][0] * 2, given["v"][1] * 2])) == traced(
        lambda given: given["v"][:2] * 2
    )


# What torch is given to write to.


@pytest.mark.parametrize(
    "function",
    [
        lambda w, out: torch.mul(w, 2, out=out),
        lambda w, out: torch.cat([w, w], out=out),
        lambda w, out: torch.stack([w, w], out=out),
        lambda w, out: torch.index_select(w, 0, torch.tensor([1, 0]), out=out),
        lambda w, out: torch.take(w, torch.tensor([1, 0]), out=out),
        lambda w, out: torch.exp(w, out=out),
    ],
)
def test_out_that_is_empty_gets_the_result_s_shape(function: Callable[..., torch.Tensor]) -> None:
    def run(tensors: Tensors) -> torch.Tensor:
        out = torch.empty(0)
        assert function(tensors["w"], out) is out
        return out.add_(1).T if out.ndim == 2 else out

    check_equal(run)


def test_out_of_another_shape_or_dtype_is_refused() -> None:
    with pytest.raises(
        TraceError, match=r"out= cannot be recorded for 'w': its shape is \[5\], and the result's \[4, 3\]"
    ):
        traced(lambda tensors: torch.mul(tensors["w"], 2, out=torch.zeros(5)))
    with pytest.raises(TraceError, match="the result is float32, which torch does not cast to int32"):
        traced(lambda tensors: torch.mul(tensors["w"], 2, out=torch.zeros(4, 3, dtype=torch.int32)))


def test_out_that_the_code_fills_itself_is_what_it_filled() -> None:
    def run(tensors: Tensors) -> torch.Tensor:
        buffer, met = torch.empty(4), torch.zeros(4)
        torch.mul(torch.ones(4), 2, out=buffer)
        before = torch.cat([met, tensors["v"]])
        torch.cat([torch.ones(4)], out=met)
        torch._foreach_add_([met], 2)
        return torch.cat([buffer, met, before, tensors["v"]])

    check_equal(run)


@pytest.mark.parametrize(
    "make",
    [
        lambda given: torch.tensor([given["s"]]),
        lambda given: torch.tensor([[given["s"], 1.0], [2.0, given["t"]]]),
        lambda given: torch.as_tensor([given["s"]]),
        lambda given: given["v"].new_tensor([given["s"]]),
        lambda given: torch.FloatTensor([given["s"]]),
        lambda given: torch.tensor(list(torch.zeros(4).copy_(given["v"]))),
        lambda given: torch.Tensor([torch.zeros(4).copy_(given["v"])[0]]),
        lambda given: torch.arange(30.0)[[[torch.zeros(4).copy_(given["v"]).long()[0], 1]]],
    ],
)
def test_traced_elements_in_lists_are_refused(make: Callable[[Tensors], torch.Tensor]) -> None:
    with pytest.raises(TraceError, match="which has none while it is traced"):
        traced(make)


@pytest.mark.parametrize(
    "change",
    [
        lambda w, v: w[:1].expand(4, 3).fill_(7.0),
        lambda w, v: w[:1].expand(4, 3).zero_(),
        lambda w, v: w[:1].expand(1, 3).copy_(v[:3]),
        lambda w, v: w[:, :1].expand(4, 3)[0:1, 0].copy_(v[:1]),
        lambda w, v: w[:1].expand(4, 3).masked_fill_(torch.tensor([True, False, True]), 7.0),
        lambda w, v: w[:1].expand(4, 3).__setitem__(0, v[:3]),
        lambda w, v: w.diagonal().copy_(v[:3]),
    ],
)
@pytest.mark.filterwarnings("ignore:Use of")
def test_an_expanded_view_is_written_where_torch_writes_it(change: Callable[..., Any]) -> None:
    def run(tensors: Tensors) -> torch.Tensor:
        new = tensors["w"].clone()
        change(new, tensors["v"])
        return new

    check_equal(run)


@pytest.mark.parametrize(
    "change",
    [
        lambda w, v: w[:1].expand(4, 3).copy_(v[:3]),
        lambda w, v: w[0, 0].expand(3).copy_(v[:1]),
        lambda w, v: w[:1].expand(4, 3).mul_(2),
        lambda w, v: w[:1].expand(4, 3).add_(w),
        lambda w, v: w[:1].expand(4, 3).fill_(v[0]),
    ],
)
def test_an_expanded_view_is_refused_where_torch_refuses_it_and_by_what_happened(change: Callable[..., Any]) -> None:
    def run(tensors: Tensors) -> torch.Tensor:
        new = tensors["w"].clone()
        change(new, tensors["v"])
        return new

    with pytest.raises(RuntimeError, match="refers to a single memory location"):
        run(GIVEN)
    with pytest.raises(TraceError, match="writing cannot be recorded for 'w': elements of the view share a place"):
        traced(run)


# Functions, by where elements lie.

LONG = {"z": torch.randn(67, dtype=torch.complex64, generator=torch.Generator().manual_seed(0))}
LONG["h"] = LONG["z"].real.to(torch.bfloat16)
ROUNDED: dict[str, Callable[[Tensors], torch.Tensor]] = {
    "power": lambda tensors: tensors["h"].float().abs() ** 3.3,
    "complex product": lambda tensors: tensors["z"] * tensors["z"].flip(0),
    "complex factor": lambda tensors: tensors["z"] * (2.3 + 1j),
    "alpha": lambda tensors: torch.add(tensors["h"], tensors["h"].flip(0), alpha=0.3),
}


def check_parts(make: Callable[[Tensors], torch.Tensor]) -> None:
    found = st.trace(lambda tensors: {"out": make(tensors)}, LONG)
    whole = found(LONG)["out"]
    for count in range(1, len(whole) + 1):
        part = found.narrow({"out": ((0,), (count,))})(LONG)["out"]
        assert torch.equal(bits_of(part), bits_of(whole[:count]))


@pytest.mark.parametrize("name", ROUNDED)
def test_an_element_is_rounded_the_same_however_its_output_is_cut(name: str) -> None:
    check_parts(ROUNDED[name])


@pytest.mark.parametrize("name", ROUNDED)
def test_the_law_of_roundings_catches_functions_taken_for_exact(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(_steps, "is_exact", lambda name, operands, options: True)
    with pytest.raises(AssertionError):
        check_parts(ROUNDED[name])


def test_a_number_is_rounded_as_the_code_rounds_it() -> None:
    for number in LONG["z"]:
        found = st.trace(lambda tensors: {"out": tensors["z"] * (2.3 + 1j)}, {"z": number})
        assert torch.equal(bits_of(found({"z": number})["out"]), bits_of(number * (2.3 + 1j)))
