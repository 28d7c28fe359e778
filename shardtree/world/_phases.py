"""Phases: steps that either work on every rank, or raise on every rank.

Whatever can fail (a file call, the caller's code, a check) runs inside a phase, so that no rank waits in a collective
for one that gave up. A phase must not run inside another one, nor may its function call a collective: a rank that
fails before it would skip it.

Steps that touch nothing which others see can share one collective: a phase then lists them, in order, and its function
calls `step` for each. A rank that fails in a step is heard of as if the step had been a phase of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from ..errors import REMOTE_TWINS, RemoteError, UnsupportedValue, WorldError, attributes_of, error_text
from ._world import T, World, pack, unpack

U = TypeVar("U")


@dataclass(frozen=True, slots=True)
class _Failure:
    twins: tuple[type[RemoteError], ...]  # of the exception's classes, the most specific first; pickled by name
    text: str  # "TypeName: message", and its notes
    step: str  # in which it came about; empty where that wasn't said
    has_attributes: bool  # that other ranks' twins should have too


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What a rank tells the others at the end of a phase."""

    phase: str
    failure: _Failure | None = None
    packed: bytes = b""


_STEP = "_shardtree_step"


def step(phase: str, fn: Callable[[], T]) -> T:
    """Return what fn returns; if it fails, the phase around it tells the others that it was this step.

    Args:
        phase: what is being done, one of the `steps` of the phase around it.
        fn: as for `agree`.

    Examples:
        >>> from shardtree.errors import RemoteError
        >>> from shardtree.world import agree, simulate, step
        >>> def halve(rank):
        ...     ten = step("divide", lambda: 10 // rank)
        ...     return step("subtract", lambda: ten - 5)
        >>> try:
        ...     simulate(2, lambda world: agree(world, "count", lambda: halve(world.rank), steps=["divide"]))
        ... except RemoteError as error:
        ...     print(error)
        divide: failed on 1 rank
          rank 0: ZeroDivisionError: integer division or modulo by zero
    """
    try:
        return fn()
    except BaseException as error:
        error.__dict__[_STEP] = phase  # not by setattr, which an exception that is a frozen dataclass refuses
        raise


def agree(world: World, phase: str, fn: Callable[[], T], *, steps: Sequence[str] = ()) -> T:
    """Return what fn returns on this rank, once it worked on every rank.

    Args:
        world: the ranks that take part.
        phase: what is being done, for the error.
        fn: takes nothing and runs on every rank. It must not call a collective or start a phase.
        steps: the names of the steps that fn takes, in order. Where ranks fail in several, all hear of the first one.

    Raises:
        RemoteError: on every rank, if fn failed on some or all; on a failing rank the cause is its own exception. It is
            the twin of the most specific class of `shardtree.errors` that all failing ranks' exceptions share:
            ``except NotACheckpoint`` catches a `RemoteNotACheckpoint`. A world of one raises its own exception as it
            is. What isn't an ``Exception`` (``KeyboardInterrupt``) is raised as it is where it occurred.

    Examples:
        >>> from shardtree.errors import RemoteError
        >>> from shardtree.world import agree, simulate
        >>> simulate(2, lambda world: agree(world, "count", lambda: 10 + world.rank))
        [10, 11]
        >>> try:
        ...     simulate(2, lambda world: agree(world, "divide", lambda: 1 / world.rank))
        ... except RemoteError as error:
        ...     print(error)
        divide: failed on 1 rank
          rank 0: ZeroDivisionError: division by zero
    """
    if world.size == 1:
        return fn()
    try:
        value = fn()
    except BaseException as error:
        _meet(world, _Outcome(phase, _failure(error)), error, steps)
        raise
    _meet(world, _Outcome(phase), None, steps)
    return value


def gather(world: World, phase: str, fn: Callable[[], T], *, steps: Sequence[str] = ()) -> list[T]:
    """Return what fn returns on each rank, by rank, once it worked on every rank; one all-gather in total.

    A rank's own value is in the list as it is, those of others as copies.

    Raises:
        RemoteError: as `agree`; a value that can't be pickled is a failure too.

    Examples:
        >>> from shardtree.world import gather, simulate
        >>> simulate(2, lambda world: gather(world, "count", lambda: 10 + world.rank))
        [[10, 11], [10, 11]]
    """
    return share(world, phase, fn, _itself, steps=steps)[1]


def _itself(value: T) -> T:
    return value


def share(
    world: World, phase: str, fn: Callable[[], T], tell: Callable[[T], U], *, steps: Sequence[str] = ()
) -> tuple[T, list[U]]:
    """Return what fn returns on this rank, and what `tell` takes of that on each rank, by rank; one all-gather.

    Raises:
        RemoteError: as `gather`.

    Examples:
        >>> from shardtree.world import share, simulate
        >>> simulate(2, lambda world: share(world, "measure", lambda: "ab"[: world.rank], len))
        [('', [0, 1]), ('a', [0, 1])]
    """
    if world.size == 1:
        value = fn()
        return value, [tell(value)]
    try:
        value = fn()
        told = tell(value)
        # Packed here, so that a value that can't be pickled fails inside the phase.
        packed = pack(phase, told)
    except BaseException as error:
        _meet(world, _Outcome(phase, _failure(error)), error, steps)
        raise
    outcomes = _meet(world, _Outcome(phase, packed=packed), None, steps)
    return value, [told if rank == world.rank else unpack(phase, each.packed) for rank, each in enumerate(outcomes)]


