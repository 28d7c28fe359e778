"""The script and the change of the section about torchtitan."""

from __future__ import annotations

from pathlib import Path

import pytest
import torchtitan  # noqa: F401

import shardtree as st
from tests.docs.test_blocks import fences
from tests.docs.test_fsdp2 import ROOT, SCRIPTS, killed, resumed, start

pytestmark = [pytest.mark.torchrun, pytest.mark.slow, pytest.mark.peers]

PAGE = ROOT / "docs" / "in-your-trainer-torchtitan.part.md"
SCRIPT = "train_titan_plug.py"


def test_the_change_is_a_line_of_the_script() -> None:
    (change,) = [code for _, language, code in fences(PAGE.read_text()) if language == "diff"]
    (added,) = [line[1:] for line in change.splitlines() if line.startswith("+")]
    assert added in (SCRIPTS / SCRIPT).read_text().splitlines()


def test_it_goes_on_on_three_processes_with_the_same_losses(tmp_path: Path) -> None:
    before = killed(start(SCRIPT, 2, tmp_path, 100_000), tmp_path)
    after = resumed(SCRIPT, 3, tmp_path, before)
    assert after == {step: pytest.approx(before[step], rel=1e-4) for step in after}
    steps = [path for path in tmp_path.iterdir() if st.is_checkpoint(path)]
    assert len(steps) > 1 and all(st.verify(step) == () for step in steps)
