"""The script of the section about torchtitan."""

from __future__ import annotations

from pathlib import Path

import pytest
import torchtitan  # noqa: F401

import shardtree as st
from tests.docs.test_fsdp2 import killed, resumed, start

pytestmark = [pytest.mark.torchrun, pytest.mark.slow, pytest.mark.peers]

SCRIPT = "train_titan_plug.py"


def test_it_goes_on_on_three_processes_with_the_same_losses(tmp_path: Path) -> None:
    before = killed(start(SCRIPT, 2, tmp_path, 100_000), tmp_path)
    after = resumed(SCRIPT, 3, tmp_path, before)
    assert after == {step: pytest.approx(before[step], rel=1e-4) for step in after}
    steps = [path for path in tmp_path.iterdir() if st.is_checkpoint(path)]
    assert len(steps) > 1 and all(st.verify(step) == () for step in steps)
