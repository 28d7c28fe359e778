"""A refusal that code catches isn't taken for what the code does: the trace names it at the end."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

import shardtree as st
from shardtree.errors import TraceError
from tests.traces.test_recording import Tensors, in_threads

GIVEN = {"a": torch.arange(24.0).view(4, 6), "b": torch.ones(6)}


def by_scale(tensors: Tensors) -> Tensors:
    try:
        scale = float(tensors["a"].max())
    except Exception:
        scale = 1.0
    return {"w": tensors["a"] / scale}


def by_shape(tensors: Tensors) -> Tensors:
    with contextlib.suppress(RuntimeError):
        return {"w": tensors["a"][tensors["b"] > 0]}
    return {"w": tensors["a"]}


def in_a_thread(tensors: Tensors) -> Tensors:
    result = dict(tensors)

    def change() -> None:
        with contextlib.suppress(RuntimeError):
            result["w"] = torch.as_tensor(tensors["a"].numpy())

    in_threads(change)
    return result


@pytest.mark.parametrize(
    ("load", "name", "line"), [(by_scale, "max", 2), (by_shape, "an index", 2), (in_a_thread, "numpy", 5)]
)
def test_a_caught_refusal_is_named_at_the_end(load: Callable[[Tensors], Tensors], name: str, line: int) -> None:
    with pytest.raises(TraceError) as caught:
        st.trace(load, GIVEN)
    first, second, last = str(caught.value).splitlines()[0], str(caught.value).splitlines()[1], str(caught.value)
    assert first == "trace: the code caught trace errors and went on"
    assert second.strip().startswith(f"{name} needs elements of ")
    assert f"test_caught_refusals.py:{load.__code__.co_firstlineno + line} in " in second
    assert f"may_catch=[{name!r}]" in last


def test_named_ones_may_be_caught() -> None:
    found = st.trace(by_scale, GIVEN, may_catch=["max"])
    assert torch.equal(found(GIVEN)["w"], GIVEN["a"])
    with pytest.raises(TraceError, match="'max'"):
        st.trace(by_scale, GIVEN, may_catch=["min", "item"])


@pytest.mark.parametrize("name", ["item", "float", "item, bool, int or float"])
def test_a_number_is_named_by_any_of_its_names(name: str) -> None:
    def load(tensors: Tensors) -> Tensors:
        with contextlib.suppress(RuntimeError):
            _ = float(tensors["b"][0])
        return dict(tensors)

    assert st.trace(load, GIVEN, may_catch=[name]) == st.trace(dict, GIVEN)
    with pytest.raises(TraceError, match="may_catch="):
        st.trace(load, GIVEN)


def test_all_are_named_each_once() -> None:
    def load(tensors: Tensors) -> Tensors:
        for _ in range(3):
            for ask in (torch.sum, torch.isnan):
                with contextlib.suppress(RuntimeError):
                    ask(tensors["a"])
        return dict(tensors)

    with pytest.raises(TraceError) as caught:
        st.trace(load, GIVEN)
    text = str(caught.value)
    assert [text.count(f"{name} needs elements") for name in ("sum", "isnan")] == [1, 1]
    assert "may_catch=['sum', 'isnan']" in text


def test_an_error_that_the_record_makes_is_a_refusal_and_the_code_s_own_isn_t() -> None:
    def load(tensors: Tensors) -> Tensors:
        for wrong in (
            lambda w: w.view(5, 5),
            lambda w: w[9],
            lambda w: w + torch.ones(5),
            lambda w: w[torch.tensor(9)],
        ):
            with contextlib.suppress(RuntimeError, IndexError):
                wrong(tensors["a"])
        return dict(tensors)

    assert st.trace(load, GIVEN) == st.trace(dict, GIVEN)


def test_an_error_of_a_rule_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    from shardtree.traces import _operations

    def fails(*args: Any) -> Any:
        raise AttributeError("no such overload")

    monkeypatch.setitem(_operations.RULES, "flip", fails)

    def load(tensors: Tensors) -> Tensors:
        try:
            return {"w": tensors["a"].flip(0)}
        except (AttributeError, RuntimeError):
            return {"w": tensors["a"]}

    with pytest.raises(
        TraceError,
        match=r"(?s)caught trace errors.*flip cannot be recorded for 'a': these arguments are not supported: no such",
    ):
        st.trace(load, GIVEN)


def test_a_refusal_in_the_destinations_counts() -> None:
    def outputs() -> Tensors:
        with contextlib.suppress(RuntimeError):
            _ = model.max().item()
        return {"w": model}

    model = torch.zeros(4, 6)
    with pytest.raises(TraceError, match=r"(?s)caught trace errors.*in outputs"):
        st.trace(lambda tensors: model.copy_(tensors["a"]), GIVEN, into=outputs)


def test_a_lens_and_the_law_of_one_s_own_code_tell_it_too() -> None:
    with pytest.raises(TraceError, match="caught trace errors"):
        st.lenses.from_function(lambda w: by_scale({"a": w})["w"])(
            st.ShardedTensor.from_rank_offsets("w", torch.zeros(4, 6))
        )
    with pytest.raises(TraceError, match="caught trace errors"):
        st.testing.check_trace(by_scale, GIVEN)


@pytest.mark.parametrize("where", ["function", "into"])
def test_a_refusal_that_torch_makes_another_error_of_is_named(where: str) -> None:
    def load(tensors: Tensors) -> Tensors:
        layer = torch.nn.Linear(6, 4, bias=False)
        layer.weight.detach().numpy()
        layer.load_state_dict({"weight": tensors["a"]})
        return layer.state_dict()

    kept: Tensors = {}
    function, into = (load, None) if where == "function" else (kept.update, lambda: load(kept))
    with pytest.raises(TraceError, match=r"(?s)raised RuntimeError.*a write of 'a'.*gave to numpy at") as caught:
        st.trace(function, GIVEN, into=into)
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_the_code_s_own_error_is_its_own() -> None:
    def load(tensors: Tensors) -> Tensors:
        _ = by_scale(tensors)
        raise ValueError("own")

    with pytest.raises(ValueError, match="own"):
        st.trace(load, GIVEN, may_catch=["max"])
    with pytest.raises(TraceError, match="raised ValueError"):
        st.trace(load, GIVEN)
