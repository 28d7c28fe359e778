"""`load_module` does what `load_state_dict` does of the same values, whatever hooks a module has, or names the hook."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some
from torch import nn

import shardtree as st
from shardtree.errors import CheckpointingException, KeyMismatch, ShapeError
from shardtree.interop.dtensor import ModuleKeys, _module_hooks, load_module
from shardtree.storage import MemoryStorage
from shardtree.world import World, run_processes

State = dict[str, torch.Tensor]


def stored(tensors: State, common: Any = None, folder: Any = None) -> Any:
    place = MemoryStorage() if folder is None else folder
    st.save({key: st.ShardedTensor.from_rank_offsets(key, each) for key, each in tensors.items()} | (common or {}), place)
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
paths = some.lists(some.sampled_from(["x", "y", "was"]), max_size=2).map(lambda path: "".join(f"{each}." for each in path))
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
        with pytest.raises(KeyMismatch, match="not stored"):
            load_module(make(spec), folder)
    else:
        load_module(make(spec), folder)


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
    before = _module_hooks.walk

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
