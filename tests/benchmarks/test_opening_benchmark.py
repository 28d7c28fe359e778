"""The benchmark of opening runs, checks what everybody read, and has a row for every bar; nothing is timed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import shardtree as st
from benchmarks import _opening_keys, _opening_rows, _turns, opening


@pytest.mark.exhaustive
def test_it_has_a_row_for_every_bar(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "files").mkdir()
    numbers = tmp_path / "numbers.json"
    assert opening.main(["--quick", "--dir", str(tmp_path / "files"), "--json", str(numbers)]) == 0
    rows = json.loads(numbers.read_text())
    asked = [row["most"] for row in rows if row["most"] is not None]
    assert asked == [1.5, 1.5, 0.5, 0.5, 2.0, 0.01, 0.01] and len(rows) == 15
    assert all(row["ours"] > 0 and row["figure"] > 0 for row in rows)
    printed = capsys.readouterr().out
    assert all(title in printed for title in opening.PARTS)
    assert list((tmp_path / "files").iterdir()) == [] and not dist.is_initialized()


def test_a_wrong_element_is_noticed() -> None:
    with pytest.raises(ValueError, match="not the elements"):
        _opening_rows._check(torch.zeros(2), torch.ones(2))
    with pytest.raises(ValueError, match="names"):
        _opening_keys._check("names", ["a"], ["b"])


def test_the_sparse_checkpoint_is_one(tmp_path: Path) -> None:
    _opening_keys.sparse_checkpoint(tmp_path, 3, 70)
    tree = st.open_checkpoint(tmp_path)
    assert list(tree) == [f"model.layers.{number}.weight" for number in range(3)]
    whole = st.open_checkpoint(tmp_path, options=st.LoadOptions(verify=None))[
        "model.layers.1.weight"
    ]  # no file has what its hashes say
    assert whole.global_shape == (280, 8) and not whole.data[100:200].read().isnan().any()
    assert st.load_common_state_dict(tmp_path) == {"step": 1}


def test_dcp_loads_one_ranks_rows_alone(tmp_path: Path) -> None:
    tensor = torch.arange(128 * 4, dtype=torch.int32).reshape(128, 4)
    _opening_rows._save_dcp(tensor, tmp_path)
    target = torch.zeros(2, 4, dtype=torch.int32)
    with _opening_rows._one_of_many(5, target) as sharded:
        assert sharded.shape == (128, 4)
        assert _opening_rows._load_dcp(tmp_path, sharded).tolist() == tensor[10:12].tolist()
    assert not dist.is_initialized()


@pytest.mark.exhaustive
def test_rounds_take_the_fastest_try_in_another_order_each_time() -> None:
    order: list[str] = []
    seconds = _turns.in_turns({name: lambda name=name: order.append(name) for name in "abc"}, rounds=4, tries=2)
    assert {name: len(taken) for name, taken in seconds.items()} == dict.fromkeys("abc", 4)
    rounds = ["".join(order[first : first + 6 : 2]) for first in range(0, 24, 6)]
    assert len(set(rounds)) > 1 and all(sorted(one) == [*"abc"] for one in rounds)
    assert _turns.ratio({"a": [2.0, 9.0, 3.0], "b": [1.0, 1.0, 1.0]}, "a", "b") == 3.0
