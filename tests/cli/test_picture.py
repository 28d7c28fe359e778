"""Pictures in a terminal: of the demo's layouts, and of a stored tensor by a command."""

from __future__ import annotations

import io
from pathlib import Path

import torch
from rich.console import Console

import shardtree as st
from shardtree.cli._picture import show_layouts
from tests.cli.checkpoints import run, save_training_state

SPECS = {0: st.P("tp"), 1: st.P(None, "tp"), None: st.P()}


def shards(axis: int | None, count: int) -> list[st.ShardedTensor]:
    return [tree["w"] for tree in st.shard({"w": torch.empty(10, 8)}, st.Mesh(tp=count), SPECS[axis])]


def shown(before: list[st.ShardedTensor], after: list[st.ShardedTensor]) -> list[str]:
    console = Console(file=io.StringIO(), width=80, color_system=None)
    show_layouts(console, before, after)
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined]


def test_two_layouts_stand_side_by_side() -> None:
    lines = shown(shards(0, 2), shards(1, 2))
    assert lines[0].split("  ")[0] == "saved by 2 ranks"
    assert lines[3] == "0000000000 rank 0 0000000000     0000000000000011111111111111"
    assert lines[7].startswith("1111111111111111111111111111  →  ")
    assert lines[-1].split() == ["rows:", "2", "x", "5", "columns:", "2", "x", "4"]


def test_every_line_of_many_ranks_is_one_rank_s() -> None:
    lines = shown(shards(0, 10), shards(None, 3))
    assert {line[0] for line in lines[1:13]} == set("0123456789")
    assert set(lines[2][33:]) <= set("0 ")


def test_a_stored_tensor_is_printed_and_written(tmp_path: Path) -> None:
    folder = tmp_path / "step-100"
    save_training_state(folder)
    done = run("picture", folder, "model.weight")
    assert done.exit_code == 0 and done.stdout.startswith("'model.weight' (8, 16) float32\n")
    assert "00003-of-00004.safetensors" in done.stdout
    for ending in ("svg", "html", "txt"):
        assert run("picture", folder, "model.weight", "-o", tmp_path / f"w.{ending}").exit_code == 0
        assert "model.weight" in (tmp_path / f"w.{ending}").read_text()
    assert run("picture", folder).stdout.startswith("5 tensors in 4 files")


def test_what_cannot_be_drawn_is_an_error(tmp_path: Path) -> None:
    folder = tmp_path / "step-100"
    save_training_state(folder)
    misspelt, unknown = run("picture", folder, "model.wieght"), run("picture", folder, "-o", tmp_path / "w.png")
    assert (misspelt.exit_code, unknown.exit_code) == (2, 2)
    assert "did you mean 'model.weight'" in misspelt.stderr.lower() and ".svg, .html, .txt" in unknown.stderr
