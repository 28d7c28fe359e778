"""`check_resume`: a check that a training job goes on unchanged after it is saved and resumed, in any layout."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from os import PathLike, fspath
from typing import Any, Protocol, TypeAlias

from ..core.geometry import refuse
from ..core.trees import diff
from ..errors import MetadataError, error_text
from ..live import simulate
from ..meshes import Mesh
from ..shell.world import World
from ..stores import MemoryStorage
from ._job_states import Shards, nudge_job, read_job
from ._law_resume import JobState, Reading, ResumeProblem, gathered, report
from ._law_resume_causes import Known, state_problems
from ._law_resume_updates import sample_problems, update_problems

Layout: TypeAlias = int | Mesh
Samples: TypeAlias = Collection[Hashable] | None

_AFTER = 2  # steps after the save whose states and samples are recorded, so that a skipped step can be named
_NUDGES = (1, 2)


class Run(Protocol):
    """Type of functions that run another function on a number of ranks, such as `simulate` and `run_processes`."""

    def __call__(self, size: int, fn: Callable[[World], Any], /) -> list[Any]: ...


@dataclass(frozen=True, slots=True)
class _Job:
    """The caller's functions and the number of steps, in a form that can be sent to the ranks' processes."""

    make: Callable[..., Any]
    step: Callable[[Any, int], Samples]
    save: Callable[[Any, Any], object]
    load: Callable[[Any, Any], Any]
    steps: int
    shards: Shards | None

    def build(self, layout: Layout, world: World) -> Any:
        return self.make(world) if isinstance(layout, int) else self.make(world, layout)

    def read(self, job: Any) -> Reading:
        return read_job(job, self.shards)


@dataclass(frozen=True, slots=True)
class _Trained:
    """A run that trains and saves.

    Attributes:
        states: State after each step, by the number of steps since the save (0: the saved state).
        samples: Samples that each step used, by the step's number (0: the first step after the save).
    """

    states: Mapping[int, Any]
    samples: Mapping[int, Any]


@dataclass(frozen=True, slots=True)
class _Resumed:
    """A run that is resumed from a save, and takes one step.

    Attributes:
        fresh: State before the load.
        found: State after the load.
        after: State after the step.
        samples: Samples that the step used.
    """

    fresh: Any
    found: Any
    after: Any
    samples: Any


def check_resume(
    make: Callable[..., Any],
    step: Callable[[Any, int], Samples],
    save: Callable[[Any, Any], object],
    load: Callable[[Any, Any], Any],
    *,
    layouts: Sequence[Layout] = (1, 2),
    steps: int = 3,
    shards: Shards | None = None,
    folder: str | PathLike[str] | None = None,
    run: Run = simulate,
) -> None:
    """Raise unless a job that is saved in any of the layouts and resumed in any of them goes on unchanged.

    First, the restored state, gathered by key, must equal the saved one bit for bit. Then both jobs take one more step:
    each parameter must get the same update, up to the rounding of sums in another order. Losses and whole runs aren't
    compared, since they can look right despite a fault.

    Args:
        make: Function that builds the job before its first step, called as ``make(world)`` if the layout is a number of
            ranks, and as ``make(world, mesh)`` if it is a mesh. It is called several times in a process, and must build
            the same job each time. A job is a mapping, a sequence or an object; its members are modules, optimizers,
            generators, objects with a ``state_dict`` (a scheduler, a data loader) and plain values, by names of your
            choice. Other members, such as the world, aren't compared.
        step: Function that takes a step, called as ``step(job, number)`` with the step's number from 0. It may return
            ids of the samples that the rank has used, so that skipped and repeated data are found.
        save: Function that saves, called as ``save(job, place)``; `place` is the folder of this save. An asynchronous
            save must be finished when it returns.
        load: Function that restores, called as ``load(job, place)`` with a newly built job. It fills the job in place,
            or returns another one.
        layouts: Numbers of ranks, or meshes, tried in all pairs of a save and a load.
        steps: Number of steps before the save.
        shards: Function that takes the job and returns, by parameter name, a `ShardedTensor` for each plain tensor that
            is only this rank's part of a parameter. Optimizer states of the same shape are taken to be sharded in the
            same way. DTensors need no description.
        folder: Parent folder of the saves' folders; by default each `place` is a `MemoryStorage`, for `st.save` on
            simulated ranks.
        run: Function that runs ``fn(world)`` on a number of ranks and returns their results: `simulate`, or
            `shardtree.live.run_processes`, which needs functions at the top level of a module. Simulated ranks share
            torch's global generator: use your own generators there.

    Raises:
        AssertionError: The resumed job differs; the error names each state that differs and the likely cause.

    Examples:
        >>> import shardtree as st
        >>> import torch
        >>> def make(world):
        ...     model = torch.nn.utils.skip_init(torch.nn.Linear, 3, 1)
        ...     torch.nn.init.ones_(model.weight), torch.nn.init.zeros_(model.bias)
        ...     return {"model": model, "optimizer": torch.optim.AdamW(model.parameters()), "world": world}
        >>> def step(job, number):
        ...     job["optimizer"].zero_grad()
        ...     job["model"](torch.tensor([1.0, 2, number])).square().sum().backward()
        ...     job["optimizer"].step()
        >>> def save(job, place):
        ...     st.save({"model": job["model"].state_dict()}, place, world=job["world"])
        >>> def load(job, place):
        ...     job["model"].load_state_dict(st.load({}, place, world=job["world"])["model"])
        >>> check_resume(make, step, save, load, layouts=[1])
        Traceback (most recent call last):
        AssertionError: check_resume: the resumed job is not the one that was saved
          1 rank → 1 rank: 'weight', 'bias': step: not restored; it is missing
          ...
    """
    problems = resume_problems(
        make, step, save, load, layouts=layouts, steps=steps, shards=shards, folder=folder, run=run
    )
    if problems:
        raise AssertionError(report(problems))


def resume_problems(
    make: Callable[..., Any],
    step: Callable[[Any, int], Samples],
    save: Callable[[Any, Any], object],
    load: Callable[[Any, Any], Any],
    *,
    layouts: Sequence[Layout] = (1, 2),
    steps: int = 3,
    shards: Shards | None = None,
    folder: str | PathLike[str] | None = None,
    run: Run = simulate,
) -> tuple[ResumeProblem, ...]:
    """Return the problems that `check_resume` finds, as data; empty if a job goes on unchanged.

    Args:
        make: Function that builds the job; this and all other arguments are those of `check_resume`.
        step: Function that takes a step.
        save: Function that saves.
        load: Function that restores.
        layouts: Numbers of ranks, or meshes.
        steps: Number of steps before the save.
        shards: Function that describes plain tensors that are a rank's part of a parameter.
        folder: Parent folder of the saves' folders.
        run: Function that runs another function on a number of ranks.

    Raises:
        AssertionError: Training isn't deterministic, so that states can't be compared.
        MetadataError: `steps` is less than 1.

    Examples:
        >>> import torch
        >>> def make(world):
        ...     return {"position": torch.zeros(())}
        >>> def step(job, number):
        ...     job["position"] += 1
        >>> def load(job, place):
        ...     job["position"].fill_(2.0)
        >>> print(*resume_problems(make, step, lambda job, place: None, load, layouts=[1]))
        'position': value: stale by 1 step; found 2, expected 3
    """
    if steps < 1:
        refuse("check_resume", "steps", repr(steps), "at least 1", "Train before the save.", error=MetadataError)
    job = _Job(make, step, save, load, steps, shards)
    places = [
        MemoryStorage() if folder is None else f"{fspath(folder)}/saved_{number}" for number in range(len(layouts))
    ]
    saved = [_saved_run(job, layout, place, run) for layout, place in zip(layouts, places, strict=True)]
    # A layout's ranks resume from all saves in turn, since starting processes takes longer than a step.
    resumed = [_resumed_runs(job, layout, places, run) for layout in layouts]
    problems: list[ResumeProblem] = []
    for number, (layout, (trained, nudged)) in enumerate(zip(layouts, saved, strict=True)):
        for other, runs in zip(layouts, resumed, strict=True):
            where = f"{_text(layout)} → {_text(other)}"
            problems += [replace(problem, layouts=where) for problem in _compare(trained, runs[number], nudged)]
    return tuple(problems)


def _saved_run(job: _Job, layout: Layout, place: Any, run: Run) -> tuple[_Trained, list[tuple[JobState, JobState]]]:
    """Run a job that trains and saves, and its nudged steps: steps from the saved state with slightly changed weights.

    Returns:
        The job's states and samples; and for each nudged step, the state after the last bits of the weights were
        changed, and the state after the step.
    """
    results = run(_ranks(layout), partial(_train, job, layout, place))
    ranks, nudges = zip(*results, strict=True)
    states = {offset: gathered([rank.states[offset] for rank in ranks]) for offset in ranks[0].states}
    samples = {offset: [rank.samples[offset] for rank in ranks] for offset in ranks[0].samples}
    return _Trained(states, samples), _nudged_states(nudges, layout, states[0])


def _resumed_runs(job: _Job, layout: Layout, places: Sequence[Any], run: Run) -> list[_Resumed]:
    """Resume the job in a layout from the save in each of `places` (storages or paths), and return one run for each."""
    ranks = run(_ranks(layout), partial(_resume, job, layout, places))
    return [_gathered_run(results) for results in zip(*ranks, strict=True)]


def _ranks(layout: Layout) -> int:
    return layout if isinstance(layout, int) else layout.size


def _text(layout: Layout) -> str:
    return f"{layout} rank{'s' * (layout != 1)}" if isinstance(layout, int) else str(layout)


def _compare(trained: _Trained, resumed: _Resumed, nudged: Sequence[tuple[JobState, JobState]]) -> list[ResumeProblem]:
    states = trained.states
    near = {offset: state for offset, state in states.items() if offset}
    problems = state_problems(resumed.found, Known(states[0], resumed.fresh, near))
    problems += sample_problems(resumed.samples, trained.samples)
    # Updates are compared only if both steps begin with the same state and data.
    return problems or update_problems(states[0], states[1], resumed.after, nudged)


# What ranks run.


_Nudged: TypeAlias = list[tuple[Reading, Reading, Reading]]


def _train(job: _Job, layout: Layout, place: Any, world: World) -> tuple[_Trained, _Nudged]:
    """Train, save and take further steps, on one rank; then call `_nudge` with each of its seeds.

    Returns:
        This rank's states and samples of the run that saves; and the results of `_nudge`.
    """
    instance = job.build(layout, world)
    states, samples = {}, {}
    for number in range(job.steps + _AFTER):
        if number == job.steps:
            job.save(instance, place)
        samples[number - job.steps] = job.step(instance, number)
        states[number + 1 - job.steps] = job.read(instance)
    return _Trained(states, samples), [_nudge(job, layout, seed, world) for seed in _NUDGES]


def _nudge(job: _Job, layout: Layout, seed: int, world: World) -> tuple[Reading, Reading, Reading]:
    """Train again up to the save, change the last bits of the weights, and take a step.

    Returns:
        The states before the change, after it, and after the step.
    """
    instance = job.build(layout, world)
    for number in range(job.steps):
        job.step(instance, number)
    saved = job.read(instance)
    nudge_job(instance, seed)
    before = job.read(instance)
    job.step(instance, job.steps)
    return saved, before, job.read(instance)


def _resume(job: _Job, layout: Layout, places: Sequence[Any], world: World) -> list[_Resumed]:
    return [_resumed_from(job, layout, place, world) for place in places]


def _resumed_from(job: _Job, layout: Layout, place: Any, world: World) -> _Resumed:
    instance = job.build(layout, world)
    fresh = job.read(instance)
    loaded = job.load(instance, place)
    instance = instance if loaded is None else loaded
    restored = job.read(instance)
    samples = job.step(instance, job.steps)
    return _Resumed(fresh, restored, job.read(instance), samples)


def _gathered_run(ranks: Sequence[_Resumed]) -> _Resumed:
    triples = [(rank.fresh, rank.found, rank.after) for rank in ranks]
    fresh, found, after = (gathered(readings) for readings in zip(*triples, strict=True))
    return _Resumed(fresh, found, after, [rank.samples for rank in ranks])


def _nudged_states(ranks: Sequence[_Nudged], layout: Layout, saved: JobState) -> list[tuple[JobState, JobState]]:
    """Return pairs of the job's states before and after steps from slightly changed weights, gathered from the ranks.

    Raises:
        AssertionError: Training anew up to the save did not give the state `saved` again.
    """
    pairs = []
    for readings in zip(*ranks, strict=True):
        again, before, after = map(gathered, zip(*readings, strict=True))
        differing = [place for place in saved.values if diff(again.values.get(place), saved.values[place])]
        if differing:
            heading = f"check_resume: training twice on {_text(layout)} gives different states"
            fix = "Use seeded generators in make= and step=; torch's global generator is shared by simulated ranks."
            lines = [f"{key!r}: {state}" for key, state in differing]
            raise AssertionError(error_text(heading, offenders=lines, fix=fix))
        pairs.append((before, after))
    return pairs
