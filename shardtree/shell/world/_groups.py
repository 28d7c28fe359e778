"""The gloo groups through which ranks coordinate, and the detection of ranks that have given up waiting."""

from __future__ import annotations

import atexit
import time
from collections import Counter
from collections.abc import Iterable
from datetime import timedelta
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import torch

from ...errors import WorldError, error_text

# A ProcessGroup or a ProcessGroupGloo, which have the same methods, but no annotated common base class.
Gloo: TypeAlias = Any

# A gloo group that still exists after the interpreter's end aborts the process. So these are the only references to our
# groups, and they are dropped with the caller's group, or at exit.
_groups: WeakKeyDictionary[torch.distributed.ProcessGroup, dict[tuple[str | None, float], Gloo]] = WeakKeyDictionary()
_use_counts: Counter[str] = Counter()

_stores: WeakKeyDictionary[Gloo, torch.distributed.Store] = WeakKeyDictionary()
"""Stores by group, in which ranks that give up waiting leave a mark, so that errors can name the absent ranks."""

_LOOK = 1.0  # seconds between two checks whether another rank has given up
_GRACE = 2.0  # seconds within which the other waiting ranks give up too


def is_initialised() -> bool:
    """Return whether torch.distributed has a default process group."""
    import torch.distributed as dist

    return dist.is_available() and dist.is_initialized()


def coordination_group(group: torch.distributed.ProcessGroup, timeout: float, purpose: str | None) -> Gloo:
    """Return a gloo group with the members of a process group.

    The first call for a purpose makes a gloo group, and so does a later call with a longer timeout than all before it.
    All members must make these calls. Every gloo group lives as long as `group`, since earlier worlds still use it.

    Args:
        group: Process group of the caller.
        timeout: Seconds after which the gloo group's calls give up; the result may have a longer timeout.
        purpose: Name of a use that needs separate gloo groups; None for the common use.

    Raises:
        WorldError: the gloo group can't be made.
    """
    # A group that uses gloo itself gets one too: gloo's timeout is that of the group, whatever a call asks for.
    groups = _groups.setdefault(group, {})
    long_enough = [gloo for (other, seconds), gloo in groups.items() if other == purpose and seconds >= timeout]
    if not long_enough:
        # A group with a shorter timeout stays, since earlier worlds still use it.
        long_enough = [groups.setdefault((purpose, timeout), _make(group, timeout, purpose))]
        atexit.unregister(_groups.clear)
        atexit.register(_groups.clear)
    return long_enough[0]


def member_of(group: torch.distributed.ProcessGroup | None) -> torch.distributed.ProcessGroup:
    """Return a process group, or the default one for None; raise if this process is not a member."""
    import torch.distributed as dist

    if not is_initialised():
        fix = "Call torch.distributed.init_process_group first, or pass world=one_process()."
        raise WorldError(error_text("torch.distributed has no default process group", fix=fix))
    group = dist.group.WORLD if group is None else group
    if not isinstance(group, dist.ProcessGroup) or dist.get_rank(group) < 0:
        raise WorldError(error_text(f"rank {dist.get_rank()} is not in the process group: only members may use it"))
    return group


def _make(group: torch.distributed.ProcessGroup, timeout: float, purpose: str | None) -> Gloo:
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _get_default_store

    # gloo's own class is used because every rank of the job must call `torch.distributed.new_group`, or, with
    # `use_local_synchronization`, the call hangs if ranks belong to different numbers of groups:
    # https://github.com/pytorch/pytorch/issues/173608
    ranks = dist.get_process_group_ranks(group)
    # The members make their groups in the same order, so their counters agree. The name contains the counter, since
    # keys that an earlier group left in the store would confuse a new group.
    name = f"shardtree/{purpose or ''}/{'_'.join(map(str, ranks))}"
    _use_counts[name] += 1
    store = dist.PrefixStore(f"{name}/{_use_counts[name]}", _get_default_store())
    heading = f"the {len(ranks)} ranks of a process group could not make a gloo group beside it"
    try:
        # torch 2.15's gloo aborts the process if the store keeps nothing, as that of the backend "fake".
        store.set(f"seen by {group.rank()}", "yes")
        if store.get(f"seen by {group.rank()}") != b"yes":
            raise RuntimeError("the group's store does not return what was set")
        gloo = dist.ProcessGroupGloo(store, group.rank(), group.size(), timedelta(seconds=timeout))
    except RuntimeError as error:
        found = f"{type(error).__name__}: {error}"
        fix = "Start the processes with torchrun, or pass world=one_process() for a process by itself."
        raise WorldError(error_text(heading, found=found, fix=fix)) from error
    _stores[gloo] = store
    return gloo


def wait_for_all(group: Gloo, work: torch.distributed.Work, timeout: float) -> None:
    """Wait until a collective is complete, or until another rank has stopped waiting.

    In gloo's rings, only the neighbours of a dead rank notice at once. Without this function, the other ranks would
    wait for the full timeout, and errors on the neighbours would name those waiting ranks as absent.

    Raises:
        RuntimeError: the collective failed or timed out, or another rank gave up.
    """
    end = time.monotonic() + timeout
    while not work.is_completed():
        left = end - time.monotonic()
        try:
            # A wait that times out doesn't affect a collective, whereas it would end a send or recv.
            work.wait(timedelta(seconds=min(_LOOK, max(left, 0.001))))
        except RuntimeError:
            if work.is_completed():
                break
            if left <= _LOOK:
                raise
            if _another_gave_up(group):
                raise RuntimeError("another rank gave up waiting") from None
    work.wait()  # raises the collective's error


def _another_gave_up(group: Gloo) -> bool:
    """Return whether another rank has given up a collective for which this rank still waits.

    Each rank counts the collectives that it has given up; the counts are compared.
    """
    store = _stores.get(group)
    return store is not None and store.check([f"gave up {store.add(f'gave up: {group.rank()}', 0) + 1} times"])


def absent_ranks(group: Gloo, peers: Iterable[int], timeout: float) -> list[int]:
    """Record that this rank gave up a collective, and return the absent peers: those that don't soon give up as well.

    A peer that waits in the same collective sees this record, and gives up within about `_GRACE` seconds. The result is
    empty if the records can't be read.
    """
    store = _stores.get(group)
    if store is None:
        return []
    try:
        times = store.add(f"gave up: {group.rank()}", 1)
        store.set(f"gave up {times} times", "yes")
        end, absent = time.monotonic() + min(_GRACE, timeout), sorted(peers)
        while True:
            # Only ranks that are still absent are checked again, since there may be thousands.
            absent = [rank for rank in absent if store.add(f"gave up: {rank}", 0) < times]
            if not absent or time.monotonic() > end:
                return absent
            time.sleep(0.05)
    except RuntimeError:  # the rank that hosts the store has ended
        return []
