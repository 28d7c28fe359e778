"""Random programs of writes in place to views of parameters, buffers and constants, on the CPU and on meta."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as draw
from torch import nn

import shardtree as st
from shardtree.errors import TraceError
from shardtree.traces import _operations, _recording
from tests.traces.programs import Tensors, bits_of

GIVEN = {
    "w": torch.arange(1.0, 13.0).reshape(4, 3),
    "h": torch.linspace(-2, 2, 12).reshape(4, 3).bfloat16(),
    "i": torch.arange(-3, 9, dtype=torch.int32).reshape(4, 3),
    "s": torch.tensor(2.5),
}
Pool = list[torch.Tensor]
Step = Callable[[Random, torch.Tensor, torch.Tensor, str], torch.Tensor | None]


def _one_of(random: Random, ways: list[Callable[[], Any]]) -> Any:
    return random.choice(ways)()


def _part(random: Random, one: torch.Tensor, other: torch.Tensor, device: str) -> Any:
    if not one.ndim:
        return one.unsqueeze(0)
    dim = random.randrange(one.ndim)
    start = random.randrange(max(1, one.shape[dim]))
    return _one_of(
        random,
        [
            lambda: one.narrow(dim, start, one.shape[dim] - start),
            lambda: one.unsqueeze(dim),
            lambda: one.movedim(dim, 0),
            lambda: one.reshape(-1),
            lambda: one[:: random.randint(1, 2)],
            lambda: one.unfold(0, 2, 1) if one.shape[0] > 1 else one,
        ],
    )


def _constant(random: Random, one: torch.Tensor, other: torch.Tensor, device: str) -> Any:
    return _one_of(
        random,
        [
            lambda: torch.zeros(4, 3, device=device),
            lambda: torch.full((3,), 2.0, device=device, dtype=torch.bfloat16),
            lambda: torch.arange(12.0, device=device).reshape(4, 3),
            lambda: torch.tensor([1, 2, 3], device=device),
        ],
    )


def _write(random: Random, one: torch.Tensor, other: torch.Tensor, device: str) -> None:
    name = random.choice(["copy_", "add_", "mul_", "maximum", "div_"])
    if name == "maximum":
        torch.maximum(one, other, out=one)
    else:
        getattr(one, name)(random.choice([other, other, one]) if name == "copy_" else random.choice([other, 2, 0.5]))


def _shift(random: Random, one: torch.Tensor, other: torch.Tensor, device: str) -> None:
    if one.ndim and one.shape[-1] > 1:
        source = one[..., :-1]
        one[..., 1:].copy_(random.choice([source, source.clone()]))


def _by_index(random: Random, one: torch.Tensor, other: torch.Tensor, device: str) -> None:
    rows = [random.randrange(max(1, one.shape[0])) for _ in range(random.randint(1, 3))] if one.ndim else [0]
    mask = torch.arange(one.numel(), device=device).reshape(one.shape) % random.randint(1, 3) == 0
    _one_of(
        random,
        [
            lambda: one.__setitem__(rows, 3),
            lambda: one.__setitem__(torch.tensor(rows, device=device), other),
            lambda: one.masked_fill_(mask, -1.0),
            lambda: one.__setitem__(slice(rows[0], None), other),
            lambda: one.index_fill_(0, torch.tensor(rows), 5),
        ],
    )


def _reshape(random: Random, one: torch.Tensor, other: torch.Tensor, device: str) -> Any:
    new = random.choice([one.clone(), torch.arange(12.0, device=device).reshape(4, 3)])
    changes = [lambda: new.unsqueeze_(0), lambda: new.squeeze_(), lambda: new.add_(1).transpose_(0, -1)]
    return _one_of(random, changes)


def _compute(random: Random, one: torch.Tensor, other: torch.Tensor, device: str) -> Any:
    return _one_of(
        random,
        [
            lambda: one + other,
            lambda: one * 3,
            lambda: one.to(random.choice([torch.float64, torch.int32, torch.bfloat16])),
            lambda: torch.where(one > 2, one, other),
            lambda: torch.cat([one, one]),
            lambda: one.flip(0),
            lambda: one.clone(),
        ],
    )


STEPS: tuple[Step, ...] = (_part, _part, _constant, _write, _write, _shift, _by_index, _reshape, _compute)


def program(seed: int, device: str) -> Callable[[nn.Parameter, Tensors], Tensors]:
    def load(p: nn.Parameter, tensors: Tensors) -> Tensors:
        random = Random(seed)
        p.data.copy_(tensors["w"])
        pool: Pool = [p.data, p.data, *tensors.values()]
        for _ in range(random.randint(3, 8)):
            one, other = random.choice(pool), random.choice(pool)
            if (new := random.choice(STEPS)(random, one, other, device)) is not None and new.numel() < 200:
                pool.append(new)
        return {"p": p.detach(), **{f"out{number}": each for number, each in enumerate(pool)}}

    return load


def outcome(run: Callable[[], Tensors]) -> Tensors | Exception:
    try:
        return {name: bits_of(each) for name, each in run().items()}
    except Exception as error:
        return error


def check(seed: int, device: str) -> None:
    """Traced is eager, bit for bit, or both raise, or the trace refuses; and the parameter is what it was."""
    parameter = nn.Parameter(torch.full((4, 3), 9.0, device=device), requires_grad=False)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        eager = outcome(
            lambda: program(seed, "cpu")(
                nn.Parameter(torch.full((4, 3), 9.0), requires_grad=False),
                {name: each.clone() for name, each in GIVEN.items()},
            )
        )
        load = program(seed, device)
        traced = outcome(lambda: st.trace(lambda tensors: load(parameter, tensors), GIVEN)(GIVEN))
    assert type(parameter) is nn.Parameter
    assert parameter.is_meta or (parameter == 9).all()
    if isinstance(traced, Exception):
        assert isinstance(eager, Exception) or isinstance(traced, TraceError), repr(traced)
        return
    assert not isinstance(eager, Exception), f"torch raises {eager!r}"
    assert traced.keys() == eager.keys()
    for name, elements in eager.items():
        assert traced[name].shape == elements.shape
        assert torch.equal(traced[name], elements), name


@pytest.mark.parametrize("device", ["cpu", "meta"])
@given(draw.integers(0, 2**32))
def test_writes_in_place_are_what_torch_makes_of_them(device: str, seed: int) -> None:
    check(seed, device)


def test_the_law_of_writes_in_place_catches_overlaps_that_nobody_looks_at(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (_operations, _recording):
        monkeypatch.setattr(module, "check_apart", lambda *args, **kwargs: None)

    def check_all() -> None:
        for seed in range(2000):
            check(seed, "meta")

    with pytest.raises(AssertionError):
        check_all()
