"""The script of the section about Ray Train, and what it asks of Ray."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray.train
import ray.train.torch

import shardtree as st
from tests.docs.test_fsdp2 import ROOT, SCRIPTS, loss_of

pytestmark = [pytest.mark.peers]


def losses(run: Path, steps: int, workers: int) -> dict[int, float]:
    """Return the losses that a run has written once a job has ended."""
    command = [sys.executable, str(SCRIPTS / "train_ray.py"), str(run), str(steps), str(workers)]
    given = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, stdout=-1, stderr=-2, text=True, env=given, timeout=600, check=False)
    assert done.returncode == 0, done.stdout
    return dict(_pairs(run / "losses.txt"))


def _pairs(file: Path) -> Iterator[tuple[int, float]]:
    for line in file.read_text().splitlines(keepends=True):
        if pair := loss_of(line):
            yield pair


@pytest.mark.slow
def test_a_job_goes_on_with_three_workers(tmp_path: Path) -> None:
    before = losses(tmp_path, 10, 2)
    (tmp_path / "losses.txt").unlink()
    after = losses(tmp_path, 12, 3)
    assert list(after) == [9, 10, 11, 12]
    assert [after[step] for step in (9, 10)] == pytest.approx([before[step] for step in (9, 10)], rel=1e-4)
    assert st.verify(tmp_path / "step_00000012") == ()


CONTRACT = [
    (ray.train.get_context, ""),
    (ray.train.torch.prepare_model, "model move_to_device parallel_strategy parallel_strategy_kwargs"),
]


def changed(function: Any, expected: str) -> str | None:
    """Return what to say of a function whose parameters aren't those that the page's script was written for."""
    parameters = " ".join(inspect.signature(function).parameters)
    name = f"{function.__module__}.{function.__qualname__}"
    told = f"{name} has changed: its parameters are ({parameters}), docs/scripts/train_ray.py expects ({expected})"
    return None if parameters == expected else told


@pytest.mark.parametrize(("function", "expected"), CONTRACT, ids=lambda value: getattr(value, "__qualname__", ""))
def test_signatures_are_those_that_the_script_was_written_for(function: Any, expected: str) -> None:
    assert changed(function, expected) is None, changed(function, expected)
    assert function.__qualname__ in str(changed(function, expected + " more"))  # the planted fault


def test_reports_need_no_checkpoint() -> None:
    told = inspect.signature(ray.train.report).parameters
    expected = ["metrics", "checkpoint"]
    assert list(told)[:2] == expected and told["checkpoint"].default is None, f"ray.train.report has changed: {told}"


def test_the_page_names_the_version_that_is_tested() -> None:
    assert f"ray {ray.__version__}" in (ROOT / "docs" / "in-your-trainer.md").read_text()
