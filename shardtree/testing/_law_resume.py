"""The law of resumption: a restored job has the saved state; each difference has a cause, with advice.

This is pure: the ranks' states are gathered by key, and two gathered states are compared bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeAlias

import torch

from ..core.mapping import ShardedTensor
from ..core.trees import diff
from ..errors import error_text, shorten
from ._bits import carried

Place: TypeAlias = tuple[str, str]
"""Key of a parameter, a buffer or a member of the job, and the name of its state, such as "exp_avg"."""

WEIGHT: Final = "weight"

FIXES: Final = {
    "not restored": "Not restored: store this state, and load it after the job is built, over what `make` has set.",
    "stale": "Stale: wait for a save's copy before the next step, and write the state that belongs to the step.",
    "ahead": "Ahead: the save wrote after training went on, or the loader had drawn data that no step has used.",
    "swapped": "Swapped: relate states to parameters by name; numbers depend on the order of groups and layers.",
    "another group's settings": "Another group's settings: relate groups to parameters by name, not by their order.",
    "permuted": "Permuted: rows are stored in another order than they are read; describe both, by a lens for example.",
    "scaled": "Scaled: look for a sum over data-parallel ranks where a mean or a copy was meant, or the reverse.",
    "rounded": "Rounded: store masters and moments in their own dtype, and do not make them anew from the weights.",
    "replicas differ": "Replicas differ: restore every rank that holds a copy, or send the copy from a restored rank.",
    "untied": "Untied: tie the weights again after the load, or let the load fill the existing tensors.",
    "repeated": "Repeated: store how far the data were read, in samples, and go on from there.",
    "skipped": "Skipped: store the samples that steps have used, not those that a loader has prefetched.",
    "another update": (
        "Another update: something that a step depends on is in no member of the job, such as a schedule, a closure's "
        "counter, dropout that depends on the rank, or a gradient that is averaged otherwise."
    ),
}
"""Advice by cause."""


@dataclass(frozen=True, slots=True)
class ResumeProblem:
    """A difference between a resumed job and the saved job.

    Attributes:
        keys: Parameters, buffers or members of the job that have this difference.
        state: The name of the state, such as "exp_avg", "step", "group['lr']", "buffer" or "generator"; "update" for
            the next step's change of a parameter.
        cause: The likely cause, in a few words, such as "stale by 1 step" or "swapped".
        what: The difference, with values.
        ranks: The ranks that differ from the others; empty where all agree.
        layouts: Layouts of the saved and the resumed job, as text; empty if unknown.

    Examples:
        >>> print(ResumeProblem(("w", "b"), "step", "not restored", "found 0, expected 3"))
        'w', 'b': step: not restored; found 0, expected 3
    """

    keys: tuple[str, ...]
    state: str
    cause: str
    what: str
    ranks: tuple[int, ...] = ()
    layouts: str = ""

    def __str__(self) -> str:
        names = ", ".join(shorten(map(repr, self.keys)))
        where = f" on rank {', '.join(map(str, self.ranks))}" if self.ranks else ""
        return f"{names}: {self.state}{where}: {self.cause}; {self.what}"


def report(problems: Sequence[ResumeProblem]) -> str:
    """Return an error text that lists problems with their causes, and advice for each cause.

    Examples:
        >>> print(report([ResumeProblem(("w",), "exp_avg", "stale by 2 steps", "2 of 2 elements differ")]))
        check_resume: the resumed job is not the one that was saved
          'w': exp_avg: stale by 2 steps; 2 of 2 elements differ
          Stale: wait for a save's copy before the next step, and write the state that belongs to the step.
    """
    lines = [f"{problem.layouts}: {problem}" if problem.layouts else str(problem) for problem in problems]
    fixes = [text for cause, text in FIXES.items() if any(problem.cause.startswith(cause) for problem in problems)]
    heading = "check_resume: the resumed job is not the one that was saved"
    return error_text(heading, offenders=lines, fix="\n  ".join(fixes) or None)


# Ranks' states, and the whole state gathered from them.


@dataclass(frozen=True, slots=True)
class Reading:
    """One rank's state of a job.

    Attributes:
        values: Values by (key, state name), such as ("w", "exp_avg"); a tensor that is cut is a tuple of shards.
        ties: Groups of keys that share one tensor, as tied weights do.
    """

    values: Mapping[Place, Any]
    ties: frozenset[tuple[str, ...]] = frozenset()


@dataclass(frozen=True, slots=True)
class JobState:
    """A job's state, gathered from all ranks.

    Attributes:
        values: Whole values by place, a pair (key, state name).
        others: Values that differ from `values` on some ranks, by place and then by rank. A tensor is whole here too:
            a copy of the one in `values`, with the rank's own elements put in.
        ties: Groups of keys that share one tensor on any rank.
        ranks: Number of ranks.
    """

    values: Mapping[Place, Any]
    others: Mapping[Place, Mapping[int, Any]] = field(default_factory=dict)
    ties: frozenset[tuple[str, ...]] = frozenset()
    ranks: int = 1

    def of(self, place: Place, rank: int) -> Any:
        """Return a rank's value at a place, a pair (key, state name)."""
        return self.others.get(place, {}).get(rank, self.values[place])


