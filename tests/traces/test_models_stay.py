"""A model that was traced is what it was before: attributes, parameters, buffers, submodules, hooks, and its memory."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import shardtree as st
from shardtree.errors import TraceError
from shardtree.traces import _leftovers, _recording

GIVEN = {"w": torch.arange(12.0).reshape(4, 3), "v": torch.arange(4.0)}
Tensors = dict[str, torch.Tensor]


def _hook(*_: Any) -> None:
    pass


class Model(nn.Module):
    b: torch.Tensor

    def __init__(self, device: str) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.zeros(4, 3, device=device), requires_grad=False)
        self.q = nn.Parameter(torch.ones(4, 3, device=device))
        self.tied = self.q
        self.register_buffer("b", torch.ones(3, device=device))
        self.parts = nn.ParameterList([nn.Parameter(torch.zeros(2, device=device)) for _ in range(2)])
        self.named = nn.ParameterDict({"a": nn.Parameter(torch.zeros(2, device=device))})
        self.inner = nn.Linear(3, 4, device=device)
        self.is_loaded, self.seen, self.settings = False, list[Any](), dict[str, Any](x=1)
        self.q.note = "q"  # type: ignore[attr-defined]


Change = Callable[[Model, Tensors], object]


def _set(name: str, value: Callable[[Model, Tensors], object]) -> Change:
    return lambda model, given: setattr(model, name, value(model, given))


def _parameter(model: Model, given: Tensors) -> nn.Parameter:
    return nn.Parameter(given["w"], requires_grad=False)


def _own_parameter(model: Model, given: Tensors) -> nn.Parameter:
    return nn.Parameter(torch.empty(4, 3).copy_(given["w"]))


def _replaced(model: Model, given: Tensors) -> None:
    del model.q
    model.register_parameter("q", _parameter(model, given))


def _held_weakly(model: Model, given: Tensors) -> None:
    view = model.q[:2]
    model.q.data = given["w"]
    model.seen += [weakref.ref(model.q), view, model.q[2:]]


def _data_twice(model: Model, given: Tensors) -> None:
    model.q.data = _zeros(model, 1)
    model.q.data = given["w"]


def _swapped(model: Model, given: Tensors) -> None:
    torch.utils.swap_tensors(model.q, _parameter(model, given))  # type: ignore[no-untyped-call]


def _zeros(model: Model, *shape: int) -> torch.Tensor:
    return torch.zeros(shape, device=model.b.device)


CHANGES: dict[str, Change] = {
    "a flag": _set("is_loaded", lambda *_: True),
    "a new attribute": _set("w", lambda _, given: given["w"]),
    "a list": lambda model, given: model.seen.append(given["w"]),
    "a dict": lambda model, given: model.settings.update(w=given["w"]),
    "a deleted parameter": lambda model, _: delattr(model, "q"),
    "a deleted buffer": lambda model, _: delattr(model, "b"),
    "a deleted module": lambda model, _: delattr(model, "inner"),
    "a replaced parameter": _replaced,
    "a parameter of the code's own": _set("q", _own_parameter),
    "a new buffer": lambda model, given: model.register_buffer("n", torch.empty(4, 3).copy_(given["w"])),
    "a new module": _set("inner", lambda model, _: nn.Linear(3, 4)),
    "a parameter's attribute": lambda model, given: setattr(model.q, "note", given["w"]),
    "a list of parameters": lambda model, given: model.parts.append(nn.Parameter(given["v"][:2])),
    "a dict of parameters": lambda model, given: model.named.pop("a"),
    "a hook": lambda model, _: model.register_forward_hook(_hook),
    "a hook of states": lambda model, _: model.register_forward_pre_hook(_hook),
    "a parametrization": lambda model, _: nn.utils.parametrizations.weight_norm(model.inner),
    "a mode": lambda model, _: model.eval(),
    "no gradients": lambda model, _: model.requires_grad_(False),
    "another dtype": lambda model, _: model.half(),
    "data": lambda model, given: setattr(model.q, "data", given["w"]),
    "data of the code's own": lambda model, _: setattr(model.q, "data", _zeros(model, 2, 2)),
    "data twice": _data_twice,
    "data with a view": _held_weakly,
    "a swap": _swapped,
    "a view in place": lambda model, _: (model.b.unsqueeze_(0), model.p.t_()),
    "a storage": lambda model, _: model.b.set_(torch.empty_like(model.q).untyped_storage()),
    "a number added": lambda model, _: model.q.data.add_(1),
    "a part multiplied": lambda model, _: model.q.data.view(-1)[2:5].mul_(7),
    "an initialisation": lambda model, _: model.inner.reset_parameters(),
    "an initialisation that infers": lambda model, _: torch.inference_mode()(model.inner.reset_parameters)(),
    "random numbers": lambda model, _: model.b.bernoulli_(),
    "out": lambda model, _: torch.add(_zeros(model, 3), 1, out=model.b),
    "a list of tensors": lambda model, _: torch._foreach_add_([model.q.data, model.b], 1),
}


def state_of(model: Model) -> dict[Any, Any]:
    """Return all that a model is, as values that compare: identities, contents of containers, kinds and memory."""
    found: dict[Any, Any] = {}
    for place, module in model.named_modules():
        for name, value in vars(module).items():
            items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
            found[place, name] = id(value), [(str(key), id(each)) for key, each in items]
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is not None:
                kind = (type(tensor), tensor.shape, tensor.dtype, tensor.stride(), tensor.requires_grad)
                memory = None if tensor.is_meta else (tensor.data_ptr(), tensor.tolist())
                found[place, name, "tensor"] = *kind, memory, list(vars(tensor).items())
    return found


def check_stays(change: Change, device: str, *, fails: bool = False) -> None:
    model = Model(device)
    before = state_of(model)
    kept = list(vars(model).values())  # so that no identity is used again

    def load(given: Tensors) -> None:
        model.p.data.copy_(given["w"])
        with torch.no_grad():
            change(model, given)
        if fails:
            raise KeyError("w")

    if fails:
        with pytest.raises(KeyError):
            st.trace(load, GIVEN)
    else:
        st.trace(load, GIVEN, into=lambda: {"p": model.p})
    after = state_of(model)
    assert list(after) == list(before)
    assert after == before
    assert kept


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("name", CHANGES)
def test_a_model_is_what_it_was(name: str, device: str) -> None:
    check_stays(CHANGES[name], device)
    check_stays(CHANGES[name], device, fails=True)


@pytest.mark.parametrize("name", ["a flag", "a deleted parameter", "a hook", "data of the code's own"])
def test_the_law_of_models_catches_what_is_not_put_back(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    for part in ("_restore", "_set_data", "_reset"):
        monkeypatch.setattr(_leftovers, part, lambda *args, **kwargs: None)
    with pytest.raises(AssertionError):
        check_stays(CHANGES[name], "cpu")


def test_the_law_of_models_catches_a_change_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_recording.RecordingMode, "_models_among", lambda *args: [])
    with pytest.raises(AssertionError):
        check_stays(CHANGES["a number added"], "cpu")


@pytest.mark.parametrize(
    "change",
    [
        lambda model, _: model.b.resize_(2),
        lambda model, _: model.b.apply_(lambda number: number + 1),
        lambda model, _: nn.init.trunc_normal_(model.q),
    ],
)
def test_a_change_of_a_model_that_is_not_recorded_is_refused(change: Change) -> None:
    with pytest.raises(TraceError):
        check_stays(change, "cpu")


class Closed(nn.Module):
    """A module that sets its attributes itself."""

    def __init__(self) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.zeros(4, 3), requires_grad=False)

    def __setattr__(self, name: str, value: Any) -> None:
        table = self._parameters if isinstance(value, nn.Parameter) else self.__dict__
        table[name] = value


class Worker:
    def __init__(self) -> None:
        self.models = [Closed()]

    def load(self, given: Tensors, times: int = 1) -> None:
        self.models[0].kept, self.models[0].p = given["w"], nn.Parameter(given["w"], requires_grad=False)

    def state(self) -> Mapping[str, torch.Tensor]:
        return dict(self.models[0].named_parameters())


@pytest.mark.parametrize("wrap", [lambda load: load, partial, lambda load: lambda given: load(given)])
def test_a_module_is_found_wherever_the_code_has_it(wrap: Callable[[Any], Any]) -> None:
    worker = Worker()
    before = worker.models[0].p
    found = st.trace(wrap(worker.load), GIVEN, into=lambda: worker.state())
    assert torch.equal(found(GIVEN)["p"], GIVEN["w"])
    assert worker.models[0].p is before
    assert not hasattr(worker.models[0], "kept")
