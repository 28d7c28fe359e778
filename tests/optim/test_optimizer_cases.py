"""Optimizers' states, plain cases: who is whose, numbers and hyperparameters as they were, what wrong input gets."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import shardtree as st
from shardtree.errors import KeyMismatch, TreeError
from shardtree.testing._law_factory import stacked

W, B = torch.nn.Parameter(torch.ones(2, 3)), torch.nn.Parameter(torch.ones(2, 3))
MODEL = {"w": st.ShardedTensor.from_rank_offsets("w", W), "b": st.ShardedTensor.from_rank_offsets("b", B)}
PARAMS = {0: MODEL["w"], 1: MODEL["b"]}


def state_dict(*, by_name: bool = False, moved: bool = False) -> dict[str, Any]:
    w, b = ("w", "b") if by_name else (0, 1)
    groups = [
        {"lr": 0.1, "betas": (0.9, 0.99), "params": [w]},
        {"lr": 0.2, "betas": (0.9, 0.99), "custom": {"a": [1]}, "params": [b]},
    ]
    if moved:
        groups = [{"lr": 0.0, "params": [b]}, {"lr": 0.0, "params": [w]}]
    states = {
        w: {"m": torch.full((2, 3), 1.0), "step": torch.tensor(3.0)},
        b: {"m": torch.full((2, 3), 2.0), "n": None},
    }
    return {"state": states, "param_groups": groups}


# -- who is whose


def test_parameters_are_told_by_identity() -> None:
    alike = torch.nn.Parameter(torch.ones(2, 3))
    assert st.optim.get_param_id_to_sharded_param_map(MODEL, [alike, B, W]) == {1: MODEL["b"], 2: MODEL["w"]}


def test_an_optimizer_gives_its_own_order() -> None:
    optimizer = torch.optim.SGD([{"params": [B]}, {"params": [W]}])
    assert st.optim.get_param_id_to_sharded_param_map(MODEL, optimizer) == {0: MODEL["b"], 1: MODEL["w"]}
    assert st.optim.get_param_id_to_name_map([("w", W), ("b", B)], optimizer) == {0: "b", 1: "w"}


def test_a_tied_parameter_counts_once_under_its_first_key() -> None:
    for places in (("z", "a"), ("a", "z")):
        leaves = [st.ShardedTensor.from_rank_offsets(key, W) for key in ("head", "embed")]
        tree = dict(zip(places, leaves, strict=True))
        found = st.optim.get_param_id_to_sharded_param_map(tree, [W, W])
        assert [(number, leaf.key) for number, leaf in found.items()] == [(0, "embed")]
    assert st.optim.get_param_id_to_name_map([("embed", W), ("head", W)], [W]) == {0: "embed"}


def test_factories_are_found_too() -> None:
    factory = st.ShardedTensorFactory("f", W, lambda *args: [], lambda parts: parts)
    assert st.optim.get_param_id_to_sharded_param_map({"any": [[factory]]}, [W]) == {0: factory}


# -- what becomes of it


def test_it_is_saved_and_comes_back_as_it_was() -> None:
    tree, storage = st.optim.optim_state_to_sharding_state(state_dict(), PARAMS), st.storage.MemoryStorage()
    st.save({"o": tree}, storage)
    assert set(st.load_sharded_metadata(storage)) == {
        "optimizer.state.m.w", "optimizer.state.m.b", "optimizer.state.step.w", "optimizer.state.n.b/shard_0_1",
    }  # fmt: skip
    assert st.load_common_state_dict(storage)["o"]["param_groups"][0] == {"lr": 0.1, "betas": (0.9, 0.99)}
    found = st.optim.sharding_state_to_optim_state(st.load({"o": tree}, storage)["o"])
    assert not st.diff(found, state_dict())
    assert list(found["state"]) == [0, 1]


def test_param_names_stay_on_their_rank() -> None:
    groups = [{"lr": 0.1, "params": [0], "param_names": ["w"]}]
    tree = st.optim.optim_state_to_sharding_state({"state": {}, "param_groups": groups, "extra": 1}, PARAMS)
    assert isinstance(tree["param_groups"][0]["param_names"], st.LocalNonpersistentObject)
    assert tree["extra"] == 1


@pytest.mark.parametrize(("exclude", "left"), [(("m", "n"), ["step"]), (["m", "n"], ["step"]), ("m", ["step", "n"])])
def test_excluded_keys_are_left_out_and_need_no_rule(exclude: Any, left: list[str]) -> None:
    state = {
        "state": {0: {"m": torch.zeros(7), "step": torch.tensor(3.0), "n": None}},
        "param_groups": [{"params": [0]}],
    }
    assert list(st.optim.optim_state_to_sharding_state(state, PARAMS, exclude)["state"][0]) == left


# -- groups


def by_name() -> tuple[Any, st.storage.MemoryStorage]:
    params, storage = st.optim.sharded_params_by_name(MODEL), st.storage.MemoryStorage()
    st.save({"o": st.optim.optim_state_to_sharding_state(state_dict(by_name=True), params)}, storage)
    return params, storage


def loaded_by_name(groups: list[dict[str, Any]]) -> Any:
    params, storage = by_name()
    target = {"state": state_dict(by_name=True)["state"], "param_groups": groups}
    return st.load({"o": st.optim.optim_state_to_sharding_state(target, params)}, storage)["o"]


def test_by_names_a_parameter_that_joined_another_group_is_told() -> None:
    loaded = loaded_by_name([{"lr": 0.7, "params": ["b", "w"]}])
    with pytest.raises(
        TreeError, match=r"group 0: 'custom': 'b' had \{'a': \[1\]\}, 'w' had None\n.*'lr': 'b' had 0.2"
    ):
        st.optim.sharding_state_to_optim_state(loaded)
    found = st.optim.sharding_state_to_optim_state(loaded, hyperparameters="own")
    assert found["param_groups"] == [{"lr": 0.7, "params": ["b", "w"]}]
    assert found["state"]["w"]["m"][0, 0] == 1.0


def test_by_names_one_group_may_become_two() -> None:
    params, storage = st.optim.sharded_params_by_name(MODEL), st.storage.MemoryStorage()
    both = {"state": {}, "param_groups": [{"lr": 0.3, "params": ["w", "b"]}]}
    st.save(st.optim.optim_state_to_sharding_state(both, params), storage)
    two = {"state": {}, "param_groups": [{"lr": 0.0, "params": ["b"]}, {"lr": 0.0, "params": ["w"]}]}
    found = st.optim.sharding_state_to_optim_state(
        st.load(st.optim.optim_state_to_sharding_state(two, params), storage)
    )
    assert found["param_groups"] == [{"lr": 0.3, "params": ["b"]}, {"lr": 0.3, "params": ["w"]}]


def test_by_ids_moments_stay_with_their_parameters_and_groups_with_their_places() -> None:
    """Ids say nothing of groups in another order: the states are right all the same."""
    storage = st.storage.MemoryStorage()
    st.save({"o": st.optim.optim_state_to_sharding_state(state_dict(), PARAMS)}, storage)
    states = {0: state_dict()["state"][1], 1: state_dict()["state"][0]}
    target = {"state": states, "param_groups": [{"lr": 0.0, "params": [0]}, {"lr": 0.0, "params": [1]}]}
    asked = st.optim.optim_state_to_sharding_state(target, {0: MODEL["b"], 1: MODEL["w"]})
    found = st.load({"o": asked}, storage)["o"]
    assert (found["state"][0]["m"][0, 0], found["param_groups"][0]["lr"]) == (2.0, 0.1)


def test_by_ids_another_number_of_groups_is_an_error() -> None:
    storage = st.storage.MemoryStorage()
    st.save({"o": st.optim.optim_state_to_sharding_state(state_dict(), PARAMS)}, storage)
    one = {"state": {}, "param_groups": [{"lr": 0.0, "params": [0, 1]}]}
    with pytest.raises(TreeError, match=r"target\['o'\]\['param_groups'\] does not fit"):
        st.load({"o": st.optim.optim_state_to_sharding_state(one, PARAMS)}, storage)


def test_what_was_saved_by_names_loads_by_ids() -> None:
    _, storage = by_name()
    found = st.load({"o": st.optim.optim_state_to_sharding_state(state_dict(), PARAMS)}, storage)["o"]
    assert not st.diff(st.optim.sharding_state_to_optim_state(found), state_dict())


def test_what_was_saved_by_ids_does_not_load_by_names() -> None:
    """Nothing tells which group a parameter was in."""
    params, storage = st.optim.sharded_params_by_name(MODEL), st.storage.MemoryStorage()
    st.save({"o": st.optim.optim_state_to_sharding_state(state_dict(), PARAMS)}, storage)
    named = state_dict(by_name=True)
    with pytest.raises(TreeError, match=r"param group of these parameters\n  'w'\n  'b'\n  If the optimizer was"):
        st.optim.abstract_optim_state_from_metadata(named, params, st.load_sharded_metadata(storage))
    with pytest.raises(KeyMismatch, match=r"optimizer\.param_group\.w"):
        st.load({"o": st.optim.optim_state_to_sharding_state(named, params)}, storage)


def test_a_group_without_members_keeps_its_own_by_name() -> None:
    named = {"state": {}, "param_groups": [{"lr": 1, "params": ["w"]}]}
    groups = [{"lr": 5, "params": []}, {"params": ["w"]}]
    assert st.optim.regroup_optim_state(named, groups)["param_groups"] == [
        {"lr": 5, "params": []},
        {"lr": 1, "params": ["w"]},
    ]


# -- what is refused


def test_a_list_of_tensors_is_a_state_for_each() -> None:
    """By the keys of its items, and back as a list; a value among them too."""
    moments = [torch.arange(6.0).view(2, 3), None, torch.tensor(3.0), torch.ones(2, 3), *[None] * 8, torch.zeros(2, 3)]
    state = {"state": {0: {"h": moments, "n": [1, 2]}}, "param_groups": [{"params": [0]}]}
    tree = st.optim.optim_state_to_sharding_state(state, PARAMS)
    assert tree["state"][0]["h"][0].key == "optimizer.state.h[0].w"
    storage, fresh = st.storage.MemoryStorage(), {"state": {}, "param_groups": [{"params": [0]}]}
    st.save({"o": tree}, storage)
    metadata = st.load_sharded_metadata(storage)
    target = st.optim.abstract_optim_state_from_metadata(fresh, PARAMS, metadata)
    found = st.optim.sharding_state_to_optim_state(st.load({"o": target}, storage)["o"])
    assert not st.diff(found["state"], state["state"])
    left = st.optim.abstract_optim_state_from_metadata(fresh, PARAMS, metadata, "h")
    assert list(left["state"][0]) == ["n"]
    template = {"h": lambda param: moments}
    assert not st.diff(st.optim.abstract_optim_state(fresh, PARAMS, template)["state"][0]["h"], target["state"][0]["h"])


def test_items_of_a_list_that_are_not_all_stored_are_an_error() -> None:
    state = {"state": {0: {"h": [None, torch.zeros(2, 3)]}}, "param_groups": [{"params": [0]}]}
    storage, fresh = st.storage.MemoryStorage(), {"state": {}, "param_groups": [{"params": [0]}]}
    st.save({"o": st.optim.optim_state_to_sharding_state(state, PARAMS)}, storage)
    with pytest.raises(TreeError, match=r"'h' of state\[0\]: item 0 is missing, but item 1"):
        st.optim.abstract_optim_state_from_metadata(fresh, PARAMS, st.load_tensors_metadata(storage))


# -- what would be silently wrong


@pytest.mark.parametrize("by_name", [False, True])
def test_a_rank_without_parameters_has_its_own_hyperparameters_or_the_stored_ones(by_name: bool) -> None:
    named, params = state_dict(by_name=by_name), st.optim.sharded_params_by_name(MODEL) if by_name else PARAMS

    def tree(rank: int, *, fresh: bool) -> Any:
        groups = [{**group, "params": group["params"] if rank == 1 else []} for group in named["param_groups"]]
        groups = [{**group, "lr": 0.7} if fresh else group for group in groups]
        return st.optim.optim_state_to_sharding_state(
            {"state": named["state"] if rank else {}, "param_groups": groups}, params
        )

    storage = st.storage.MemoryStorage()
    st.simulate(2, lambda world: st.save({"o": tree(world.rank, fresh=False)}, storage, world=world))
    found = st.simulate(2, lambda world: st.load({"o": tree(world.rank, fresh=True)}, storage, world=world)["o"])
    rates = [[group["lr"] for group in st.optim.sharding_state_to_optim_state(each)["param_groups"]] for each in found]
    assert rates == [[0.1, 0.2], [0.1, 0.2]]
    own = st.optim.sharding_state_to_optim_state(found[0], hyperparameters="own")["param_groups"]
    assert [group["lr"] for group in own] == [0.7, 0.7]


def test_a_rank_without_parameters_loads_other_numbers_of_groups() -> None:
    _, storage = by_name()
    one = {"state": {}, "param_groups": [{"lr": 0.7, "params": []}]}
    found = st.load({"o": st.optim.optim_state_to_sharding_state(one, {})}, storage, validate_access_integrity=False)[
        "o"
    ]
    assert st.optim.sharding_state_to_optim_state(found) == one
    as_many = loaded_by_name([{"lr": 0.7, "params": ["b"]}, {"lr": 0.7, "params": []}])
    groups = st.optim.sharding_state_to_optim_state({**as_many, "state": {}})["param_groups"]
    assert [group["lr"] for group in groups] == [0.2, 0.7]


def test_a_new_parameter_by_name_starts_without_states() -> None:
    params, storage = by_name()
    new = {**params, "new": st.ShardedTensor.from_rank_offsets("new", torch.zeros(4))}
    fresh = {"state": {}, "param_groups": [{"lr": 0.7, "params": ["new", "b"]}, {"lr": 0.8, "params": ["w"]}]}
    metadata = st.load_sharded_metadata(storage)
    with pytest.raises(TreeError, match="without a stored state\n  'new'\n"):
        st.optim.abstract_optim_state_from_metadata(fresh, new, metadata)
    target = st.optim.abstract_optim_state_from_metadata(fresh, new, metadata, missing="leave_out")
    loaded = st.load({"o": target}, storage)["o"]
    with pytest.raises(TreeError, match="parameters without a stored group\n  'new'\n  Pass hyperparameters='own'"):
        st.optim.sharding_state_to_optim_state(loaded)
    found = st.optim.sharding_state_to_optim_state(loaded, hyperparameters="own")
    assert found["param_groups"] == fresh["param_groups"]
    assert not st.diff(found["state"], state_dict(by_name=True)["state"])


def test_a_number_for_each_layer_is_no_moment() -> None:
    """Of a parameter without axes, in a stack or flat, both are stored alike: only a template tells them apart."""
    param = st.ShardedTensor.from_rank_offsets_flat("w", torch.zeros(1), (), flattened_range=slice(0, 1))
    for one in (stacked("w", torch.zeros(3)), param):
        held = torch.ones(1 if one is param else 3)
        state = {"state": {0: {"m": held, "step": torch.tensor(5.0)}}, "param_groups": [{"params": [0]}]}
        storage = st.storage.MemoryStorage()
        st.save(st.optim.optim_state_to_sharding_state(state, {0: one}), storage)
        fresh = {"state": {}, "param_groups": [{"params": [0]}]}
        with pytest.raises(TreeError, match=r"'step' of state\[0\]: .* may be a moment or a number"):
            st.optim.abstract_optim_state_from_metadata(fresh, {0: one}, st.load_sharded_metadata(storage))
        asked = st.optim.abstract_optim_state(fresh, {0: one}, {"m": torch.float32, "step": torch.tensor(0.0)})
        assert not st.diff(st.load(asked, storage), state)
