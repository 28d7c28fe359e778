"""Steps, ranks, counts and versions may be what `operator.index` takes, as NumPy's integers; no bool, float or text."""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import Any

import numpy as np
import pytest
import torch

import shardtree as st
from shardtree import optim, retention
from shardtree.errors import CheckpointingException, MetadataError
from shardtree.formats.huggingface._save import save_sharded_up_to
from shardtree.retention import SavedStep
from shardtree.storage import MemoryStorage
from shardtree.strategies import StrategyAction

Make = Callable[[int], Any]


class Number:
    def __init__(self, number: int) -> None:
        self.number_of_it = number

    def __index__(self) -> int:
        return self.number_of_it


def member(number: int) -> IntEnum:
    return IntEnum("Step", {"IT": number})["IT"]


KINDS: dict[str, Make] = {
    "numpy.int64": np.int64,
    "numpy.uint8": np.uint8,
    "an array of no axes": np.array,
    "a tensor of one element": torch.tensor,
    "a class of one's own": Number,
    "an enum": member,
}
OTHERS: list[Any] = [True, np.True_, 2.0, np.float64(2), torch.tensor(2.0), "2", None, [2]]


def shard(count: int = 4) -> st.ShardedTensor:
    return st.ShardedTensor.from_rank_offsets("w", torch.ones(count))


def a_series() -> st.CheckpointSeries:
    series = st.CheckpointSeries(MemoryStorage())
    for step in (1, 2, 3):
        series.save({"w": shard()}, step)
    return series


def steps_after(change: Callable[[st.CheckpointSeries], object]) -> Any:
    series = a_series()
    change(series)
    return [(step.number, step.pinned, dict(step.metrics), step.folder) for step in series.steps()]


STEPS = [SavedStep(number, time=float(number), metrics={"loss": 1.0 / (1 + number)}) for number in range(6)]
STEP_CALLS: dict[str, Callable[[Any], Any]] = {
    "series.save": lambda two: steps_after(lambda series: series.save({"w": shard()}, two, overwrite=True)),
    "series.load": lambda two: a_series().load({"w": shard()}, two)["w"].tolist(),
    "series.at": lambda two: st.is_checkpoint(a_series().at(two)),
    "series.pin": lambda two: steps_after(lambda series: series.pin(two)),
    "series.unpin": lambda two: steps_after(lambda series: (series.pin(2), series.unpin(two))),
    "series.note": lambda two: steps_after(lambda series: series.note(two, {"loss": 1.0})),
    "series.drop_after": lambda two: steps_after(lambda series: series.drop_after(two)),
}
CALLS: dict[str, Callable[[Any], Any]] = STEP_CALLS | {
    "keep_steps": lambda two: (retention.keep_steps([two])(STEPS), repr(retention.keep_steps([two]))),
    "keep_last": lambda two: (retention.keep_last(two)(STEPS), repr(retention.keep_last(two))),
    "keep_every": lambda two: (retention.keep_every(two)(STEPS), repr(retention.keep_every(two))),
    "keep_best": lambda two: (retention.keep_best(two, "loss")(STEPS), repr(retention.keep_best(two, "loss"))),
    "a policy's answer": lambda two: dict(a_series().plan_removal(lambda _: [two]).kept),
    "a mapping by rank": lambda two: str(st.plan_reshard({two: {"w": shard()}}, {two: {"w": shard()}})),
    "convert's bytes": lambda two: convert(max_bytes_in_flight=two),
    "convert's pieces": lambda two: convert(layout={"w": (two,)}),
    "along": lambda two: optim.along(two)(
        st.ShardedTensor.from_rank_offsets("w", torch.ones(1, 1, 4)), "s", torch.ones(4)
    ),
    "block_scales": lambda two: str(optim.block_scales(two)(shard(), "absmax", torch.zeros(2))),
    "bytes of a model's file": lambda two: save_sharded_up_to(two).args[0],
    "threads of verify": lambda two: st.verify(a_series().at(1), options=st.LoadOptions(threads=two)),
    "Mesh": lambda two: str(st.Mesh(x=two)),
    "a cell and a count": lambda two: str(st.ShardedTensor.from_rank_offsets("w", torch.ones(4), (0, 1, two))),
}
COUNTS = [name for name in CALLS if name not in ("a policy's answer", "along", "a mapping by rank")]


def convert(**keywords: Any) -> Any:
    source, new = MemoryStorage(), MemoryStorage()
    st.save({"w": shard()}, source)
    report = st.convert(source, new, backend="safetensors", **keywords)
    return report.tensors, report.batches, st.load_plain_tensors(new)["w"].tolist()


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_int_likes_do_what_ints_do(name: str) -> None:
    expected = str(CALLS[name](2))
    for kind, make in KINDS.items():
        hashable = not (name == "a mapping by rank" and kind == "an array of no axes")
        assert not hashable or str(CALLS[name](make(2))) == expected, kind


@pytest.mark.slow
@pytest.mark.parametrize("name", COUNTS)
def test_nothing_else_is_taken_for_one(name: str) -> None:
    for other in OTHERS:
        # No step is the newest one; no number of threads, as many as torch has.
        if other is None and name in ("series.load", "series.at", *STEP_CALLS, "threads of verify"):
            continue
        with pytest.raises(CheckpointingException):
            CALLS[name](other)


def test_a_version_is_stored_as_a_number() -> None:
    for make in KINDS.values():
        storage = MemoryStorage()
        st.save({"w": shard()}, storage, ("safetensors", make(1)), ("safetensors", make(1)))
        assert st.load_plain_tensors(storage)["w"].tolist() == [1.0] * 4
        found = st.get_default_strategy(StrategyAction.SAVE_SHARDED, "safetensors", make(1))
        assert found is st.get_default_strategy(StrategyAction.SAVE_SHARDED, "safetensors", 1)
    for other in (True, 1.0, "1", None):
        with pytest.raises(CheckpointingException):
            st.save({"w": shard()}, MemoryStorage(), ("safetensors", other))


def test_seconds_of_a_policy_may_be_any_real_number() -> None:
    expected = retention.keep_for(2)(STEPS)
    for make in (np.float32, np.float64, np.int16):
        assert retention.keep_for(make(2))(STEPS) == retention.keep_every_seconds(make(1))(STEPS[3:]) == expected
    for other in (True, np.True_, "2", None, float("nan"), -1):
        with pytest.raises(MetadataError):
            retention.keep_for(other)


def test_ranks_may_name_one_step_in_several_kinds() -> None:
    storage = MemoryStorage()

    def run(world: st.World) -> list[int]:
        series = st.CheckpointSeries(storage, world=world)
        part = st.ShardedTensor.from_rank_offsets("w", torch.ones(2), (0, world.rank, 2))
        kind = (int, np.int64)[world.rank]
        series.save({"w": part}, kind(5))
        series.pin(kind(5))
        return [step.number for step in series.steps() if step.pinned]

    assert st.simulate(2, run) == [[5], [5]]
