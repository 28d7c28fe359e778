"""Optimizers' states: what test_optimizer says of keys, frozen parameters, buckets, single moments and layouts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import shardtree as st
from shardtree.errors import KeyMismatch
from tests.megatron_cases.worlds import (
    Place,
    assert_same,
    data_of,
    in_every_format,
    loaded,
    on_ranks,
    places,
    saved,
    whole,
)


def stepped(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Return Adam after a step."""
    for parameter in parameters:
        if parameter.requires_grad:
            parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.Adam(parameters)
    optimizer.step()
    return optimizer


def sharding_state(model: dict[str, Any], optimizer: torch.optim.Optimizer, *exclude: str) -> Any:
    by_id = st.optim.get_param_id_to_sharded_param_map(model, optimizer)
    return st.optim.optim_state_to_sharding_state(optimizer.state_dict(), by_id, exclude)


def test_states_are_stored_under_their_names_before_the_parameters_keys() -> None:
    layers = {"conv": torch.nn.Conv1d(8, 16, 3), "proj": torch.nn.Linear(8, 5)}
    parameters = {f"{name}.{key}": one for name, layer in layers.items() for key, one in layer.named_parameters()}
    model = {key: whole(key, parameter) for key, parameter in parameters.items()}
    tree = sharding_state(model, stepped(list(parameters.values())), "step")
    keys = {leaf.key for _, leaf in st.trees.leaves_with_paths(tree) if isinstance(leaf, st.ShardedBase)}
    assert keys == {f"optimizer.state.{state}.{key}" for state in ("exp_avg", "exp_avg_sq") for key in model}


def test_frozen_parameters_and_ones_of_another_dtype_do_not_shift_the_others_states() -> None:
    shapes = {"pre": (8, 8), "frozen": (8, 8), "gate": (24,), "post": (8, 8)}
    dtypes = {"gate": torch.float32}
    parameters = {
        key: torch.nn.Parameter(torch.zeros(shape, dtype=dtypes.get(key, torch.bfloat16)), key != "frozen")
        for key, shape in shapes.items()
    }
    model = {key: whole(key, parameter) for key, parameter in parameters.items()}
    state = sharding_state(model, stepped(list(parameters.values())))["state"]
    assert list(state) == [0, 2, 3]
    for number, key in ((0, "pre"), (2, "gate"), (3, "post")):
        moment = state[number]["exp_avg"]
        assert (moment.key, moment.global_shape) == (f"optimizer.state.exp_avg.{key}", shapes[key])
        assert moment.dtype is parameters[key].dtype


# Fine-tuning.


