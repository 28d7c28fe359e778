"""Processes started from here: values by rank, and failures that reach the caller instead of hanging."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from functools import partial
from multiprocessing import RawArray, get_context
from pathlib import Path
from typing import Any

import pytest
import torch

from shardtree.errors import NotACheckpoint, RemoteNotACheckpoint, WorldError
from shardtree.live import run_processes
from shardtree.shell.world import agree
from shardtree.world import World, current_world

pytestmark = pytest.mark.torchrun
ROOT = str(Path(__file__).parents[2])


class Unhappy(Exception):
    def __init__(self, one: int, two: int) -> None:  # so that it can't be rebuilt from its args
        super().__init__("unhappy")


def everything(world: World, counts: Any) -> tuple[int, int, list[float]]:
    assert current_world().size == world.size
    counts[world.rank] = world.rank + 1
    return world.rank, world.size, world.all_gather(torch.tensor(world.rank / 2)).copy()


def raises(world: World, what: type[BaseException] = ZeroDivisionError) -> None:
    if world.rank == 1:
        raise what(1, 2) if what is Unhappy else what("on purpose")
    world.barrier()


def dies(world: World) -> None:
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    world.barrier()


def hangs(world: World) -> None:
    if world.rank == 0:
        raise ValueError("on purpose")
    time.sleep(280)


def agrees_to_fail(world: World) -> None:
    def look() -> None:
        if world.rank == 1:
            raise NotACheckpoint("nothing there")

    agree(world, "look", look)


def starts_another(world: World) -> int | None:
    child = get_context("spawn").Process(target=int)
    child.start()
    child.join()
    return child.exitcode


@pytest.mark.slow
def test_a_rank_may_start_processes() -> None:
    """As checkpoints' writers and data loaders do."""
    assert run_processes(2, starts_another) == [0, 0]


SCRIPT = """
import sys
from shardtree.live import run_processes

def has_dynamo(world):
    return "torch._dynamo" in sys.modules

if __name__ == "__main__":
    if "dtensors" in sys.argv:
        import torch.distributed.fsdp
    print(run_processes(2, has_dynamo))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("argument", "expected"), [("dtensors", "[True, True]"), ("", "[False, False]")])
def test_ranks_have_what_takes_long_to_import_if_this_process_has(argument: str, expected: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, str(tmp_path / "script.py"), argument]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, "PYTHONPATH": ROOT})
    assert done.stdout.strip() == expected


def test_each_rank_returns_a_value() -> None:
    counts = RawArray("q", 3)
    results = run_processes(3, partial(everything, counts=counts))
    assert [result[:2] for result in results] == [(0, 3), (1, 3), (2, 3)]
    assert results[0][2] == [0.0, 0.5, 1.0]
    assert list(counts) == [1, 2, 3]


def test_what_a_rank_raises_is_raised_here_with_its_rank_and_traceback() -> None:
    with pytest.raises(ZeroDivisionError, match="on purpose") as caught:
        run_processes(2, raises)
    rank, trace = caught.value.__notes__
    assert rank == "on rank 1 of 2"
    assert "in raises" in trace


def test_an_error_that_cannot_be_rebuilt_is_told_in_words() -> None:
    with pytest.raises(WorldError, match="Unhappy: unhappy"):
        run_processes(2, partial(raises, what=Unhappy))


def test_a_phase_that_fails_is_one_error() -> None:
    with pytest.raises(NotACheckpoint, match="rank 1: NotACheckpoint: nothing there") as caught:
        run_processes(3, agrees_to_fail)
    assert type(caught.value) is RemoteNotACheckpoint


def test_a_rank_that_is_killed_is_the_error() -> None:
    with pytest.raises(WorldError, match=r"rank 1 ended without a result\n  found killed by SIGKILL"):
        run_processes(2, dies)


@pytest.mark.slow
def test_a_failure_does_not_wait_for_a_rank_that_hangs() -> None:
    began = time.monotonic()
    with pytest.raises(ValueError, match="on purpose"):
        run_processes(2, hangs)
    assert time.monotonic() - began < 200


def test_no_ranks_is_an_error() -> None:
    with pytest.raises(WorldError, match="too few ranks"):
        run_processes(0, raises)
