"""What notebooks show of values, and their reprs: one screen, however much they hold."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import shardtree as st
from shardtree.checkpoint import CheckpointDifference, ConversionReport
from shardtree.layouts import layout_of
from shardtree.plans import Explanation, RankReads
from shardtree.storage import ReadReport
from shardtree.strategies import Damage, Unchecked, VerifyReport

MODEL = {f"layers.{number}.<b>w": torch.zeros(8, 6) for number in range(300)}
LAYOUT = layout_of(MODEL, st.Mesh(tp=2), st.P("tp"))
PLAN = st.plan_reshard(LAYOUT, layout_of(MODEL, st.Mesh(tp=2), st.P(None, "tp")))
KEYS = tuple(MODEL)
SERIES = st.CheckpointSeries(st.storage.MemoryStorage())
SERIES.save(st.shard_at(MODEL, st.Mesh(tp=1), st.P(), 0), 100)
OPENED = st.open_checkpoint(SERIES.at(100))

DRAWN: list[Any] = [
    *(st.Mesh(dp=2, tp=4), LAYOUT, PLAN, PLAN.schedule(), OPENED, SERIES, OPENED[KEYS[0]]),
    *(OPENED[KEYS[0]].without_data(), OPENED.stored_layout(*KEYS)),
]
WRITTEN: list[Any] = [
    st.coverage(LAYOUT),
    Explanation(KEYS, (), tuple(RankReads(rank, 3, 0, None) for rank in range(200))),
    ConversionReport(300, 0, 57_600, KEYS, tuple((key, 7) for key in KEYS), 1, 0, 57_600, dict.fromkeys(KEYS, 5)),
    CheckpointDifference(only_left=KEYS, only_right=KEYS),
    VerifyReport(100, tuple(Unchecked(key, "no checksum", 7) for key in KEYS)),
    ReadReport(100, 2, 1, 1, KEYS, KEYS),
    SERIES.plan_removal(st.retention.keep_all()),
    st.ShardedObject("<b>", 5, (1,), (0,)),
]


@pytest.mark.parametrize("value", DRAWN, ids=lambda value: type(value).__name__)
def test_a_notebook_shows_a_picture(value: Any) -> None:
    html = value._repr_html_()
    assert html.startswith("<svg") and html == st.draw(value).svg() and "<b>" not in html


@pytest.mark.parametrize("value", WRITTEN, ids=lambda value: type(value).__name__)
def test_a_notebook_shows_text_of_one_screen(value: Any) -> None:
    html = value._repr_html_()
    assert html.startswith("<pre>") and html.count("<br>") <= 40 and "<b>" not in html


@pytest.mark.parametrize(
    "value", [*DRAWN[:-3], DRAWN[-1], OPENED.metadata, *WRITTEN[:6]], ids=lambda value: type(value).__name__
)
def test_a_repr_is_a_line(value: Any) -> None:
    assert type(value).__name__ in repr(value) and len(repr(value)) < 150 and "\n" not in repr(value)


def test_reprs_of_what_runs_are_a_line() -> None:
    tree = st.shard_at(MODEL, st.Mesh(tp=1), st.P(), 0)
    with st.AsyncCallsQueue() as queue:
        request = st.save(tree, st.storage.MemoryStorage(), async_sharded_save=True)
        assert repr(request).startswith("AsyncRequest(to ") and repr(request).endswith(", not executed yet)")
        queue.schedule_async_request(request)
        assert repr(request).endswith(", scheduled)") and repr(queue) == "AsyncCallsQueue(1 save in progress)"
        request.result()
        assert repr(request).endswith(", committed)") and repr(queue) == "AsyncCallsQueue(0 saves in progress)"
    assert repr(Damage("f", "cut", 0, 9, KEYS)) == "Damage('f', bytes 0 to 9, 300 keys)"


def test_a_report_prints_as_few_lines() -> None:
    assert (
        str(WRITTEN[2]).split("\n")[0]
        == "300 tensors, 57.6 kB, in 1 batch; 57.6 kB read back and compared, by fingerprint"
    )
    assert [len(str(report).split("\n")) for report in WRITTEN[2:6]] == [3, 2, 2, 3]
    assert all(len(str(report)) < 1500 for report in WRITTEN[2:6])
    assert str(CheckpointDifference(nbytes=100)) == "equal, bit for bit: 100 B of tensors compared"


def test_a_series_that_several_ranks_share_is_not_listed_to_show_it() -> None:
    def shown(world: Any) -> str:
        series = st.CheckpointSeries(st.storage.MemoryStorage(), world=world)
        return series._repr_html_() if world.rank == 1 else ""

    assert st.simulate(2, shown)[1].startswith("<pre>CheckpointSeries(")


def test_a_checkpoint_that_cannot_be_drawn_shows_its_text() -> None:
    storage = st.storage.MemoryStorage()
    st.save({"w": st.ShardedTensor.from_rank_offsets("w", torch.zeros(4))}, storage)
    row = (st.StrategyAction.LOAD_METADATA, "safetensors", 1)
    # A format whose metadata says what there is, not where.
    without_index = {**st.default_strategies, row: lambda checkpoint: dict(st.default_strategies[row](checkpoint))}
    assert st.open_checkpoint(storage, strategies=without_index)._repr_html_().startswith("<pre>OpenCheckpoint(")
