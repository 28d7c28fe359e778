"""Comparison of the saved and the resumed job's updates in the next step; rounding of sums may make them differ."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence

import torch

from ._bits import carried
from ._law_resume import WEIGHT, JobState, ResumeProblem, together
from ._law_resume_causes import scale_of

_SAFETY = 16
"""Allowed difference of updates, as a multiple of their spread when weights change in their last bits."""


def update_problems(
    before: JobState, after: JobState, found: JobState, nudged: Sequence[tuple[JobState, JobState]]
) -> list[ResumeProblem]:
    """Return a problem for each parameter that the next step changes differently in the resumed and the saved job.

    Two layouts add numbers in different orders, which changes gradients about as much as changing the last bits of the
    weights does. So the saved job also takes steps from weights with changed last bits (`nudged`), and the change in
    their updates is measured. The two jobs' updates may differ, in norm, by a multiple of this change. The change is
    large where gradients consist of rounding errors only, if the optimizer normalises gradients, as Adam does.

    Args:
        before: The saved state, from which both jobs take the step.
        after: The saved job's state, one step later.
        found: The resumed job's state, one step later.
        nudged: Pairs of the saved job's states before and after a step from weights with changed last bits.

    Examples:
        >>> before, after, found = (JobState({("w", "weight"): torch.tensor([1.0, 2]) * n}) for n in (1, 2, 3))
        >>> print(*update_problems(before, after, found, []))
        'w': update: another update: scaled by 2; it differs by 2.236 in norm, of 2.236; other orders of sums allow ...
        >>> update_problems(before, after, after, [])
        []
    """
    problems = (_problem(place[0], before, after, found, nudged) for place in before.values if place[1] == WEIGHT)
    return together(problem for problem in problems if problem is not None)


def _problem(
    key: str, before: JobState, after: JobState, found: JobState, nudged: Sequence[tuple[JobState, JobState]]
) -> ResumeProblem | None:
    start = before.values[key, WEIGHT]
    if not start.is_floating_point():
        return None
    expected, update = _update(key, before, after), _update(key, before, found)
    spread = max([float((_update(key, *states) - expected).norm()) for states in nudged], default=0.0)
    precision = torch.finfo(start.dtype).eps
    size = float(expected.norm())
    allowed = _SAFETY * (spread + precision * float(start.double().norm())) + precision**0.5 * size
    error = float((update - expected).norm())
    if error <= allowed:
        return None
    cause = "another update"
    if not float(update.norm()):
        cause += ": none"
    elif (factor := scale_of(update, expected, max(precision**0.5, allowed / (size or 1)))) is not None:
        cause += f": scaled by {factor:.3g}"
    what = f"it differs by {error:.4g} in norm, of {size:.4g}; other orders of sums allow {allowed:.2g}"
    return ResumeProblem((key,), "update", cause, what)


def _update(key: str, before: JobState, after: JobState) -> torch.Tensor:
    start: torch.Tensor = before.values[key, WEIGHT].double()
    end: torch.Tensor = after.values[key, WEIGHT].double()
    return (end - start).flatten()


def nudge(tensor: torch.Tensor, seed: int) -> None:
    """Change the last bit of each element in place, up or down depending on its value, so that replicas stay equal.

    Examples:
        >>> weight = torch.tensor([1.0, 1.0, 4.0])
        >>> nudge(weight, 1)
        >>> ((weight - torch.tensor([1.0, 1.0, 4.0])) * 2**23).tolist()
        [-1.0, -1.0, -4.0]
    """
    if not tensor.is_floating_point():
        return
    mixed = carried(tensor).long() * (2654435761 + 2 * seed)
    sign = 1 - 2 * ((mixed >> 15 ^ mixed >> 23) & 1)
    with torch.no_grad():
        tensor.add_(tensor * sign.to(tensor.dtype), alpha=torch.finfo(tensor.dtype).eps)


# Samples that a step has used.


def sample_problems(
    found: Sequence[Collection[Hashable] | None], samples: Mapping[int, Sequence[Collection[Hashable] | None]]
) -> list[ResumeProblem]:
    r"""Compare the samples of the resumed job's first step with the saved job's; return one problem if they differ.

    Args:
        found: Samples that the step used, by rank; None if steps don't return any.
        samples: Samples of the saved job's steps, by number of the step (0 is the first after the save), then by rank.

    Examples:
        >>> samples = {-1: [{0, 1}], 0: [{2}, {3}], 1: [{4, 5}]}
        >>> print(*sample_problems([[0, 1]], samples), *sample_problems([[4], [5]], samples), sep="\n")
        'data': samples: repeated; those of 1 step before
        'data': samples: skipped; those of 1 step after
        >>> sample_problems([[3, 2]], samples)
        []
    """
    mine, expected = _united(found), _united(samples[0])
    if mine == expected:
        return []
    cause, what = next(_misplaced(mine, samples), ("other samples", f"found {_few(mine)}, expected {_few(expected)}"))
    return [ResumeProblem(("data",), "samples", cause, what)]


def _misplaced(
    mine: set[Hashable], samples: Mapping[int, Sequence[Collection[Hashable] | None]]
) -> Iterator[tuple[str, str]]:
    for offset, used in sorted(samples.items(), key=lambda item: abs(item[0])):
        if mine == _united(used):
            steps = f"{abs(offset)} step{'s' * (abs(offset) > 1)}"
            yield ("repeated", f"those of {steps} before") if offset < 0 else ("skipped", f"those of {steps} after")
    if mine < _united(samples[0]):
        yield "skipped", f"{len(_united(samples[0]) - mine)} of the step's samples are used by no rank"


def _united(samples: Sequence[Collection[Hashable] | None]) -> set[Hashable]:
    return {sample for of_rank in samples for sample in of_rank or ()}


def _few(samples: set[Hashable]) -> str:
    return ", ".join(sorted(map(repr, samples))[:8]) or "none"
