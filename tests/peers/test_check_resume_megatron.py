"""`check_resume` over gloo: a tensor-parallel job that Megatron-Core saves, what it restores, and what it doesn't."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardtree.live import run_processes
from shardtree.testing import ResumeProblem, check_resume, resume_problems
from tests.testing import megatron_jobs as jobs
from tests.testing.resumed_jobs import shards, step

pytest.importorskip("megatron.core.dist_checkpointing.mapping")
pytestmark = [pytest.mark.peers, pytest.mark.torchrun, pytest.mark.slow]


def test_a_job_that_megatron_saves_resumes(tmp_path: Path) -> None:
    job = (jobs.make, step, jobs.save, jobs.load)
    check_resume(*job, layouts=[1, 2], steps=2, shards=shards, folder=tmp_path, run=run_processes)


def test_steps_that_are_excluded_are_named(tmp_path: Path) -> None:
    job = (jobs.make, step, jobs.save, jobs.load_without_steps)
    problems = resume_problems(*job, layouts=[2], steps=2, shards=shards, folder=tmp_path, run=run_processes)
    assert {(problem.state, problem.cause) for problem in problems} == {("step", "not restored")}


def own_noise(
    save: Callable[[Any, str], None], load: Callable[[Any, str], None], folder: Path
) -> tuple[ResumeProblem, ...]:
    job = (jobs.make_with_own_noise, jobs.step_with_own_noise, save, load)
    return resume_problems(*job, layouts=[2], steps=2, shards=shards, folder=folder, run=run_processes)


def test_rank_0s_generator_on_all_ranks_is_named(tmp_path: Path) -> None:
    [problem] = own_noise(jobs.save_own_noise, jobs.load_own_noise, tmp_path)
    assert (problem.keys, problem.state, problem.ranks) == (("own",), "generator", (1,))


def test_generators_that_are_objects_of_their_ranks_resume(tmp_path: Path) -> None:
    assert own_noise(jobs.save_own_noise_as_objects, jobs.load_own_noise_as_objects, tmp_path) == ()
