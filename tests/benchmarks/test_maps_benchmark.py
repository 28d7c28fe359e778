"""The benchmark of tree maps runs, has every bar, and finds a map that does something else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import shardtree as st
from benchmarks import maps


@pytest.mark.exhaustive
def test_it_has_every_bar(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert maps.main(["--quick", "--json", str(tmp_path / "numbers.json")]) == 0
    bars = json.loads((tmp_path / "numbers.json").read_text())
    per_tree = [(maps.OURS, 1.3), (maps.OURS, 1.3), (maps.KEPT, 6.0), (maps.NEW, 6.0)]
    assert [(bar["operation"].rpartition(", 1,000")[0], bar["most"]) for bar in bars] == 2 * per_tree
    assert [bar["beside"] for bar in bars[:2]] == [maps.PLAIN, maps.ASKED]
    assert all(bar["ours"] > 0 and bar["figure"] > 0 for bar in bars)
    assert "map_data, new data" in capsys.readouterr().out


def test_microseconds_are_those_of_one_leaf() -> None:
    names = (maps.OURS, maps.PLAIN, maps.ASKED, maps.KEPT, maps.NEW, maps.ALONE)
    bars = maps._rows("tree", {name: [0.5, 9.0, 0.5] for name in names}, 100_000)
    assert [bar.figure for bar in bars] == pytest.approx([1.0, 1.0, 5.0, 5.0])
    assert [bar.passed for bar in bars] == [True, True, True, True]


def test_a_map_that_keeps_data_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(st, "map_data", lambda f, tree: st.map_shards(maps._same, tree))
    with pytest.raises(ValueError, match="is another"):
        maps._check(maps._flat(3))


def test_a_map_that_loses_a_leaf_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(st, "map_shards", lambda f, tree: {**tree, "k0": None})
    with pytest.raises(ValueError, match="differ"):
        maps._check(maps._flat(3))
