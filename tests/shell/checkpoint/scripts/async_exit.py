"""Run by tests: schedules a save and ends the process in some way, as one process or under torchrun."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import shardtree as st
from tests.options import save_keywords

FOLDER, WHAT = Path(sys.argv[1]), sys.argv[2]
SLOW = 0.2  # seconds that each write takes
LARGE = 2**20 + 1  # elements


def request(value: float, name: str = "new", size: int = 1000, **options: Any) -> st.AsyncRequest[Any]:
    rank = dist.get_rank() if dist.is_initialized() else 0
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    tree = {"w": st.ShardedTensor.from_rank_offsets("w", torch.full((size,), value), (0, rank, ranks)), "step": value}
    made = st.save(tree, FOLDER / name, async_sharded_save=True, **save_keywords(**options))
    assert made is not None

    def slowly() -> Any:
        time.sleep(SLOW)
        return made.async_fn()

    return replace(made, async_fn=slowly)


def fail(size: int) -> None:
    raise OSError("no space left on device")


def schedule() -> None:
    for name in ("new", "newer"):
        st.async_calls.schedule_async_request(request(2.0, name))


def schedule_large() -> None:
    if WHAT == "large":
        torch.set_num_threads(2)  # so many would share the work, but at the end none is to be had
        st.async_calls.schedule_async_request(request(2.0, "large", LARGE))


def child() -> None:
    st.async_calls.schedule_async_request(request(2.0, "of the child"))


def hang() -> None:
    threading.Event().wait()


def one_process() -> None:
    if WHAT == "fail":
        st.async_calls.schedule_async_request(request(2.0, "failed", progress=fail))
    schedule_large()
    schedule()
    if WHAT == "exit 3":
        sys.exit(3)
    if WHAT == "raise":
        raise RuntimeError("the training diverged")
    if WHAT == "terminate":
        os.kill(os.getpid(), signal.SIGTERM)
    if WHAT == "leave":
        os._exit(0)
    if WHAT == "fork":
        pid = os.fork()
        if not pid:
            sys.exit(0)  # runs what is registered for the exit
        assert os.waitpid(pid, 0)[1] == 0 and not st.is_checkpoint(FOLDER / "new")
    if WHAT == "workers":
        process = multiprocessing.get_context("fork").Process(target=child)
        process.start()
        process.join()
        assert process.exitcode == 0 and st.is_checkpoint(FOLDER / "of the child")
    if WHAT == "hang":
        queue = st.AsyncCallsQueue(exit_timeout=1.0)
        st.async_calls.close()
        queue.schedule_async_request(replace(request(2.0, "hung"), async_fn=hang))


def two_ranks() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    options = {"progress": fail} if WHAT == "one fails" and rank == 1 else {}
    st.async_calls.exit_timeout = 20.0
    st.async_calls.schedule_async_request(request(2.0, "new", overwrite=True, **options))
    if WHAT == "killed" and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if WHAT == "destroyed":
        dist.destroy_process_group()


if "RANK" in os.environ:
    two_ranks()
else:
    one_process()
