"""`check_resume` over gloo: FSDP2, tensor parallelism and both, saved by DCP and by us."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as hs

import shardtree as st
from shardtree.live import run_processes
from shardtree.testing import check_resume, resume_problems
from tests.testing import fsdp2_jobs as jobs
from tests.testing.fsdp2_jobs import Kind

pytestmark = [pytest.mark.peers, pytest.mark.torchrun, pytest.mark.slow]

TWO = st.Mesh(dp=2, tp=1)
SPLIT = st.Mesh(dp=1, tp=2)
BOTH = st.Mesh(dp=2, tp=2)
OURS = (jobs.save_ours, jobs.load_ours)
DCP = (jobs.save_dcp, jobs.load_dcp)


@pytest.fixture(autouse=True, scope="module")
def _imported_once() -> None:
    """Ranks are forked with DTensors imported, if this process has imported them before it starts the first."""
    import torch.distributed.fsdp  # noqa: F401


def check(kind: Kind, how: tuple[Any, Any], layouts: list[st.Mesh], folder: Any) -> None:
    make = partial(jobs.make, kind=kind)
    check_resume(make, jobs.step, *how, layouts=layouts, steps=2, folder=folder, run=run_processes)


@pytest.mark.parametrize(
    ("kind", "how", "layouts"),
    [
        (Kind(groups=2, frozen=True, tied=True), OURS, [TWO, BOTH]),
        (Kind("sgd", groups=2), DCP, [TWO, SPLIT]),
        (Kind("muon", tied=True), OURS, [SPLIT, BOTH]),
        (Kind("schedule-free", groups=2, frozen=True), DCP, [TWO, BOTH]),
    ],
    ids=lambda each: getattr(each, "optimizer", ""),
)
def test_a_job_under_fsdp2_resumes(kind: Kind, how: tuple[Any, Any], layouts: list[st.Mesh], tmp_path: Path) -> None:
    if kind.optimizer == "schedule-free":
        pytest.importorskip("schedulefree")
    check(kind, how, layouts, tmp_path)


KINDS = hs.builds(
    Kind,
    optimizer=hs.sampled_from(["adamw", "sgd", "schedule-free", *(["muon"] if hasattr(torch.optim, "Muon") else [])]),
    groups=hs.integers(1, 3),
    frozen=hs.booleans(),
    tied=hs.booleans(),
)


@pytest.mark.exhaustive
@settings(max_examples=20)
@given(KINDS, hs.sampled_from([OURS, DCP]), hs.permutations([TWO, SPLIT, BOTH]))
def test_no_false_alarm_under_fsdp2(kind: Kind, how: tuple[Any, Any], layouts: list[st.Mesh]) -> None:
    pytest.importorskip("schedulefree")
    with TemporaryDirectory() as folder:
        check(kind, how, layouts[:2], folder)


def test_muon_of_parts_is_another_step_in_another_layout(tmp_path: Path) -> None:
    """It adds up bfloat16 sums over ranks: all states are restored, and the law says that the step isn't the same."""
    make = partial(jobs.make, kind=Kind("muon of parts"))
    problems = resume_problems(make, jobs.step, *DCP, layouts=[TWO, BOTH], steps=2, folder=tmp_path, run=run_processes)
    assert {(problem.state, problem.cause) for problem in problems} == {("update", "another update")}
    assert {problem.layouts for problem in problems} == {f"{TWO} → {BOTH}", f"{BOTH} → {TWO}"}


# Faults.


def named(
    kind: Kind,
    load: Callable[[dict[str, Any], str], Any],
    folder: Path,
    step: Callable[[dict[str, Any], int], list[int]] = jobs.step,
    save: Callable[[dict[str, Any], str], None] = jobs.save_dcp,
) -> dict[tuple[str, str], tuple[str, tuple[int, ...]]]:
    """Return causes and ranks by key and state, on two ranks."""
    problems = resume_problems(
        partial(jobs.make, kind=kind), step, save, load, layouts=[TWO], steps=2, folder=folder, run=run_processes
    )
    return {(key, problem.state): (problem.cause, problem.ranks) for problem in problems for key in problem.keys}


def test_moments_that_arent_loaded_are_named(tmp_path: Path) -> None:
    found = named(Kind(), jobs.load_weights_alone, tmp_path)
    assert {(state, cause) for (key, state), (cause, _) in found.items() if "." in key} == {
        (state, "not restored") for state in ("exp_avg", "exp_avg_sq", "step")
    }


def test_faults_under_fsdp2_are_named(tmp_path: Path) -> None:
    found = named(Kind(groups=2), jobs.load_with_faults, tmp_path)
    rates = {place: cause for place, (cause, _) in found.items() if place[1] == "group['lr']"}
    assert len(rates) == 8 and set(rates.values()) == {"another group's settings"}
    assert {place: cause for place, cause in found.items() if place not in rates} == {
        ("up.weight", "exp_avg"): ("scaled by 2", ()),
        ("norm.weight", "exp_avg_sq"): ("swapped with that of 'norm.bias'", ()),
        ("norm.bias", "exp_avg_sq"): ("swapped with that of 'norm.weight'", ()),
        ("down.bias", "step"): ("not restored", ()),
        ("down.weight", "weight"): ("permuted along axis 0", ()),
        ("head.weight", "weight"): ("rounded to bfloat16", ()),
        ("seen", "buffer"): ("not restored", ()),
        ("mean", "buffer"): ("replicas differ: not restored", (1,)),
        ("noise", "generator"): ("not restored", ()),
        ("data", "position"): ("ahead by 1 step", ()),
        ("data", "samples"): ("skipped", ()),
    }


def test_data_that_are_repeated_under_fsdp2_are_named(tmp_path: Path) -> None:
    assert named(Kind(), jobs.load_repeating, tmp_path) == {
        ("data", "position"): ("stale by 1 step", ()),
        ("data", "samples"): ("repeated", ()),
    }


def test_a_save_of_an_older_step_under_fsdp2_is_named(tmp_path: Path) -> None:
    found = named(Kind(), jobs.load_dcp, tmp_path, step=jobs.step_and_keep, save=jobs.save_an_older_step)
    causes = {cause for (_, state), (cause, _) in found.items() if state != "samples"}
    assert causes == {"stale by 1 step"}
    assert {state for _, state in found} >= {"weight", "exp_avg", "step", "buffer", "generator", "position"}


def test_a_weight_that_is_untied_under_fsdp2_is_named(tmp_path: Path) -> None:
    found = named(Kind(tied=True), jobs.load_untied, tmp_path)
    assert found["embed.weight", "tie"] == found["head.weight", "tie"] == ("untied", ())


def test_muon_that_is_resumed_as_another_optimizer_is_named(tmp_path: Path) -> None:
    found = named(Kind("muon"), jobs.load_muon_with_faults, tmp_path)
    assert found == {
        ("up.weight", "momentum_buffer"): ("not restored", ()),
        ("up.weight", "group['lr']"): ("another group's settings", ()),
        ("down.weight", "group['lr']"): ("another group's settings", ()),
    }


def test_states_of_schedule_free_that_torch_takes_for_made_are_named(tmp_path: Path) -> None:
    pytest.importorskip("schedulefree")
    found = named(Kind("schedule-free"), jobs.load_in_train_mode, tmp_path)
    assert {state for (_, state), (cause, _) in found.items() if cause == "not restored"} >= {"z", "exp_avg_sq"}
