"""How long an asynchronous save keeps its caller: ``python -m benchmarks.async_save --size 1GB``.

Beside one copy of the same bytes, and the asynchronous saves of DCP and Megatron-Core. Each save is committed before
the next one begins; what is blocked is the call, and what finalizing takes once all is written.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as processes
from rich.console import Console
from rich.table import Table
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import shardtree as st

from ._work import Work, work
from .roundtrip import _bytes

COPY, OURS, OURS_UNCOPIED = "one copy", "shardtree", "shardtree, snapshot=False"
MEGATRON, DCP_THREAD, DCP_PROCESS, DCP_STAGED = (
    "Megatron-Core",
    "DCP, thread",
    "DCP, process",
    "DCP, thread, own stager",
)

# Blocks the caller, and returns what waits for the end and commits; that one returns the seconds that it blocked.
Save = Callable[[Work, Path], Callable[[], float]]


def _copy(mine: Work, folder: Path) -> Callable[[], float]:
    for name, tensor in mine.rows.items():
        mine.targets[name].copy_(tensor)
    return lambda: 0.0


def _ours(mine: Work, folder: Path, *, queue: st.AsyncCallsQueue, snapshot: bool) -> Callable[[], float]:
    place = (0, mine.rank, mine.ranks)
    tree = {name: st.ShardedTensor.from_rank_offsets(name, tensor, place) for name, tensor in mine.rows.items()}
    queue.schedule_async_request(st.save(tree, folder, async_sharded_save=True, snapshot=snapshot, durable=False))

    def end() -> float:
        while not queue._calls[0].written.done():
            time.sleep(0.001)
        if mine.ranks > 1:
            dist.barrier()
        start = time.perf_counter()
        queue.maybe_finalize_async_calls(blocking=True)
        return time.perf_counter() - start

    return end


def _dcp(mine: Work, folder: Path, **options: Any) -> Callable[[], float]:
    state = dict(mine.rows) if mine.ranks == 1 else {f"{mine.rank}.{key}": value for key, value in mine.rows.items()}
    writer = dcp.FileSystemWriter(folder, sync_files=False)
    saving = dcp.async_save(state, storage_writer=writer, **options)

    def end() -> float:
        getattr(saving, "upload_completion", saving).result()
        return 0.0

    return end


def _megatron(mine: Work, folder: Path, *, queue: Any) -> Callable[[], float]:
    from megatron.core.dist_checkpointing import ShardedTensor, save

    place = (0, mine.rank, mine.ranks)
    tree = {name: ShardedTensor.from_rank_offsets(name, tensor, place) for name, tensor in mine.rows.items()}
    queue.schedule_async_request(save(tree, str(folder), async_sharded_save=True))

    def end() -> float:
        while queue.async_calls[0].async_caller.process.is_alive():
            time.sleep(0.001)
        start = time.perf_counter()
        queue.maybe_finalize_async_calls(blocking=True)
        return time.perf_counter() - start

    return end


def _without_a_device() -> None:
    """Let Megatron-Core's asynchronous save run on the CPU: what it asks of CUDA is about streams and one flag."""
    if not torch.cuda.is_available():
        torch.cuda.synchronize = lambda *_: None
        torch.cuda.current_device = lambda: "cpu"


def _everybody() -> dict[str, Save]:
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

    staged = StagingOptions(
        use_pinned_memory=False, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=False
    )
    queue = st.AsyncCallsQueue()
    return {
        COPY: _copy,
        OURS: partial(_ours, queue=queue, snapshot=True),
        OURS_UNCOPIED: partial(_ours, queue=queue, snapshot=False),
        DCP_THREAD: _dcp,
        DCP_STAGED: partial(_dcp, async_stager=DefaultStager(staged)),
        DCP_PROCESS: partial(_dcp, async_checkpointer_type=AsyncCheckpointerType.PROCESS),
        MEGATRON: partial(_megatron, queue=AsyncCallsQueue()),
    }


def _run(rank: int, ranks: int, folder: Path, options: argparse.Namespace, results: Any) -> None:
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=ranks)
    _without_a_device()
    mine = work(rank, ranks, folder, size=options.size, tensors=options.tensors)
    everybody = _everybody()
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in everybody}
    errors: dict[str, str] = {}
    for number in range(-1, options.rounds):
        for name in Random(number).sample(list(everybody), len(everybody)):
            if name not in errors:
                try:
                    taken = _timed(mine, everybody[name], folder / "files")
                except Exception as error:
                    errors[name] = f"{type(error).__name__}: {error}"[:100]
                else:
                    seconds[name] += [taken] * (number >= 0)
    if rank == 0:
        results.put((seconds, errors))
    dist.barrier()
    dist.destroy_process_group()


def _timed(mine: Work, save: Save, folder: Path) -> tuple[float, float]:
    """Return the seconds that this rank was blocked, and those until the save counted."""
    dist.barrier()
    if mine.rank == 0:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
    dist.barrier()
    start = time.perf_counter()
    end = save(mine, folder)
    blocked = time.perf_counter() - start
    blocked += end()
    return blocked, time.perf_counter() - start


def _print(ranks: int, seconds: dict[str, list[tuple[float, float]]], errors: dict[str, str], size: int) -> None:
    table = Table(title=f"{ranks} process{'es' * (ranks > 1)}, {size / 1e9:.3g} GB", title_justify="left")
    for heading in ("by", "seconds blocked", "shardtree / it", "seconds until committed"):
        table.add_column(heading, justify="left" if heading == "by" else "right")
    for name, taken in seconds.items():
        if name in errors:
            table.add_row(name, errors[name], "", "")
            continue
        ratio = median(own[0] / other[0] for own, other in zip(seconds[OURS], taken, strict=True))
        total = median(each[1] for each in taken)
        table.add_row(name, f"{median(each[0] for each in taken):.3f}", f"{ratio:.2f}", f"{total:.3f}")
    Console(width=None if sys.stdout.isatty() else 130).print(table)


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.async_save", description=__doc__)
    parser.add_argument("--size", type=_bytes, default=_bytes("1GB"), help="of all tensors together, such as 1GB")
    parser.add_argument("--tensors", type=int, default=50, help="how many there are")
    parser.add_argument("--rounds", type=int, default=5, help="that count; one more warms up")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2], help="one table for each number")
    parser.add_argument("--dir", type=Path, help="a folder on the storage to measure; the system's temporary one")
    options = parser.parse_args(arguments)
    for ranks in options.processes:
        with tempfile.TemporaryDirectory(dir=options.dir, prefix="shardtree-benchmark-") as folder:
            results = processes.get_context("spawn").SimpleQueue()
            processes.spawn(_run, (ranks, Path(folder), options, results), nprocs=ranks)
            _print(ranks, *results.get(), options.size)
    return 0


if __name__ == "__main__":
    sys.exit(main())
