"""Trees of thousands of levels, and those that contain themselves: an error of ours, wherever a tree is taken."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import torch

import shardtree as st
from shardtree.errors import CheckpointingException, TreeError
from shardtree.interop.dtensor import dtensor_layout, from_dtensors, to_dtensors
from shardtree.interop.megatron import from_megatron, to_megatron

LEVELS = 3000
SHARD = st.ShardedTensor.from_rank_offsets("w", torch.ones(2))
FACTORY = st.ShardedTensorFactory("f", torch.ones(2), lambda key, data, replica_id, flat: [SHARD], lambda x: x[0])
MESH, SPEC = st.Mesh(dp=1), st.PartitionSpec()
SAVED = st.storage.MemoryStorage()
Call = Callable[[Any], object]

CALLS: dict[str, Call] = {
    "abstract": lambda deep: st.abstract(deep, MESH, SPEC),
    "abstract_at": lambda deep: st.abstract_at(deep, MESH, SPEC, 0),
    "abstract_optim_state": lambda deep: st.optim.abstract_optim_state({"state": {}, "param_groups": deep}, {}, {}),
    "abstract_optim_state_from_metadata": lambda deep: st.optim.abstract_optim_state_from_metadata(
        {"state": {}, "param_groups": deep}, {}, {}
    ),
    "apply_factories": st.apply_factories,
    "apply_factory_merges": lambda deep: st.apply_factory_merges(deep, deep),
    "broadcast_prefix": lambda deep: st.trees.broadcast_prefix(1, deep),
    "map_by_pattern": lambda deep: st.map_by_pattern({"**": torch.neg})(deep),
    "cast": lambda deep: st.cast(deep, torch.float64),
    "combine": lambda deep: st.combine(deep, deep),
    "common_problems": lambda deep: st.core.layouts.common_problems([deep, deep]),
    "common_with_holes": st.core.trees.common_with_holes,
    "coverage": lambda deep: st.coverage([deep]),
    "data_at": lambda deep: st.data_at(deep, "**", torch.neg),
    "diff": lambda deep: st.diff(deep, nested(deep)),
    "explain": lambda deep: st.explain(deep, SAVED),
    "explain_ranks": lambda deep: st.explain_ranks([deep], SAVED),
    "extract_metadata": st.extract_metadata,
    "extract_nonpersistent": st.trees.extract_nonpersistent,
    "extract_sharded": st.trees.extract_sharded,
    "factories_by_pattern": lambda deep: st.lenses.factories_by_pattern(deep, {"w": st.lenses.transposed()}),
    "check_replicas": st.check_replicas,
    "fingerprint": st.fingerprint,
    "partial_fingerprints": st.fingerprints.partial_fingerprints,
    "from_local": lambda deep: st.from_local(deep, MESH, SPEC, 0),
    "get_param_id_to_sharded_param_map": lambda deep: st.optim.get_param_id_to_sharded_param_map({"m": deep}, []),
    "join": lambda deep: st.core.trees.join(deep, deep),
    "layout_of": lambda deep: st.layout_of(deep, MESH, SPEC),
    "leaves_with_paths": st.trees.leaves_with_paths,
    "load": lambda deep: st.load(deep, SAVED),
    "map_data": lambda deep: st.map_data(torch.neg, deep),
    "map_params": lambda deep: st.trees.map_params(lambda state, _: state, deep, deep),
    "map_shards": lambda deep: st.map_shards(str, deep),
    "map_with_path": lambda deep: st.trees.map_with_path(lambda path, leaf: leaf, deep),
    "merge": lambda deep: st.merge(deep, deep),
    "module_tensors": lambda deep: st.module_tensors({"w": deep}, torch.nn.Identity()),
    "narrow": lambda deep: st.narrow(deep, 0, 0, 1),
    "optim_state_by_id": lambda deep: st.optim.optim_state_by_id({"state": {}, "param_groups": deep}, {}),
    "optim_state_by_name": lambda deep: st.optim.optim_state_by_name({"state": {}, "param_groups": deep}, {}),
    "optim_state_to_sharding_state": lambda deep: st.optim.optim_state_to_sharding_state(
        {"state": {0: deep}, "param_groups": [{"params": [0], "lr": deep}]}, {0: SHARD}
    ),
    "partial_rename": lambda deep: st.transforms.partial_rename(deep, {"w": "v"}),
    "partition": lambda deep: st.partition(deep, lambda leaf: True),
    "plan_reshard": lambda deep: st.plan_reshard([deep], [deep]),
    "prefix": lambda deep: st.prefix(deep, "model."),
    "redistribute": lambda deep: st.redistribute(deep, deep),
    "reduce_elements": lambda deep: st.trees.reduce_elements(torch.sum, deep),
    "regroup_optim_state": lambda deep: st.optim.regroup_optim_state(
        {"state": {}, "param_groups": [{"params": [0], "lr": deep}]}, [{"params": [0], "lr": deep}]
    ),
    "flat": st.trees.flat,
    "rename": lambda deep: st.rename(deep, {"w": "v"}),
    "reshard": lambda deep: st.reshard([deep], [deep]),
    "save": lambda deep: st.save(deep, st.storage.MemoryStorage()),
    "restrict": lambda deep: st.trees.restrict(deep, deep),
    "select": lambda deep: st.select(deep, "w"),
    "shard": lambda deep: st.shard(deep, MESH, SPEC),
    "shard_at": lambda deep: st.shard_at(deep, MESH, SPEC, 0),
    "flatten_with_paths": st.trees.flatten_with_paths,
    "shard_leaves": st.core.trees.shard_leaves,
    "sharded_params_by_name": lambda deep: st.optim.sharded_params_by_name({"m": deep}),
    "sharding_state_to_optim_state": lambda deep: st.optim.sharding_state_to_optim_state(
        {"state": {0: deep}, "param_groups": [{"params": [0], "lr": deep}]}
    ),
    "tree_at": lambda deep: st.tree_at(deep, lambda tree: tree, 1),
    "tree_columns": lambda deep: st.core.layouts.tree_columns([deep]),
    "tree_norm": st.trees.tree_norm,
    "tree_sum": st.trees.tree_sum,
    "unshard": lambda deep: st.unshard([deep]),
    "unbox": st.unbox,
    "rebox": lambda deep: st.rebox(deep, deep),
    "without_data": st.without_data,
    "without_holes": st.core.trees.without_holes,
    "dtensor_layout": dtensor_layout,
    "from_dtensors": from_dtensors,
    "to_dtensors": lambda deep: to_dtensors(deep, deep),
    "from_megatron": from_megatron,
    "to_megatron": to_megatron,
}
FLAT = "buffer_slices keep_layers merge_tensors pad_tensors split_tensor stack_layers transpose_tensors "
FLAT += "unpad_tensors unstack_layers"
"""Functions of flat dicts."""

TREES = {"tree", "trees", "target", "x1", "sharded_state_dict", "sharded_state_dicts", "common", "commons", "loaded"}
TREES |= {"optim_state_dict", "model_sharded_state_dict"}


def nested(leaf: Any, levels: int = LEVELS, *, lists: bool = False) -> Any:
    """Return a leaf below many dicts, or many dicts and lists."""
    for level in range(levels):
        leaf = [leaf] if lists and level % 2 else {"a": leaf}
    return {"a": leaf}


def endless() -> dict[str, Any]:
    """Return a tree that contains itself."""
    tree: dict[str, Any] = {"w": SHARD}
    tree["a"] = [tree]
    return tree


def answer(call: Call, tree: Any) -> str:
    """Return the name of what a call raises of ours, nothing where it doesn't."""
    if call is to_megatron and find_spec("megatron") is None:
        pytest.skip("could not import 'megatron'")
    try:
        call(tree)
    except CheckpointingException as error:
        return type(error).__name__
    return ""


