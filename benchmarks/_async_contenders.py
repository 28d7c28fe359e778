"""Who saves asynchronously: shardtree, DCP by a thread and by a process, and Megatron-Core."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import shardtree as st

from ._contenders import distributed, row_tree
from ._work import Tensors, Work

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
    writing = queue._calls[0].written
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
    written = getattr(saving, "upload_completion", saving)
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
