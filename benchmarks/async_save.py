"""How long an asynchronous save keeps its caller: ``python -m benchmarks.async_save``.

Beside one copy of the same bytes into warm memory, made right before by torch's threads and by one, whichever is
faster, and the asynchronous saves of DCP and Megatron-Core. Everybody waits for the medium (Megatron-Core always does),
and commits each save before the next one begins. Two things block: the call, and what the caller does to commit once
all is written. A step that changes every tensor in place comes right after the call: where a fork writes, the system
copies each page then.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from random import Random
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as processes
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import shardtree as st

from ._contenders import Tensors, Work, distributed, row_tree, work
from ._measuring import Bar, Settings, print_bars, run

OURS, OURS_UNCOPIED = "shardtree", "shardtree, snapshot=False"
DCP_THREAD, DCP_THREAD_STAGED = "DCP, thread", "DCP, thread, kept stager"
DCP_PROCESS, DCP_PROCESS_STAGED = "DCP, process", "DCP, process, kept stager"
MEGATRON = "Megatron-Core"

LONGEST_WAIT = 120.0
"""Seconds after which a save in the background counts as stuck."""

# Blocks the caller. Returns what waits until all is written, and what the caller has to do then.
Save = Callable[[Work, Path], tuple[Callable[[], object], Callable[[], object]]]

Rows = Callable[[Work], Any]
"""Gives what a rank saves, in a library's own kind of tree."""


def everybody(only: Sequence[str] = ()) -> dict[str, Save]:
    """Return who takes part by name: all, or those that are named."""
    # Trees are made once, before anything is timed.
    rows, dtensors = cache(row_tree), cache(_dtensors)
    ours = partial(_ours, rows=rows, queue=st.AsyncCallsQueue())
    thread = partial(_dcp, rows=dtensors)
    process = partial(thread, async_checkpointer_type=AsyncCheckpointerType.PROCESS)
    named: dict[str, Save] = {
        OURS: partial(ours, snapshot=True),
        OURS_UNCOPIED: partial(ours, snapshot=False),
        DCP_THREAD: thread,
        DCP_THREAD_STAGED: partial(thread, async_stager=_stager(shared=False)),
        DCP_PROCESS: process,
        DCP_PROCESS_STAGED: partial(process, async_stager=_stager(shared=True)),
        MEGATRON: partial(_megatron, rows=cache(_megatron_tree), memo={}),
    }
    return {name: save for name, save in named.items() if not only or name in only}


def _nothing() -> None:
    pass


def copy(mine: Work) -> None:
    """Copy a rank's tensors into memory that was written before, by torch's own threads."""
    for name, tensor in mine.rows.items():
        mine.targets[name].copy_(tensor)


def memcpy(mine: Work) -> None:
    """Copy them by one thread, which is faster where a core is busy: torch's threads wait for each other."""
    for name, tensor in mine.rows.items():
        np.copyto(mine.targets[name].view(torch.uint8).numpy(), tensor.view(torch.uint8).numpy())


def _ours(
    mine: Work, folder: Path, *, rows: Rows, queue: st.AsyncCallsQueue, snapshot: bool
) -> tuple[Callable[[], object], Callable[[], object]]:
    request = st.save(rows(mine), folder, async_sharded_save=True, options=st.SaveOptions(snapshot=snapshot))
    assert request is not None
    queue.schedule_async_request(request)
    writing = queue._calls[0].writing
    return partial(_wait, writing.done), partial(queue.maybe_finalize_async_calls, blocking=True)


def _stager(*, shared: bool) -> DefaultStager:
    """Return DCP's stager that keeps its memory between saves; what is left out needs a CUDA device."""
    cuda = torch.cuda.is_available()
    return DefaultStager(
        StagingOptions(
            use_pinned_memory=cuda, use_shared_memory=shared, use_async_staging=False, use_non_blocking_copy=cuda
        )
    )


def _dtensors(mine: Work) -> Tensors:
    return distributed(mine, mine.rows, 0)


def _dcp(mine: Work, folder: Path, *, rows: Rows, **options: Any) -> tuple[Callable[[], object], Callable[[], object]]:
    saving = dcp.async_save(rows(mine), storage_writer=dcp.FileSystemWriter(folder, sync_files=True), **options)
    written: Any = getattr(saving, "upload_completion", saving)
    # A thread commits too.
    return partial(written.result, timeout=LONGEST_WAIT), _nothing


