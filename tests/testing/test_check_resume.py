"""`check_resume` names every planted fault of a job's checkpointer, and has no false alarm."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as hs
from torch import nn

import shardtree as st
from shardtree.testing import check_resume, resume_problems
from tests.testing.resumed_jobs import CUT, Job, Kind, load, make, restore, save, shards, state_of, step

OPTIMIZERS = ["adamw", "sgd", "adafactor", "masters", *(["muon"] if hasattr(torch.optim, "Muon") else [])]


def kinds(optimizers: list[str]) -> hs.SearchStrategy[Kind]:
    return hs.builds(
        Kind,
        optimizer=hs.sampled_from(optimizers),
        groups=hs.integers(1, 3),
        frozen=hs.booleans(),
        tied=hs.booleans(),
        parallel=hs.sampled_from(["dp", "tp"]),
        schedule=hs.booleans(),
        dtype=hs.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
        # Factored moments of a part aren't a part of the whole's, so that this is another job on other ranks.
    ).filter(lambda kind: (kind.optimizer, kind.parallel) != ("adafactor", "tp"))


LAYOUTS = hs.sampled_from([(1, 2), (2, 1), (3, 2), (2, 4)])
STEPS = hs.integers(1, 4)


def check_kind(kind: Kind, layouts: tuple[int, ...], steps: int) -> None:
    check_resume(partial(make, kind), step, save, load, layouts=layouts, steps=steps, shards=shards)


@given(kinds(OPTIMIZERS), LAYOUTS, STEPS)
def test_no_false_alarm(kind: Kind, layouts: tuple[int, ...], steps: int) -> None:
    check_kind(kind, layouts, steps)


@pytest.mark.peers
@settings(max_examples=4)
@given(kinds(["schedule-free"]), LAYOUTS, STEPS)
def test_no_false_alarm_of_schedule_free(kind: Kind, layouts: tuple[int, ...], steps: int) -> None:
    pytest.importorskip("schedulefree")
    check_kind(kind, layouts, steps)


@pytest.mark.peers
@pytest.mark.exhaustive
@settings(max_examples=200)
@given(kinds([*OPTIMIZERS, "schedule-free"]), LAYOUTS, STEPS)
def test_no_false_alarm_in_200_jobs(kind: Kind, layouts: tuple[int, ...], steps: int) -> None:
    pytest.importorskip("schedulefree")
    check_kind(kind, layouts, steps)


Fault = Callable[[Job, dict[str, Any]], None]
"""A change of what was loaded, before the job gets it."""


def loaded_with(fault: Fault) -> Callable[[Job, Any], None]:
    def load_it(job: Job, place: Any) -> None:
        state = st.load({}, place, world=job.world)
        fault(job, state)
        restore(job, state)

    return load_it


def lose_steps(job: Job, state: dict[str, Any]) -> None:
    for own in state["states"].values():
        own["step"] = torch.zeros_like(own["step"])


def swap_moments(job: Job, state: dict[str, Any]) -> None:
    one, other = state["states"]["embed"], state["states"]["head"]
    one["exp_avg"], other["exp_avg"] = other["exp_avg"], one["exp_avg"]


def swap_groups(job: Job, state: dict[str, Any]) -> None:
    for group in state["settings"].values():
        group["lr"] = {0.01: 0.02, 0.02: 0.01}[group["lr"]]


def permute_rows(job: Job, state: dict[str, Any]) -> None:
    state["weights"]["up"] = state["weights"]["up"].view(6, 2, 4).transpose(0, 1).reshape(12, 4)


def lose_buffer(job: Job, state: dict[str, Any]) -> None:
    state["seen"] = torch.zeros_like(state["seen"])


def lose_rope(job: Job, state: dict[str, Any]) -> None:
    state["rope"] = torch.full_like(state["rope"], 7.0)


def lose_generator(job: Job, state: dict[str, Any]) -> None:
    state["noise"] = job.noise.get_state()


def skip_data(job: Job, state: dict[str, Any]) -> None:
    state["data"] += 12


def repeat_data(job: Job, state: dict[str, Any]) -> None:
    state["data"] -= 12


def round_weights(job: Job, state: dict[str, Any]) -> None:
    state["weights"] = {name: weight.bfloat16().float() for name, weight in state["weights"].items()}


def scale_moments(job: Job, state: dict[str, Any]) -> None:
    for own in state["states"].values():
        own["exp_avg"] = own["exp_avg"] * 2


def keep_one_rank_stale(job: Job, state: dict[str, Any]) -> None:
    if job.world.rank == 1:
        state["weights"]["norm"] = job.model.norm.detach().clone()


FAULTS: list[tuple[Fault, str, str, str]] = [
    (lose_steps, "up", "step", "not restored"),
    (swap_moments, "embed", "exp_avg", "swapped with that of 'head'"),
    (swap_groups, "up", "group['lr']", "another group's settings"),
    (permute_rows, "up", "weight", "permuted along axis 0"),
    (lose_buffer, "seen", "buffer", "not restored"),
    (lose_rope, "rope", "buffer", "other values"),
    (lose_generator, "noise", "generator", "not restored"),
    (skip_data, "data", "position", "ahead by 1 step"),
    (repeat_data, "data", "position", "stale by 1 step"),
    (round_weights, "up", "weight", "rounded to bfloat16"),
    (scale_moments, "down", "exp_avg", "scaled by 2"),
    (keep_one_rank_stale, "norm", "weight", "replicas differ: not restored"),
]


@pytest.mark.parametrize("parallel", ["dp", "tp"])
@pytest.mark.parametrize(("fault", "key", "state", "cause"), FAULTS, ids=lambda each: getattr(each, "__name__", ""))
def test_a_fault_is_named(parallel: str, fault: Fault, key: str, state: str, cause: str) -> None:
    kind = Kind(groups=2, parallel=parallel)
    problems = resume_problems(partial(make, kind), step, save, loaded_with(fault), layouts=[2], shards=shards)
    named = {(name, problem.state): problem.cause for problem in problems for name in problem.keys}
    assert named[key, state] == cause, problems
    assert all(problem.layouts == "2 ranks → 2 ranks" for problem in problems)


def test_masters_that_are_made_anew_from_weights_are_named() -> None:
    def round_masters(job: Job, state: dict[str, Any]) -> None:
        for name, own in state["states"].items():
            own["master"] = state["weights"][name].float()

    kind = Kind("masters", dtype=torch.bfloat16)
    problems = resume_problems(partial(make, kind), step, save, loaded_with(round_masters), layouts=[1])
    assert {(problem.state, problem.cause) for problem in problems} == {("master", "rounded to bfloat16")}


def test_a_tied_weight_that_is_untied_is_named() -> None:
    def untie(job: Job, place: Any) -> None:
        load(job, place)
        job.model.head = nn.Parameter(job.model.embed.detach().clone())

    problems = resume_problems(partial(make, Kind(tied=True)), step, save, untie, layouts=[1])
    assert [(problem.keys, problem.cause) for problem in problems] == [(("embed", "head"), "untied")]


def test_muon_that_is_resumed_as_adamw_is_named() -> None:
    """As where a run is started again with another option: AdamW begins with moments of its own, and no error."""

    def load_as_adamw(job: Job, place: Any) -> Job:
        other = make(Kind("adamw"), job.world)
        state = st.load({}, place, world=job.world)
        restore(other, {**state, "states": {name: {} for name in state["states"]}})
        return other

    problems = resume_problems(partial(make, Kind("muon")), step, save, load_as_adamw, layouts=[1])
    named = {(key, problem.state): problem.cause for problem in problems for key in problem.keys}
    assert named["up", "momentum_buffer"] == named["down", "momentum_buffer"] == "not restored", problems
    assert named["up", "group['betas']"] == "unexpected"


@pytest.mark.parametrize("parallel", ["dp", "tp"])
def test_faults_of_muon_are_named(parallel: str) -> None:
    def fault(job: Job, state: dict[str, Any]) -> None:
        state["settings"]["up"]["lr"] = 0.02
        state["states"]["down"]["momentum_buffer"].zero_()

    kind = Kind("muon", groups=2, parallel=parallel)
    problems = resume_problems(partial(make, kind), step, save, loaded_with(fault), layouts=[2], shards=shards)
    assert {(problem.keys, problem.state, problem.cause) for problem in problems} == {
        (("up",), "group['lr']", "another group's settings"),
        (("down",), "momentum_buffer", "not restored"),
    }


@pytest.mark.peers
def test_averaged_weights_that_training_goes_on_with_are_named() -> None:
    """Schedule-free training has two sets of weights; those of evaluation aren't those of the next step."""
    pytest.importorskip("schedulefree")

    def step_in_train_mode(job: Job, number: int) -> list[int]:
        samples = step(job, number)
        job.optimizer.train()  # type: ignore[attr-defined]
        return samples

    def save_in_eval_mode(job: Job, place: Any) -> None:
        job.optimizer.eval()  # type: ignore[attr-defined]
        save(job, place)
        job.optimizer.train()  # type: ignore[attr-defined]

    problems = resume_problems(
        partial(make, Kind("schedule-free")), step_in_train_mode, save_in_eval_mode, load, layouts=[1]
    )
    assert {(problem.state, problem.cause) for problem in problems} >= {
        ("weight", "other values"),
        ("group['train_mode']", "not restored"),
    }


