"""Traces in use: what load, convert, redistribute and open_checkpoint make of stored tensors through one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import shardtree as st
from shardtree.errors import CheckpointingException, KeyMismatch, MetadataError, ShapeError, TraceError
from tests.traces.loaders import LOADERS
from tests.traces.test_loaders import QKV, given, traced

HIDDEN, FFN = 6, 8
STORED = {
    "up.weight": torch.arange(48.0).view(FFN, HIDDEN),
    "gate.weight": torch.arange(48.0, 96.0).view(FFN, HIDDEN),
    "down.weight": torch.arange(96.0, 144.0).view(HIDDEN, FFN),
    "norm": torch.arange(6.0).to(torch.bfloat16),
}


def load_model(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    gate_up = torch.stack([tensors["gate.weight"], tensors["up.weight"]], 1).flatten(0, 1)
    return {"fc1": gate_up, "fc2": tensors["down.weight"].t(), "norm": tensors["norm"].float()}


@pytest.fixture
def folder(tmp_path: Any) -> Any:
    where = tmp_path / "stored"
    shards = {key: st.ShardedTensor.from_rank_offsets(key, tensor) for key, tensor in STORED.items()}
    st.save({**shards, "rng": st.ShardedObject("rng", 5, (1,), (0,)), "step": 7}, where)
    return where


MODEL = load_model(STORED)


def found() -> st.Trace:
    return st.trace(load_model, STORED)


def target(rank: int, ranks: int, axis: int = 0) -> dict[str, st.ShardedTensor]:
    return {
        key: st.ShardedTensor.from_rank_offsets(
            key, torch.empty_like(tensor.chunk(ranks, axis)[rank]), (axis, rank, ranks)
        )
        for key, tensor in MODEL.items()
        if tensor.ndim > axis
    }


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("donate", [False, True])
def test_ranks_load_their_parts_and_read_what_they_need(folder: Any, axis: int, donate: bool) -> None:
    def rank(world: Any) -> tuple[Any, int]:
        reports: list[Any] = []
        options = st.LoadOptions(report=reports.append, exchange="never", verify=None)
        tree = target(world.rank, world.size, axis)
        held = {key: shard.data for key, shard in tree.items()}
        loaded = st.load(tree, folder, transform=found(), world=world, options=options, donate=donate)
        if donate:
            assert all(loaded[key] is tensor for key, tensor in held.items())
        return loaded, reports[0].bytes_read

    for number, (loaded, read) in enumerate(st.simulate(2, rank)):
        assert loaded["step"] == 7
        for key, tensor in MODEL.items():
            if tensor.ndim > axis:
                assert torch.equal(loaded[key], tensor.chunk(2, axis)[number]), key
        assert read == 3 * 48 * 4 // 2 + (6 * 2 // 2 if axis == 0 else 0)


def test_flat_ranges_plain_tensors_and_other_keys_load(folder: Any) -> None:
    flat = st.ShardedTensor.from_rank_offsets_flat("fc1", torch.empty(30), (16, 6), flattened_range=slice(5, 35))
    up = st.ShardedTensor.from_rank_offsets("up.weight", torch.empty(8, 6))
    tree = {"flat": flat, "fc2": torch.empty(8, 6), "up": up}
    loaded = st.load(tree, folder, transform=found())
    assert torch.equal(loaded["flat"], MODEL["fc1"].reshape(-1)[5:35])
    assert torch.equal(loaded["fc2"], MODEL["fc2"])
    assert torch.equal(loaded["up"], STORED["up.weight"])


def test_another_shape_or_dtype_is_refused_unless_it_is_cast(folder: Any) -> None:
    wrong = {"norm": st.ShardedTensor.from_rank_offsets("norm", torch.empty(6, dtype=torch.float64))}
    with pytest.raises(ShapeError, match="the trace's 'norm' does not fit the target"):
        st.load(wrong, folder, transform=found())
    assert torch.equal(st.load(wrong, folder, transform=found(), cast=True)["norm"], MODEL["norm"].double())
    with pytest.raises(MetadataError, match="found function"):
        st.load(wrong, folder, transform=load_model)  # type: ignore[arg-type]
    other = st.trace(load_model, {**STORED, "norm": torch.empty(6)})
    with pytest.raises(ShapeError):
        st.load({"norm": torch.empty(6)}, folder, transform=other)


def test_what_is_never_written_is_refused(folder: Any) -> None:
    def partly(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        new = torch.empty(9, HIDDEN)
        new[:8].copy_(tensors["up.weight"])
        return {"w": new}

    half = st.trace(partly, STORED)
    for use in (
        lambda: st.load({"w": torch.empty(9, HIDDEN)}, folder, transform=half),
        lambda: st.open_checkpoint(folder, transform=half),
    ):
        with pytest.raises(TraceError, match="6 elements of 'w' are never written"):
            use()


def test_an_open_checkpoint_is_seen_through_a_trace(folder: Any) -> None:
    opened = st.open_checkpoint(folder, transform=found())
    assert list(opened) == ["fc1", "fc2", "norm", "rng/shard_0_1"]
    assert opened["rng/shard_0_1"].data == 5
    lazy = opened["fc1"].data
    assert torch.equal(lazy[3:7].read(), MODEL["fc1"][3:7])
    assert lazy[3:7].nbytes_to_read == 4 * HIDDEN * 4
    assert {fetch.name for fetch in lazy[::2].fetches} <= {"gate.weight", "up.weight"}
    values = {key: shard.data.read() for key, shard in opened.items() if isinstance(shard, st.ShardedTensor)}
    assert all(torch.equal(values[key], tensor) for key, tensor in MODEL.items())
    with pytest.raises(KeyMismatch, match="open: missing sources"):
        st.open_checkpoint(folder, transform=st.trace(dict, {"missing": torch.empty(2)}))


def test_a_conversion_goes_there_and_back(folder: Any, tmp_path: Any) -> None:
    there, back = tmp_path / "there", tmp_path / "back"
    report = st.convert(folder, there, backend="safetensors", transform=found(), max_bytes_in_flight=100)
    assert report.batches > 4
    loaded = st.load_plain_tensors(there)
    assert all(torch.equal(loaded[key], tensor) for key, tensor in MODEL.items())
    assert st.load_common_state_dict(there) == {"step": 7}
    st.convert(there, back, backend="safetensors", transform=found().inverse())
    again = st.load_plain_tensors(back)
    assert all(torch.equal(again[key], tensor) for key, tensor in STORED.items())


def test_a_conversion_that_drops_a_tensor_is_refused(folder: Any, tmp_path: Any) -> None:
    few = {key: STORED[key] for key in ("up.weight", "norm")}
    with pytest.raises(KeyMismatch, match="the output lacks keys of the source"):
        st.convert(folder, tmp_path / "x", backend="safetensors", transform=st.trace(dict, few))
    st.convert(folder, tmp_path / "y", backend="safetensors", transform=st.trace(dict, few), prune=True)
    assert sorted(st.load_plain_tensors(tmp_path / "y")) == ["norm", "up.weight"]


def test_a_module_s_loader_fills_it_from_a_folder(folder: Any) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(HIDDEN, 2 * FFN, bias=False)

        def load_weights(self, weights: Any) -> None:
            for name, weight in weights:
                if name != "down.weight" and name != "norm":
                    start = FFN * (name == "up.weight")
                    self.fc.weight.data[start : start + FFN].copy_(weight)

    model = Model()
    engine = st.trace(
        lambda given: model.load_weights(given.items()), st.open_checkpoint(folder), into=model.state_dict
    )
    model.load_state_dict(st.load(model.state_dict(), folder, transform=engine), strict=False)
    assert torch.equal(model.fc.weight, torch.cat([STORED["gate.weight"], STORED["up.weight"]]))


@pytest.mark.parametrize("axis", [0, 1])
def test_explain_says_what_ranks_would_read_through_a_trace(folder: Any, axis: int) -> None:
    options = st.LoadOptions(exchange="never", verify=None)
    trees = [target(rank, 2, axis) for rank in range(2)]
    told = st.explain_ranks(trees, folder, transform=found(), options=options)
    assert told.ok
    assert told.reads == st.explain_ranks(trees, folder, transform=[found()] * 2, options=options).reads

    def rank(world: Any) -> int:
        reports: list[Any] = []
        reporting = st.LoadOptions(report=reports.append, exchange="never", verify=None)
        st.load(trees[world.rank], folder, transform=found(), world=world, options=reporting)
        return int(reports[0].bytes_read)

    assert [one.cost.bytes_wanted for one in told.reads if one.cost] == st.simulate(2, rank)


def test_explain_says_why_a_load_through_a_trace_fails(folder: Any) -> None:
    told = st.explain({"fc2": torch.empty(8, 6)}, folder, transform=found())
    asked = "stored, not asked for: 'gate.weight'"
    assert told.ok
    assert asked in str(told)
    assert "'down.weight'" not in str(told)
    wrong = {"norm": st.ShardedTensor.from_rank_offsets("norm", torch.empty(6, dtype=torch.float64))}
    for arguments in ({"transform": found()}, {"transform": load_model}):
        with pytest.raises(CheckpointingException) as caught:
            st.load(wrong, folder, **arguments)
        told = st.explain(wrong, folder, **arguments)
        assert told.ok is False
        assert [problem.text.partition("\nat ")[0] for problem in told.problems] == [str(caught.value)]
    with pytest.raises(MetadataError, match="invalid value of traces\\n  found 1, expected one for each of 2 targets"):
        st.explain_ranks([wrong, wrong], folder, transform=[found()])


def test_a_plan_shows_what_ranks_would_send_for_their_own_loaders() -> None:
    weights, engines = given(LOADERS[QKV]), [traced(LOADERS[QKV], rank, 2) for rank in range(2)]
    held = [
        {
            key: st.ShardedTensor.from_rank_offsets(key, tensor.chunk(2)[rank], (0, rank, 2))
            for key, tensor in weights.items()
        }
        for rank in range(2)
    ]
    wanted = [{"qkv": torch.empty(engine.outputs["qkv"].shape)} for engine in engines]
    through = [st.lenses.through_trace(*pair) for pair in zip(wanted, engines, strict=True)]
    plan = st.plan_reshard(held, through)
    # Trainer and engine cut alike: the rows of each are where they are needed.
    assert (plan.bytes_moved, plan.bytes_kept) == (0, 4 * sum(tensor.numel() for tensor in weights.values()))
    turned = st.plan_reshard(held[::-1], through)
    assert (turned.bytes_moved, turned.bytes_kept) == (plan.bytes_kept, 0)

    def rank(world: Any) -> Any:
        number = world.rank
        return st.redistribute(held[number], wanted[number], transform=engines[number], plan=plan, world=world)

    for engine, made in zip(engines, st.simulate(2, rank), strict=True):
        assert torch.equal(made["qkv"], engine(weights)["qkv"])
