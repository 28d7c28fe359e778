"""States beside their parameters, wherever they stand in an optimizer's tree."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some

import shardtree as st
from shardtree.errors import MetadataError, TreeError
from shardtree.trees import leaves_with_paths, map_params
from tests.core.trees.samples import assert_caught
from tests.transforms.test_states import FORMS, key_in, model

Map = Callable[..., Any]


class Adam(NamedTuple):
    count: Any
    mu: Any
    nu: Any


def nested(number: float) -> dict[str, Any]:
    return st.trees.nested({key: torch.full(leaf.data.shape, number) for key, leaf in model(0).items()})


def named(form: str, number: float) -> dict[str, Any]:
    keys = [key_in(form, key) for key in model(0)]
    return {key: st.ShardedTensor.from_rank_offsets(key, torch.tensor(number)) for key in keys}


STATES: dict[str, Callable[[float], Any]] = {form: lambda number, form=form: named(form, number) for form in FORMS} | {
    "optax": lambda number: (Adam(3, nested(number), nested(number)), (), [Adam(3, nested(number), {})]),
    "without the model": lambda number: {"mu": nested(number)["model"], "lr": 0.1},
    "under one name": lambda number: {"whatever": nested(number), "inner_state": {"another": nested(number)}},
    "by names": lambda number: {"state": {key: {"exp_avg": torch.tensor(number), "step": 1} for key in model(0)}},
}


def each_state_meets_its_parameter(mapped: Map, form: str, number: float) -> None:
    """The law: f gets the parameter whose key a state's has, for each state, and what is no state stays."""
    state, params = STATES[form](number), model(0)
    numbers = {key: place for place, key in enumerate(params)}
    found = mapped(lambda leaf, parameter: (leaf, numbers[parameter.key]), state, params)
    ends = [key.removeprefix("model.") for key in params]
    for path, leaf in leaves_with_paths(state):
        key = getattr(leaf, "key", ".".join(map(str, path)))
        owners = [place for place, end in enumerate(ends) if f".{end}." in f".{key}."]
        here = found
        for entry in path:
            here = here[entry]
        assert here == (leaf, *owners) if owners else here is leaf


@given(some.sampled_from([*STATES]), some.floats(0, 1))
def test_each_state_meets_its_parameter(form: str, number: float) -> None:
    each_state_meets_its_parameter(map_params, form, number)


def test_each_state_meets_its_parameter_catches_pairs_in_order() -> None:
    def in_order(f: Any, state: Any, params: Any) -> Any:
        parameters = [leaf for _, leaf in leaves_with_paths(params)]
        count = iter(range(10**6))
        return st.map_shards(lambda leaf: f(leaf, parameters[next(count) % len(parameters)]), state)

    assert_caught(each_state_meets_its_parameter, in_order, some.sampled_from([*STATES]), some.floats(0, 1))


def test_params_may_be_plain() -> None:
    params = {"layers": [{"w": torch.full((2,), 2.0)}]}
    state = Adam(torch.tensor(3), {"layers": [{"w": torch.ones(2)}]}, {"layers": [{"w": torch.ones(2)}]})
    found = map_params(torch.mul, state, params)
    assert found.mu["layers"][0]["w"].tolist() == [2, 2] == found.nu["layers"][0]["w"].tolist()
    assert found.count is state.count


@pytest.mark.parametrize(
    ("state", "line"),
    [
        ({"state": {0: {"exp_avg": torch.ones(2)}}}, r"'state.0.exp_avg': belongs to no parameter"),
        ({"state": {0: {"step": 3}}}, r"'state.0.step': belongs to no parameter"),
        ({"mu": {"w": torch.ones(2)}}, r"'mu.w': may belong to 'a.w' or 'b.w'"),
        ({"mu": {"a": {"v": torch.ones(2)}}}, r"'mu.a.v': belongs to no parameter"),
    ],
)
def test_a_state_that_is_nobodys_is_told(state: Any, line: str) -> None:
    with pytest.raises(TreeError, match=f"map_params: states that cannot be related to a parameter\n  {line}"):
        map_params(lambda leaf, _: leaf, state, {"a": {"w": torch.ones(2)}, "b": {"w": torch.ones(2)}})


def test_f_is_a_function() -> None:
    with pytest.raises(MetadataError, match="map_params"):
        map_params({}, {}, {})  # type: ignore[arg-type]
