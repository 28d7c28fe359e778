"""Megatron-Core's default optimizer format: a data-parallel group's buckets become states of the model's parameters."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some

import shardtree as st
from shardtree.errors import CorruptCheckpoint, UnsupportedValue
from shardtree.storage import MemoryStorage
from shardtree.strategies.torch_dist import _optimizer
from shardtree.strategies.torch_dist._parameter_order import Order, known_orders

from .buckets import Job, Kind, layer_kinds, write

ADAPTERS = [Kind("adapter_a.weight", (16,), fill=1.0), Kind("adapter_b.weight", (16,), fill=1.0)]


@some.composite
def jobs(draw: some.DrawFn) -> Job:
    hidden, pp, vpp = draw(some.sampled_from([8, 16, 24])), draw(some.integers(1, 2)), draw(some.integers(1, 2))
    return Job(
        layer_kinds(hidden, fused=draw(some.booleans()), bias=draw(some.booleans())),
        layers=draw(some.integers(1, 2)) * pp * vpp,
        hidden=hidden,
        pp=pp,
        vpp=vpp,
        tp=draw(some.sampled_from([1, 2, 4])),
        dp=draw(some.sampled_from([1, 2, 3, 16])),
        tied=draw(some.booleans()),
        bucket_size=draw(some.sampled_from([300, 3000, 10**6])),
        seed=draw(some.integers(0, 9)),
    )


def stored(job: Job) -> MemoryStorage:
    place = MemoryStorage()
    write(job, place)
    return place


def check_states(job: Job, parameter_names: Sequence[str] | None = None) -> None:
    checkpoint = st.open_checkpoint(stored(job), parameter_names=parameter_names)
    steps = {key for key in checkpoint if key.startswith("optimizer.state.step.")}
    assert {key for key in checkpoint if key.startswith("optimizer.state.")} - steps == job.truth.keys()
    assert len(steps) == len(job.truth) / 3 and all(checkpoint[key].data.read() == 3 for key in steps)
    assert all(torch.equal(checkpoint[key].data.read(), value) for key, value in job.truth.items())


@pytest.mark.slow
@given(jobs())
def test_buckets_are_the_states_of_the_parameters(job):
    check_states(job)


def test_the_law_catches_an_order_that_swaps_norms(monkeypatch):
    modules = known_orders(None)[0].modules
    swapped = (modules[5], *modules[1:5], modules[0], *modules[6:])
    monkeypatch.setattr(_optimizer, "known_orders", lambda names: (Order(swapped),))
    with pytest.raises((AssertionError, UnsupportedValue)):
        check_states(Job(layer_kinds(16, fused=True)))


def test_one_changed_weight_is_refused():
    job = Job(layer_kinds(16))
    job.weights["decoder.layers.mlp.linear_fc2.weight"].view(-1)[-1] += 1
    with pytest.raises(UnsupportedValue, match="no parameter of the model has the values"):
        check_states(job)


def test_the_model_of_a_changed_checkpoint_loads():
    job = Job(layer_kinds(16))
    key = "decoder.layers.mlp.linear_fc2.weight"
    job.weights[key].view(-1)[-1] += 1
    assert st.open_checkpoint(stored(job))[key].data.read().equal(job.weights[key])


def test_equal_weights_in_an_unknown_order_are_refused():
    with pytest.raises(UnsupportedValue, match=r"layers\.0\.adapter_a\.weight"):
        check_states(Job([*layer_kinds(16), *ADAPTERS]))


def test_the_order_of_names_tells_equal_weights_apart():
    job = Job([*layer_kinds(16), *ADAPTERS])
    parameters = [*job.parameters(0, 0)]
    names = [key.replace("layers.", f"layers.{layer}.") for key, layer, _ in parameters]
    check_states(job, names)
    swapped = [name.replace("_a.", "_c.").replace("_b.", "_a.").replace("_c.", "_b.") for name in names]
    with pytest.raises((AssertionError, UnsupportedValue)):
        check_states(job, swapped)


def test_an_order_that_unique_tensors_contradict_is_refused():
    kinds = layer_kinds(16)
    with pytest.raises(UnsupportedValue, match="equal weights"):
        check_states(Job([kinds[1], kinds[0], *reversed(kinds[2:])]))


def test_frozen_parameters_have_no_states():
    check_states(Job([*layer_kinds(16), Kind("mlp.adapter.weight", (16, 4), frozen=True)]))


def test_ranks_that_differ_are_refused():
    job, other = Job(layer_kinds(16), tp=2), Job(layer_kinds(16), tp=2)
    name = "optimizer.state.exp_avg.decoder.final_layernorm.weight"
    other.truth[name] = -job.truth[name]
    second = [shard for shard in other.shards() if "dp_group_idx_1" in shard.key]
    first = [shard for shard in job.shards() if "dp_group_idx_1" not in shard.key]
    place = MemoryStorage()
    st.save([*first, *second], place, sharded_strategy=("torch_dist", 1), common_strategy=("torch", 1))
    with pytest.raises(CorruptCheckpoint, match="copies of optimizer states differ"):
        list(st.open_checkpoint(place))


def test_buckets_load_by_their_own_names():
    job = Job(layer_kinds(16), dp=2)
    buckets = [shard for shard in job.shards() if "bucket_idx" in shard.key]
    place = stored(job)
    loaded = st.load({"buckets": [st.without_data(shard) for shard in buckets]}, place)["buckets"]
    assert all(torch.equal(found, shard.data) for found, shard in zip(loaded, buckets, strict=True))