@pytest.mark.parametrize(("behind", "cause"), [(1, "stale by 1 step"), (2, "stale by 2 steps")])
def test_a_save_of_an_older_step_is_named(behind: int, cause: str) -> None:
    def step_and_keep(job: Any, number: int) -> list[int]:
        samples = step(job, number)
        job.kept = [*getattr(job, "kept", []), state_of(job)]
        return samples

    def save_older(job: Any, place: Any) -> None:
        st.save(job.kept[-1 - behind], place, world=job.world)

    problems = resume_problems(partial(make, Kind()), step_and_keep, save_older, load, layouts=[1, 2])
    assert {problem.cause for problem in problems if problem.state != "samples"} == {cause}
    assert {problem.state for problem in problems} >= {"weight", "exp_avg", "step", "generator", "position"}


# What is in no state shows in the samples, or in the next update.


def test_samples_that_are_skipped_or_repeated_are_named() -> None:
    """The position isn't among the job's states here: the samples tell."""

    def shifted(by: int) -> Any:
        def step_shifted(job: Any, number: int) -> list[int]:
            return [sample + (by if getattr(job, "was_loaded", False) else 0) for sample in step(job, number)]

        return step_shifted

    def load_and_mark(job: Any, place: Any) -> None:
        load(job, place)
        job.was_loaded = True

    for by, cause in ((12, "skipped"), (-12, "repeated"), (1000, "other samples")):
        [problem] = resume_problems(partial(make, Kind()), shifted(by), save, load_and_mark, layouts=[1])
        assert (problem.state, problem.cause) == ("samples", cause)