def on_rank_zero(world: World, phase: str, fn: Callable[[], T], *, steps: Sequence[str] = ()) -> T:
    """Return what fn returns on rank 0, on every rank; it runs there only.

    Raises:
        RemoteError: on every rank, if it failed or its value can't be pickled; as `agree`.

    Examples:
        >>> from shardtree.world import on_rank_zero, simulate
        >>> simulate(3, lambda world: on_rank_zero(world, "name", lambda: f"by rank {world.rank}"))
        ['by rank 0', 'by rank 0', 'by rank 0']
    """
    return on_one_rank(world, phase, fn, rank=0, steps=steps)


def on_one_rank(world: World, phase: str, fn: Callable[[], T], *, rank: int, steps: Sequence[str] = ()) -> T:
    """Return what fn returns on the given rank, on every rank; it runs there only.

    Args:
        world: the ranks that take part.
        phase: what is being done, for the error.
        fn: as for `agree`.
        rank: which one runs it, the same on every rank.
        steps: as for `agree`.

    Raises:
        RemoteError: on every rank, if it failed or its value can't be pickled; as `agree`.

    Examples:
        >>> from shardtree.world import on_one_rank, simulate
        >>> simulate(3, lambda world: on_one_rank(world, "name", lambda: f"by rank {world.rank}", rank=2))
        ['by rank 2', 'by rank 2', 'by rank 2']
    """
    if world.size == 1:
        return fn()
    if world.rank == rank:
        return _tell(world, phase, fn, steps)
    told = world.broadcast(_Outcome(phase), rank)
    _check_phases({rank: told, world.rank: _Outcome(phase)})
    _raise(world, phase, _failures(world, rank, told.failure), None, steps)
    value: T = unpack(phase, told.packed)
    return value


def _tell(world: World, phase: str, fn: Callable[[], T], steps: Sequence[str]) -> T:
    """Return what fn returns, and let every rank know it, or why there is nothing."""
    try:
        value = fn()
        packed = pack(phase, value)
    except BaseException as error:
        world.broadcast(_Outcome(phase, _failure(error)), world.rank)
        _raise(world, phase, _failures(world, world.rank, _failure(error)), error, steps)
        raise
    world.broadcast(_Outcome(phase, packed=packed), world.rank)
    return value


def _failures(world: World, rank: int, failure: _Failure | None) -> list[_Failure | None]:
    """Return what failed by rank, where only one rank did anything."""
    return [failure if each == rank else None for each in range(world.size)]


def _meet(world: World, outcome: _Outcome, error: BaseException | None, steps: Sequence[str]) -> list[_Outcome]:
    """Return every rank's outcome, unless some rank failed."""
    outcomes = world.all_gather(outcome)
    _check_phases(dict(enumerate(outcomes)))
    _raise(world, outcome.phase, [each.failure for each in outcomes], error, steps)
    return outcomes


def _check_phases(outcomes: Mapping[int, object]) -> None:
    """Raise where ranks aren't in one phase; they would take each other's answers for something else."""
    phases = {rank: getattr(each, "phase", "no phase") for rank, each in outcomes.items()}
    if len(set(phases.values())) > 1:
        what = "the ranks aren't doing the same thing"
        fix = "Make the same calls with the same options on every rank."
        raise WorldError(
            error_text(what, offenders=(f"rank {rank}: {phase}" for rank, phase in phases.items()), fix=fix)
        )


def _failure(error: BaseException) -> _Failure:
    twins = tuple(REMOTE_TWINS[kind] for kind in type(error).__mro__ if kind in REMOTE_TWINS)
    try:
        text = f"{type(error).__name__}: {error}"
    except Exception as failed:  # the other ranks wait for this one, whatever a caller's class does
        text = f"{type(error).__name__}, whose text is a {type(failed).__name__}"
    lines = [text, *getattr(error, "__notes__", ())]
    return _Failure(twins, "\n".join(lines), getattr(error, _STEP, ""), bool(_public_attributes(error)))


def _raise(
    world: World, phase: str, failures: list[_Failure | None], error: BaseException | None, steps: Sequence[str]
) -> None:
    """Raise the same error on every rank, unless nothing failed, or this rank's own goes first."""
    failed = {rank: failure for rank, failure in enumerate(failures) if failure is not None}
    where = {rank: failure.step if failure.step in steps else phase for rank, failure in failed.items()}
    phase = min(where.values(), key=[*steps, phase].index, default=phase)
    # As far as the others got beyond that, they would have waited.
    failed = {rank: failure for rank, failure in failed.items() if where[rank] == phase}
    if not failed:
        return
    lowest, first = min(failed.items())
    shared = (twin for twin in first.twins if all(twin in failure.twins for failure in failed.values()))
    twin = next(shared, RemoteError)
    remote = twin(phase, {rank: failure.text for rank, failure in failed.items()})
    if twin is not RemoteError and first.has_attributes:
        # From one rank, and only where there are any: they may be long, and ten thousand ranks may have failed.
        own = _packed_attributes(error) if world.rank == lowest and error is not None else {}
        for name, packed in world.broadcast(own, lowest).items():
            with suppress(Exception):  # of a class that can't be found here, say
                setattr(remote, name, unpack(phase, packed))
    if error is None or isinstance(error, Exception):
        raise remote from error


def _public_attributes(error: BaseException) -> dict[str, Any]:
    kept = ("args", "phase", "failures")  # a twin has its own
    return {
        name: value for name, value in attributes_of(error).items() if not name.startswith("_") and name not in kept
    }


_MOST_BYTES = 16 * 2**20  # of all attributes together: the names of a hundred thousand keys, and no large tensor


def _packed_attributes(error: BaseException) -> dict[str, bytes]:
    """Return what can be pickled of an exception's attributes, as long as there is room."""
    found: dict[str, bytes] = {}
    for name, value in _public_attributes(error).items():
        with suppress(UnsupportedValue):
            packed = pack(name, value)
            if len(packed) + sum(map(len, found.values())) <= _MOST_BYTES:
                found[name] = packed
    return found
