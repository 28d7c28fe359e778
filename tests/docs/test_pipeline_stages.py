"""The script of docs/fsdp2.md, under torchrun: a pipeline that is resumed in other numbers of stages."""

from __future__ import annotations

from pathlib import Path

import pytest

import shardtree as st
from tests.quick_python.command import torchrun

SCRIPT = Path(__file__).parents[2] / "docs" / "scripts" / "train_pipeline.py"
pytestmark = pytest.mark.torchrun


def losses(processes: int, run: Path, steps: int, stages: int) -> list[float]:
    done = torchrun(processes, SCRIPT, str(run), str(steps), str(stages))
    assert done.returncode == 0, done.stderr
    return [float(line.split()[-1]) for line in done.stdout.splitlines() if line.startswith("step ")]


@pytest.mark.slow
def test_a_pipeline_goes_on_in_other_numbers_of_stages_with_the_same_losses(tmp_path: Path) -> None:
    resumed = [losses(4, tmp_path / "run", 4, 2), losses(2, tmp_path / "run", 8, 1), losses(2, tmp_path / "run", 12, 2)]
    assert [len(each) for each in resumed] == [4, 4, 4]
    assert [loss for each in resumed for loss in each] == pytest.approx(losses(2, tmp_path / "whole", 12, 2), rel=1e-4)
    common = st.load_common_state_dict(tmp_path / "run" / "step_00000012")["optim"]
    rates = [common[f"param_groups.layers.{number}.weight.lr"] for number in range(4)]
    assert rates == pytest.approx([0.01, 0.02, 0.03, 0.04])
    assert all(float(common[f"state.layers.{number}.bias.step"]) == 12 for number in range(4))
