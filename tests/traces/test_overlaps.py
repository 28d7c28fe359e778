"""Writes of elements that are read at other places of the same memory: refused, as what torch makes of them varies."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import shardtree as st
from shardtree.errors import TraceError
from shardtree.traces import _operations
from tests.traces.programs import Tensors, bits_of

GIVEN = {"w": torch.arange(1.0, 13.0).reshape(4, 3)}
Change = Callable[[torch.Tensor], object]
OVERLAPS: dict[str, Change] = {
    "rows": lambda p: p[1:].copy_(p[:-1]),
    "columns": lambda p: p[:, 1:].copy_(p[:, :-1]),
    "transposed": lambda p: p[:3].copy_(p[:3].T),
    "broadcast": lambda p: p.copy_(p[1]),
    "added": lambda p: p[:, 1:].add_(p[:, :-1]),
    "assigned": lambda p: p.__setitem__((slice(None), slice(0, 2)), p[:, 1:]),
    "by index": lambda p: p.__setitem__(torch.tensor([1, 2]), p[:2]),
    "by mask": lambda p: p.masked_scatter_(torch.tensor([True, False, True]), p),
    "into its input": lambda p: torch.mul(p[:, :-1], 2, out=p[:, 1:]),
    "joined into its input": lambda p: torch.cat([p[2:], p[:2]], out=p),
}
APART: dict[str, Change] = {
    "itself": lambda p: p.copy_(p),
    "doubled": lambda p: p.add_(p),
    "columns beside each other": lambda p: p[:, 1:2].copy_(p[:, :1]),
    "every other row": lambda p: p[::2].add_(p[1::2]),
    "flipped": lambda p: p.copy_(p.flip(0)),
    "a clone": lambda p: p[1:].copy_(p[:-1].clone()),
    "gathered": lambda p: p.__setitem__([1, 2], p[[0, 1]]),
    "into itself": lambda p: torch.neg(p, out=p),
}


def load(change: Change, device: str = "cpu") -> Callable[[Tensors], Tensors]:
    def run(given: Tensors) -> Tensors:
        p = torch.empty(4, 3, device=device).copy_(given["w"])
        change(p)
        return {"p": p}

    return run


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("name", OVERLAPS)
def test_a_write_of_what_lies_at_other_places_of_it_is_refused(name: str, device: str) -> None:
    with pytest.raises(TraceError, match="overlap in memory") as caught:
        st.trace(load(OVERLAPS[name], device), GIVEN)
    assert "test_overlaps.py" in str(caught.value), "the caller's line"


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("name", APART)
def test_a_write_of_what_lies_apart_is_what_torch_does(name: str, device: str) -> None:
    found = st.trace(load(APART[name], device), GIVEN)
    assert torch.equal(bits_of(found(GIVEN)["p"]), bits_of(load(APART[name])(GIVEN)["p"]))


def test_the_law_of_overlaps_catches_a_copy_that_nobody_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_operations, "check_apart", lambda *args, **kwargs: None)
    shifted = load(OVERLAPS["columns"])
    assert not torch.equal(st.trace(shifted, GIVEN)(GIVEN)["p"], shifted(GIVEN)["p"]), "torch copies in order"


def test_constants_that_share_memory_are_not_changed_together() -> None:
    def run(given: Tensors) -> Tensors:
        p = torch.ones(4, 3, device="meta")
        torch._foreach_mul_([p, p[1:]], 2)
        return {"p": given["w"] + p}

    with pytest.raises(TraceError, match="overlap in memory"):
        st.trace(run, GIVEN)


def test_out_is_cast_where_torch_casts_it() -> None:
    def into(function: Callable[..., torch.Tensor]) -> Callable[[Tensors], Tensors]:
        return lambda given: {"p": function(given["w"], out=torch.empty(4, 3, dtype=torch.bfloat16))}

    assert torch.equal(st.trace(into(torch.exp), GIVEN)(GIVEN)["p"], into(torch.exp)(GIVEN)["p"])
    for run in (into(torch.abs), lambda given: st.trace(into(torch.abs), given)):
        with pytest.raises(RuntimeError, match="Found dtype"):
            run(GIVEN)