def trained(place: Place, value: float = 1.0) -> dict[str, Any]:
    cut = (0, place.tp, place.tp_size)
    replica = (place.pp, 0, place.dp)
    rows = torch.full((16 // place.tp_size, 4), value)
    moments = (
        whole("optimizer.mu.w", rows, cut, replica_id=replica),
        [whole("optimizer.count", rows, cut, replica_id=replica), 3],
    )
    return {"model": {"w": whole("w", rows, cut, replica_id=replica)}, "optimizer": moments, "step": 10}


@in_every_format
@pytest.mark.parametrize(("source", "target"), [((2, 2), (2, 4)), ((1, 8), (4, 1)), ((2, 4), (4, 2))], ids=str)
def test_fine_tuning_loads_the_model_alone_and_names_what_stays_behind(backend: Any, source: Any, target: Any) -> None:
    folder = saved([trained(place) for place in places(*source)], backend)
    targets = [{"model": trained(place, 0.0)["model"]} for place in places(*target)]
    for place, result in zip(places(*target), loaded(targets, folder), strict=True):
        assert_same(result, {"model": data_of(trained(place))["model"], "step": 10})
    assert st.explain_ranks(targets, folder).left_out


def test_an_optimizer_that_is_not_stored_is_an_error_that_leaves_the_targets_tensors_alone() -> None:
    (place,) = places(1, 1, ranks=1)
    folder = saved([{"model": trained(place)["model"]}])
    target = trained(place, 5.0)
    with pytest.raises(KeyMismatch, match=r"optimizer\.mu\.w"):
        loaded([target], folder, donate=True)
    tensors = [leaf.data for _, leaf in st.trees.leaves_with_paths(target) if isinstance(leaf, st.ShardedTensor)]
    assert len(tensors) == 3 and all((tensor == 5).all() for tensor in tensors)


# Buckets of flat buffers.

SHAPES = {f"layers.{n}.{kind}": shape for n in range(3) for kind, shape in (("weight", (13, 7)), ("bias", (13,)))}
BUFFERS = {
    "one bucket": {},
    "two": {"bucket_size": 150},
    "three, padded": {"bucket_size": 100, "align": 4, "bucket_align": 64},
    "one a parameter": {"bucket_size": 1, "bucket_align": 11},
}


def numbered(state: str, key: str) -> torch.Tensor:
    size = torch.Size(SHAPES[key]).numel()
    return torch.arange(size, dtype=torch.float32).reshape(SHAPES[key]) + 1000 * list(SHAPES).index(key) + len(state)


def parameters() -> dict[str, Any]:
    return {key: whole(key, torch.zeros(shape, dtype=torch.bfloat16)) for key, shape in SHAPES.items()}


def buffer_plan(ranks: int, options: dict[str, int]) -> st.buffers.BufferPlan:
    return st.buffers.plan_buffers(SHAPES, data_parallel=ranks, **options)


def packed(plan: st.buffers.BufferPlan, rank: int, state: str) -> list[torch.Tensor]:
    """Return a rank's slices of the buffer, copied together element by element; padding is -1."""
    flat = torch.full((plan.buckets[-1][1],), -1.0)
    for place in plan.places:
        flat[place.start : place.stop] = numbered(state, place.name).flatten()
    shares = [(start, (stop - start) // plan.data_parallel) for start, stop in plan.buckets]
    return [flat[start + rank * share : start + (rank + 1) * share] for start, share in shares]


def buffer_states(ranks: int, options: dict[str, int], states: tuple[str, ...]) -> list[dict[str, Any]]:
    plan = buffer_plan(ranks, options)
    return [
        {
            state: st.buffers.flat_shards(
                plan, rank, packed(plan, rank, state), parameters(), prefix=f"optimizer.state.{state}"
            )
            for state in states
        }
        for rank in range(ranks)
    ]


@pytest.mark.slow
@in_every_format
@pytest.mark.parametrize("states", [("exp_avg", "exp_avg_sq"), ("exp_avg",)], ids=["two moments", "one moment"])
@pytest.mark.parametrize(("source", "target"), [(4, 4), (4, 2), (2, 3)], ids=str)
@pytest.mark.parametrize("buckets", BUFFERS.values(), ids=BUFFERS)
def test_ranges_of_buckets_load_with_other_ranks_buckets_and_padding(
    backend: Any, buckets: dict[str, int], source: int, target: int, states: tuple[str, ...]
) -> None:
    folder = saved(buffer_states(source, buckets, states), backend)
    for other in (buckets, BUFFERS["three, padded"]):
        expected = buffer_states(target, other, states)
        results = loaded([st.without_data(tree) for tree in expected], folder)
        for result, tree in zip(results, expected, strict=True):
            assert_same(result, data_of(tree))


@pytest.mark.parametrize("buckets", BUFFERS.values(), ids=BUFFERS)
def test_what_is_stored_of_buckets_is_the_parameters_elements_without_padding(buckets: dict[str, int]) -> None:
    plan = buffer_plan(2, buckets)
    padding = plan.buckets[-1][1] - sum(place.stop - place.start for place in plan.places)
    assert (padding > 0) == bool(buckets), "otherwise this says nothing of padding"
    found = st.load_plain_tensors(saved(buffer_states(2, buckets, ("exp_avg",))))
    assert_same(found, {f"optimizer.state.exp_avg.{key}": numbered("exp_avg", key) for key in SHAPES})


# Layouts.

LAYOUTS = [((2, 4), (4, 2)), ((8, 1), (1, 2)), ((1, 1), (2, 4)), ((2, 1), (1, 8))]
GATE, UP = torch.arange(160.0).reshape(32, 5), torch.arange(160.0).reshape(32, 5) + 1000


def gated(place: Place, *, known: bool = True) -> dict[str, Any]:
    """Return a gated layer, of which each tensor rank holds gate above up, and its moments."""
    rows = torch.cat([half.chunk(place.tp_size)[place.tp] for half in (GATE, UP)])
    shard = whole("fc1.weight", rows, (0, place.tp, place.tp_size), replica_id=(place.pp, 0, place.dp))
    layer = st.lenses.as_factory(shard, st.lenses.gate_and_up(tensor_parallel=place.tp_size if known else 1))
    moments = {
        state: st.optim.make_sharded_optimizer_tensor(layer, rows + more, f"optimizer.state.{state}")
        for more, state in enumerate(("exp_avg", "exp_avg_sq"), 1)
    }
    return {"layer": layer, "optimizer": moments}


def held(tree: Any) -> Any:
    return st.map_shards(lambda leaf: leaf.data, tree)


@pytest.mark.slow
@in_every_format
@pytest.mark.parametrize(("source", "target"), LAYOUTS, ids=str)
def test_a_gated_layer_and_its_moments_load_in_any_layout(backend: Any, source: Any, target: Any) -> None:
    folder = saved([gated(place) for place in places(*source)], backend)
    trees = [gated(place) for place in places(*target)]
    targets = [st.map_data(torch.zeros_like, tree) for tree in trees]
    for result, tree in zip(loaded(targets, folder), trees, strict=True):
        assert_same(result, held(tree))


def test_the_comparison_catches_halves_that_are_cut_as_plain_rows() -> None:
    folder = saved([gated(place, known=False) for place in places(2, 4)])
    trees = [gated(place, known=False) for place in places(4, 2)]
    results = loaded([st.map_data(torch.zeros_like, tree) for tree in trees], folder)
    assert any(st.diff(result, held(tree)) for result, tree in zip(results, trees, strict=True))


def flat_vector(place: Place) -> dict[str, Any]:
    """Return a data-parallel rank's range of the moments of a vector that tensor ranks share."""
    own = torch.arange(128.0).chunk(place.tp_size)[place.tp]
    parts = own.tensor_split(place.dp_size + 1)  # ranges aren't level: the first has two parts
    start = 0 if place.dp == 0 else sum(len(part) for part in parts[: place.dp + 1])
    stop = sum(len(part) for part in parts[: place.dp + 2])
    shard = st.ShardedTensor.from_rank_offsets_flat(
        "optimizer.state.exp_avg.weight_1d",
        own[start:stop],
        tuple(own.shape),
        (0, place.tp, place.tp_size),
        flattened_range=slice(start, stop),
        replica_id=(place.pp, 0, 0),
    )
    return {"moment": shard}


@pytest.mark.slow
@in_every_format
@pytest.mark.parametrize(("source", "target"), LAYOUTS, ids=str)
def test_a_vectors_flat_ranges_load_in_any_layout(backend: Any, source: Any, target: Any) -> None:
    folder = saved([flat_vector(place) for place in places(*source)], backend)
    trees = [flat_vector(place) for place in places(*target)]
    for result, tree in zip(loaded([st.without_data(one) for one in trees], folder), trees, strict=True):
        assert_same(result, data_of(tree))


def test_hyperparameters_are_common_and_come_back_in_another_layout() -> None:
    def state(rank: int, ranks: int) -> dict[str, Any]:
        moment = torch.ones(8 // ranks)
        sharded = {0: whole("w", moment, (0, rank, ranks))}
        groups = [{"lr": 0.1, "betas": (0.9, 0.95), "params": [0]}]
        return st.optim.optim_state_to_sharding_state({"state": {0: {"m": moment}}, "param_groups": groups}, sharded)

    folder = saved(on_ranks(lambda rank: {"optimizer": state(rank, 2)}, 2))
    for result in loaded(on_ranks(lambda rank: {"optimizer": state(rank, 4)}, 4), folder):
        (group,) = result["optimizer"]["param_groups"]
        assert (group["lr"], group["betas"]) == (0.1, (0.9, 0.95))
