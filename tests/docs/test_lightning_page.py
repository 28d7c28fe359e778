"""The script and the change in the section about Lightning."""

from __future__ import annotations

from pathlib import Path

import lightning
import pytest

import shardtree as st
from tests.docs.test_blocks import fences
from tests.docs.test_fsdp2 import ROOT, SCRIPTS, killed, resumed, start

pytestmark = [pytest.mark.torchrun, pytest.mark.slow, pytest.mark.peers]

PAGE = ROOT / "docs" / "in-your-trainer.md"


def test_the_change_is_at_most_five_lines_of_the_script() -> None:
    changes = [code for _, language, code in fences(PAGE.read_text()) if language == "diff"]
    (change,) = [code for code in changes if "interop.lightning" in code]
    added = [line[1:] for line in change.splitlines() if line.startswith("+")]
    assert 0 < len(added) <= 5 and {*added} <= {*(SCRIPTS / "train_lightning.py").read_text().splitlines()}


def test_the_page_names_the_version_that_is_tested() -> None:
    assert f"lightning {lightning.__version__}" in PAGE.read_text()


def test_a_killed_run_of_lightnings_goes_on_on_three_processes(tmp_path: Path) -> None:
    before = killed(start("train_lightning.py", 2, tmp_path, 100_000), tmp_path)
    after = resumed("train_lightning.py", 3, tmp_path, before)
    assert after == {step: pytest.approx(before[step], rel=1e-4) for step in after}
    steps = [path for path in tmp_path.iterdir() if st.is_checkpoint(path)]
    assert len(steps) > 1 and all(st.verify(step) == () for step in steps)
