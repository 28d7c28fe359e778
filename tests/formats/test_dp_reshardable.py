"""Megatron-Core's default optimizer format: a data-parallel group's buckets become states of the model's parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some

import shardtree as st
from shardtree.errors import CorruptCheckpoint, UnsupportedValue
from shardtree.formats.torch_dist import _buckets, _optimizer
from shardtree.formats.torch_dist._parameter_order import Order, known_orders
from shardtree.storage import MemoryStorage

from .buckets import STATES, Job, Kind, layer_kinds, write

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
    (norm,) = (number for number, pattern in enumerate(modules) if "pre_mlp_layernorm" in pattern)
    swapped = (modules[norm], *modules[1:norm], modules[0], *modules[norm + 1 :])
    monkeypatch.setattr(_optimizer, "known_orders", lambda names: (Order(swapped),))
    with pytest.raises((AssertionError, UnsupportedValue)):
        check_states(Job(layer_kinds(16, fused=True)))


def test_one_changed_weight_is_refused():
    job, key = Job(layer_kinds(16)), "decoder.layers.mlp.linear_fc2.weight"
    job.weights[key].view(-1)[-1] += 1
    with pytest.raises(UnsupportedValue, match="match no model parameter"):
        check_states(job)
    assert st.open_checkpoint(stored(job))[key].data.read().equal(job.weights[key])  # the model loads


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


def test_where_the_order_alone_tells_equal_weights_apart_the_log_names_them(caplog):
    job = Job(layer_kinds(16, fused=True))
    check_states(job)
    [told] = [record.getMessage() for record in caplog.records if "equal weights" in record.getMessage()]
    assert told.startswith("load: 'decoder.") and "Pass parameter_names=" in told and "norm" in told
    caplog.clear()
    check_states(job, [key.replace("layers.", f"layers.{layer}.") for key, layer, _ in job.parameters(0, 0)])
    assert not caplog.records


def test_an_order_that_unique_tensors_contradict_is_refused():
    kinds = layer_kinds(16)
    with pytest.raises(UnsupportedValue, match="equal weights"):
        check_states(Job([kinds[1], kinds[0], *reversed(kinds[2:])]))


@pytest.mark.slow
@pytest.mark.parametrize("hidden", [16, 32, 64])
@pytest.mark.parametrize(("dp", "moments"), [(1, 0.0), (2, None), (4, 0.0)])
def test_a_zero_bias_isnt_read_with_its_padding_of_zeros(hidden, dp, moments):
    kinds = layer_kinds(hidden, bias=True)
    check_states(Job(kinds, hidden=hidden, tp=2, dp=dp, exact=True, padding=0.0, moments=moments, bucket_size=300))


@pytest.mark.parametrize("frozen", [False, True])
def test_a_frozen_norm_isnt_taken_for_an_equal_parameter_of_a_module_that_no_order_has(frozen):
    kinds = layer_kinds(16)
    kinds[0] = kinds[0]._replace(frozen=frozen)
    job = Job([*kinds[:1], ADAPTERS[0], *kinds[1:]], layers=1)
    with pytest.raises(UnsupportedValue, match=r"layers\.0\.adapter_a\.weight"):
        check_states(job)
    check_states(job, trained(job))


@some.composite
def alike(draw: some.DrawFn) -> Job:
    """Models of which most tensors are constant or equal to others, some frozen, some of modules that no order has."""
    hidden, pp, gated = draw(some.sampled_from([8, 16, 32, 64])), draw(some.integers(1, 2)), draw(some.booleans())
    fills = some.sampled_from([0.0, 0.0, 1.0, None])
    kinds = [
        kind._replace(fill=draw(fills), frozen=draw(some.integers(0, 9)) == 9, gated=gated and "fc1.weight" in kind.key)
        for kind in layer_kinds(hidden, fused=draw(some.booleans()), bias=draw(some.booleans()))
    ]
    kinds += [Kind("mlp.linear_fc1.bias", (4 * hidden,), 0, draw(fills), gated)] * draw(some.integers(0, 1))
    for number in range(draw(some.integers(0, 2))):
        shape = draw(some.sampled_from([(16,), (32,), (hidden,), (64,), (2 * hidden, hidden)]))
        adapter = Kind(f"adapter_{number}.weight", shape, draw(some.sampled_from([None, 0])), draw(fills))
        kinds.insert(draw(some.integers(0, len(kinds))), adapter)
    job = Job(
        kinds,
        layers=draw(some.integers(1, 2)) * pp,
        hidden=hidden,
        tp=draw(some.sampled_from([1, 2, 4])),
        pp=pp,
        dp=draw(some.sampled_from([1, 2, 3, 4, 8])),
        tied=draw(some.booleans()),
        bucket_size=draw(some.sampled_from([200, 300, 1000, 3000, 10**6])),
        exact=draw(some.booleans()),
        padding=draw(some.sampled_from([None, 0.0, 0.0, 1.0])),
        moments=draw(some.sampled_from([None, 0.0])),
    )
    layers = [key for key, *_ in job.tensors() if "layers" in key]
    for one, other in draw(some.lists(some.tuples(some.sampled_from(layers), some.sampled_from(layers)), max_size=3)):
        if job.weights[one].shape == job.weights[other].shape and f"optimizer.state.param.{one}" in job.truth:
            job.weights[one] = job.weights[other]
            job.truth[f"optimizer.state.param.{one}"] = job.weights[other].float()
    return job


def trained(job: Job) -> list[str]:
    """The names that a caller gives: of all trained parameters, in the order of the whole model's modules."""
    stages = [parameter for stage in range(job.pp) for parameter in job.parameters(stage, 0)]
    names = [key.replace("layers.", f"layers.{layer}.") for key, layer, kind in stages if not kind.frozen]
    return [*dict.fromkeys(names)]


