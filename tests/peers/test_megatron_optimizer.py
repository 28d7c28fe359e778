"""Optimizers' states beside Megatron-Core's, whose function changes its argument: the same keys, shapes and places."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import find, given, settings
from hypothesis import strategies as st

import shardtree
from shardtree import mapping as ours
from shardtree.testing import check_pure
from shardtree.trees import leaves_with_paths
from tests.peers.test_mapping_megatron import FIELDS as FIELDS_OF_SHARDS

megatron = pytest.importorskip("megatron.core.dist_checkpointing.mapping")
optimizer = pytest.importorskip("megatron.core.dist_checkpointing.optimizer")
mlp = pytest.importorskip("megatron.core.transformer.mlp")

pytestmark = pytest.mark.peers

FIELDS = tuple(name for name in FIELDS_OF_SHARDS if name != "flattened_range")


def of(leaf: Any) -> Any:
    """A leaf as plain values; a factory as what it builds."""
    if isinstance(leaf, (ours.ShardedTensorFactory, megatron.ShardedTensorFactory)):
        built = leaf.build()
        return [leaf.key, leaf.replica_id, [of(part) for part in built]]
    if isinstance(leaf, (ours.LocalNonpersistentObject, megatron.LocalNonpersistentObject)):
        return ["local", leaf.unwrap()]
    if not isinstance(leaf, (ours.ShardedTensor, megatron.ShardedTensor)):
        return leaf
    fields = {name: getattr(leaf, name) for name in FIELDS}
    return fields | {"local_shape": tuple(leaf.local_shape), "data": leaf.data.tolist()}


def plain(tree: Any) -> Any:
    """A tree as plain values, of their leaves or of ours."""
    if isinstance(tree, dict):
        return {key: plain(child) for key, child in tree.items()}
    return [plain(child) for child in tree] if isinstance(tree, list) else of(tree)


def our_factory(factory: Any) -> ours.ShardedTensorFactory:
    """Megatron-Core's factory of gated rows with our leaves: what its function builds, turned into ours."""

    def build(key: str, data: Any, replica_id: Any, flattened_range: Any) -> Any:
        return [ours_of(part) for part in factory.build_fn(key, data, replica_id, flattened_range)]

    return ours.ShardedTensorFactory(factory.key, factory.data, build, factory.merge_fn, factory.replica_id)


def ours_of(shard: Any) -> ours.ShardedTensor:
    fields = {name: getattr(shard, name) for name in FIELDS if name not in ("local_shape", "key", "dtype")}
    return ours.ShardedTensor(shard.key, shard.data, shard.dtype, tuple(shard.local_shape), **fields)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Any, Any, Any, tuple[str, ...]]:
    """Their parameters and ours by id, an optimizer's state dict, and keys to leave out."""
    state, theirs, own = {}, {}, {}
    for number in range(draw(st.integers(1, 3))):
        shape = tuple(draw(st.lists(st.sampled_from([2, 4]), min_size=1, max_size=2)))
        prepended = draw(st.integers(0, 1))
        cuts = [(axis + prepended, 1, 2) for axis in range(len(shape)) if draw(st.booleans())]
        cuts += [(0, draw(st.integers(0, 2)), 3)] * prepended
        param = torch.nn.Parameter(torch.rand(shape))
        options = {"replica_id": draw(st.sampled_from([0, 1, (0, 2)])), "prepend_axis_num": prepended}
        shard = megatron.ShardedTensor.from_rank_offsets(f"p{number}", param, *cuts, **options)
        theirs[number], own[number] = shard, ours_of(shard)
        if draw(st.booleans()):
            theirs[number] = mlp.apply_swiglu_sharded_factory(shard, tuple(cut for cut in cuts if cut[0] < prepended))
            own[number] = our_factory(theirs[number])
        keys = draw(st.lists(st.sampled_from(["exp_avg", "exp_avg_sq"]), unique=True))
        dtype = draw(st.sampled_from([torch.float32, torch.bfloat16]))
        state[number] = {key: torch.rand(shape).to(dtype) for key in keys}
    groups = [{"lr": 0.1, "betas": (0.9, 0.95), "params": [number]} for number in state]
    excluded = draw(st.sampled_from([(), ("exp_avg",), ("exp_avg_sq", "step")]))
    return theirs, own, {"state": state, "param_groups": groups, "other": 1}, excluded


