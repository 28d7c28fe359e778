"""Phases: steps that either work on every rank, or raise on every rank.

Whatever can fail (a file call, the caller's code, a check) runs inside a phase, so that no rank waits in a collective
for one that gave up. A phase must not run inside another one, nor may its function call a collective: a rank that
fails before it would skip it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ..errors import RemoteError, WorldError, error_text
from ._pickled import pack, unpack
from ._world import T, World


@dataclass(frozen=True, slots=True)
class _Failure:
    kind: str  # the qualified name of the exception's type, to compare between ranks
    text: str  # "TypeName: message", and its notes


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What a rank tells the others at the end of a phase."""

    phase: str
    failure: _Failure | None = None
    packed: bytes = b""


def agree(world: World, phase: str, fn: Callable[[], T]) -> T:
    """Return what fn returns on this rank, once it worked on every rank.

    Args:
        world: the ranks that take part.
        phase: what is being done, for the error.
        fn: takes nothing and runs on every rank. It must not call a collective or start a phase.

    Raises:
        RemoteError: on every rank, if fn failed on some; on a failing rank the cause is its own exception. Where fn
            failed on all ranks with the same type of exception, each raises its own instead; so does a world of one.
            What isn't an ``Exception`` (``KeyboardInterrupt``) is also told to the others, and then raised as it is.

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
        _meet(world, _Outcome(phase, _failure(error)), error)
        raise
    _meet(world, _Outcome(phase), None)
    return value


def gather(world: World, phase: str, fn: Callable[[], T]) -> list[T]:
    """Return what fn returns on each rank, by rank, once it worked on every rank; one all-gather in total.

    A rank's own value is in the list as it is, those of others as copies.

    Raises:
        RemoteError: as `agree`; a value that can't be pickled is a failure too.

    Examples:
        >>> from shardtree.world import gather, simulate
        >>> simulate(2, lambda world: gather(world, "count", lambda: 10 + world.rank))
        [[10, 11], [10, 11]]
    """
    if world.size == 1:
        return [fn()]
    try:
        value = fn()
        # Packed here, so that a value that can't be pickled fails inside the phase.
        packed = pack(phase, value)
    except BaseException as error:
        _meet(world, _Outcome(phase, _failure(error)), error)
        raise
    outcomes = _meet(world, _Outcome(phase, packed=packed), None)
    return [value if rank == world.rank else unpack(phase, each.packed) for rank, each in enumerate(outcomes)]


def on_rank_zero(world: World, phase: str, fn: Callable[[], T]) -> T:
    """Return what fn returns on rank 0, on every rank; it runs there only.

    Raises:
        RemoteError: on every rank, if it failed or its value can't be pickled; as `agree`.

    Examples:
        >>> from shardtree.world import on_rank_zero, simulate
        >>> simulate(3, lambda world: on_rank_zero(world, "name", lambda: f"by rank {world.rank}"))
        ['by rank 0', 'by rank 0', 'by rank 0']
    """
    return on_one_rank(world, phase, fn, rank=0)


def on_one_rank(world: World, phase: str, fn: Callable[[], T], *, rank: int) -> T:
    """Return what fn returns on the given rank, on every rank; it runs there only.

    Args:
        world: the ranks that take part.
        phase: what is being done, for the error.
        fn: as for `agree`.
        rank: which one runs it, the same on every rank.

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
        return _tell(world, phase, fn)
    told = world.broadcast(_Outcome(phase), rank)
    _check_phases({rank: told, world.rank: _Outcome(phase)})
    _raise(phase, _failures(world, rank, told.failure), None)
    value: T = unpack(phase, told.packed)
    return value


def _tell(world: World, phase: str, fn: Callable[[], T]) -> T:
    """Return what fn returns, and let every rank know it, or why there is nothing."""
    try:
        value = fn()
        packed = pack(phase, value)
    except BaseException as error:
        world.broadcast(_Outcome(phase, _failure(error)), world.rank)
        _raise(phase, _failures(world, world.rank, _failure(error)), error)
        raise
    world.broadcast(_Outcome(phase, packed=packed), world.rank)
    return value


def _failures(world: World, rank: int, failure: _Failure | None) -> list[_Failure | None]:
    """Return what failed by rank, where only one rank did anything."""
    return [failure if each == rank else None for each in range(world.size)]


def _meet(world: World, outcome: _Outcome, error: BaseException | None) -> list[_Outcome]:
    """Return every rank's outcome, unless some rank failed."""
    outcomes = world.all_gather(outcome)
    _check_phases(dict(enumerate(outcomes)))
    _raise(outcome.phase, [each.failure for each in outcomes], error)
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
    kind = type(error)
    lines = [f"{kind.__name__}: {error}", *getattr(error, "__notes__", ())]
    return _Failure(f"{kind.__module__}.{kind.__qualname__}", "\n".join(lines))


def _raise(phase: str, failures: list[_Failure | None], error: BaseException | None) -> None:
    """Raise what the ranks have to hear, unless nothing failed, or this rank's own error is what it should raise."""
    failed = {rank: failure for rank, failure in enumerate(failures) if failure is not None}
    everywhere_alike = len(failed) == len(failures) and len({failure.kind for failure in failed.values()}) == 1
    if not failed or (error is not None and (everywhere_alike or not isinstance(error, Exception))):
        return
    raise RemoteError(phase, {rank: failure.text for rank, failure in failed.items()}) from error
