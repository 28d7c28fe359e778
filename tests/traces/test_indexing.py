"""Every form of index, read and written: eager torch's elements, bit for bit, or an error that names the operation."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as draw
from torch.nn import functional

import shardtree as st
from shardtree.errors import TraceError
from shardtree.traces import _scatters
from tests.traces import indexing
from tests.traces.programs import Tensors, bits_of

seeds = draw.integers(0, 2**32)
GIVEN = {"w": torch.arange(12.0).reshape(4, 3), "v": torch.arange(20.0, 32.0), "s": torch.tensor(2.5)}
ROWS, MASK = torch.tensor([True, False, True, False]), torch.arange(12).reshape(4, 3) % 5 == 1


@pytest.fixture(autouse=True)
def _without_warnings() -> Iterator[None]:
    with warnings.catch_warnings():  # torch warns of masks of bytes, and of writes to expanded views
        warnings.simplefilter("ignore")
        yield


def outcome(run: Callable[[], Tensors]) -> Tensors | Exception:
    try:
        return {name: bits_of(each) for name, each in run().items()}
    except Exception as error:
        return error


def check_like_eager(function: Callable[[Tensors], Tensors], tensors: Tensors) -> str:
    """Return "equal" or "refused", or "raises" where eager torch does; after checking that nothing else happens."""
    eager = outcome(lambda: function({name: each.clone() for name, each in tensors.items()}))
    traced = outcome(lambda: st.trace(function, tensors)(tensors))
    if isinstance(eager, Exception):
        assert isinstance(traced, TraceError | type(eager)), f"torch raises {eager!r}, and this {traced!r}"
        return "raises"
    if isinstance(traced, Exception):
        assert isinstance(traced, TraceError), repr(traced)
        return "refused"
    assert traced.keys() == eager.keys()
    for name, elements in eager.items():
        assert traced[name].shape == elements.shape
        assert torch.equal(traced[name], elements), name
    return "equal"


def drawn(seed: int, kind: Callable[[Random], Any]) -> tuple[Callable[[Tensors], Tensors], Tensors]:
    """Return a program that indexes a tensor, a part of one, a transposed one or a buffer, and its sources."""
    random = Random(seed)
    shape = tuple(random.randint(1, 4) for _ in range(random.randint(1, 3)))
    count = int(torch.tensor(shape).prod())
    given = {"w": torch.arange(1.0, 1 + count).reshape(shape), "v": torch.arange(100.0, 100.0 + count)}
    step, held = kind(random), random.randrange(4)

    def run(tensors: Tensors) -> Tensors:
        one = tensors["w"].clone()
        if held == 1:
            one = torch.zeros(shape).copy_(one)
        elif held == 2:
            one = one.permute(*reversed(range(one.ndim))).clone().permute(*reversed(range(one.ndim)))
        elif held == 3:
            larger = torch.zeros(2, *shape)
            larger[1], one = one, larger[1]
        return {"result": step(one, tensors["v"]), "one": one}

    return run, given


def check_reads(seed: int) -> None:
    assert check_like_eager(*drawn(seed, indexing.read)) != "refused"


def check_writes(seed: int) -> None:
    check_like_eager(*drawn(seed, indexing.write))


@given(seeds)
def test_any_index_takes_the_elements_that_it_takes(seed: int) -> None:
    check_reads(seed)


@given(seeds)
def test_any_index_writes_what_it_writes(seed: int) -> None:
    check_writes(seed)


def test_the_law_of_writes_catches_a_mask_that_is_taken_for_one_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    known = _scatters.known

    def careless(*args: Any) -> Any:
        (into, indices, *rest), options = known(*args)
        masks = isinstance(indices, list) and [
            each.flatten(1).any(1) if each is not None and each.ndim > 1 and each.dtype is torch.bool else each
            for each in indices
        ]
        return (into, masks or indices, *rest), options

    monkeypatch.setattr(_scatters, "known", careless)
    with pytest.raises(AssertionError):
        [check_writes(seed) for seed in range(200)]


def test_the_law_of_writes_catches_places_that_forget_strides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_scatters, "places_of", lambda view: torch.arange(view.numel()).reshape(view.shape))
    with pytest.raises(AssertionError):
        [check_writes(seed) for seed in range(60)]


def written(change: Callable[[torch.Tensor, Tensors], Any]) -> Callable[[Tensors], Tensors]:
    def run(tensors: Tensors) -> Tensors:
        one = tensors["w"].clone()
        result = change(one, tensors)
        return {"one": one} if result is None else {"one": one, "result": result}

    return run


def set_to(index: Any, value: Any) -> Callable[[Tensors], Tensors]:
    return written(lambda one, given: one.__setitem__(index, value(given) if callable(value) else value))


@pytest.mark.parametrize(
    "function",
    {
        "a mask of two axes": set_to(MASK, 0),
        "traced elements by a mask of two axes": set_to(MASK, lambda given: given["v"][: int(MASK.sum())]),
        "-0.0": set_to(MASK, -0.0),
        "a mask and numbers": set_to((ROWS, torch.tensor([2, 0])), lambda given: given["v"][:2]),
        "a mask and a number": set_to((ROWS, 1), lambda given: given["v"][:2]),
        "numbers that broadcast": set_to((torch.tensor([[0], [2]]), torch.tensor([0, 2])), lambda given: given["s"]),
        "lists": set_to(([0, 3], [1, 1]), lambda given: given["v"][:2]),
        "None": set_to((None, torch.tensor([1, 0])), lambda given: given["v"][:6].reshape(1, 2, 3)),
        "an ellipsis": set_to((..., torch.tensor([1, 0])), lambda given: given["v"][:4, None]),
        "a slice with steps": set_to((slice(None, None, 2), torch.tensor([2, 0])), lambda given: given["v"][:2]),
        "True": set_to(True, 1),
        "nothing": set_to(torch.tensor([], dtype=torch.long), 1),
        "one element to a place twice": set_to(torch.tensor([1, 1]), lambda given: given["v"][:3]),
        "adding": written(lambda one, given: one.index_put_((MASK,), given["s"], accumulate=True)),
        "masked_fill": written(lambda one, given: one.masked_fill(MASK, given["s"])),
        "masked_fill of an expanded one": written(lambda one, given: one[:1].masked_fill(MASK, 3.0)),
        "masked_scatter_": written(lambda one, given: one.masked_scatter_(MASK, given["v"])),
        "scatter_": written(lambda one, given: one.scatter_(1, torch.tensor([[2], [0]]), given["v"].reshape(4, 3))),
        "scatter_add": written(lambda one, given: one.scatter_add(0, torch.tensor([[1, 2, 0]]), given["w"])),
        "index_add_": written(lambda one, given: one.index_add_(0, torch.tensor([1, 3]), given["w"][:2])),
        "index_fill": written(lambda one, given: one.index_fill(1, torch.tensor([0, 0]), -0.0)),
        "index_copy": written(lambda one, given: one.index_copy(0, torch.tensor([2, 0]), given["w"][:2])),
        "put_ to a transposed one": written(lambda one, given: one.T.put_(torch.tensor([1, -1]), given["v"][:2])),
        "take": written(lambda one, given: one.T.take(torch.tensor([[1, 5], [2, 2]]))),
        "unfold": lambda given: {"u": functional.unfold(given["v"].reshape(1, 1, 3, 4), 2, padding=1, stride=2)},
        "windows that overlap": written(lambda one, given: one.unfold(0, 2, 1).zero_()),
        "strides that interleave": written(lambda one, given: one.as_strided((2, 3), (3, 2)).copy_(given["w"][:2])),
        "flipped memory": written(lambda one, given: one.T.flip(0).as_strided((4,), (1,))),
    }.items(),
    ids=lambda pair: pair[0],
)
def test_a_form_is_recorded(function: tuple[str, Callable[[Tensors], Tensors]]) -> None:
    assert check_like_eager(function[1], GIVEN) == "equal"


@pytest.mark.parametrize(
    ("text", "function"),
    [
        ("torch leaves open which of them stays", set_to(torch.tensor([1, 1]), lambda given: given["w"][:2])),
        ("which of them stays", written(lambda one, given: one.scatter_(1, torch.tensor([[2, 2]]), given["w"]))),
        ("depends on torch's order", written(lambda one, given: one.index_add_(0, ROWS.long(), given["w"]))),
        (
            "no other reduction",
            written(lambda one, given: one.scatter_(0, ROWS.long()[None, :3], 2.0, reduce="add")),
        ),
        (
            "alpha.*: only additions with alpha=1 are recorded",
            written(lambda one, given: one.index_add_(0, ROWS.long()[:1], given["w"][:1], alpha=2)),
        ),
        ("an index needs elements of", written(lambda one, given: one.masked_fill(one > 3, 0))),
        ("an index needs elements of", lambda given: {"r": torch.repeat_interleave(given["v"].long())}),
        ("on the meta device", lambda given: {"r": given["w"][torch.randperm(2, device="meta")]}),
        ("setitem|getitem", lambda given: {"r": torch.arange(30.0)[[[given["v"][0].long(), 1]]]}),
    ],
)
def test_a_form_is_refused(text: str, function: Callable[[Tensors], Tensors]) -> None:
    with pytest.raises(TraceError, match=text):
        st.trace(function, GIVEN)


@pytest.mark.parametrize(
    "function",
    [
        set_to(torch.tensor([True, False]), 0),
        set_to(torch.tensor([9]), 0),
        set_to((torch.tensor([0, 9]), torch.tensor([0, 0])), 0),
        set_to(MASK, lambda given: given["v"][:2]),
        written(lambda one, given: one[torch.tensor([1.0])]),
        written(lambda one, given: one.index_select(0, torch.tensor([-1]))),
        written(lambda one, given: one.index_copy_(0, torch.tensor([1, 2]), given["w"][:1])),
        written(lambda one, given: one.masked_scatter_(MASK, given["v"][:1])),
        written(lambda one, given: one.fill_(given["v"][:1])),
        written(lambda one, given: one.flip(0, 0)),
        written(lambda one, given: one.long().mul_(2.5)),
    ],
)
def test_an_index_that_torch_refuses_is_refused(function: Callable[[Tensors], Tensors]) -> None:
    assert check_like_eager(function, GIVEN) == "raises"


def test_an_index_that_the_code_fills_is_known() -> None:
    def run(tensors: Tensors) -> Tensors:
        mask = torch.empty(4, dtype=torch.bool, device="meta")
        mask.fill_(False)
        mask[1:3] = True
        return {"rows": tensors["w"][mask]}

    assert torch.equal(st.trace(run, GIVEN)(GIVEN)["rows"], GIVEN["w"][1:3])


def test_a_number_is_written_to_a_tensor_on_the_meta_device() -> None:
    def run(tensors: Tensors) -> Tensors:
        padded = torch.empty(6, 3, device="meta")
        padded[:4] = tensors["w"]
        padded[4:] = -0.0
        return {"padded": padded}

    found = st.trace(run, GIVEN)(GIVEN)["padded"]
    assert torch.equal(bits_of(found), bits_of(functional.pad(GIVEN["w"], (0, 0, 0, 2), value=-0.0)))