def _megatron_tree(mine: Work) -> dict[str, Any]:
    from megatron.core.dist_checkpointing import ShardedTensor

    place = (0, mine.rank, mine.ranks)
    return {name: ShardedTensor.from_rank_offsets(name, tensor, place) for name, tensor in mine.rows.items()}


def _megatron(
    mine: Work, folder: Path, *, rows: Rows, memo: dict[str, Any]
) -> tuple[Callable[[], object], Callable[[], object]]:
    import psutil  # noqa: F401, what writes fails without, in a process that nobody hears
    from megatron.core.dist_checkpointing import save
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

    _without_a_device()
    queue = memo.setdefault("queue", AsyncCallsQueue())
    queue.schedule_async_request(save(rows(mine), str(folder), async_sharded_save=True))
    process = queue.async_calls[0].async_caller.process

    def wait() -> None:
        try:
            _wait(lambda: process is None or not process.is_alive())
        except TimeoutError:
            process.kill()
            raise

    return wait, partial(queue.maybe_finalize_async_calls, blocking=True)


def _without_a_device() -> None:
    """Let Megatron-Core's asynchronous save run on the CPU: what it asks of CUDA is about streams and one flag."""
    if not torch.cuda.is_available():
        torch.cuda.synchronize = lambda *_: None
        torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]


def _wait(is_done: Callable[[], bool]) -> None:
    end = time.monotonic() + LONGEST_WAIT
    while not is_done():
        if time.monotonic() > end:
            raise TimeoutError(f"not written after {LONGEST_WAIT:g} seconds")
        time.sleep(0.001)


COPY = "one copy"

MOST_COPIES = 1.2
"""The most that the call may take of a copy's time."""


class Job(NamedTuple):
    """What is measured: bytes of all tensors together, tensors, rounds, tries in a row in each, and of whom."""

    size: int
    tensors: int
    rounds: int
    tries: int
    only: tuple[str, ...]


FULL = Job(500_000_000, 50, 5, 2, ())
QUICK = Job(2_000_000, 3, 1, 1, (OURS, OURS_UNCOPIED, DCP_THREAD_STAGED))


class Taken(NamedTuple):
    """What one save took, in seconds: a copy right before, the call, the step after it, the commit, and all of it."""

    copy: float
    call: float
    step: float
    commit: float
    total: float


class Measured(NamedTuple):
    """What was measured of everybody, a value for each round, and why some couldn't be measured."""

    seconds: dict[str, list[Taken]]
    errors: dict[str, str]


def bars(settings: Settings) -> list[Bar]:
    """Measure asynchronous saves in one process and in two, print a table for each, and return the bars."""
    made: list[Bar] = []
    for ranks in (1,) if settings.quick else (1, 2):
        found = _in_processes(ranks, settings.folder, QUICK if settings.quick else FULL)
        made += (drawn := bars_of(found, ranks))
        print_bars(f"Asynchronous saves, {_processes(ranks)}; everybody waits for the medium", drawn, settings.console)
    return made


def _in_processes(ranks: int, folder: Path | None, job: Job) -> Measured:
    with tempfile.TemporaryDirectory(dir=folder, prefix="shardtree-benchmark-") as place:
        results = processes.get_context("spawn").SimpleQueue()
        processes.spawn(_run, (ranks, Path(place), job, results), nprocs=ranks)
        return Measured(*results.get())


