"""What isn't kept: test_nonpersistent's short-lived checkpoints, and redundant extra states that stay on their rank."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

import shardtree as st
from tests.megatron_cases.worlds import assert_same, in_every_format, loaded, on_ranks, saved, whole


@dataclass
class Run:
    """A run that keeps some checkpoints for good, and the newest two of those between."""

    kept: st.CheckpointSeries
    passing: st.CheckpointSeries

    def save(self, step: int, *, persistent: bool) -> None:
        series = self.kept if persistent else self.passing
        series.save({"w": whole("w", torch.full((4,), float(step)))}, step, options=st.SaveOptions(durable=False))
        self.passing.remove(self.passing.plan_removal(st.retention.keep_last(2)))

    def newest(self) -> float:
        series = max((self.kept, self.passing), key=lambda one: found.number if (found := one.latest()) else -1)
        return series.load({"w": whole("w", torch.zeros(4))})["w"][0].item()


def steps(series: st.CheckpointSeries) -> list[int]:
    return [step.number for step in series.steps()]


def test_the_newest_checkpoint_is_loaded_whether_it_is_kept_or_not_and_old_passing_ones_go() -> None:
    run, newest = Run(*(st.CheckpointSeries(st.storage.MemoryStorage()) for _ in range(2))), []
    for step, persistent in ((2, False), (3, True), (4, False), (6, True), (8, False)):
        run.save(step, persistent=persistent)
        newest.append(run.newest())
    assert newest == [2, 3, 4, 6, 8]
    assert steps(run.kept) == [3, 6] and steps(run.passing) == [4, 8]


@in_every_format
def test_a_nonpersistent_object_is_not_stored_and_comes_back_as_the_targets_own(backend: Any) -> None:
    def tree(rank: int, name: str) -> dict[str, Any]:
        local = st.LocalNonpersistentObject({name: rank})
        return {"w": whole("w", torch.ones(2), replica_id=rank), "local": local, "deep": [local, 1]}

    folder = saved(on_ranks(lambda rank: tree(rank, "saved"), 2), backend)
    assert "local" not in st.load_common_state_dict(folder)
    for rank, result in enumerate(loaded(on_ranks(lambda rank: tree(rank, "own"), 2), folder)):
        own = {"own": rank}
        assert_same(result, {"w": torch.ones(2), "local": own, "deep": [own, 1]})


STATES = {
    "decoder.0.attention._extra_state": None,
    "decoder.0.mlp._extra_state": {"recipe": "current"},
    "decoder.1.mlp._extra_state": {"amax_history_fwd": [0.0, 1.0]},
    "decoder.0.metadata": {"foo": "bar"},
}


def is_redundant(leaf: Any) -> bool:
    """Return whether an extra state is none, or has no scales that were measured."""
    if not isinstance(leaf, st.ShardedObject) or not leaf.key.endswith("_extra_state"):
        return False
    return "amax_history_fwd" not in (leaf.data or {})


def localized(tree: Any) -> Any:
    """Return a tree whose redundant extra states stay on their rank: a map, where theirs writes into the tree."""
    return st.map_shards(lambda leaf: st.LocalNonpersistentObject(leaf.data) if is_redundant(leaf) else leaf, tree)


def extra_states() -> dict[str, Any]:
    return {key: st.ShardedObject(key, data, (1,), (0,)) for key, data in STATES.items()} | {
        "w": whole("w", torch.ones(4))
    }


@in_every_format
def test_redundant_extra_states_are_not_stored_and_come_back(backend: Any) -> None:
    folder = saved([localized(extra_states())], backend)
    assert st.load_sharded_metadata(folder).keys() == {
        "decoder.1.mlp._extra_state/shard_0_1",
        "decoder.0.metadata/shard_0_1",
        "w",
    }
    (result,) = loaded([localized(extra_states())], folder)
    assert_same(result, STATES | {"w": torch.ones(4)})


def test_a_tree_without_redundant_extra_states_is_unchanged() -> None:
    tree = {"es": extra_states()["decoder.1.mlp._extra_state"]}
    assert localized(tree)["es"] is tree["es"]


class Unsafe:
    """A class of the user's that no format knows."""

    def __init__(self, value: int) -> None:
        self.value = value


@in_every_format
def test_unknown_classes_are_refused_by_path_unless_pickling_is_allowed(backend: Any) -> None:
    tree = {"args": {"deep": [Unsafe(123)]}}
    with pytest.raises(st.errors.UnsupportedValue, match=r"tree\['args'\]\['deep'\]\[0\][\s\S]*allow_pickle"):
        saved([tree], backend)


@in_every_format
def test_an_object_is_replaced_by_the_stored_one_of_its_key(backend: Any) -> None:
    stored = st.ShardedObject("o", {"a": torch.arange(3)}, (1,), (0,))
    (result,) = loaded([{"new": replace(stored, data=None)}], saved([{"old": stored}], backend))
    assert_same(result, {"new": {"a": torch.arange(3)}})
