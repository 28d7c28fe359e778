"""A process is killed, or its request fails, at each request to a bucket in turn: old or new, whole, and cleaned up."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest

import shardtree as st
from shardtree.core import limits
from shardtree.shell.table._metadata import replace_metadata
from tests.faults.sampling import EXHAUSTIVE, sample, usually
from tests.s3 import jobs
from tests.s3.environment import at, s3
from tests.s3.server import Request, Server

pytest.importorskip("obstore")
pytest.importorskip("botocore")
pytestmark = pytest.mark.slow

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["shardtree.checkpoint", "tests.s3.jobs"])


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with pytest.MonkeyPatch.context() as patch, s3(patch) as running:
        patch.setattr(limits, "UPLOAD_PART_BYTES", jobs.PART_BYTES)
        yield running


def prepared(server: Server, job: str) -> dict[str, Any]:
    """Return the objects that a job finds."""
    server.reset()
    server.store.objects.clear()
    server.store.uploads.clear()
    if job == "remove":
        for step in (1, 2, 3):
            jobs.save_step(step)
    elif job in ("save over", "convert", "convert_hf"):
        jobs.save(1)
    elif job == "save_step":
        jobs.save_step(1)
    elif job == "remove_tensors":
        jobs.save_with_momentum(1, ("safetensors", 1), biases=300)
    elif job == "remove_zarr":
        jobs.save_with_momentum(1, ("zarr", 3), biases=2)
    return dict(server.store.objects)


def requests_of(server: Server, job: str) -> int:
    """Return how many requests a job makes where nothing goes wrong."""
    prepared(server, job)
    server.reset()
    jobs.JOBS[job.partition(" ")[0]](2)
    return len(server.log)


def state(job: str) -> object:
    """Return what is there: the values of whole checkpoints; raises if one is damaged."""
    if job.startswith("convert"):
        return jobs.value_of(at()), jobs.value_of(at("there"))
    if job in ("remove", "save_step"):
        series = st.CheckpointSeries(at("series"))
        return [(each.number, jobs.value_of(series.at(each))) for each in series.steps()]
    if job in ("remove_tensors", "remove_zarr"):
        return jobs.value_of(at()), jobs.momentum_of(at())
    return jobs.value_of(at())


MAY_BE: dict[str, list[object]] = {
    "save": [None, 2],
    "save over": [1, 2],
    "save_dist": [None, 2],
    "convert": [(1, None), (1, 1)],
    "convert_hf": [(1, None), (1, 1)],
    "remove": [[(1, 1), (2, 2), (3, 3)], [(2, 2), (3, 3)], [(1, 1), (3, 3)], [(3, 3)]],  # each step by itself
    "save_step": [[(1, 1)], [(1, 1), (2, 2)]],
    "remove_tensors": [(1, 1), (1, None)],
    "remove_zarr": [(1, 1), (1, None)],
}


def in_a_process(job: str) -> Any:
    process = CONTEXT.Process(target=jobs.run, args=(job.partition(" ")[0], 2, jobs.settings()))
    process.start()
    return process


def then_it_is_whole(server: Server, job: str) -> None:
    """Whatever happened, what is there is old or new; the job done again works, and leaves nothing else."""
    server.fault = lambda _: None
    assert state(job) in MAY_BE[job]
    if job in ("save", "save over", "remove_tensors"):
        jobs.save(3)
        assert jobs.value_of(at()) == 3
        folders = {name.split("/")[1] for name in server.store.objects}
        assert len(folders) == 2, sorted(server.store.objects)  # metadata.json, and the folder of the one save
    else:
        with suppress(st.errors.AlreadyACheckpoint):  # the commit had taken effect
            jobs.JOBS[job](2)
        assert state(job) == MAY_BE[job][-1]
    # Where a save was killed right after its commit and isn't replaced, its note stays: nothing minds it.
    notes = (".convert-",) if job in ("save_dist", "save_step") else (".convert-", "owner.json")
    assert not any(note in name for name in server.store.objects for note in notes)
    assert job != "convert_hf" or sum("/there/" in name for name in server.store.objects) == 1
    assert server.store.uploads == {}


REQUESTS = {
    "save": 24,
    "save over": 20,
    "save_dist": 40,
    "convert": 60,
    "convert_hf": 60,
    "remove": 26,
    "save_step": 36,
    "remove_tensors": 16,
    "remove_zarr": 16,
}
"""At least as many as a job makes: where it is done before, it isn't killed."""

CASES = [(job, number) for job, count in REQUESTS.items() for number in range(count)]
CHOSEN = sample(CASES, 10)
USUAL = [pytest.param(*case, marks=() if case in CHOSEN else EXHAUSTIVE) for case in CASES]


