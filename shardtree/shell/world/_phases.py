"""Phases: work that either succeeds on every rank, or raises on every rank.

Everything that can fail (a file call, the caller's code, a check) runs inside a phase, so that no rank waits in a
collective for a rank that has failed. Phases must not be nested, and a phase's function must not call a collective,
which a rank that fails earlier would skip.

Steps whose effects other ranks can't see may share a collective: the phase lists them in order, and its function runs
each inside a `step`. A failure in a step is reported as if the step were a phase of its own.
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
    twins: tuple[type[RemoteError], ...]  # remote twins of the exception's classes, most specific first
    text: str  # "TypeName: message" and notes
    step: str  # name of the step that failed; empty outside of steps
    has_attributes: bool  # whether the exception has public attributes, which its remote twin gets too


@dataclass(frozen=True, slots=True)
class _Outcome:
    """Message that a rank sends to the others at the end of a phase."""

    phase: str
    failure: _Failure | None = None
    data: bytes = b""
    given: Mapping[str, str] | None = None


Given = Mapping[str, object]
"""Arguments that must be equal on all ranks, by name, without those that have their default. They are sent as texts."""
_LONG = 200


_STEP = "_shardtree_step"


class step:  # noqa: N801  as `contextlib.suppress` is: one writes `with step(...)`
    """Make the block a step of the enclosing phase: failures in the block are reported under the step's name.

    Args:
        phase: Name of the step, one of the enclosing phase's `steps`.

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

    # `contextmanager` sets an attribute of the exception, which an exception that is a frozen dataclass refuses.
    __slots__ = ("phase",)

    def __init__(self, phase: str) -> None:
        self.phase = phase

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is not None:
            error.__dict__[_STEP] = self.phase  # not setattr, for the same reason


def tried(fn: Callable[[], T]) -> Callable[[], T]:
    """Call a function now, and return a function that returns its result or raises its error; it may be called once.

    For work before a phase: if the phase calls the returned function, an error of the work reaches all ranks.

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
            raise errors.pop()  # a reference here would keep alive everything that the error's frames hold

        return fail
    return lambda: result


def agree(world: World, phase: str, fn: Callable[[], T], *, steps: Sequence[str] = (), given: Given | None = None) -> T:
    """Run a function on every rank, and return this rank's result after the function succeeded on all of them.

    Args:
        world: Ranks that take part.
        phase: Name of the phase, for errors.
        fn: Function without arguments that runs on every rank. It must not call a collective or start a phase.
        steps: Names of the steps in fn, in order. If ranks fail in several steps, the first one is reported.
        given: Arguments that must be equal on every rank, by name; they are compared before a result is returned.

    Raises:
        WorldError: on every rank, if the ranks are in different phases or have different arguments; the error names
            the phase or the arguments of each rank.
        RemoteError: on every rank, if fn failed on any; on a failing rank the cause is that rank's own exception. The
            error is also an instance of the most specific class of `shardtree.errors` that the exceptions of all
            failing ranks share: ``except NotACheckpoint`` catches a `RemoteNotACheckpoint`. In a world of one, fn's own
            exception is raised. An exception that isn't an ``Exception`` (``KeyboardInterrupt``) is raised unchanged on
            its own rank.

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
    """Run a function on every rank, and return all results, by rank, after it succeeded everywhere; one all-gather.

    The list contains this rank's result itself, and copies of the other ranks' results.

    Raises:
        RemoteError: see `agree`; a result that can't be pickled is a failure too.

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
    """Return this rank's result of `fn`, and all ranks' `message(result)`, by rank; other arguments: see `agree`.

    Raises:
        RemoteError: see `gather`.

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
        sent = message(value)
        # It is packed here, so that a message that can't be pickled is a failure of the phase, reported on every rank.
        data = pack(phase, sent)
    except BaseException as error:
        _gather_outcomes(world, _Outcome(phase, _failure(error), given=_texts(given)), error, steps)
        raise
    outcomes = _gather_outcomes(world, _Outcome(phase, data=data, given=_texts(given)), None, steps)
    return value, [sent if rank == world.rank else unpack(phase, end.data) for rank, end in enumerate(outcomes)]


def gather_on_rank_zero(world: World, phase: str, fn: Callable[[], T], *, steps: Sequence[str] = ()) -> list[T]:
    """Run a function on every rank, and return all results, by rank, on rank 0; an empty list on other ranks.

    Every rank learns of failures, but results are sent only to rank 0; one gather in total.

    Raises:
        RemoteError: see `gather`.

    Examples:
        >>> from shardtree.shell.world import gather_on_rank_zero
        >>> from shardtree.world import simulate
        >>> simulate(2, lambda world: gather_on_rank_zero(world, "count", lambda: 10 + world.rank))
        [[10, 11], []]
    """
    if world.size == 1:
        return [fn()]
    try:
        value = fn()
        data = pack(phase, value)
    except BaseException as error:
        _gather_outcomes(world, _Outcome(phase, _failure(error)), error, steps, root=0)
        raise
    outcomes = _gather_outcomes(world, _Outcome(phase, data=data), None, steps, root=0)
    if world.rank != 0:
        return []
    return [value if rank == 0 else unpack(phase, outcome.data) for rank, outcome in enumerate(outcomes)]