def _run(rank: int, ranks: int, folder: Path, job: Job, results: Any) -> None:
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=ranks)
    torch.set_num_threads(max(1, torch.get_num_threads() // ranks))
    mine = work(rank, ranks, folder, size=job.size, tensors=job.tensors)
    found = measured(mine, everybody(job.only), job)
    if rank == 0:
        results.put(tuple(found))
    dist.barrier()
    dist.destroy_process_group()


def measured(mine: Work, contenders: dict[str, Save], job: Job) -> Measured:
    """Have everybody save in each round, in another order; what comes before warms up, and is read again."""
    found = Measured({name: [] for name in contenders}, {})
    for number in range(-1, job.rounds):
        for name in Random(number).sample(list(contenders), len(contenders)):
            tries = [] if name in found.errors else [_tried(mine, contenders[name], name, number < 0)]
            while tries and not tries[-1][1] and number >= 0 and len(tries) < job.tries:
                tries.append(_tried(mine, contenders[name], name, False))
            if tries and tries[-1][1]:
                found.errors[name] = tries[-1][1]
            elif tries and number >= 0:
                found.seconds[name].append(Taken(*map(min, zip(*(taken for taken, _ in tries), strict=True))))
    return found


def _tried(mine: Work, save: Save, name: str, checks: bool) -> tuple[Taken, str]:
    """Return what a save took of the slowest rank, and what the first rank says where it failed."""
    taken, error = Taken(0, 0, 0, 0, 0), ""
    try:
        taken = _timed(mine, save, mine.folder / "files", changes=name != OURS_UNCOPIED)
        if checks:
            _check(mine, mine.folder / "files", changed=name != OURS_UNCOPIED)
    except Exception as failure:
        error = f"{type(failure).__name__}: {failure}"[:100]
    told: list[tuple[Taken, str]] = [(taken, error)] * mine.ranks
    dist.all_gather_object(told, (taken, error))
    return Taken(*map(max, zip(*(each for each, _ in told), strict=True))), next((why for _, why in told if why), "")


def _timed(mine: Work, save: Save, folder: Path, *, changes: bool) -> Taken:
    _meet()
    if mine.rank == 0:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
    copy(mine)  # so that all of it was touched lately
    copied = min(_seconds(partial(way, mine)) for way in (copy, memcpy))
    _meet()
    start = time.perf_counter()
    wait, commit = save(mine, folder)
    called = time.perf_counter()
    stepped = _seconds(lambda: [tensor.neg_() for tensor in mine.rows.values()] if changes else None)
    wait()
    committed = _seconds(commit)
    return Taken(copied, called - start, stepped, committed, time.perf_counter() - start)


def _seconds(do: Callable[[], object]) -> float:
    _meet()
    start = time.perf_counter()
    do()
    return time.perf_counter() - start


@cache
def _own_group() -> dist.ProcessGroup:
    """Return a group that no save in the background talks in meanwhile, as DCP's thread does in the default one."""
    group: dist.ProcessGroup = dist.new_group()
    return group


def _meet() -> None:
    dist.barrier(group=_own_group())


def _check(mine: Work, folder: Path, *, changed: bool) -> None:
    """Raise unless what was saved is what the tensors were at the call."""
    _meet()
    stored = st.load_plain_tensors(folder)
    for name, tensor in mine.rows.items():
        rows = stored[name][mine.rank * len(tensor) :][: len(tensor)]
        if not torch.equal(rows, -tensor if changed else tensor):
            raise ValueError(f"{name!r} isn't what was saved")


def bars_of(found: Measured, ranks: int) -> list[Bar]:
    """Return our call beside a copy and beside every other one's, and what else of a save the caller notices."""
    ours = found.seconds[OURS]
    call = f"async save, {_processes(ranks)}: the call"
    if OURS in found.errors:
        return [Bar(call, COPY, float("nan"), None, float("nan"), MOST_COPIES, note=found.errors[OURS])]
    made = [_bar(call, COPY, [each.call for each in ours], [each.copy for each in ours], MOST_COPIES)]
    peers = {name: taken for name, taken in found.seconds.items() if name != OURS}
    for name, taken in peers.items():
        note = found.errors.get(name) or f"{median(each.call / each.copy for each in taken):.2f} of a copy"
        most = None if name == OURS_UNCOPIED else 1.0
        made.append(_bar(call, name, [each.call for each in ours], [each.call for each in taken], most, note))
    for what, seconds in _TOLD.items():
        for name, taken in peers.items():
            if taken and not (name == OURS_UNCOPIED and what in (_STEP, _BLOCKED)):
                mine, its = list(map(seconds, ours)), list(map(seconds, taken))
                most = 1.0 if what == _BLOCKED else None
                made.append(_bar(f"async save, {_processes(ranks)}: {what}", name, mine, its, most))
    return made


_STEP = "the step after it"

_BLOCKED = "call and step"
"""What blocks in all where a fork leaves the copy to the step."""

_TOLD: dict[str, Callable[[Taken], float]] = {
    _STEP: lambda taken: taken.step,
    _BLOCKED: lambda taken: taken.call + taken.step,
    "call and commit": lambda taken: taken.call + taken.commit,
    "until committed": lambda taken: taken.total,
}


def _bar(
    operation: str, beside: str, ours: Sequence[float], other: Sequence[float], most: float | None, note: str = ""
) -> Bar:
    if not other:
        return Bar(operation, beside, median(ours), None, float("nan"), most, note=note)
    figure = median(one / its if its else float("nan") for one, its in zip(ours, other, strict=True))
    return Bar(operation, beside, median(ours), median(other), figure, most, note=note)


def _processes(ranks: int) -> str:
    return f"{ranks} process{'es' * (ranks > 1)}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark by its command."""
    return run(bars, arguments, "benchmarks.async_save", __doc__)


if __name__ == "__main__":
    sys.exit(main())
