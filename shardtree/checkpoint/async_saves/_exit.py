"""The end of the process: saves on their way are committed before it, or it fails and says which are not."""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.util import Finalize
from queue import Empty, SimpleQueue
from threading import Lock, Thread

from ._call import Call, Calls
from ._finalize import finalize_all

STATUS = 1
"""The exit status of a process that could not commit a save."""

_AFTER_A_FAILURE = 60.0  # seconds that a rank waits for others at its end, when an exception ended it


@dataclass(slots=True, eq=False)
class _Process:
    """What one process has on its way; a fork of it has nothing of its own.

    Attributes:
        pid: whose it is.
        queues: each queue's calls and the seconds to wait for them at exit, in the order of their first call.
        limits: what the guard hears: seconds from now, or that there is no limit any more.
    """

    pid: int = field(default_factory=os.getpid)
    queues: list[tuple[Calls, float]] = field(default_factory=list)
    limits: SimpleQueue[float | None] = field(default_factory=SimpleQueue)


_process: _Process | None = None
_changing = Lock()  # simulated ranks are threads


def watch(calls: Calls, timeout: float) -> None:
    """See to it that a queue's calls are committed before the process ends, or that it ends with an error.

    Args:
        calls: looked at again at the end.
        timeout: seconds that they may take then.
    """
    with _changing:
        own = _own() or _begin()
        others = [(kept, limit) for kept, limit in own.queues if kept and kept is not calls]
        own.queues = [*others, (calls, timeout)]
        # What was registered last runs first: while the process groups are there that others take down.
        atexit.unregister(_at_exit)
        atexit.register(_at_exit)


def on_their_way() -> Iterator[Call]:
    """Yield every call of this process that isn't committed."""
    own = _own()
    for calls, _ in own.queues if own else ():
        yield from tuple(calls)


def _own() -> _Process | None:
    return _process if _process is not None and _process.pid == os.getpid() else None


def _begin() -> _Process:
    global _process
    _process = _Process()
    # Started now: no thread can be at the end.
    Thread(target=_guard, args=(_process,), name="shardtree: exit", daemon=True).start()
    if multiprocessing.parent_process() is not None:
        # A forked child of multiprocessing's leaves without what is registered with atexit.
        Finalize(None, _at_exit, exitpriority=1000)
    return _process


def _guard(own: _Process) -> None:
    """End the process once a limit has passed."""
    limit = own.limits.get()
    while limit is not None:
        try:
            limit = own.limits.get(timeout=limit)
        except Empty:
            _fail(own, [f"not done in {limit:g} seconds"])


def _at_exit() -> None:
    own = _own()
    if own is None or not any(calls for calls, _ in own.queues):
        return
    own.limits.put(max(limit for calls, limit in own.queues if calls))
    failures: list[str] = []
    try:
        _wait_for_writing(own)
        for calls, _ in own.queues:
            failures += map(_text, finalize_all(calls))
    except BaseException as error:  # a second Ctrl-C, say
        failures.append(_text(error))
    if failures:
        _fail(own, failures)
    own.limits.put(None)


def _wait_for_writing(own: _Process) -> None:
    """Wait for this process's own part; whoever fails alone doesn't wait as long for others that may not come."""
    for calls, _ in own.queues:
        for call in tuple(calls):
            call.written.exception()
    if _is_failing():
        own.limits.put(_AFTER_A_FAILURE)


def _is_failing() -> bool:
    return getattr(sys, "last_value", None) is not None


def _text(error: BaseException) -> str:
    return "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])


def _fail(own: _Process, reasons: list[str]) -> None:
    """End the process here, with an error status: at exit, to raise would change nothing."""
    lost = [str(call) for calls, _ in own.queues for call in calls]
    lines = ["shardtree: the process ends with saves that were not committed", *reasons, *lost]
    sys.stderr.write("\n  ".join("\n".join(lines).split("\n")) + "\n")
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(STATUS)