@pytest.mark.parametrize("done", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(("job", "number"), USUAL)
def test_a_process_killed_at_a_request_leaves_old_or_new(server: Server, job: str, number: int, done: bool) -> None:
    prepared(server, job)
    server.reset()
    killed: list[Any] = []

    def kill(request: Request) -> str | None:
        if request.number < number:
            return None
        if request.number == number:
            os.kill(killed[0].pid, signal.SIGKILL)
            return "done-cut" if done else "cut"
        return "cut"  # what was already on its way comes to nothing

    process = CONTEXT.Process(target=jobs.run, args=(job.partition(" ")[0], 2, jobs.settings()))
    server.fault = kill
    killed.append(process)
    process.start()
    process.join(60)
    assert process.exitcode in (0, -signal.SIGKILL), process.exitcode
    then_it_is_whole(server, job)


def test_the_kill_law_catches_a_save_that_removes_the_old_one_first(server: Server) -> None:
    prepared(server, "save over")
    server.reset()
    process = CONTEXT.Process(target=jobs.run, args=("remove_first", 2, jobs.settings()))

    def kill_when_it_writes(request: Request) -> str | None:
        if request.action == "PutObject":
            os.kill(process.pid or 0, signal.SIGKILL)
            return "cut"
        return None

    server.fault = kill_when_it_writes
    process.start()
    process.join(60)
    with pytest.raises((AssertionError, st.errors.CheckpointingException)):
        then_it_is_whole(server, "save over")


@pytest.mark.parametrize("fault", usually(["refuse", "cut", "done-cut", "done-500", "conflict", "expired", "late"], 3))
@pytest.mark.parametrize(
    "job", ["save over", *(pytest.param(job, marks=EXHAUSTIVE) for job in REQUESTS if job != "save over")]
)
def test_a_request_that_fails_leaves_old_or_new(server: Server, job: str, fault: str) -> None:
    for number in range(requests_of(server, job)):
        prepared(server, job)
        server.reset()
        server.fault = lambda request, number=number: fault if request.number == number else None
        with suppress(st.errors.CheckpointingException):
            jobs.JOBS[job.partition(" ")[0]](2)
        server.fault = lambda _: None
        # An upload that the server wouldn't give up is left to the next save.
        assert state(job) in MAY_BE[job], (number, state(job))
        server.apply_late()
        assert state(job) in MAY_BE[job], (number, state(job))
        if job in ("save", "save over", "remove_tensors"):
            jobs.save(3)
            server.apply_late()
            assert jobs.value_of(at()) == 3, number
            # An upload whose beginning arrives after everything else is for the bucket's lifecycle rule.
            assert fault == "late" or server.store.uploads == {}, number


def is_commit(request: Request) -> bool:
    return request.action == "PutObject" and request.key == "runs/metadata.json"


def commit(value: int, before: bytes | None) -> bool:
    """Return whether a commit of this number won."""
    try:
        replace_metadata(at("race"), before, {"sharded_backend": "safetensors", "value": value}, durable=True)
    except st.errors.CheckpointReplaced:
        return False
    return True


@pytest.mark.parametrize("rounds", [100, pytest.param(10_000, marks=EXHAUSTIVE)])
def test_of_two_commits_at_once_exactly_one_wins(server: Server, rounds: int) -> None:
    server.reset()
    server.store.objects.clear()
    with ThreadPoolExecutor(2) as threads:
        for number in range(rounds):
            before = server.store.objects.get("runs/race/metadata.json")
            old = None if before is None else bytes(before.data)
            won = list(threads.map(commit, (2 * number, 2 * number + 1), (old, old)))
            assert sorted(won) == [False, True], number
            winner = 2 * number + won.index(True)
            assert f'"value":{winner}}}'.encode() in bytes(server.store.objects["runs/race/metadata.json"].data)
            server.log.clear()


def test_the_law_of_one_winner_catches_a_store_without_conditions(server: Server) -> None:
    server.store.ignores_conditions = True
    try:
        prepared(server, "save")
        won = [commit(number, None) for number in range(2)]
    finally:
        server.store.ignores_conditions = False
    assert won == [True, True]


@pytest.mark.parametrize("rounds", [2, pytest.param(100, marks=EXHAUSTIVE)])
def test_of_two_processes_that_save_at_once_one_wins(server: Server, rounds: int) -> None:
    for _ in range(rounds):
        prepared(server, "save over")
        both = [in_a_process("save over") for _ in range(2)]
        for process in both:
            process.join(60)
        codes = sorted(process.exitcode for process in both)
        assert codes in ([0, 1], [0, 0]) and state("save") == 2, codes
        commits = [each for each in server.log if is_commit(each) and each.status == 200]
        assert len(commits) == 1 + codes.count(0)


@pytest.mark.parametrize("rounds", [6, pytest.param(1_000, marks=EXHAUSTIVE)])
def test_no_late_commit_is_without_its_files(server: Server, rounds: int) -> None:
    for number in range(rounds):
        prepared(server, "save" if number % 2 else "save over")
        server.fault = lambda request: (
            "late" if request.key == "runs/metadata.json" and request.action == "PutObject" else None
        )
        with pytest.raises(st.errors.OutcomeUnknown):
            jobs.save(2)
        server.fault = lambda _: None
        server.apply_late()
        assert state("save") == 2