def gathered(readings: Sequence[Reading]) -> JobState:
    """Return the whole state, gathered from the ranks' readings.

    Raises:
        AssertionError: Some elements of a tensor are on no rank; the error names the tensor.

    Examples:
        >>> halves = [ShardedTensor.from_rank_offsets("w", torch.full((1,), n), (0, n, 2)) for n in range(2)]
        >>> state = gathered([Reading({("w", "weight"): (half,), ("data", "position"): 4}) for half in halves])
        >>> state.values
        {('w', 'weight'): tensor([0, 1]), ('data', 'position'): 4}
        >>> gathered([Reading({("data", "position"): number}) for number in (4, 4, 3)]).others
        {('data', 'position'): {2: 3}}
    """
    values_at: dict[Place, dict[int, Any]] = {}
    for rank, reading in enumerate(readings):
        for place, value in reading.values.items():
            values_at.setdefault(place, {})[rank] = value
    wholes = {
        place: (_whole_tensor(place, by_rank) if _in_parts(by_rank) else _common(by_rank))
        for place, by_rank in values_at.items()
    }
    return JobState(
        {place: main for place, (main, _) in wholes.items()},
        {place: others for place, (_, others) in wholes.items() if others},
        frozenset(tie for reading in readings for tie in reading.ties),
        len(readings),
    )


def _in_parts(by_rank: Mapping[int, Any]) -> bool:
    return all(
        isinstance(value, tuple) and value and all(isinstance(part, ShardedTensor) for part in value)
        for value in by_rank.values()
    )


def _common(by_rank: Mapping[int, Any]) -> tuple[Any, dict[int, Any]]:
    main = next(iter(by_rank.values()))
    return main, {rank: value for rank, value in by_rank.items() if diff(value, main)}


def _whole_tensor(place: Place, by_rank: Mapping[int, Sequence[ShardedTensor]]) -> tuple[torch.Tensor, dict[int, Any]]:
    """Assemble a tensor from all ranks' shards.

    Args:
        place: Pair (key, state name), for the error.
        by_rank: Shards of each rank.

    Returns:
        The whole tensor, and a dict of its copies by rank. A rank that disagrees with a lower rank has a copy there,
        with its own elements.
    """
    first = next(iter(by_rank.values()))[0]
    shape, dtype = first.global_shape, first.dtype
    number = torch.arange(torch.Size(shape).numel(), device="cpu").view(shape)
    whole = carried(torch.zeros(number.numel(), dtype=dtype, device="cpu"))
    is_there = torch.zeros(number.numel(), dtype=torch.bool, device="cpu")
    differing: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for rank, shards in by_rank.items():
        for shard in shards:
            at = number[shard.global_slice()].reshape(-1)[shard.flattened_range or slice(None)]
            new, is_copy = carried(shard.data).reshape(-1), is_there[at]
            if bool((new[is_copy] != whole[at][is_copy]).any()):
                differing.setdefault(rank, []).append((at, new))
            whole[at[~is_copy]] = new[~is_copy]
            is_there[at] = True
    missing = int((~is_there).sum())
    what = f"{missing} of {whole.numel()} elements of {place[0]!r} ({place[1]})"
    assert not missing, f"check_resume: {what} are on no rank"
    others: dict[int, Any] = {}
    for rank, parts in differing.items():
        copy = whole.clone()
        for at, new in parts:
            copy[at] = new
        others[rank] = copy.view(dtype).view(shape)
    return whole.view(dtype).view(shape), others


def together(problems: Iterable[ResumeProblem]) -> list[ResumeProblem]:
    """Merge problems that differ only in their keys, and return the results.

    Examples:
        >>> [problem.keys for problem in together(ResumeProblem((key,), "step", "stale", "") for key in "ab")]
        [('a', 'b')]
    """
    keys_of: dict[ResumeProblem, list[str]] = {}
    for problem in problems:
        keys_of.setdefault(replace(problem, keys=()), []).extend(problem.keys)
    return [replace(problem, keys=tuple(keys)) for problem, keys in keys_of.items()]
