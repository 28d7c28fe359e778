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
from shardtree.cli._demo import LOADED_AS, SAVED_AS, Moved, compare, drawn_layouts, made_up_weights, training_state
from shardtree.layouts import SpecFunction
from shardtree.pictures import text_of
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


def test_two_layouts_of_a_matrix_stand_side_by_side() -> None:
    title, headings, _, first, _, *lines = text_of(drawn_layouts(torch.empty(16, 8), 4, 2)).splitlines()
    assert title == "One matrix: embeddings.word_embeddings.weight, 16 by 8"
    assert headings.split("   ")[0] == "saved by 4 ranks" and headings.endswith("loaded by 2 ranks")
    assert first[:38] == "0" * 38 and first[41:] == "0" * 19 + "1" * 19
    assert sum(" → " in line for line in lines) == 1


WEIGHTS = made_up_weights()
STATES = [training_state(WEIGHTS, LOADED_AS, rank, 2) for rank in range(2)]
ELEMENTS = sum(shard.data.numel() for shard in st.layouts.tensor_shards(training_state(WEIGHTS, LOADED_AS, 0, 1)))


def test_every_matrix_is_cut_along_its_other_axis() -> None:
    matrices = {name: whole for name, whole in WEIGHTS.items() if whole.dim() == 2}

    def axis(layout: SpecFunction, name: str) -> int | None:
        shard = st.layouts.shard_at({name: matrices[name]}, st.Mesh(tp=2), layout, 1)[name]
        return next((axis for axis, start in enumerate(shard.global_offset) if start), None)

    both = {(axis(SAVED_AS, name), axis(LOADED_AS, name)) for name in matrices}
    assert {(0, 1), (1, 0)} <= both <= {(0, 1), (1, 0), (None, 1)}


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
