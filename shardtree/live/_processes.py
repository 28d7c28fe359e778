"""Ranks as processes, connected by gloo: new ones on this machine, and those that a launcher has started."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection, forkserver, get_context, util
from typing import Any, TypeVar

from ..errors import WorldError, error_text
from ..shell.world import DEFAULT_TIMEOUT, World, distributed, one_process

T = TypeVar("T")

# `fully_shard` imports torch._dynamo at its first call.
_DTENSOR_MODULES = ("torch.distributed.tensor", "torch.distributed.fsdp", "torch._dynamo")
_GRACE = 5.0  # seconds in which the other ranks may end by themselves after a failure


@dataclass(frozen=True, slots=True)
class _RankEnd:
    """Outcome of a rank: its value, or its error and the text of the traceback."""

    value: Any = None
    error: BaseException | None = None
    trace: str = ""
    reported: bool = True  # False for a process that ended without a result


def run_processes(
    size: int,
    fn: Callable[[World], T],
    *,
    timeout: float = DEFAULT_TIMEOUT,
) -> list[T]:
    """Run fn in several processes on this machine, and return its results, by rank.

    Each process runs ``fn(world)`` with a gloo group as torch.distributed's default group. After a failure, the other
    processes have a few seconds to end; all have ended when this returns or raises. As with any multiprocessing, a
    script must call this under ``if __name__ == "__main__":``. Ranks are forked from a server that has imported torch,
    and also DTensors and FSDP2 if this process had imported them before its first call.

    Args:
        size: Number of processes.
        fn: Function called in each process with its world. It is pickled, so it must be a module's function, or a
            `functools.partial` of one.
        timeout: Seconds that a rank waits for the others.

    Raises:
        BaseException: The error of fn on the first rank that failed, with the rank and its traceback as notes.
        WorldError: A process ended without a result.

    Examples:
        >>> from operator import methodcaller
        >>> run_processes(2, methodcaller("all_gather", "here"))
        [['here', 'here'], ['here', 'here']]
    """
    if size < 1:
        raise WorldError(error_text("run_processes: too few ranks", found=size, expected="at least 1"))
    with _started_ranks(size, fn, timeout) as ends:
        outcomes = _outcomes(ends)
        for process, _ in ends:
            process.join(0 if len(outcomes) < size else _GRACE)
    # A process that ended without a result causes the other ranks' errors, so it is reported first.
    for rank, outcome in sorted(outcomes.items(), key=lambda item: item[1].reported):
        if outcome.error is not None:
            outcome.error.add_note(f"on rank {rank} of {size}")
            if outcome.trace:
                outcome.error.add_note(outcome.trace)
            raise outcome.error
    return [outcomes[rank].value for rank in range(size)]


@contextmanager
def _started_ranks(size: int, fn: Callable[[World], T], timeout: float) -> Iterator[list[tuple[Any, Any]]]:
    """Start a process for each rank, and yield (process, pipe for its result) pairs; at the end, kill all processes."""
    from torch.distributed import TCPStore

    # With port 0 the system chooses a free port, and this process keeps it open, so that no other program can take it.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    # A server process imports torch once, and each rank is forked from it, which takes a tenth of the time.
    context = get_context("forkserver")
    context.set_forkserver_preload([__package__, *_shared_imports()])
    _start_server()
    ends: list[tuple[Any, Any]] = []
    # At exit, the interpreter waits for processes that aren't daemons. Those that a thread has left hanging are killed
    # before that, since finalizers with a priority run first.
    kill = util.Finalize(None, _kill, args=(ends,), exitpriority=0)
    try:
        for rank in range(size):
            receiver, sender = context.Pipe(duplex=False)
            arguments = (rank, size, store.port, timeout, fn, sender)
            # Ranks aren't daemons, which can't start processes such as data loaders or writers of checkpoints.
            process = context.Process(target=_run_rank, args=arguments, name=f"rank {rank} of {size}")
            process.start()
            sender.close()
            ends.append((process, receiver))
        yield ends
    finally:
        kill()


def _kill(ends: Sequence[tuple[Any, Any]]) -> None:
    for process, receiver in ends:
        process.kill()  # does nothing if it has ended
        process.join()
        receiver.close()


def _shared_imports() -> tuple[str, ...]:
    """Return the names of slow modules that the fork server imports once for all ranks.

    They are the modules of DTensors if this process has imported them, otherwise none.
    """
    return _DTENSOR_MODULES if _DTENSOR_MODULES[0] in sys.modules else ()


def _start_server() -> None:
    """Start the server process that ranks are forked from."""
    # It inherits a blocked Ctrl-C: otherwise it would print a traceback of its imports.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _outcomes(ends: Sequence[tuple[Any, Any]]) -> Mapping[int, _RankEnd]:
    """Return the ranks' outcomes in the order in which they ended; ranks that hang after a failure are left out."""
    waiting = {receiver: rank for rank, (_, receiver) in enumerate(ends)}
    outcomes: dict[int, _RankEnd] = {}
    deadline: float | None = None
    while waiting and (deadline is None or time.monotonic() < deadline):
        for receiver in connection.wait(list(waiting), None if deadline is None else deadline - time.monotonic()):
            rank = waiting.pop(receiver)
            outcomes[rank] = _outcome(rank, *ends[rank])
            if outcomes[rank].error is not None:
                deadline = deadline or time.monotonic() + _GRACE
    return outcomes


