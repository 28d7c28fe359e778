"""`check_resume` over gloo: FSDP2, tensor parallelism and both, saved by DCP and by us."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import shardtree as st
from shardtree.live import run_processes
from shardtree.testing import check_resume, resume_problems
from tests.testing import fsdp2_jobs as jobs

pytestmark = [pytest.mark.peers, pytest.mark.torchrun, pytest.mark.slow]

TWO = st.Mesh(dp=2, tp=1)
BOTH = st.Mesh(dp=2, tp=2)


@pytest.mark.parametrize(("save", "load"), [(jobs.save_ours, jobs.load_ours), (jobs.save_dcp, jobs.load_dcp)])
def test_a_job_under_fsdp2_resumes(save: Any, load: Any, tmp_path: Path) -> None:
    layouts = [TWO, BOTH]
    check_resume(jobs.make, jobs.step, save, load, layouts=layouts, steps=2, folder=tmp_path, run=run_processes)


def test_moments_that_arent_loaded_are_named(tmp_path: Path) -> None:
    save, load = jobs.save_dcp, jobs.load_weights_alone
    problems = resume_problems(
        jobs.make, jobs.step, save, load, layouts=[TWO], steps=2, folder=tmp_path, run=run_processes
    )
    assert {(problem.state, problem.cause) for problem in problems} == {
        (state, "not restored") for state in ("exp_avg", "exp_avg_sq", "step")
    }


def test_faults_under_fsdp2_are_named(tmp_path: Path) -> None:
    save, load = jobs.save_dcp, jobs.load_with_faults
    problems = resume_problems(
        jobs.make, jobs.step, save, load, layouts=[TWO], steps=2, folder=tmp_path, run=run_processes
    )
    named = {(key, problem.state): (problem.cause, problem.ranks) for problem in problems for key in problem.keys}
    assert named == {
        ("up.weight", "exp_avg"): ("scaled by 2", ()),
        ("norm.weight", "exp_avg_sq"): ("swapped with that of 'norm.bias'", ()),
        ("norm.bias", "exp_avg_sq"): ("swapped with that of 'norm.weight'", ()),
        ("seen", "buffer"): ("replicas differ: not restored", (1,)),
    }
