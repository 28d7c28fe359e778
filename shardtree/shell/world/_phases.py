"""Phases: work that either succeeds on every rank, or raises on every rank.

Everything that can fail (a file call, the caller's code, a check) runs inside a phase, so that no rank waits in a
collective for one that has failed. A phase must not run inside another one, and its function must not call a
collective, which a rank that fails earlier would skip.

Steps without effects that other ranks see can share one collective: a phase then lists them, in order, and its function
does each inside of a `step`. A failure in a step is reported as if the step had been a phase of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any, TypeVar

from ...core import limits
from ...errors import REMOTE_TWINS, RemoteError, UnsupportedValue, WorldError, attributes_of, error_text
from ._world import T, World, pack, unpack

U = TypeVar("U")


@dataclass(frozen=True, slots=True)
class _Failure:
    twins: tuple[type[RemoteError], ...]  # of the exception's classes, the most specific first; pickled by name
    text: str  # "TypeName: message", and its notes
    step: str  # in which it occurred; empty if not in a named one
    has_attributes: bool  # which the twins on other ranks get too


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What a rank sends to the others at the end of a phase."""

    phase: str
    failure: _Failure | None = None
    data: bytes = b""
    given: Mapping[str, str] | None = None


Given = Mapping[str, object]
_LONG = 200
"""Arguments that must be the same on all ranks, by name. They travel as texts: what has its usual value is left out."""


_STEP = "_shardtree_step"


class step:  # noqa: N801  as `contextlib.suppress` is: one writes `with step(...)`
    """Mark what is done inside as a step of the enclosing phase, which reports a failure as one of this step.

    Args:
        phase: what is being done, one of the `steps` of the enclosing phase.

    Examples:
        >>> from shardtree.errors import RemoteError
        >>> from shardtree.shell.world import agree, step
        >>> from shardtree.world import simulate
        >>> def halve(rank):
        ...     with step("divide"):
        ...         ten = 10 // rank
        ...     with step("subtract"):
        ...         return ten - 5
        >>> try:
        ...     simulate(2, lambda world: agree(world, "count", lambda: halve(world.rank), steps=["divide"]))
        ... except RemoteError as error:
        ...     print(error)
        divide: failed on 1 rank
          rank 0: ZeroDivisionError: integer division or modulo by zero
    """

    # No `contextmanager`: that sets an attribute of the exception, and one that is a frozen dataclass refuses it.
    __slots__ = ("phase",)

    def __init__(self, phase: str) -> None:
        self.phase = phase

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is not None:
            error.__dict__[_STEP] = self.phase  # not setattr, for the same reason


def tried(fn: Callable[[], T]) -> Callable[[], T]:
    """Call a function now, and return one to be called once: it returns the result, or raises the error.

    For what a rank does before it meets the others: inside of the phase that follows, they learn of it if it fails.

    Examples:
        >>> from shardtree.shell.world import tried
        >>> half = tried(lambda: 10 // 0)
        >>> half()
        Traceback (most recent call last):
        ...
        ZeroDivisionError: integer division or modulo by zero
    """
    try:
        result = fn()
    except BaseException as error:
        errors = [error]

        def fail() -> T:
            raise errors.pop()  # kept here, it would keep what its frames hold alive

        return fail
    return lambda: result