def on_rank_zero(
    world: World, phase: str, fn: Callable[[], T], *, steps: Sequence[str] = (), given: Given | None = None
) -> T:
    """Run a function on rank 0 only, and return its result on every rank.

    The arguments are those of `agree`. The ranks compare `given` first, by a separate collective, if it is passed.

    Raises:
        WorldError: on every rank, if the ranks have different arguments; see `agree`.
        RemoteError: on every rank, if the function failed or its result can't be pickled; see `agree`.

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
    """Run a function on a single rank, and return its result on every rank.

    Args:
        world: Ranks that take part.
        phase: Name of the phase, for errors.
        fn: Function without arguments, which must not call a collective or start a phase.
        rank: Rank that runs the function, equal on every rank.
        steps: Names of the steps in fn, in order.

    Raises:
        RemoteError: on every rank, if the function failed or its result can't be pickled; see `agree`.

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
    """Run a function on this rank, broadcast its result or failure to the others, and return the result or raise."""
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
    """Return a list with an entry for each rank: `failure` for `rank`, None for all others."""
    return [failure if other == rank else None for other in range(world.size)]


def _gather_outcomes(
    world: World, outcome: _Outcome, error: BaseException | None, steps: Sequence[str], root: int | None = None
) -> list[_Outcome]:
    """Gather every rank's outcome; raise if a rank failed. With a `root`, results are sent only to that rank."""
    if root is None:
        outcomes = world.all_gather(outcome)
    else:
        outcomes = world.gather(outcome, replace(outcome, data=b""), root)
    _check_phases(dict(enumerate(outcomes)))
    _raise_on_failure(world, outcome.phase, [other.failure for other in outcomes], error, steps)
    return outcomes


def _texts(given: Given | None) -> Mapping[str, str] | None:
    return {name: _text(value) for name, value in given.items()} if given else None


def _text(value: object) -> str:
    """Return a value's repr, for comparison between ranks; a list becomes a tuple, a long repr is cut with a digest."""
    text = repr(tuple(value) if isinstance(value, list) else value)
    return text if len(text) <= _LONG else f"{text[:_LONG]}... ({blake2b(text.encode(), digest_size=8).hexdigest()})"


def _check_phases(outcomes: Mapping[int, object]) -> None:
    """Raise if ranks differ in phase or arguments, since they would then misread each other's values."""
    texts = {rank: dict(getattr(outcome, "given", None) or {}) for rank, outcome in outcomes.items()}
    phases = {rank: getattr(outcome, "phase", "no phase") for rank, outcome in outcomes.items()}
    names = dict.fromkeys(name for text in texts.values() for name in text) if len(set(phases.values())) == 1 else ()
    differing = [name for name in names if len({text.get(name) for text in texts.values()}) > 1]
    if differing or len(set(phases.values())) > 1:
        lines = (
            ", ".join(
                [f"rank {rank}: {phases[rank]}", *(f"{name}={text.get(name, 'the default')}" for name in differing)]
            )
            for rank, text in texts.items()
        )
        fix = "Make the same calls with the same options on every rank."
        raise WorldError(error_text("the ranks' calls or options differ", offenders=lines, fix=fix))


def _failure(error: BaseException) -> _Failure:
    twins = tuple(REMOTE_TWINS[kind] for kind in type(error).__mro__ if kind in REMOTE_TWINS)
    try:
        text = f"{type(error).__name__}: {error}"
    except Exception as other:  # other ranks are waiting, so even an exception whose __str__ raises must be reported
        text = f"{type(error).__name__}, whose text raises a {type(other).__name__}"
    lines = [text, *getattr(error, "__notes__", ())]
    return _Failure(twins, "\n".join(lines), getattr(error, _STEP, ""), bool(_public_attributes(error)))


def _raise_on_failure(
    world: World, phase: str, failures: list[_Failure | None], error: BaseException | None, steps: Sequence[str]
) -> None:
    """Raise on every rank if one failed. The error names the earliest of `steps` that failed, or `phase` if none did.

    If this rank's own error is no ``Exception`` (``KeyboardInterrupt``), return, so that the caller raises that one.
    """
    by_rank = {rank: failure for rank, failure in enumerate(failures) if failure is not None}
    where = {rank: failure.step if failure.step in steps else phase for rank, failure in by_rank.items()}
    phase = min(where.values(), key=[*steps, phase].index, default=phase)
    # Failures in later steps are dropped: had the step been a phase of its own, those ranks wouldn't have got there.
    by_rank = {rank: failure for rank, failure in by_rank.items() if where[rank] == phase}
    if not by_rank:
        return
    lowest, first = min(by_rank.items())
    shared = (twin for twin in first.twins if all(twin in failure.twins for failure in by_rank.values()))
    twin = next(shared, RemoteError)
    remote = twin(phase, {rank: failure.text for rank, failure in by_rank.items()})
    if twin is not RemoteError and first.has_attributes:
        # Only one rank sends its attributes: they can be long, and ten thousand ranks may have failed.
        attributes = _packed_attributes(error) if world.rank == lowest and error is not None else {}
        for name, data in world.broadcast(attributes, lowest).items():
            with suppress(Exception):  # a class that can't be imported here, for one
                setattr(remote, name, unpack(phase, data))
    if error is None or isinstance(error, Exception):
        raise remote from error


def _public_attributes(error: BaseException) -> dict[str, Any]:
    skip = ("args", "phase", "failures")  # a remote twin sets these itself
    return {name: item for name, item in attributes_of(error).items() if not name.startswith("_") and name not in skip}


def _packed_attributes(error: BaseException) -> dict[str, bytes]:
    """Return an exception's public attributes, pickled, without those that can't be pickled or exceed the limit."""
    attributes: dict[str, bytes] = {}
    for name, value in _public_attributes(error).items():
        with suppress(UnsupportedValue):
            data = pack(name, value)
            if len(data) + sum(map(len, attributes.values())) <= limits.ERROR_BYTES:
                attributes[name] = data
    return attributes
