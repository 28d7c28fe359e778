"""Optimizers' states: what test_optimizer says of buckets, single moments and layouts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import shardtree as st
from tests.megatron_cases.worlds import Place, assert_same, data_of, in_every_format, loaded, places, saved, whole

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
