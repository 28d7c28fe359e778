"""`shardtree demo`: what it prints and its exit status; its layouts cut every weight; planted differences are found."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import shardtree as st
from shardtree.cli import _demo
from shardtree.cli._demo import LOADED_AS, Moved, compare, made_up_weights, training_state
from tests.cli.checkpoints import process, run


@pytest.mark.slow
@pytest.mark.torchrun
def test_demo_saves_loads_and_finds_everything_the_same(tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    done = process("demo", "--keep", folder)
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout
    assert done.stdout.count("✓") == 2
    assert "✗" not in done.stdout
    for text in ("Made-up weights", "saved by 4 ranks", "0 rank 0 0", "7,878,144 of 7,878,144 elements"):
        assert text in done.stdout
    assert st.open_checkpoint(folder)["optimizer.exp_avg.encoder.layer.1.output.dense.bias"].global_shape == (256,)


@pytest.mark.slow
@pytest.mark.torchrun
def test_demo_replaces_no_checkpoint(tmp_path: Path) -> None:
    st.save({"step": 7}, tmp_path)
    done = process("demo", "--keep", tmp_path)
    assert done.returncode == 2
    assert "already holds a checkpoint" in done.stderr
    assert "Traceback" not in done.stderr
    assert st.load_common_state_dict(tmp_path) == {"step": 7}


@pytest.mark.parametrize("status", [0, 1])
def test_the_exit_status_is_1_where_something_differs(status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_demo, "run_demo", lambda **options: status)
    assert run("demo").exit_code == status


WEIGHTS = made_up_weights()
STATES = [training_state(WEIGHTS, LOADED_AS, rank, 2) for rank in range(2)]
ELEMENTS = sum(shard.data.numel() for shard in st.layouts.tensor_shards(training_state(WEIGHTS, LOADED_AS, 0, 1)))


MATRIX = "encoder.layer.1.intermediate.dense.weight"


def flip_a_bit(loaded: Any) -> None:
    loaded["model"][MATRIX].view(torch.int32)[3, 4] ^= 1


def change_the_step(loaded: Any) -> None:
    loaded["step"] = 2


NAMED = {
    flip_a_bit: f"tree['model'][{MATRIX!r}]",
    change_the_step: "tree['step']",
}


def verdict(loaded: list[Any]) -> tuple[bool, str]:
    console = Console(file=io.StringIO(), width=200)
    ranks = [Moved(0, 0, *compare(*pair)) for pair in zip(loaded, STATES, strict=False)]
    return _demo.show_comparison(console, ELEMENTS, ranks), console.file.getvalue()  # type: ignore[attr-defined]


def as_loaded() -> list[Any]:
    return [
        st.map_shards(lambda leaf: leaf.data.clone() if isinstance(leaf, st.ShardedTensor) else leaf, state)
        for state in STATES
    ]


@pytest.mark.parametrize("change", NAMED)
def test_a_planted_difference_is_found_and_named(change: Callable[[Any], None]) -> None:
    loaded = as_loaded()
    assert verdict(loaded)[0]
    change(loaded[1])
    holds, text = verdict(loaded)
    assert not holds and f"differs: {NAMED[change]}" in text


def test_a_rank_that_compared_nothing_is_found() -> None:
    assert not verdict(as_loaded()[:1])[0]