def taking_trees() -> list[str]:
    """Return the public functions that take a tree."""
    functions = {name: value for name, value in vars(st).items() if inspect.isfunction(value)}
    taken = {name: TREES & inspect.signature(function).parameters.keys() for name, function in functions.items()}
    return [name for name in st.__all__ if taken.get(name) and name not in FLAT.split()]


@pytest.fixture(scope="module", autouse=True)
def saved() -> None:
    st.save({"a": {"w": SHARD}}, SAVED)


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("make", [nested, lambda leaf: nested(leaf, lists=True)], ids=["dicts", "lists"])
def test_a_deep_tree_is_an_error_of_ours_or_none(name: str, make: Call) -> None:
    for leaf in (SHARD, FACTORY, 3, torch.ones(2)):
        assert answer(CALLS[name], make(leaf)) in ("TreeError", "")


@pytest.mark.parametrize("name", CALLS)
def test_a_tree_that_contains_itself_is_too(name: str) -> None:
    assert answer(CALLS[name], endless()) in ("TreeError", "")


def test_each_function_that_takes_a_tree_is_tried() -> None:
    assert [name for name in taking_trees() if name not in CALLS] == []


def test_the_error_says_where() -> None:
    with pytest.raises(
        TreeError, match=r"too deep, or contains itself\n  found tree\['a'\]\['a'\].*\.\.\. of 100 levels"
    ):
        st.rename(nested(3), {})


def test_a_function_that_calls_itself_is_not_taken_for_a_deep_tree() -> None:
    def endlessly(path: Any, leaf: Any) -> Any:
        return endlessly(path, leaf)

    with pytest.raises(RecursionError):
        st.select({"a": [1]}, endlessly)


def test_other_threads_too() -> None:
    found: list[str] = []
    thread = threading.Thread(target=lambda: found.append(answer(st.unbox, nested(3))))
    thread.start()
    thread.join()
    assert found == ["TreeError"]


@pytest.mark.parametrize("planted", [lambda tree: walk(tree), lambda tree: [*map(walk, tree.values())]])
def test_the_law_catches_a_walk_that_runs_out_of_stack(planted: Call) -> None:
    with pytest.raises(RecursionError):
        answer(planted, nested(3))


def walk(tree: Any) -> Any:
    return {key: walk(child) for key, child in tree.items()} if isinstance(tree, dict) else tree
