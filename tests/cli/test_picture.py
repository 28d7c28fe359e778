"""`shardtree picture`: a stored tensor in a terminal, and as a file."""

from __future__ import annotations

from pathlib import Path

from tests.cli.checkpoints import run, save_training_state


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