def agree(world: World, phase: str, fn: Callable[[], T], *, steps: Sequence[str] = (), given: Given | None = None) -> T:
    """Return what fn returns on this rank, after it succeeded on every rank.

    Args:
        world: the ranks that take part.
        phase: what is being done, for the error.
        fn: takes no arguments and runs on every rank. It must not call a collective or start a phase.
        steps: the names of the steps in fn, in order. Where ranks fail in several, the first one is reported.
        given: what has to be the same on every rank, compared before what fn returns counts.

    Raises:
        WorldError: on every rank, if the ranks are in other phases, or were given other values: names who has what.
        RemoteError: on every rank, if fn failed on some or all; on a failing rank the cause is its own exception. It is
            the twin of the most specific class of `shardtree.errors` that all failing ranks' exceptions share:
            ``except NotACheckpoint`` catches a `RemoteNotACheckpoint`. In a world of one, fn's own exception is raised.
            What isn't an ``Exception`` (``KeyboardInterrupt``) is raised unchanged on the rank where it occurred.

    Examples:
        >>> from shardtree.errors import RemoteError
        >>> from shardtree.shell.world import agree
        >>> from shardtree.world import simulate
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
        _gather_outcomes(world, _Outcome(phase, _failure(error), given=_texts(given)), error, steps)
        raise
    _gather_outcomes(world, _Outcome(phase, given=_texts(given)), None, steps)
    return value


def gather(
    world: World, phase: str, fn: Callable[[], T], *, steps: Sequence[str] = (), given: Given | None = None
) -> list[T]:
    """Return what fn returns on each rank, by rank, after it succeeded on every rank; one all-gather in total.

    The list has this rank's own value itself, and copies of the others.

    Raises:
        RemoteError: as `agree`; a value that can't be pickled is a failure too.

    Examples:
        >>> from shardtree.shell.world import gather
        >>> from shardtree.world import simulate
        >>> simulate(2, lambda world: gather(world, "count", lambda: 10 + world.rank))
        [[10, 11], [10, 11]]
    """
    return share(world, phase, fn, lambda value: value, steps=steps, given=given)[1]


def share(
    world: World,
    phase: str,
    fn: Callable[[], T],
    message: Callable[[T], U],
    *,
    steps: Sequence[str] = (),
    given: Given | None = None,
) -> tuple[T, list[U]]:
    """Return what fn returns on this rank, and what `message` returns for that on each rank, by rank; one all-gather.

    Raises:
        RemoteError: as `gather`.

    Examples:
        >>> from shardtree.shell.world import share
        >>> from shardtree.world import simulate
        >>> simulate(2, lambda world: share(world, "measure", lambda: "ab"[: world.rank], len))
        [('', [0, 1]), ('a', [0, 1])]
    """
    if world.size == 1:
        value = fn()
        return value, [message(value)]
    try:
        value = fn()
        own = message(value)
        # Packed here, so that a value that can't be pickled is a failure inside the phase, reported on every rank.
        data = pack(phase, own)
    except BaseException as error:
        _gather_outcomes(world, _Outcome(phase, _failure(error), given=_texts(given)), error, steps)
        raise
    outcomes = _gather_outcomes(world, _Outcome(phase, data=data, given=_texts(given)), None, steps)
    return value, [own if rank == world.rank else unpack(phase, each.data) for rank, each in enumerate(outcomes)]


def gather_on_rank_zero(world: World, phase: str, fn: Callable[[], T], *, steps: Sequence[str] = ()) -> list[T]:
    """Return what fn returns on each rank, by rank, on rank 0, and nothing on the others; it runs on every rank.

    Every rank hears of failures, but what the ranks return travels to rank 0 alone; one gather in total.

    Raises:
        RemoteError: as `gather`.

    Examples:
        >>> from shardtree.shell.world import gather_on_rank_zero
        >>> from shardtree.world import simulate
        >>> simulate(2, lambda world: gather_on_rank_zero(world, "count", lambda: 10 + world.rank))
        [[10, 11], []]
    """
    if world.size == 1:
        return [fn()]
    try:
        own = fn()
        data = pack(phase, own)
    except BaseException as error:
        _gather_outcomes(world, _Outcome(phase, _failure(error)), error, steps, root=0)
        raise
    outcomes = _gather_outcomes(world, _Outcome(phase, data=data), None, steps, root=0)
    if world.rank != 0:
        return []
    return [own if rank == 0 else unpack(phase, each.data) for rank, each in enumerate(outcomes)]


def on_rank_zero(
    world: World, phase: str, fn: Callable[[], T], *, steps: Sequence[str] = (), given: Given | None = None
) -> T:
    """Return what fn returns on rank 0, on every rank; it runs there only.

    What is `given` is compared first, by a collective of its own.

    Raises:
        WorldError: on every rank, if the ranks were given other values; as `agree`.
        RemoteError: on every rank, if it failed or its value can't be pickled; as `agree`.

    Examples:
        >>> from shardtree.shell.world import on_rank_zero
        >>> from shardtree.world import simulate
        >>> simulate(3, lambda world: on_rank_zero(world, "name", lambda: f"by rank {world.rank}"))
        ['by rank 0', 'by rank 0', 'by rank 0']
    """
    if given is not None:
        agree(world, phase, lambda: None, given=given)
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
        >>> from shardtree.shell.world import on_one_rank
        >>> from shardtree.world import simulate
        >>> simulate(3, lambda world: on_one_rank(world, "name", lambda: f"by rank {world.rank}", rank=2))
        ['by rank 2', 'by rank 2', 'by rank 2']
    """
    if world.size == 1:
        return fn()
    if world.rank == rank:
        return _run_and_broadcast(world, phase, fn, steps)
    outcome = world.broadcast(_Outcome(phase), rank)
    _check_phases({rank: outcome, world.rank: _Outcome(phase)})
    _raise_on_failure(world, phase, _failures(world, rank, outcome.failure), None, steps)
    value: T = unpack(phase, outcome.data)
    return value


def _run_and_broadcast(world: World, phase: str, fn: Callable[[], T], steps: Sequence[str]) -> T:
    """Return what fn returns, and broadcast it, or the failure, to every rank."""
    try:
        value = fn()
        data = pack(phase, value)
    except BaseException as error:
        world.broadcast(_Outcome(phase, _failure(error)), world.rank)
        _raise_on_failure(world, phase, _failures(world, world.rank, _failure(error)), error, steps)
        raise
    world.broadcast(_Outcome(phase, data=data), world.rank)
    return value


