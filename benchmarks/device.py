"""Saves and loads of tensors on a GPU: ``python -m benchmarks.device``.

A snapshot and the call of an asynchronous save, beside one copy of the same bytes into pinned memory that is there;
steps of a trainer while a save is written, beside steps alone; a load to the device, beside the same file read by hand
through two pinned buffers; and, with two GPUs, a redistribution beside nccl's own all_to_all. Without a GPU nothing is
measured; ``--quick`` then rehearses everything on the CPU, and such figures mean nothing.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as processes

import shardtree as st
from shardtree.shell.storage._buffers import copies_by_device, plain_copies

from ._measuring import Bar, Settings, in_turns, print_bars, ratio, run

SIZE, TENSORS = 2_000_000_000, 50
QUICK_SIZE, QUICK_TENSORS = 2_000_000, 3
WINDOW = 32 * 1024 * 1024

COPY, SNAPSHOT, CALL = "one copy to pinned memory", "snapshot", "the call of an asynchronous save"
ALONE, SAVING = "steps alone", "steps while a save is written"
BY_HAND, LOAD = "file, pinned memory, device by hand", "load to the device"
ALL_TO_ALL, MOVED = "nccl's all_to_all_single", "redistribute"

MOST = {SNAPSHOT: 1 / 0.9, CALL: 1.1, SAVING: 1.05, LOAD: 1.1, MOVED: 1.1}
"""The most that each may take of what is beside it."""


def bars(settings: Settings) -> list[Bar]:
    """Measure on the first GPU, and on two where there are two; print a table, and return the bars."""
    if not torch.cuda.is_available() and not settings.quick:
        settings.console.print("device: no GPU here, nothing was measured")
        return []
    with _device() as device, tempfile.TemporaryDirectory(dir=settings.folder, prefix="shardtree-benchmark-") as folder:
        size, tensors = (QUICK_SIZE, QUICK_TENSORS) if settings.quick else (SIZE, TENSORS)
        rounds, tries = (1, 1) if settings.quick else (5, 2)
        tree = _tree(device, size, tensors)
        measured = partial(in_turns, rounds=rounds, tries=tries)
        made = [
            *_saves(tree, device, measured),
            *_steps(tree, device, Path(folder), rounds),
            *_loads(tree, device, Path(folder), measured),
        ]
    made += _moves(size, rounds, tries)
    print_bars(f"On {device}", made, settings.console)
    return made


@contextmanager
def _device() -> Iterator[torch.device]:
    """Yield the GPU; or, to rehearse, the CPU, whose tensors then go the ways of a device's."""
    if torch.cuda.is_available():
        yield torch.device("cuda", torch.cuda.current_device())
        return
    copies_by_device["cpu"] = plain_copies
    try:
        yield torch.device("cpu")
    finally:
        del copies_by_device["cpu"]


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _tree(device: torch.device, size: int, tensors: int) -> dict[str, st.ShardedTensor]:
    elements = size // tensors // 4
    named = ((f"layers.{n}", torch.rand(elements // 1000, 1000, device=device)) for n in range(tensors))
    return {key: st.ShardedTensor.from_rank_offsets(key, data) for key, data in named}


def _bar(seconds: dict[str, list[float]], ours: str, other: str) -> Bar:
    return Bar(ours, other, median(seconds[ours]), median(seconds[other]), ratio(seconds, ours, other), MOST[ours])


def _saves(tree: dict[str, st.ShardedTensor], device: torch.device, measured: Callable[..., Any]) -> list[Bar]:
    pinned = [torch.empty(s.data.shape, pin_memory=device.type == "cuda") for s in tree.values()]
    queue = st.AsyncCallsQueue()

    def copy() -> None:
        for target, shard in zip(pinned, tree.values(), strict=True):
            target.copy_(shard.data, non_blocking=True)
        _wait(device)

    def call() -> st.AsyncRequest[Any]:
        return st.save(tree, st.storage.MemoryStorage(), async_sharded_save=True)

    def drop(request: st.AsyncRequest[Any]) -> None:
        request.abandon()

    for action in (copy, partial(queue.warm_up, tree), lambda: drop(call())):
        action()
    # What a call returns is let go of outside of the timed part; an abandoned request doesn't warn.
    seconds = measured({COPY: copy, SNAPSHOT: partial(queue.warm_up, tree), CALL: lambda: _Dropped(call())})
    queue.close()
    return [_bar(seconds, SNAPSHOT, COPY), _bar(seconds, CALL, COPY)]


class _Dropped:
    """A request that is abandoned as soon as nobody has it."""

    def __init__(self, request: st.AsyncRequest[Any]) -> None:
        self.request = request

    def __del__(self) -> None:
        self.request.abandon()


def _steps(tree: dict[str, st.ShardedTensor], device: torch.device, folder: Path, rounds: int) -> list[Bar]:
    """Compare the time of a step beside a save in progress with that of a step alone, as medians of many steps."""
    side = 4096 if device.type == "cuda" else 64
    weight, queue = torch.rand(side, side, device=device), st.AsyncCallsQueue()

    def step() -> float:
        begin = time.perf_counter()
        for _ in range(10):
            torch.mm(weight, weight)
        _wait(device)
        return time.perf_counter() - begin

    seconds: dict[str, list[float]] = {ALONE: [], SAVING: []}
    for number in range(-1, rounds):
        alone = median(step() for _ in range(30))
        request = st.save(tree, folder / f"step{number}", async_sharded_save=True)
        queue.schedule_async_request(request)
        beside = [step()]
        while queue._calls and not queue._calls[0].writing.done():
            beside.append(step())
        queue.maybe_finalize_async_calls(blocking=True)
        if number >= 0:
            seconds[ALONE].append(alone)
            seconds[SAVING].append(median(beside))
    queue.close()
    return [_bar(seconds, SAVING, ALONE)]


def _loads(
    tree: dict[str, st.ShardedTensor], device: torch.device, folder: Path, measured: Callable[..., Any]
) -> list[Bar]:
    st.save(tree, folder / "saved", options=st.SaveOptions(durable=False))
    files = sorted(file for file in (folder / "saved").rglob("*.safetensors") if file.stat().st_size > WINDOW // 64)
    memory = torch.empty(sum(file.stat().st_size for file in files), dtype=torch.uint8, device=device)
    windows = [torch.empty(WINDOW, dtype=torch.uint8, pin_memory=device.type == "cuda") for _ in range(2)]

    def by_hand() -> None:
        at = 0
        for file in files:
            with file.open("rb", buffering=0) as opened:
                number, events = 0, list[Any]([None, None])
                while True:
                    if events[number] is not None:
                        events[number].synchronize()
                    got = opened.readinto(windows[number].numpy())
                    if not got:
                        break
                    memory[at : at + got].copy_(windows[number][:got], non_blocking=True)
                    if device.type == "cuda":
                        events[number] = torch.cuda.Event()
                        events[number].record()
                    at, number = at + got, 1 - number
        _wait(device)

    def load() -> Any:
        loaded = st.load(tree, folder / "saved", donate=True, options=st.LoadOptions(verify=None))
        _wait(device)
        return loaded

    by_hand()
    load()
    return [_bar(measured({BY_HAND: by_hand, LOAD: load}), LOAD, BY_HAND)]


def _moves(size: int, rounds: int, tries: int) -> list[Bar]:
    """Measure a redistribution between two GPUs from rows to columns."""
    if torch.cuda.device_count() < 2:
        return [Bar(MOVED, ALL_TO_ALL, float("nan"), None, float("nan"), MOST[MOVED], note="needs two GPUs")]
    with tempfile.TemporaryDirectory() as folder:
        results = processes.get_context("spawn").SimpleQueue()
        processes.spawn(_move, (folder, size, rounds, tries, results), nprocs=2)
        return [_bar(results.get(), MOVED, ALL_TO_ALL)]


def _move(rank: int, folder: str, size: int, rounds: int, tries: int, results: Any) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{folder}/group", rank=rank, world_size=2)
    side = int((size / 4) ** 0.5) // 2 * 2
    mine = torch.rand(side // 2, side, device="cuda")
    rows = {"w": st.ShardedTensor.from_rank_offsets("w", mine, (0, rank, 2))}
    columns = {"w": st.ShardedTensor.from_rank_offsets("w", torch.empty(side, side // 2, device="cuda"), (1, rank, 2))}
    received = torch.empty_like(mine)

    def all_to_all() -> None:
        dist.all_to_all_single(received, mine)
        torch.cuda.synchronize()

    def moved() -> None:
        st.redistribute(rows, columns, donate=True)
        torch.cuda.synchronize()

    all_to_all()
    moved()
    seconds = in_turns({ALL_TO_ALL: all_to_all, MOVED: moved}, rounds=rounds, tries=tries)
    if rank == 0:
        results.put(seconds)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(run(bars, None, "benchmarks.device", __doc__))