def _outcome(rank: int, process: Any, receiver: Any) -> _RankEnd:
    try:
        outcome: _RankEnd = receiver.recv()
    except EOFError:
        process.join()
        code = process.exitcode
        found = f"exit status {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"
        error = WorldError(error_text(f"run_processes: rank {rank} ended without a result", found=found))
        return _RankEnd(error=error, reported=False)
    return outcome


def _run_rank(rank: int, size: int, port: int, timeout: float, fn: Callable[[World], T], sender: Any) -> None:
    """Run one rank in its own process, and report its outcome."""
    import torch.distributed as dist

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C reaches the parent too, which ends all ranks
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    sender.send_bytes(_packed_outcome(rank, size, port, timeout, fn))
    # The group is destroyed after reporting: peers fail once this rank's connections close, and its own error should
    # come first.
    if dist.is_initialized():
        dist.destroy_process_group()


def _packed_outcome(rank: int, size: int, port: int, timeout: float, fn: Callable[[World], T]) -> bytes:
    import torch.distributed as dist
    from torch.distributed import TCPStore

    patience = timedelta(seconds=timeout)
    try:
        store = TCPStore("127.0.0.1", port, timeout=patience)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=patience)
        return pickle.dumps(_RankEnd(fn(distributed(timeout=timeout))))
    except BaseException as error:
        return _packed_error(error)


def _packed_error(error: BaseException) -> bytes:
    trace = "".join(traceback.format_exception(error)).rstrip()
    try:
        data = pickle.dumps(_RankEnd(error=error, trace=trace))
        pickle.loads(data)  # some exceptions can be pickled but not unpickled
    except Exception:
        substitute = WorldError(f"{type(error).__name__}: {error}")
        data = pickle.dumps(_RankEnd(error=substitute, trace=trace))
    return data


# The ranks of a program that a launcher such as torchrun has started.


def launched_rank() -> int:
    """Return this process's rank from the launcher's environment variables; 0 if the process is alone."""
    return int(os.environ["RANK"]) if _is_one_of_several() else 0


@contextmanager
def launched_world(timeout: float) -> Iterator[World]:
    """Yield the world of the processes that a launcher has started, or of this process alone without a launcher.

    Several processes have a gloo group, which is torch.distributed's default group until the context ends.

    Args:
        timeout: Seconds after which a silent peer counts as dead.

    Raises:
        WorldError: The processes can't connect to each other.

    Examples:
        >>> with launched_world(600.0) as world:
        ...     world.size
        1
    """
    if not _is_one_of_several():
        yield one_process()
        return
    import torch.distributed as dist

    try:
        dist.init_process_group("gloo", timeout=timedelta(seconds=timeout))
    except (RuntimeError, ValueError) as error:
        heading = f"WORLD_SIZE is {os.environ['WORLD_SIZE']}, and the processes cannot connect"
        fix = "Start them with torchrun, or unset WORLD_SIZE and RANK for a process by itself."
        raise WorldError(error_text(heading, found=f"{type(error).__name__}: {error}", fix=fix)) from error
    try:
        yield distributed(timeout=timeout)
    finally:
        dist.destroy_process_group()


def _is_one_of_several() -> bool:
    # Both variables are needed, since some platforms set the size alone.
    return int(os.environ.get("WORLD_SIZE") or 1) > 1 and bool(os.environ.get("RANK"))