def test_a_counter_that_is_in_no_member_is_named() -> None:
    """All states are restored, and the next step is another one."""

    def step_with_a_clock(job: Any, number: int) -> list[int]:
        job.clock = getattr(job, "clock", 0) + 1
        for group in job.optimizer.param_groups:
            group["lr"] = 0.01 / job.clock
        samples = step(job, number)
        for group in job.optimizer.param_groups:
            group["lr"] = 0.01
        return samples

    problems = resume_problems(partial(make, Kind()), step_with_a_clock, save, load, layouts=[1])
    named = {(key, problem.cause) for problem in problems for key in problem.keys}
    assert {problem.state for problem in problems} == {"update"}
    assert ("up", "another update: scaled by 4") in named, problems


def test_gradients_that_are_a_sum_where_a_mean_was_meant_are_named() -> None:
    def step_summed(job: Job, number: int) -> list[int]:
        hook = job.optimizer.register_step_pre_hook(lambda *_: multiply(job))
        samples = step(job, number)
        hook.remove()
        return samples

    def multiply(job: Job) -> None:
        for parameter in job.model.parameters():
            parameter.grad.mul_(job.world.size)  # type: ignore[union-attr]

    problems = resume_problems(partial(make, Kind("sgd")), step_summed, save, load, layouts=[1, 2])
    assert {problem.layouts for problem in problems} == {"1 rank → 2 ranks", "2 ranks → 1 rank"}
    assert {(problem.state, problem.cause.split(":")[0]) for problem in problems} == {("update", "another update")}


def test_training_that_isnt_deterministic_is_an_error() -> None:
    generator = torch.Generator().manual_seed(0)

    def step_at_random(job: Job, number: int) -> list[int]:
        with torch.no_grad():
            job.model.norm.add_(torch.rand((), generator=generator))
        return step(job, number)

    with pytest.raises(AssertionError, match="training twice on 1 rank gives different states\n  'embed': weight"):
        check_resume(partial(make, Kind()), step_at_random, save, load, layouts=[1])


def test_ranks_are_started_twice_for_each_layout() -> None:
    """Starting processes takes most of a run's time: n layouts are n saves and n resumptions from each of them."""
    started: list[int] = []

    def run(size: int, fn: Callable[[Any], Any], /) -> list[Any]:
        started.append(size)
        return st.simulate(size, fn)

    check_resume(partial(make, Kind()), step, save, load, layouts=[1, 2, 3], run=run)
    assert started == [1, 2, 3, 1, 2, 3]


def test_no_step_is_refused() -> None:
    with pytest.raises(st.errors.MetadataError, match="at least 1"):
        check_resume(partial(make, Kind()), step, save, load, steps=0)


def test_the_report_is_an_error_of_ours() -> None:
    with pytest.raises(AssertionError) as raised:
        check_resume(partial(make, Kind()), step, save, loaded_with(lose_steps), layouts=[1, 2])
    lines = str(raised.value).splitlines()
    assert lines[0] == "check_resume: the resumed job is not the one that was saved"
    assert lines[1].startswith("  1 rank → 1 rank: 'embed', 'norm', 'up', 'down', 'head': step: not restored; found 0")
    assert lines[-1].startswith("  Not restored: store this state")
    assert set(CUT) == {"up", "down"}
