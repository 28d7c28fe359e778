"""A series that compares steps warns of one that repeats the last one, and of tensors that changed before the write."""

from __future__ import annotations

import logging

import pytest
import torch

import shardtree as st
from shardtree.world import World

STORED = st.SaveOptions(fingerprint=True)
UNSAFE = st.SaveOptions(fingerprint=True, snapshot=False)


def rows(world: World, weight: torch.Tensor) -> dict[str, st.ShardedTensor]:
    part = weight.chunk(world.size)[world.rank]
    return {"w": st.ShardedTensor.from_rank_offsets("w", part, (0, world.rank, world.size))}


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("compare", [True, False])
def test_a_step_that_repeats_the_last_one_is_told(compare: bool, caplog: pytest.LogCaptureFixture) -> None:
    root = st.storage.MemoryStorage()

    def run(world: World) -> None:
        series = st.CheckpointSeries(root, world=world)
        for step, value in ((100, 1.0), (200, 2.0), (300, 2.0)):
            series.save(rows(world, torch.full((4,), value)), step, options=STORED, compare=compare)
        series.save(rows(world, torch.full((4,), 2.0)), 400, compare=compare)  # without fingerprints

    st.simulate(2, run)
    expected = "series: step 300 has the tensors of step 200, all 1 of them; was an older step's copy saved?"
    assert warnings_of(caplog) == [expected] * compare


def test_tensors_that_change_before_they_are_written_are_told(caplog: pytest.LogCaptureFixture) -> None:
    series = st.CheckpointSeries(st.storage.MemoryStorage())
    for step, options in ((100, STORED), (200, UNSAFE)):
        weight = torch.full((4,), float(step))
        later = {"async_sharded_save": True, "compare": True}
        request = series.save(rows(st.world.one_process(), weight), step, options=options, **later)
        weight += 1
        request.execute_sync()
    [warning] = warnings_of(caplog)
    assert warning.startswith("series: step 200 holds other values than memory did when save was called: 'w';")