def _failures(world: World, rank: int, failure: _Failure | None) -> list[_Failure | None]:
    """Return a list of failures by rank, for a phase in which only one rank did anything."""
    return [failure if each == rank else None for each in range(world.size)]


def _gather_outcomes(
    world: World, outcome: _Outcome, error: BaseException | None, steps: Sequence[str], root: int | None = None
) -> list[_Outcome]:
    """Return every rank's outcome, with what it returned, on the root alone if there is one; raises if some failed."""
    if root is None:
        outcomes = world.all_gather(outcome)
    else:
        outcomes = world.gather(outcome, replace(outcome, data=b""), root)
    _check_phases(dict(enumerate(outcomes)))
    _raise_on_failure(world, outcome.phase, [each.failure for each in outcomes], error, steps)
    return outcomes


def _texts(given: Given | None) -> Mapping[str, str] | None:
    return {name: _text(value) for name, value in given.items()} if given else None


def _text(value: object) -> str:
    """Return a value as text: all of it in a digest where that is long, and lists as the tuples that mean the same."""
    text = repr(tuple(value) if isinstance(value, list) else value)
    return text if len(text) <= _LONG else f"{text[:_LONG]}... ({blake2b(text.encode(), digest_size=8).hexdigest()})"


def _check_phases(outcomes: Mapping[int, object]) -> None:
    """Raise unless all ranks are in the same phase, with the same arguments; they would misread each other's values."""
    texts = {rank: dict(getattr(each, "given", None) or {}) for rank, each in outcomes.items()}
    phases = {rank: getattr(each, "phase", "no phase") for rank, each in outcomes.items()}
    names = dict.fromkeys(name for each in texts.values() for name in each) if len(set(phases.values())) == 1 else ()
    differing = [name for name in names if len({each.get(name) for each in texts.values()}) > 1]
    if differing or len(set(phases.values())) > 1:
        lines = (
            ", ".join(
                [f"rank {rank}: {phases[rank]}", *(f"{name}={each.get(name, 'the usual')}" for name in differing)]
            )
            for rank, each in texts.items()
        )
        fix = "Make the same calls with the same options on every rank."
        raise WorldError(error_text("the ranks aren't doing the same thing", offenders=lines, fix=fix))


def _failure(error: BaseException) -> _Failure:
    twins = tuple(REMOTE_TWINS[kind] for kind in type(error).__mro__ if kind in REMOTE_TWINS)
    try:
        text = f"{type(error).__name__}: {error}"
    except Exception as other:  # the other ranks are waiting for this one, even if an exception's __str__ raises
        text = f"{type(error).__name__}, whose text raises a {type(other).__name__}"
    lines = [text, *getattr(error, "__notes__", ())]
    return _Failure(twins, "\n".join(lines), getattr(error, _STEP, ""), bool(_public_attributes(error)))


def _raise_on_failure(
    world: World, phase: str, failures: list[_Failure | None], error: BaseException | None, steps: Sequence[str]
) -> None:
    """Raise the same error on every rank if any failed, except where this rank's own isn't an ``Exception``."""
    by_rank = {rank: failure for rank, failure in enumerate(failures) if failure is not None}
    where = {rank: failure.step if failure.step in steps else phase for rank, failure in by_rank.items()}
    phase = min(where.values(), key=[*steps, phase].index, default=phase)
    # Later failures are dropped: had the step been a phase of its own, those ranks wouldn't have got there.
    by_rank = {rank: failure for rank, failure in by_rank.items() if where[rank] == phase}
    if not by_rank:
        return
    lowest, first = min(by_rank.items())
    shared = (twin for twin in first.twins if all(twin in failure.twins for failure in by_rank.values()))
    twin = next(shared, RemoteError)
    remote = twin(phase, {rank: failure.text for rank, failure in by_rank.items()})
    if twin is not RemoteError and first.has_attributes:
        # From one rank only, and only if it has any: attributes can be long, and ten thousand ranks may have failed.
        own = _packed_attributes(error) if world.rank == lowest and error is not None else {}
        for name, data in world.broadcast(own, lowest).items():
            with suppress(Exception):  # such as a class that can't be imported here
                setattr(remote, name, unpack(phase, data))
    if error is None or isinstance(error, Exception):
        raise remote from error


def _public_attributes(error: BaseException) -> dict[str, Any]:
    own = ("args", "phase", "failures")  # a twin sets these itself
    return {name: value for name, value in attributes_of(error).items() if not name.startswith("_") and name not in own}


def _packed_attributes(error: BaseException) -> dict[str, bytes]:
    """Return an exception's attributes, pickled; leaves out those that can't be pickled, or exceed the limit."""
    attributes: dict[str, bytes] = {}
    for name, value in _public_attributes(error).items():
        with suppress(UnsupportedValue):
            data = pack(name, value)
            if len(data) + sum(map(len, attributes.values())) <= limits.ERROR_BYTES:
                attributes[name] = data
    return attributes
