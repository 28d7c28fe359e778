"""The benchmark of thousands of ranks runs with few, agrees with itself, and draws its curves; nothing is timed."""

from __future__ import annotations

from io import StringIO
from xml.etree import ElementTree

import numpy as np
import pytest
from rich.console import Console

from benchmarks import thousands
from benchmarks._bars import Settings
from benchmarks._many import Case, by_rank, layout, shards_of
from benchmarks._plot import Curve, Panel, plot
from shardtree.checkpoint import _packed
from shardtree.layouts import access_problems, shard_columns


def test_it_prints_a_row_for_every_way_to_agree() -> None:
    printed = StringIO()
    found = thousands.bars(Settings(None, True, Console(file=printed, width=200)))
    for how in ("grids exchanged", "layout=", "flat ranges exchanged"):
        own = {bar.operation.removeprefix(f"{how}: ") for bar in found if bar.operation.startswith(how)}
        passed = {thousands.COMPUTE} if how == "layout=" else set[str]()
        assert own == {thousands.SAVE, thousands.LOAD, thousands.TOGETHER, thousands.COMMIT, "a rank says"} | passed
    assert all(bar.ours > 0 for bar in found)
    assert "One of 8 ranks" in printed.getvalue()


@pytest.mark.parametrize("flat", [False, True])
def test_the_model_is_whole_and_its_shards_are_its_columns(flat: bool) -> None:
    columns = layout(Case(8, 800, flat=flat))
    assert not access_problems(columns)
    for rank, part in enumerate(by_rank(columns, 8)):
        made = shard_columns(shards_of(part), rank)
        assert (made.keys, made.kinds) == (part.keys, part.kinds)
        for name in ("key", "offset", "shape", "start", "stop", "rank", "main"):
            assert np.array_equal(getattr(made, name), getattr(part, name))


def test_dcp_agrees_on_the_same_model() -> None:
    found = thousands.measured(Case(8, 800), peer=True, quick=True)
    save = found.stages[thousands.SAVE]
    assert found.shards > 0 and save.seconds > 0 and save.heard > save.said


@pytest.mark.parametrize("known", [True, False])
def test_a_rank_does_not_hear_of_more_tensors_from_every_rank(known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_packed, "_TOGETHER", 2**14)  # few for 64 ranks, as 2**20 are for thousands
    few, many = (thousands.measured(Case(64, tensors, known=known), quick=True) for tensors in (800, 2_400))
    assert many.shards > 2 * few.shards
    for stage in (thousands.SAVE, thousands.LOAD, thousands.TOGETHER):
        # Names are heard once for the ranks that are alike: some bytes for each of 1,600 more tensors.
        grown = many.stages[stage].heard - few.stages[stage].heard
        assert grown == 0 if known else 0 < grown < 1_600 * 20


def test_curves_are_drawn_with_their_names() -> None:
    curves = (Curve("ours", ((1, 0.5), (10, 2))), Curve("<theirs>", ((1, 3), (10, 30))))
    drawn = ElementTree.fromstring(plot("growth", [Panel("seconds", "ranks", "s", curves)]))
    texts = {element.text for element in drawn.iter() if element.text}
    assert {"seconds", "ranks", "ours", "<theirs>", "0.1 s", "100 s"} <= texts