def check_alike(job: Job, names: Sequence[str] | None) -> None:
    try:
        check_states(job, names)
    except UnsupportedValue as error:
        assert "equal weights" in str(error) and "parameter_names=" in str(error)


@pytest.mark.slow
@given(alike(), some.booleans())
def test_constant_and_equal_weights_give_the_right_states_or_an_error_that_names_them(job, named):
    check_alike(job, trained(job) if named else None)


def test_the_law_catches_values_that_come_before_chunks_and_names(monkeypatch):
    """Plant a fault: any chunks may be any two pieces, and the longest that have the values are taken."""
    job = Job(layer_kinds(16, bias=True), tp=2, dp=4, exact=True, padding=0.0, bucket_size=300)
    check_states(job)
    choose = _optimizer.choose
    monkeypatch.setattr(_buckets, "_slice_edges", lambda edges: set(edges[:-1]))
    monkeypatch.setattr(_buckets, "may_be_gated", lambda piece: True)
    monkeypatch.setattr(_optimizer, "choose", lambda readings, orders: choose([each[:1] for each in readings], orders))
    with pytest.raises(CorruptCheckpoint, match="copies of optimizer states differ"):
        check_alike(job, None)


@pytest.mark.slow
@pytest.mark.parametrize("dp", [2, 4, 8])
@pytest.mark.parametrize("hidden", [8, 16, 32])
def test_unique_weights_in_an_unknown_order_are_read_where_a_slice_ends_between_a_pairs_halves(hidden, dp):
    gated = Kind("mlp.linear_fc1.weight", (4 * hidden, hidden), 0, gated=True)
    kinds = [gated, Kind("self_attention.linear_proj.weight", (hidden, hidden))]
    check_states(Job(kinds, layers=1, hidden=hidden, dp=dp, bucket_size=300))


def with_adapters(change: int) -> Job:
    """Modules that no order has, of equal weights, and of states that are equal but for one in the second layer."""
    kinds = layer_kinds(16)
    for place, name in ((0, "a"), (3, "b")):
        kinds.insert(place, Kind(f"adapter_{name}.weight", (16,), fill=0.5))
    job = Job(kinds, tp=2, dp=2)
    for name in "ab":
        for number, state in enumerate(STATES):
            values = torch.tensor([0.5, 0.5 + (name == "b" and number == change) * 1e-4])
            key = f"optimizer.state.{state}.decoder.layers.adapter_{name}.weight"
            job.truth[key] = values[:, None].expand(2, 16).contiguous()
    return job


def test_equal_weights_are_read_where_all_states_are_equal():
    check_states(with_adapters(change=len(STATES)))


