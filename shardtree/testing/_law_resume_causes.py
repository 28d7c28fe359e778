"""Comparing a restored state with the saved one, and the likely cause of each difference."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch

from ..core.trees import diff, torch_converts
from ._bits import carried, first_difference
from ._law_resume import JobState, Place, ResumeProblem, together

_MISSING = object()
_NARROW = (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass(frozen=True, slots=True)
class Known:
    """States of a job that a restored state is compared with.

    Attributes:
        saved: The state that was saved.
        fresh: The state of the job that resumes, before the load; None if unknown.
        near: States of the saved job by steps since the save: -1 is one step before, 1 is one step after.
    """

    saved: JobState
    fresh: JobState | None = None
    near: Mapping[int, JobState] = field(default_factory=dict)


def state_problems(found: JobState, known: Known) -> list[ResumeProblem]:
    """Return the differences of a restored state from the saved one, bit for bit, with likely causes.

    Saved values that differ between ranks, such as generators, are compared rank by rank if both jobs have the same
    number of ranks, and otherwise not at all.

    Args:
        found: The restored state.
        known: The saved state, and other states that may explain differences.

    Examples:
        >>> steps = {number: JobState({("w", "step"): torch.tensor(number)}) for number in (3, 4, 5)}
        >>> print(*state_problems(steps[4], Known(steps[5], steps[3], {-1: steps[4]})))
        'w': step: stale by 1 step; found 4, expected 5
        >>> print(*state_problems(steps[3], Known(steps[5], steps[3])))
        'w': step: not restored; found 3, expected 5
    """
    saved = known.saved
    problems = chain.from_iterable(_problems_at(place, found, known) for place in saved.values)
    extra = [place for place in found.values if place not in saved.values and not _is_nothing(found.values[place])]
    unknown = [ResumeProblem((key,), state, "unexpected", "the saved job does not have it") for key, state in extra]
    return together([*problems, *unknown, *_tie_problems(found, saved)])


def _problems_at(place: Place, found: JobState, known: Known) -> Iterator[ResumeProblem]:
    """Yield the problems at one place, a pair (key, state name).

    If the saved job has one value on all ranks, that value is compared with the restored job's main value, in
    `found.values`, and with the values of single ranks in `found.others`. If the saved job's ranks have different
    values, each is compared with the restored value of the same rank, unless the jobs' numbers of ranks differ.
    """
    saved = known.saved
    if place in saved.others:
        if saved.ranks == found.ranks:
            ranks = [
                rank for rank in range(saved.ranks) if place not in found.values or _differs(place, rank, found, saved)
            ]
            for rank in ranks:
                value = found.of(place, rank) if place in found.values else _MISSING
                cause, what = cause_of(place, value, known, rank)
                yield ResumeProblem((place[0],), place[1], cause, what, (rank,))
        return
    main = found.values.get(place, _MISSING)
    expected = saved.values[place]
    if main is _MISSING and expected is None:
        return
    others = found.others.get(place, {})
    wrong = [rank for rank, value in others.items() if diff(value, expected)]
    if main is _MISSING or diff(main, expected):
        right = tuple(rank for rank in range(found.ranks) if rank not in wrong) if others else ()
        cause, what = cause_of(place, main, known)
        yield _of_replicas(place, cause, what, right) if others else ResumeProblem((place[0],), place[1], cause, what)
    for rank in wrong:
        yield _of_replicas(place, *cause_of(place, others[rank], known), (rank,))


def _of_replicas(place: Place, cause: str, what: str, ranks: tuple[int, ...]) -> ResumeProblem:
    return ResumeProblem((place[0],), place[1], f"replicas differ: {cause}", what, ranks)


def _differs(place: Place, rank: int, found: JobState, saved: JobState) -> bool:
    return bool(diff(found.of(place, rank), saved.of(place, rank)))


def _tie_problems(found: JobState, saved: JobState) -> Iterator[ResumeProblem]:
    for tie in sorted(saved.ties):
        if not any(set(tie) <= set(other) for other in found.ties):
            yield ResumeProblem(tie, "tie", "untied", "they were one tensor, and are several now")
    for tie in sorted(found.ties):
        if not any(set(tie) <= set(other) for other in saved.ties):
            yield ResumeProblem(tie, "tie", "tied", "they were several tensors, and are one now")


# Causes.


def cause_of(place: Place, found: Any, known: Known, rank: int = 0) -> tuple[str, str]:
    """Return the likely cause of a difference, and the difference as text.

    Args:
        place: Pair (key, state name) of the value.
        found: The restored value.
        known: The saved state, and other states that may explain the difference.
        rank: Rank whose saved value is compared, if ranks saved different values.

    Examples:
        >>> saved = JobState({("w", "exp_avg"): torch.tensor([1.0, 2, 3]), ("v", "exp_avg"): torch.tensor([3.0, 4, 5])})
        >>> for values in ([3.0, 4, 5], [3.0, 1, 2], [2.0, 4, 6]):
        ...     print(cause_of(("w", "exp_avg"), torch.tensor(values), Known(saved))[0])
        swapped with that of 'v'
        permuted
        scaled by 2
    """
    expected = known.saved.of(place, rank)
    if found is _MISSING:
        return "not restored", "it is missing"
    what = _difference(found, expected)
    if not _alike(found, expected):
        return _cause_of_another_kind(found, expected), what
    explanations: Sequence[Callable[[], str | None]] = (
        lambda: _earlier(place, found, known, rank),
        lambda: _elsewhere(place, found, known.saved),
        lambda: _rearranged(found, expected) if isinstance(found, torch.Tensor) else None,
    )
    return next(filter(None, (explain() for explain in explanations)), "other values"), what


def _difference(found: Any, expected: Any) -> str:
    tensors = isinstance(found, torch.Tensor) and isinstance(expected, torch.Tensor)
    if tensors and found.shape == expected.shape and found.dtype == expected.dtype and found.ndim:
        return first_difference(found, expected) or ""
    return f"found {_text(found)}, expected {_text(expected)}"


def _text(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return repr(value)[:60]
    return (
        f"{value.item():.9g}"
        if not value.ndim and value.dtype is not torch.bool
        else (f"{tuple(value.shape)} {value.dtype}".replace("torch.", ""))
    )


def _alike(found: Any, expected: Any) -> bool:
    if isinstance(found, torch.Tensor) or isinstance(expected, torch.Tensor):
        both = isinstance(found, torch.Tensor) and isinstance(expected, torch.Tensor)
        return both and found.shape == expected.shape and found.dtype == expected.dtype
    return type(found) is type(expected)


def _cause_of_another_kind(found: Any, expected: Any) -> str:
    if not (isinstance(found, torch.Tensor) and isinstance(expected, torch.Tensor)):
        return "not restored" if found is None else "another type"
    if found.shape != expected.shape:
        return "another shape"
    is_rounded = torch_converts(expected.dtype, found.dtype) and not diff(expected.to(found.dtype), found)
    return f"rounded to {found.dtype}".replace("torch.", "") if is_rounded else "another dtype"


def _explains(candidate: Any, found: Any, expected: Any) -> bool:
    """Return whether `found` equals `candidate` in all elements in which `found` differs from `expected`."""
    if not _alike(candidate, found):
        return False
    if not isinstance(found, torch.Tensor):
        return not diff(candidate, found)
    bits, other = carried(found), carried(candidate)
    wrong = bits != carried(expected)
    return torch.equal(bits[wrong], other[wrong])


def _earlier(place: Place, found: Any, known: Known, rank: int) -> str | None:
    """Return the cause of a wrong value if it was not restored, or is the value at another step; else None.

    A value was not restored if it is the one that the job had before the load, or zero.
    """
    expected = known.saved.of(place, rank)
    fresh = known.fresh
    if fresh is not None and place in fresh.values and _explains(fresh.of(place, rank), found, expected):
        return "not restored"
    for offset, state in sorted(known.near.items(), key=lambda item: abs(item[0])):
        if place in state.values and _explains(state.of(place, rank), found, expected):
            steps = f"{abs(offset)} step{'s' * (abs(offset) > 1)}"
            return f"stale by {steps}" if offset < 0 else f"ahead by {steps}"
    return (
        "not restored"
        if isinstance(found, torch.Tensor) and _explains(torch.zeros_like(found), found, expected)
        else None
    )


def _elsewhere(place: Place, found: Any, saved: JobState) -> str | None:
    """Return the cause if `found` is the saved value of another parameter or another state; else None."""
    key, state = place
    setting = state.startswith("group[")
    # Single numbers, such as step counts, may be equal by accident.
    if not setting and not (isinstance(found, torch.Tensor) and found.numel() > 1):
        return None
    places = [(other, name) for other, name in saved.values if (other == key) != (name == state)]
    # The same state of another parameter is likelier than another state of the same parameter.
    for other, name in sorted(places, key=lambda candidate: candidate[1] != state):
        value = saved.values[other, name]
        if _alike(value, found) and not diff(value, found):
            if setting:
                return "another group's settings" if name == state else None
            return f"swapped with that of {other!r}" if name == state else f"swapped with {name}"
    return None


def _rearranged(found: torch.Tensor, expected: torch.Tensor) -> str | None:
    """Return the cause if `found` is the expected value, but rounded, permuted or scaled; else None."""
    if expected.is_floating_point():
        for dtype in _NARROW:
            narrower = dtype.itemsize < expected.dtype.itemsize
            if narrower and _explains(expected.to(dtype).to(expected.dtype), found, expected):
                return f"rounded to {dtype}".replace("torch.", "")
    axes = [axis for axis in range(found.ndim) if _slices(found, axis) == _slices(expected, axis)]
    if axes:
        return "permuted" if found.ndim == 1 else f"permuted along axis {axes[0]}"
    if found.ndim and torch.equal(carried(found).flatten().sort().values, carried(expected).flatten().sort().values):
        return "permuted"
    return _scaled(found, expected)


def _slices(tensor: torch.Tensor, axis: int) -> list[bytes]:
    slices = carried(tensor).movedim(axis, 0).contiguous().cpu()
    return sorted(part.numpy().tobytes() for part in slices)


def _scaled(found: torch.Tensor, expected: torch.Tensor) -> str | None:
    if (factor := scale_of(found, expected)) is None:
        return None
    return f"scaled by {factor:.4g}" if abs(factor) >= 1 else f"scaled by 1/{1 / factor:.4g}"


def scale_of(found: torch.Tensor, expected: torch.Tensor, tolerance: float | None = None) -> float | None:
    """Return the factor between a tensor and the expected one; None if no factor fits, or if it is 0 or 1.

    Args:
        found: The scaled tensor.
        expected: The tensor before scaling, of the same shape.
        tolerance: Allowed relative error in norm; by default four times the dtype's epsilon.

    Examples:
        >>> scale_of(torch.tensor([2.0, 0, 6]), torch.tensor([1.0, 0, 3]))
        2.0
    """
    if not expected.is_floating_point() or expected.numel() < 2:
        return None
    left, right = found.detach().double().flatten(), expected.detach().double().flatten()
    square = float(right @ right)
    if not square or not bool(left.isfinite().all()):
        return None
    factor = float(left @ right) / square
    allowed = 4 * torch.finfo(expected.dtype).eps if tolerance is None else tolerance
    fits = float((left - factor * right).norm()) <= allowed * abs(factor) * square**0.5
    return factor if fits and factor and abs(factor - 1) > allowed else None


def _is_nothing(value: Any) -> bool:
    """Return whether a value is None, zero or empty, like the states that a load may create before any step."""
    return value is None or (not bool(torch.count_nonzero(value)) if isinstance(value, torch.Tensor) else not value)
