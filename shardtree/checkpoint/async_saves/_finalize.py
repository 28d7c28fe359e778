"""The end of scheduled saves: in order, and each only when every rank has written its part."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import wait
from itertools import takewhile

from ...errors import WorldError, error_text
from ...world import World, gather
from ._call import Call, Calls

_LONGEST_WAIT = 60.0  # seconds after which ranks tell each other that they live, however long they write


def finalize(calls: Calls, *, blocking: bool, no_dist: bool = False) -> list[int]:
    """Commit and remove the first calls as far as they are written on all ranks, and return their indices; collective.

    A call that fails on some rank is abandoned and removed on all of them; those behind it stay.

    Args:
        calls: in order, the same on all ranks.
        blocking: whether to wait until all of them are written.
        no_dist: whether to go by what this rank has written, without asking the others before the commit.

    Raises:
        CheckpointingException: the first call that failed, on every rank; as `AsyncRequest.execute_sync`.
    """
    check_idle(calls)
    done: list[int] = []
    while calls:
        together = _leading(calls)
        ready = _ready(together, blocking=blocking, no_dist=no_dist)
        for _ in range(ready):
            done.append(_finalize_first(calls, done))
        if ready < len(together) and not blocking:
            break
    return done


def finalize_all(calls: Calls) -> list[BaseException]:
    """Commit all that can be, and return why others couldn't, in order; what ranks couldn't agree on stays."""
    failures: list[BaseException] = []
    while calls:
        left = len(calls)
        try:
            finalize(calls, blocking=True)
        except BaseException as error:
            failures.append(error)
            if len(calls) == left or not isinstance(error, Exception):
                break
    return failures


def check_idle(calls: Calls) -> None:
    """Raise where a call is being committed: one of its finalizers asks.

    Raises:
        WorldError: names the call.
    """
    if calls.is_committing:
        fix = "Do it after maybe_finalize_async_calls; a finalizer may schedule saves, and not finalize or close."
        raise WorldError(error_text(f"{calls[0]} is being committed, and a finalizer asks for it again", fix=fix))


def _leading(calls: Calls) -> list[Call]:
    """Return the first calls, as far as they are of one world, which can be asked for all of them at once."""
    world = calls[0].request.world
    return list(takewhile(lambda call: call.request.world is world, calls))


def _ready(calls: Sequence[Call], *, blocking: bool, no_dist: bool) -> int:
    """Return how many of the calls, from the first on, are written on every rank."""
    world = calls[0].request.world

    def written() -> tuple[int, int]:
        if blocking:
            wait([call.written for call in calls], timeout=min(_LONGEST_WAIT, world.timeout / 4))
        return calls[0].index, sum(1 for _ in takewhile(lambda call: call.written.done(), calls))

    if no_dist:
        return written()[1]
    # Ranks that wait and ranks that don't meet here: one that is at its end waits for those that still look in passing.
    told = gather(world, "async save: look how far ranks are", written)
    _check_same_call(world, calls[0], [index for index, _ in told])
    return min(count for _, count in told)


def _check_same_call(world: World, first: Call, indices: Sequence[int]) -> None:
    if len(set(indices)) > 1:
        offenders = [f"rank {rank}: async save {index}" for rank, index in enumerate(indices)]
        fix = "Schedule and finalize the same saves on every rank, in the same order."
        what = f"{first}: rank {world.rank} would finalize it, others another one"
        raise WorldError(error_text(what, offenders=offenders, fix=fix))


def _finalize_first(calls: Calls, before: Sequence[int]) -> int:
    call = calls[0]
    calls.is_committing = True
    try:
        call.request.finish(call.written.result)
    except BaseException as error:
        error.add_note(str(call))
        if before:
            error.add_note(f"Committed before it: {', '.join(map(str, before))}")
        raise
    finally:
        calls.is_committing = False
        calls.popleft()
    return call.index