def fresh(state_dict: Any) -> Any:
    return {**state_dict, "param_groups": copy.deepcopy(state_dict["param_groups"])}


def convert_alike(convert: Callable[..., Any], case: Any) -> None:
    theirs, own, state_dict, excluded = case
    expected = fresh(state_dict)
    with torch.no_grad():
        assert optimizer.optim_state_to_sharding_state(expected, theirs, excluded) is None
        found = convert(fresh(state_dict), own, excluded)
        assert plain(found) == plain(expected)


@given(cases())
def test_states_are_sharded_as_megatron_does(case: Any) -> None:
    convert_alike(shardtree.optim.optim_state_to_sharding_state, case)


def with_offset_of_another(state_dict: Any, params: Any, excluded: Any) -> Any:
    first = params[0]
    return shardtree.optim.optim_state_to_sharding_state(state_dict, dict.fromkeys(params, first), excluded)


@pytest.mark.slow
def test_states_are_sharded_as_megatron_does_catches() -> None:
    def caught(case: Any) -> bool:
        try:
            convert_alike(with_offset_of_another, case)
        except (AssertionError, shardtree.CheckpointingException):
            return True
        return False

    find(cases(), caught, settings=settings(max_examples=300))


@given(cases())
def test_theirs_changes_its_argument_and_ours_does_not(case: Any) -> None:
    theirs, own, state_dict, excluded = case
    check_pure(shardtree.optim.optim_state_to_sharding_state, fresh(state_dict), own, excluded)
    with torch.no_grad(), pytest.raises(AssertionError, match="changed its argument 0"):
        check_pure(optimizer.optim_state_to_sharding_state, fresh(state_dict), theirs, excluded)


@given(cases())
def test_ids_are_megatrons(case: Any) -> None:
    theirs, own, _, _ = case
    others = [torch.nn.Parameter(torch.rand(1)) for _ in range(2)]
    params = [others[0], *(leaf.data for leaf in reversed(theirs.values())), others[1]]
    expected = optimizer.get_param_id_to_sharded_param_map({"model": dict(theirs)}, iter(params))
    found = shardtree.optim.get_param_id_to_sharded_param_map({"model": dict(own)}, iter(params))
    assert {number: leaf.key for number, leaf in found.items()} == {
        number: leaf.key for number, leaf in expected.items()
    }


def test_ids_are_megatrons_catches_an_order_of_keys() -> None:
    params = {key: torch.nn.Parameter(torch.rand(2)) for key in "ba"}
    tree = {key: ours.ShardedTensor.from_rank_offsets(key, param) for key, param in params.items()}
    found = shardtree.optim.get_param_id_to_sharded_param_map(tree, params.values())
    assert {number: leaf.key for number, leaf in found.items()} != dict(enumerate(sorted(params)))


def test_a_number_which_megatron_refuses_has_a_place() -> None:
    """Megatron-Core moves `step` elsewhere before it converts a state."""
    state = {"state": {0: {"step": torch.tensor(3.0)}}, "param_groups": [{"params": [0]}]}
    shard = megatron.ShardedTensor.from_rank_offsets("w", torch.rand(2, 4), (0, 1, 3))
    with pytest.raises(AssertionError, match="does not match model shape"):
        optimizer.optim_state_to_sharding_state(copy.deepcopy(state), {0: shard})
    tree = shardtree.optim.optim_state_to_sharding_state(state, {0: ours_of(shard)})
    assert [leaf.key for _, leaf in leaves_with_paths(tree["state"])] == ["optimizer.state.step.w"]
