"""What code leaves of a trace: a tensor says that its recording has ended, and modules hold what they held before."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

import shardtree as st
from shardtree.errors import TraceError
from shardtree.traces import _leftovers

GIVEN = {"w": torch.arange(12.0).reshape(4, 3)}


def left_of_a_trace() -> torch.Tensor:
    tracers = []
    st.trace(lambda given: tracers.append(given["w"][:2]) or given, GIVEN)
    return tracers[0]


@pytest.mark.parametrize(
    "use",
    [
        lambda w: w + 1,
        lambda w: w[0],
        lambda w: w.copy_(torch.ones(2, 3)),
        lambda w: torch.ones(2, 3).copy_(w),
        lambda w: w.sum(),
        lambda w: bool(w[0, 0]),
        lambda w: np.asarray(w),
        lambda w: w.data_ptr(),
        lambda w: nn.Linear(3, 3).weight.data.copy_(w),
        lambda w: setattr(w, "data", torch.ones(2, 3)),
    ],
)
def test_a_tensor_whose_recording_has_ended_refuses_what_is_done_to_it(use: Callable[[torch.Tensor], object]) -> None:
    tensor = left_of_a_trace()
    with pytest.raises(TraceError, match="made of 'w': its recording has ended") as caught:
        use(tensor)
    assert "test_leftovers.py" in str(caught.value), "the caller's line"
    assert "while it is traced" not in str(caught.value)
    assert repr(tensor) == "Tracer('w', float32[2,3])"


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.kv = nn.Parameter(torch.empty(4, 3, device="meta"), requires_grad=False)
        self.o = nn.Parameter(torch.zeros(4, 3), requires_grad=False)
        self.w_kc: torch.Tensor | None = None
        self.register_buffer("scale", torch.ones(2))

    def load_weights(self, w: torch.Tensor) -> None:
        self.kv.data.copy_(w)
        self.w_kc = w[:2].clone()
        self.w_vc = w[2:].contiguous()
        self.scale = w[0]
        self.register_buffer("late", w[1])
        self._buffers["direct"] = w[2]
        self.o.data = w[1:]


def held(module: Attention) -> dict[str, object]:
    names = {*vars(module), *module._parameters, *module._buffers}
    return {name: getattr(module, name) for name in names if name not in ("_parameters", "_buffers")}


def is_put_back(module: Attention, before: dict[str, object]) -> bool:
    after = held(module)
    return after.keys() == before.keys() and all(after[name] is before[name] for name in before)


def test_a_module_holds_what_it_held_before() -> None:
    module = Attention()
    before = held(module)
    found = st.trace(lambda given: module.load_weights(given["w"]), GIVEN, into=module.state_dict)
    assert set(found.outputs) == {"kv", "o", "scale", "late", "direct"}
    assert found.outputs["o"].shape == (3, 3)
    assert is_put_back(module, before)
    assert torch.equal(module.o, torch.zeros(4, 3))
    module.load_weights(GIVEN["w"])
    assert torch.equal(module.w_kc, GIVEN["w"][:2]), "a real load has what it loads"


def test_the_law_of_modules_catches_what_is_not_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_leftovers, "_restore", lambda *args: None)
    with pytest.raises(AssertionError):
        test_a_module_holds_what_it_held_before()


def test_a_module_that_the_trace_does_not_know_holds_what_it_held_too() -> None:
    module, other = Attention(), Attention()
    before, old = held(module), held(other)

    def load(given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        module.w_kc, other.w_vc = given["w"], given["w"]
        other.scale = torch.ones(3)
        return {"w": given["w"]}

    st.trace(load, GIVEN)
    assert is_put_back(module, before)
    assert is_put_back(other, old)


def test_a_module_holds_what_it_held_after_an_error() -> None:
    module = Attention()
    before = held(module)

    def load(given: dict[str, torch.Tensor]) -> None:
        module.load_weights(given["w"])
        given["w"].sum()

    with pytest.raises(TraceError):
        st.trace(load, GIVEN, into=module.state_dict)
    assert is_put_back(module, before)


def test_modules_are_what_they_were_once_no_trace_runs() -> None:
    originals = nn.Module.__setattr__, nn.Module.register_buffer, nn.Module.register_parameter
    st.trace(lambda given: given, GIVEN)
    assert originals == (nn.Module.__setattr__, nn.Module.register_buffer, nn.Module.register_parameter)
