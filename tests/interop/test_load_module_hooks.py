"""`load_module` does what `load_state_dict` does of the same values, whatever hooks a module has, or names the hook."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some
from torch import nn

import shardtree as st
from shardtree.errors import CheckpointingException, KeyMismatch, ShapeError
from shardtree.interop.dtensor import ModuleKeys, _module_hooks, _module_walk, load_module
from shardtree.interop.dtensor._module_names import UnreadValue
from shardtree.storage import MemoryStorage

State = dict[str, torch.Tensor]


def stored(tensors: State, common: Any = None) -> Any:
    place = MemoryStorage()
    st.save(
        {key: st.ShardedTensor.from_rank_offsets(key, each) for key, each in tensors.items()} | (common or {}), place
    )
    return place


# A law: random modules with random hooks


class Node(nn.Module):
    """A module with two tensors, children, and what its hooks note."""

    def __init__(self, hooks: list[str], children: dict[str, nn.Module]) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.zeros(2))
        self.register_buffer("n", torch.tensor(0.0))
        self.notes: list[Any] = []
        self.hooks = hooks
        for name, child in children.items():
            self.add_module(name, child)
        for hook in hooks:
            if hook in BEFORE:
                self.register_load_state_dict_pre_hook(BEFORE[hook])
            if hook in AFTER:
                self.register_load_state_dict_post_hook(AFTER[hook])

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        # The arguments: metadata, strict, missing, unexpected, errors.
        if "takes" in self.hooks:
            self.notes.append(state.pop(f"{prefix}spare", None))
        super()._load_from_state_dict(state, prefix, *rest)
        if "forgives" in self.hooks:
            rest[2][:] = [name for name in rest[2] if name != f"{prefix}a"]


class Plain(Node):
    """The same without a loading of its own."""

    _load_from_state_dict = nn.Module._load_from_state_dict


class Extra(Plain):
    """The same with an extra state, whose setter looks at the parameters."""

    def get_extra_state(self) -> torch.Tensor:
        return torch.ones(1)

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.notes += [state.clone(), self.a.detach().clone()]


def renames(_: nn.Module, state: Any, prefix: str, *__: Any) -> None:
    if f"{prefix}old" in state:
        state[f"{prefix}a"] = state.pop(f"{prefix}old")


def doubles(_: nn.Module, state: Any, prefix: str, *__: Any) -> None:
    if f"{prefix}a" in state:
        state[f"{prefix}a"].mul_(2)


def drops(_: nn.Module, state: Any, prefix: str, *__: Any) -> None:
    state.pop(f"{prefix}n", None)


def moves(_: nn.Module, state: Any, prefix: str, *__: Any) -> None:
    for name in [each for each in state if each.startswith(f"{prefix}was.")]:
        state[name.replace(f"{prefix}was.", f"{prefix}x.")] = state[name]
        del state[name]


def adds_to_child(_: nn.Module, state: Any, prefix: str, *__: Any) -> None:
    for name, value in list(state.items()):
        if name == f"{prefix}x.a":
            state[name] = value + 1


def supplies(_: nn.Module, state: Any, prefix: str, *__: Any) -> None:
    state.setdefault(f"{prefix}a", torch.full((2,), 7.0))


def looks(module: Any, *_: Any) -> None:
    module.notes.append([each.detach().clone() for each in module.parameters()])


def forgives_all(_: nn.Module, keys: Any) -> None:
    keys.missing_keys.clear()


def complains(_: nn.Module, keys: Any) -> None:
    keys.missing_keys.append("made up")


BEFORE: dict[str, Callable[..., None]] = {
    "renames": renames,
    "doubles": doubles,
    "drops": drops,
    "moves": moves,
    "adds to child": adds_to_child,
    "supplies": supplies,
}
AFTER: dict[str, Callable[..., None]] = {"looks": looks, "forgives all": forgives_all, "complains": complains}
NAMES = ["a", "n", "old", "spare", "_extra_state"]
Spec = tuple[str, list[str], dict[str, Any]]

hook_names = some.lists(some.sampled_from([*BEFORE, *AFTER, "takes", "forgives"]), max_size=2, unique=True)
kinds = some.sampled_from(["Node", "Plain", "Plain", "Extra"])
specs = some.recursive(
    some.tuples(kinds, hook_names, some.just({})),
    lambda below: some.tuples(kinds, hook_names, some.dictionaries(some.sampled_from(["x", "y"]), below)),
    max_leaves=4,
)
paths = some.lists(some.sampled_from(["x.", "y.", "was."]), max_size=2).map("".join)
entries = some.sets(some.tuples(paths, some.sampled_from(NAMES)).map("".join), max_size=12)


def make(spec: Spec) -> Node:
    kind, hooks, children = spec
    cls = {"Node": Node, "Plain": Plain, "Extra": Extra}[kind]
    return cls(hooks, {name: make(child) for name, child in children.items()})


def notes(module: nn.Module) -> str:
    return repr([each.notes for each in module.modules() if isinstance(each, Node)])


def check_is_load_state_dict(spec: Spec, names: set[str]) -> None:
    """Raise unless a module is as `load_state_dict` leaves its twin, with the same report, strict or not."""
    numbers = {name: float(number) for number, name in enumerate(sorted(names), 1)}
    shapes = {name: () if name.endswith("n") else (2,) for name in names}
    tensors = {name: torch.full(shapes[name], number) for name, number in numbers.items()}
    theirs, ours, folder = make(spec), make(spec), stored(tensors)
    expected = theirs.load_state_dict({name: each.clone() for name, each in tensors.items()}, strict=False)
    found = load_module(ours, folder, strict=False)
    assert {*found.missing} == {*expected.missing_keys}
    assert {*found.unused} == {*expected.unexpected_keys}
    state = ours.state_dict()
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(state[name], tensor), name
    assert notes(ours) == notes(theirs)
    if expected.missing_keys:
        with pytest.raises(KeyMismatch, match="without a stored value"):
            load_module(make(spec), folder)
    else:
        load_module(make(spec), folder)


@pytest.mark.slow
@settings(max_examples=60)
@given(specs, entries)
def test_a_module_with_hooks_is_as_load_state_dict_leaves_it(spec: Spec, names: set[str]) -> None:
    check_is_load_state_dict(spec, names)


FULL = {"a", "n", "x.a", "x.n"}


@pytest.mark.parametrize("hook", [*BEFORE, *AFTER, "takes", "forgives"])
def test_each_hook_alone(hook: str) -> None:
    lacking = {"renames": "a", "supplies": "a", "moves": "x.a", "forgives": "a", "forgives all": "x.a"}.get(hook)
    names = (FULL | {"old", "was.a", "spare"}) - {lacking}
    check_is_load_state_dict(("Node", [hook], {"x": ("Plain", [], {})}), names)
    check_is_load_state_dict(("Plain", [], {"x": ("Node", [hook], {})}), FULL | {"x.old"})


@pytest.mark.parametrize(
    "hook", ["renames", "doubles", "drops", "moves", "adds to child", "supplies", "looks", "forgives all", "complains"]
)
def test_the_law_catches_hooks_that_are_bypassed(hook: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_module_hooks, "own_hooks", lambda module: [])
    monkeypatch.setattr(_module_walk, "loads_itself", lambda *_: False)
    before = _module_walk.walk

    def bypassing(module: nn.Module, *rest: Any) -> None:
        kept = [(each, each._load_state_dict_pre_hooks, each._load_state_dict_post_hooks) for each in module.modules()]
        for each in module.modules():
            each._load_state_dict_pre_hooks, each._load_state_dict_post_hooks = {}, {}  # type: ignore[assignment]
        before(module, *rest)
        for each, pre, post in kept:
            each._load_state_dict_pre_hooks, each._load_state_dict_post_hooks = pre, post

    monkeypatch.setattr("shardtree.interop.dtensor._module.walk", bypassing)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        test_each_hook_alone(hook)


# torch's own hooks accept what they accept


def old_weight_norm() -> State:
    torch.manual_seed(0)
    with pytest.warns(FutureWarning, match="weight_norm"):
        return dict(nn.utils.weight_norm(nn.Conv1d(3, 4, 2)).state_dict())


def normed() -> nn.Module:
    return nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Conv1d(3, 4, 2)))


@pytest.mark.parametrize("start", ["", "model."])
@pytest.mark.parametrize("in_common", [False, True])
def test_an_old_weight_norm_goes_into_a_parametrised_one(start: str, in_common: bool) -> None:
    state, theirs, ours = old_weight_norm(), normed(), normed()
    theirs.load_state_dict({f"0.{name}": each for name, each in state.items()})
    tensors = {f"{start}0.{name}": each for name, each in state.items()}
    folder = stored({}, tensors) if in_common else stored(tensors)
    assert load_module(ours, folder, key=(lambda name: start + name) if start else str) == ModuleKeys((), ())
    for name, each in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], each)


def test_names_that_a_table_of_keys_lacks_are_named() -> None:
    state, model = old_weight_norm(), normed()
    table = {name: name for name in model.state_dict()}
    with pytest.raises(KeyMismatch, match="original0") as caught:
        load_module(model, stored({f"0.{name}": each for name, each in state.items()}), key=table.__getitem__)
    assert caught.value.unexpected == tuple(f"0.parametrizations.weight.original{number}" for number in (0, 1))


def wrapped() -> nn.Module:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    inner = nn.Sequential(nn.Linear(2, 2), checkpoint_wrapper(nn.Linear(2, 2)))  # type: ignore[no-untyped-call]
    return nn.Sequential(checkpoint_wrapper(inner))  # type: ignore[no-untyped-call]


NORM = {"weight": torch.full((2,), 2.0), "bias": torch.ones(2)}
STATISTICS = {"running_mean": torch.ones(2), "running_var": torch.full((2,), 3.0)}
LINEAR = {
    f"0.{name}.{kind}": torch.full(shape, 5.0)
    for name in ("0", "1")
    for kind, shape in {"weight": (2, 2), "bias": (2,)}.items()
}
OWN = {
    "a batch norm of old": (lambda: nn.BatchNorm1d(2), NORM | STATISTICS, ModuleKeys((), (), ("num_batches_tracked",))),
    "a counter with an axis": (
        lambda: nn.BatchNorm1d(2),
        NORM | STATISTICS | {"num_batches_tracked": torch.tensor([4])},
        ModuleKeys((), ()),
    ),
    "instance norm": (lambda: nn.InstanceNorm1d(2, affine=True), NORM, ModuleKeys((), ())),
    "lazy layers": (
        lambda: nn.Sequential(nn.Sequential(nn.LazyLinear(2), nn.LazyLinear(2))),
        LINEAR,
        ModuleKeys((), ()),
    ),
    "activation checkpointing": (wrapped, LINEAR | {"0.0.more": torch.ones(1)}, ModuleKeys((), ("0.0.more",))),
    "spectral norm": (
        lambda: nn.utils.spectral_norm(nn.Linear(2, 2)),
        {"weight_orig": torch.eye(2), "bias": torch.ones(2), "weight_u": torch.ones(2), "weight_v": torch.ones(2)},
        ModuleKeys((), ()),
    ),
}


@pytest.mark.parametrize("name", OWN)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_torchs_own_modules_load_what_they_take(name: str) -> None:
    make_one, tensors, expected = OWN[name]
    theirs, ours = make_one(), make_one()
    theirs.load_state_dict({key: each.clone() for key, each in tensors.items()}, strict=not expected.unused)
    assert load_module(ours, stored(tensors)) == expected
    for key, each in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[key], each), key


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_hooks_of_torch_that_look_at_no_element_are_known() -> None:
    for module in (normed(), wrapped(), nn.LazyLinear(2), nn.SyncBatchNorm(2), nn.InstanceNorm2d(2)):
        assert not any(map(_module_hooks.own_hooks, module.modules())), module


def test_an_instance_norm_refuses_what_torch_refuses() -> None:
    with pytest.raises(ShapeError, match=r"Unexpected running stats buffer"):
        load_module(nn.InstanceNorm1d(2, affine=True), stored(NORM | STATISTICS))


# What hooks cost, and what they raise


def test_only_what_a_hook_asks_for_is_read_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []
    before = _module_walk.StoredState.__getitem__

    def noted(state: Any, name: str) -> Any:
        names.append(name)
        return before(state, name)

    monkeypatch.setattr(_module_walk.StoredState, "__getitem__", noted)
    model = make(("Plain", ["renames"], {"x": ("Plain", [], {"y": ("Plain", ["looks"], {})})}))
    load_module(model, stored({name: torch.ones(() if name[-1] == "n" else 2) for name in FULL | {"x.y.a", "x.y.n"}}))
    assert {*names} == {"a", "n"}


def other_size(module: nn.Module, state: Any, prefix: str, *_: Any) -> None:
    state[f"{prefix}a"] = torch.ones(3)


def raises(*_: Any) -> None:
    raise ZeroDivisionError("no")


def returns(*_: Any) -> int:
    return 1


@pytest.mark.parametrize(
    ("register", "hook", "error", "text"),
    [
        ("register_load_state_dict_pre_hook", raises, CheckpointingException, r"raises of x \(Plain\).*(?s:.*)no"),
        ("register_load_state_dict_post_hook", raises, CheckpointingException, r"raises of x \(Plain\).*(?s:.*)no"),
        ("register_load_state_dict_post_hook", returns, CheckpointingException, r"returns of x \(Plain\)"),
        ("register_load_state_dict_pre_hook", other_size, ShapeError, r"size mismatch for x\.a"),
    ],
)
def test_what_a_hook_raises_is_named(register: str, hook: Any, error: Any, text: str) -> None:
    model = make(("Plain", [], {"x": ("Plain", [], {})}))
    getattr(model.x, register)(hook)
    folder = stored({name: torch.ones(() if name[-1] == "n" else 2) for name in FULL})
    with pytest.raises(error, match=text):
        load_module(model, folder)


def test_a_hook_is_given_another_dtype_on_request_alone() -> None:
    model = make(("Plain", ["doubles"], {}))
    folder = stored({"a": torch.full((2,), 0.5, dtype=torch.float64), "n": torch.tensor(1.0)})
    with pytest.raises(ShapeError, match=r"'a' does not fit\n.*float64(?s:.*)cast=True\n?(?s:.*)asked for by doubles"):
        load_module(model, folder)
    load_module(model, folder, cast=True)
    assert model.a.tolist() == [1, 1] and model.a.dtype == torch.float32


class Overridden(nn.Linear):
    """A module whose `load_state_dict` knows other names."""

    def load_state_dict(self, state: Mapping[str, Any], **options: Any) -> Any:  # type: ignore[override]
        return super().load_state_dict({name.removeprefix("old."): each for name, each in state.items()}, **options)


class Silent(nn.Linear):
    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # type: ignore[override]
        with torch.no_grad():
            self.weight.copy_(state["old.weight"] * 3)


def test_a_load_state_dict_of_its_own_is_called() -> None:
    folder = stored({"old.weight": torch.ones(2, 2), "old.bias": torch.ones(2), "more": torch.ones(1)})
    model = Overridden(2, 2)
    assert load_module(model, folder) == ModuleKeys((), ("more",))
    assert model.weight.equal(torch.ones(2, 2)) and model.bias.equal(torch.ones(2))
    with pytest.raises(ShapeError, match="size mismatch for bias"):
        load_module(Overridden(2, 2), stored({"old.weight": torch.ones(2, 2), "old.bias": torch.ones(3)}))
    with pytest.raises(KeyMismatch, match="bias"):
        load_module(Overridden(2, 2), stored({"old.weight": torch.ones(2, 2)}))
    silent = Silent(2, 2)
    load_module(silent, folder)
    assert silent.weight.equal(torch.full((2, 2), 3.0))


def test_a_stored_state_is_a_dict_of_what_is_read() -> None:
    def state() -> Any:
        entries = {"a": UnreadValue("a", (2,)), "b": 1}
        return _module_walk.StoredState(entries, lambda name, _: f"{name} was read")

    whole = {"a": "a was read", "b": 1}
    for copied in (dict, lambda each: {**each}, lambda each: each.copy(), lambda each: each | {}, deepcopy):
        assert copied(state()) == whole
    assert [*state().values()] == [*whole.values()] and [*reversed(state())] == ["b", "a"]
    assert state().pop("a") == state().get("a") == state().setdefault("a", 3) == "a was read"
    assert state().entries()["a"] == UnreadValue("a", (2,))
    assert isinstance(state(), dict) and state() == whole


@pytest.mark.parametrize("hooked", [False, True])
def test_values_that_need_scales_are_refused_whoever_copies_them(hooked: bool) -> None:
    folder, values = MemoryStorage(), torch.ones(2, 2).to(torch.float8_e4m3fn)
    stored = {"weight": values, "weight_scale": torch.ones(2, 1)}
    st.save({key: st.ShardedTensor.from_rank_offsets(key, tensor) for key, tensor in stored.items()}, folder)
    module = nn.Linear(2, 2, bias=False)
    if hooked:
        module.register_load_state_dict_pre_hook(lambda *_: None)
    with pytest.raises(ShapeError, match="'weight': float8_e4m3fn values that need 'weight_scale'"):
        load_module(module, folder, cast=True)
    load_module(module, folder, cast=True, plain=["weight"])
    assert module.weight.tolist() == [[1, 1], [1, 1]]
