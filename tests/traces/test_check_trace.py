"""`check_trace`: what it catches in loading code that isn't a function of its tensors alone."""

from __future__ import annotations

from itertools import count

import pytest
import torch

from shardtree.testing import check_trace
from shardtree.traces import Trace

GIVEN = {"w": torch.arange(24.0).view(6, 4), "s": torch.rand(6, 1)}


def test_code_that_moves_and_computes_keeps_the_laws() -> None:
    found = check_trace(lambda tensors: {"a": tensors["w"].T[1:], "b": tensors["w"] * tensors["s"]}, GIVEN)
    assert isinstance(found, Trace)


def test_code_that_does_something_else_each_time_is_caught() -> None:
    rows = count()
    with pytest.raises(AssertionError, match="the trace gives other tensors than the code"):
        check_trace(lambda tensors: {"a": tensors["w"].roll(next(rows), 0)}, GIVEN)


def test_code_that_looks_whether_it_is_traced_is_caught() -> None:
    def load(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        is_traced = type(tensors["w"]) is not torch.Tensor
        return {"a": tensors["w"].flip(0) if is_traced else tensors["w"]}

    law = "the trace gives other tensors than the code"
    with pytest.raises(AssertionError, match=f"{law}\n  'a': 24 of 24 elements differ"):
        check_trace(load, GIVEN)


def test_parts_that_are_no_cuts_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault: a part is cut at the beginning, wherever it is."""
    from shardtree.testing import _law_trace as law

    cut = law.localized
    monkeypatch.setattr(law, "localized", lambda found, name, offset, shape: cut(found, name, [0] * len(shape), shape))
    with pytest.raises(AssertionError, match="a part is not a cut of the whole"):
        check_trace(lambda tensors: {"a": tensors["w"]}, GIVEN)


def test_a_way_back_to_other_sources_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Trace, "inverse", lambda self: self)
    with pytest.raises(AssertionError, match="the way back gives other sources"):
        check_trace(lambda tensors: {"w": tensors["w"].view(4, 6).T.reshape(6, 4)}, {"w": GIVEN["w"]})
