"""Ranks that have nothing of a parameter, or of an optimizer's group: there are some under ZeRO and of padded axes."""

from __future__ import annotations

from typing import Any

import torch

import shardtree as st
from shardtree.lenses import Lens, as_factory, padded_axis
from shardtree.mapping import ShardedTensor
from shardtree.optim import (
    abstract_optim_state_from_metadata,
    optim_state_to_sharding_state,
    sharding_state_to_optim_state,
)

STORED = [{"lr": 0.1, "params": ["w"]}, {"lr": 0.2, "params": ["b"]}]


def resumed_rates(own: list[dict[str, Any]]) -> list[float]:
    """Return the learning rates of an optimizer's own groups, once it has loaded the stored ones."""
    params = {name: ShardedTensor.from_rank_offsets(name, torch.zeros(2)) for name in ("w", "b")}
    storage = st.storage.MemoryStorage()
    st.save({"o": optim_state_to_sharding_state({"state": {}, "param_groups": STORED}, params)}, storage)
    target = optim_state_to_sharding_state({"state": {}, "param_groups": own}, params)
    groups = sharding_state_to_optim_state(st.load({"o": target}, storage)["o"])["param_groups"]
    return [group["lr"] for group in groups]


def test_it_keeps_its_own_where_the_groups_are_others() -> None:
    fresh = {"lr": 0.0}
    assert resumed_rates([{**fresh, "params": ["b"]}, {**fresh, "params": []}]) == [0.2, 0.0]
    assert resumed_rates([{**fresh, "params": ["w"]}, {**fresh, "params": ["b"]}, {**fresh, "params": []}]) == [
        0.1,
        0.2,
        0.0,
    ]


def padding(lens: Lens, device: str) -> Any:
    """Return the factory of the last of 3 ranks, which has nothing of 4 rows that are padded to 6."""
    return as_factory(ShardedTensor.from_rank_offsets("w", torch.ones(2, 3, device=device), (0, 2, 3)), lens)


def test_a_rank_that_has_nothing_of_a_parameter_asks_for_the_states_that_others_have() -> None:
    states = {"exp_avg": torch.zeros(4, 3), "step": torch.tensor(3.0)}
    stored = {
        f"optimizer.state.{key}.w": ShardedTensor.from_rank_offsets(f"optimizer.state.{key}.w", state)
        for key, state in states.items()
    }
    fresh = {"state": {}, "param_groups": [{"lr": 0.1, "params": [0]}]}
    tree = abstract_optim_state_from_metadata(fresh, {0: padding(padded_axis(4), "cpu")}, stored)
    assert tree["state"][0].keys() == states.keys()
    storage = st.storage.MemoryStorage()
    st.save(stored, storage)
    loaded = st.load({"o": tree}, storage, validate_access_integrity=False)
    assert loaded["o"]["state"][0]["step"] == 3
    assert torch.equal(loaded["o"]["state"][0]["exp_avg"], torch.zeros(2, 3))
