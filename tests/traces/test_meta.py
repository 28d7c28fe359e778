"""An engine on the meta device: what code makes there of numbers alone is known, and the trace is the CPU engine's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as drawn

import shardtree as st
from shardtree.errors import TraceError

Tensors = Mapping[str, torch.Tensor]
Loader = Callable[[torch.Tensor, Tensors], Any]

STORED = {"w": torch.arange(12.0).view(4, 3), "v": torch.arange(6.0).view(2, 3) + 50, "s": torch.tensor([2.5])}


def traced(load: Loader, device: str) -> st.Trace:
    parameter = torch.nn.Parameter(torch.zeros(4, 3, device=device), requires_grad=False)
    return st.trace(lambda tensors: load(parameter, tensors), STORED, into=lambda: {"p": parameter})


def by_list(p: torch.Tensor, given: Tensors) -> None:
    p.data[[1, 0]] = given["v"]
    p.data[2:] = 0


def read_by_list(p: torch.Tensor, given: Tensors) -> None:
    p.data.copy_(given["w"])
    p.data.copy_(p.data[[1, 0, 3, 2]])


def by_arange(p: torch.Tensor, given: Tensors) -> None:
    order = torch.arange(4, device=p.device).flip(0)
    p.data.copy_(given["w"].index_select(0, order))


def set_by_arange(p: torch.Tensor, given: Tensors) -> None:
    p.data[2 * torch.arange(2, device=p.device)] = given["v"]
    p.data[[1, 3]] = 7


def zeros_copied(p: torch.Tensor, given: Tensors) -> None:
    p.data[:2].copy_(given["v"])
    p.data[2:].copy_(torch.zeros(2, 3, device=p.device))


def masked(p: torch.Tensor, given: Tensors) -> None:
    p.data.copy_(given["w"])
    mask = torch.zeros(4, 3, dtype=torch.bool, device=p.device)
    mask[0] = True
    p.data[mask] = 0
    p.data.masked_fill_((torch.arange(4, device=p.device) >= 3)[:, None], -1)


def masked_first(p: torch.Tensor, given: Tensors) -> None:
    p.data[torch.arange(4, device=p.device) >= 2] = 0
    p.data[:2] = given["v"]


def scattered(p: torch.Tensor, given: Tensors) -> None:
    rows = torch.tensor([3, 2, 1, 0], device=p.device)[:, None].expand(4, 3)
    p.data.scatter_(0, rows, given["w"])


def nonzero_rows(p: torch.Tensor, given: Tensors) -> None:
    p.data.fill_(1)
    rows = (torch.arange(4, device=p.device) % 2).nonzero().flatten()
    p.data[rows] = given["v"]


def number_of_a_source(p: torch.Tensor, given: Tensors) -> None:
    p.data.fill_(given["s"].item())


def number_of_its_own(p: torch.Tensor, given: Tensors) -> None:
    count = int(torch.full((), 2, device=p.device))
    p.data[:count] = given["v"]
    p.data[count:] = 0


def largest_of_one(p: torch.Tensor, given: Tensors) -> None:
    p.data.fill_(given["s"].max())


LOADERS = (
    by_list,
    read_by_list,
    by_arange,
    set_by_arange,
    zeros_copied,
    masked,
    masked_first,
    scattered,
    nonzero_rows,
    number_of_a_source,
    number_of_its_own,
    largest_of_one,
)


@pytest.mark.parametrize("load", LOADERS, ids=[load.__name__ for load in LOADERS])
def test_the_trace_on_meta_is_that_on_the_cpu_and_makes_what_the_loader_makes(load: Loader) -> None:
    on_meta = traced(load, "meta")
    assert on_meta == traced(load, "cpu")
    filled = torch.full((4, 3), torch.nan)
    load(filled, STORED)
    assert torch.equal(on_meta(STORED)["p"], filled)


@given(
    drawn.lists(drawn.integers(0, 3), min_size=4, max_size=4),
    drawn.lists(drawn.booleans(), min_size=4, max_size=4),
    drawn.integers(-3, 3),
)
def test_constants_on_meta_are_those_of_the_cpu(index: list[int], keep: list[bool], number: int) -> None:
    def load(p: torch.Tensor, given: Tensors) -> None:
        rows, mask = torch.tensor(index, device=p.device), torch.tensor(keep, device=p.device)
        p.data.copy_(given["w"][rows])
        p.data[mask & (rows > 0)] = number
        p.data.masked_fill_(torch.where(mask, rows, number).bool()[:, None], 4)

    filled = torch.empty(4, 3)
    load(filled, STORED)
    assert torch.equal(traced(load, "meta")(STORED)["p"], filled)


def test_a_known_tensor_that_is_filled_at_random_isn_t_known_any_more() -> None:
    def load(p: torch.Tensor, given: Tensors) -> None:
        rows = torch.arange(4, device=p.device)
        rows.random_(0, 4)
        p.data.copy_(given["w"][rows])

    with pytest.raises(TraceError, match="an index needs elements of a tensor on the meta device"):
        traced(load, "meta")


def test_an_engine_s_own_number_on_meta_is_refused_with_the_line() -> None:
    def load(p: torch.Tensor, given: Tensors) -> None:
        if bool(p.data[0, 0] != 1):
            p.data.copy_(given["w"])

    with pytest.raises(TraceError, match=r"(?s)a tensor on the meta device.*in load\n  Build the engine on the CPU"):
        traced(load, "meta")
    traced(load, "cpu")


def test_a_maximum_of_several_says_what_to_write() -> None:
    with pytest.raises(TraceError, match=r"(?s)max needs elements of 'w'.*Write functools.reduce\(torch.maximum"):
        traced(lambda p, given: p.data.fill_(given["w"].max()), "meta")
    pairs = traced(lambda p, given: p.data.copy_(torch.maximum(given["w"], given["w"].flip(0))), "meta")
    assert torch.equal(pairs(STORED)["p"], torch.maximum(STORED["w"], STORED["w"].flip(0)))


def test_whatever_needs_a_source_s_number_still_refuses() -> None:
    for ask in (float, int, bool, lambda one: [0][one], lambda one: torch.full((2,), one), lambda one: one.tolist()):
        with pytest.raises(TraceError, match="'s', which has none while it is traced"):
            traced(lambda p, given, ask=ask: ask(given["s"].item()), "meta")


# Values that new ones are computed from aren't lost.


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_what_a_value_is_computed_from_is_not_overwritten(device: str) -> None:
    def load(p: torch.Tensor, given: Tensors) -> None:
        p.data.copy_(given["w"])
        p.data.copy_(-torch.exp(p.float()))  # as Mamba2's A_log
        p.data.copy_(p * given["s"])

    found = traced(load, device)
    assert not [problem for problem in found.check() if problem.kind == "overwritten"]
    assert torch.equal(found(STORED)["p"], -torch.exp(STORED["w"]) * 2.5)


def test_what_is_written_over_is_still_told() -> None:
    def load(p: torch.Tensor, given: Tensors) -> None:
        p.data.copy_(given["w"])
        p.data[:2] = p.data[1:3].clone()  # row 0 is lost, and rows 1 and 2 stay

    lost = [problem for problem in traced(load, "meta").check() if problem.kind == "overwritten"]
    assert [(problem.elements, problem.where) for problem in lost] == [(3, "[0, 0:3]")]


# What a trace leaves behind.


class Attention(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.kv = torch.nn.Parameter(torch.zeros(4, 3, device="meta"), requires_grad=False)
        self.w_kc: torch.Tensor | None = None
        self.replaced = torch.nn.Parameter(torch.zeros(4, 3), requires_grad=False)

    def load_weights(self, given: Tensors) -> None:
        self.kv.data.copy_(given["w"])
        self.w_kc = self.kv[:2].clone()
        self.w_vc = self.kv[2:].clone()
        self.replaced.data = given["w"]


def test_attributes_that_code_assigns_are_put_back() -> None:
    model = Attention()
    memory = model.replaced.data_ptr()
    found = st.trace(model.load_weights, STORED, into=model.state_dict)
    assert {*found.outputs} == {"kv", "replaced"}
    assert model.w_kc is None and model.replaced.data_ptr() == memory
    assert type(model.replaced) is torch.nn.Parameter and not model.replaced.any()
    assert not hasattr(model, "w_vc"), "what was not there is taken out"


def test_small_things_are_told_as_they_are() -> None:
    number = {"w": torch.empty(()), "v": torch.empty(())}
    found = st.trace(lambda given: {"a": given["w"].pin_memory()}, number)
    assert list(map(str, found.check())) == ["'v': 1 element reaches no output: the scalar"]
    computed = st.trace(lambda given: {"a": given["w"].exp() * 2}, number)
    with pytest.raises(TraceError, match=r"'a' is computed: exp\(w\)"):
        computed.inverse()