@pytest.mark.parametrize("change", range(len(STATES)))
def test_equal_weights_are_refused_where_a_state_differs(change):
    with pytest.raises(UnsupportedValue, match="equal weights"):
        check_states(with_adapters(change))


EXPERTS = "decoder.layers.mlp.experts.experts.linear_fc1.weight"


def stored_experts(*moments: float, copies: int = 1) -> MemoryStorage:
    """Store experts of equal weights, each on a rank of its own, or on several."""
    weight, place, shards = torch.full((64,), 0.5), MemoryStorage(), []
    for expert, moment in enumerate(moments):
        cuts = (0, 0, 1), (1, expert, len(moments))
        shards.append(st.ShardedTensor.from_rank_offsets(EXPERTS, weight.bfloat16(), *cuts, prepend_axis_num=2))
        for copy in range(copies):
            bucket = f"chained_1.optimizer.distributed.dp_group_idx_{expert * copies + copy}.gbuf_idx_0"
            bucket += ".dtype_(torch.bfloat16, torch.float32).bucket_idx_0"
            for state, value in zip(STATES, (0.5, moment, 0.25), strict=True):
                whole = torch.full((64,), value)
                shards.append(st.ShardedTensor.from_rank_offsets(f"{bucket}.{state}", whole))
    st.save(shards, place, sharded_strategy=("torch_dist", 1), common_strategy=("torch", 1))
    return place


def test_equal_experts_of_several_ranks_are_read_where_their_states_are_equal():
    read = st.open_checkpoint(stored_experts(0.75, 0.75))[f"optimizer.state.exp_avg.{EXPERTS}"].data.read()
    assert read.equal(torch.full((1, 2, 64), 0.75))


def test_equal_experts_of_several_ranks_are_refused_where_moments_differ_or_one_may_be_frozen():
    for place in (stored_experts(0.75, 0.5), stored_experts(0.75, 0.75, copies=2)):
        with pytest.raises(UnsupportedValue, match=r"layers\.0\.mlp\.experts"):
            list(st.open_checkpoint(place))


class Narrow(Job):
    """A job that keeps its moments in other dtypes, as Megatron-Core may be told to."""

    def shards(self):
        for shard in super().shards():
            dtype = NARROW.get(shard.key.rpartition(".")[2])
            yield shard if dtype is None else replace(shard, data=shard.data.to(dtype), dtype=dtype)


NARROW = {"exp_avg": torch.bfloat16, "exp_avg_sq": torch.float16}


@pytest.mark.parametrize("dp", [1, 3])
def test_moments_in_other_dtypes_are_read_as_what_they_are(dp):
    job = Narrow(layer_kinds(16), tp=2, dp=dp)
    job.truth |= {key: value.to(NARROW.get(key.split(".")[2], torch.float32)) for key, value in job.truth.items()}
    check_states(job)


def test_masters_in_another_dtype_are_refused(monkeypatch):
    monkeypatch.setitem(NARROW, "param", torch.float64)
    with pytest.raises(CorruptCheckpoint, match=r"param in torch.float32, and all states"):
        check_states(Narrow(layer_kinds(16)))


def test_ranks_whose_moments_have_other_dtypes_are_refused():
    """Of what is a copy on each rank it would be noticed by the values, so that nothing is here."""
    job = Narrow([kind for kind in layer_kinds(16) if kind.axis is not None], tp=2)
    job.after = job.after[1:]
    wide = [shard for shard in Job.shards(job) if "dp_group_idx_1." in shard.key]
    job.shards = lambda: [shard for shard in Narrow.shards(job) if "dp_group_idx_1." not in shard.key] + wide
    with pytest.raises(CorruptCheckpoint, match="ranks' optimizer states have different dtypes"):
        check_states(job)


def test_buckets_load_by_their_own_names():
    job = Job(layer_kinds(16), dp=2)
    buckets = [shard for shard in job.shards() if "bucket_idx" in shard.key]
    place = stored(job)
    loaded = st.load({"buckets": [st.without_data(shard) for shard in buckets]}, place)["buckets"]
    assert all(torch.equal(found, shard.data) for found, shard in zip(loaded, buckets, strict=True))
