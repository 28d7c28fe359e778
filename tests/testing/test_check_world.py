"""`check_world`: our worlds and one of queues keep their promises, and each of many planted faults is named."""

from __future__ import annotations

import queue
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from shardtree.errors import UnsupportedValue, WorldError
from shardtree.live import run_processes
from shardtree.shell.world import pack, unpack
from shardtree.testing import check_world
from shardtree.world import World, simulate

Queues = dict[tuple[int, int], Any]


class QueueWorld(World):
    """A world of threads that has nothing of ours but the class: a queue for each pair of ranks."""

    patience = 5.0  # seconds; short only where a rank waits in vain

    def __init__(self, rank: int, size: int, queues: Queues) -> None:
        super().__init__(rank, size, timeout=self.patience)
        self.queues = queues

    @property
    def others(self) -> list[int]:
        return [peer for peer in range(self.size) if peer != self.rank]

    def send(self, value: Any, to: int) -> None:
        self.queues[self.rank, to].put(pack("send", value))

    def recv(self, source: int) -> Any:
        try:
            return unpack("recv", self.queues[source, self.rank].get(timeout=self.timeout))
        except queue.Empty as error:
            raise WorldError(f"rank {source} sends nothing") from error

    def all_to_all(self, values: Any) -> list[Any]:
        packed = [pack("all_to_all", value) for value in values]  # all of them before any is sent
        for peer in self.others:
            self.send(packed[peer], peer)
        return [
            values[rank] if rank == self.rank else unpack("all_to_all", self.recv(rank)) for rank in range(self.size)
        ]

    def all_gather(self, value: Any) -> list[Any]:
        return self.all_to_all([value] * self.size)

    def broadcast(self, value: Any, root: int = 0) -> Any:
        if self.rank != root:
            return self.recv(root)
        for peer in self.others:
            self.send(value, peer)
        return value

    def barrier(self) -> None:
        self.all_gather(None)


def run_threads(kind: Callable[[int, int, Queues], World], size: int, function: Callable[[World], Any]) -> None:
    queues: Queues = defaultdict(queue.Queue)
    errors: dict[int, BaseException] = {}

    def one(rank: int) -> None:
        try:
            function(kind(rank, size, queues))
        except BaseException as error:
            errors[rank] = error

    threads = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for rank in sorted(errors):
        raise errors[rank]


@pytest.mark.parametrize("size", [2, 3, 5])
def test_worlds_keep_their_promises(size: int) -> None:
    check_world(lambda function: simulate(size, function), hears_of_the_dead=True)
    check_world(partial(run_threads, QueueWorld, size), hears_of_the_dead=True)


def test_ranks_that_each_call_it_are_held_to_the_same() -> None:
    simulate(3, lambda world: check_world(lambda function: function(world)))


@pytest.mark.slow
@pytest.mark.torchrun
def test_so_do_processes_of_torch_distributed() -> None:
    check_world(partial(run_processes, 3), hears_of_the_dead=True)


# The planted faults.


class ByArrival(QueueWorld):
    def all_gather(self, value: Any) -> list[Any]:
        values = super().all_gather(value)
        return [values[self.rank], *(other for rank, other in enumerate(values) if rank != self.rank)]


class OneRoundBehind(QueueWorld):
    def all_gather(self, value: Any) -> list[Any]:
        before, self.before = getattr(self, "before", None), super().all_gather(value)
        return before if before is not None and isinstance(value, tuple) and value[0] == 7 else self.before


class EveryoneIsMe(QueueWorld):
    def all_gather(self, value: Any) -> list[Any]:
        values = super().all_gather(value)
        return [value] * self.size if type(value).__name__ == "_Outcome" else values


class ByReference(QueueWorld):
    def send(self, value: Any, to: int) -> None:
        self.queues[self.rank, to].put(value)

    def recv(self, source: int) -> Any:
        return self.queues[source, self.rank].get(timeout=self.timeout)


class TensorsByReference(QueueWorld):
    def all_gather(self, value: Any) -> list[Any]:
        if not isinstance(value, torch.Tensor):
            return super().all_gather(value)
        for peer in self.others:
            self.queues[self.rank, peer].put(value)
        get = [self.queues[rank, self.rank].get if rank != self.rank else (lambda: value) for rank in range(self.size)]
        return [one() for one in get]


class Hasty(QueueWorld):
    def barrier(self) -> None:
        pass


class LeavesTheLast(QueueWorld):
    def barrier(self) -> None:
        """Wait until the ranks before the last are there."""
        if self.rank == self.size - 1:
            return
        for peer in self.others[: self.size - 2]:
            self.send(None, peer)
        for peer in self.others[: self.size - 2]:
            self.recv(peer)


class LosesErrors(QueueWorld):
    def all_to_all(self, values: Any) -> list[Any]:
        try:
            return super().all_to_all(values)
        except UnsupportedValue:
            return super().all_to_all([None] * self.size)


class SendsHalf(QueueWorld):
    def all_to_all(self, values: Any) -> list[Any]:
        for peer in self.others:
            try:
                self.send(pack("all_to_all", values[peer]), peer)
            except UnsupportedValue:
                self.send(pack("all_to_all", "half"), peer)
                raise
        return [values[rank] if rank == self.rank else unpack("", self.recv(rank)) for rank in range(self.size)]


class FromZero(QueueWorld):
    def broadcast(self, value: Any, root: int = 0) -> Any:
        return self.all_gather(value if self.rank == root else ("from", 9))[0]


class PacksAll(QueueWorld):
    patience = 0.5

    def broadcast(self, value: Any, root: int = 0) -> Any:
        return self.all_gather(value)[root]


class Transposed(QueueWorld):
    def all_to_all(self, values: Any) -> list[Any]:
        rows = self.all_gather(list(values))
        return [rows[rank][rank] for rank in range(self.size)]

    def all_gather(self, value: Any) -> list[Any]:
        return QueueWorld.all_to_all(self, [value] * self.size)


class LastInFirstOut(QueueWorld):
    def __init__(self, rank: int, size: int, queues: Queues) -> None:
        super().__init__(rank, size, queues)
        queues.default_factory = queue.LifoQueue  # type: ignore[attr-defined]


class Brief(QueueWorld):
    def gather(self, value: Any, brief: Any, root: int = 0) -> list[Any]:
        return self.all_gather(brief)


class Rolled(QueueWorld):
    def exchange(self, outgoing: Any, incoming: Any) -> None:
        super().exchange({to: data.roll(1) for to, data in outgoing.items()}, incoming)


class ReadsLater(QueueWorld):
    def exchange(self, outgoing: Any, incoming: Any) -> None:
        for to, data in outgoing.items():
            self.queues[self.rank, to].put(data)
        rooms = [(room, self.queues[source, self.rank].get(timeout=self.timeout)) for source, room in incoming.items()]
        time.sleep(0.02 * (self.rank == 0))
        for room, data in rooms:
            room.copy_(data)


class AllAreZero(QueueWorld):
    def __init__(self, rank: int, size: int, queues: Queues) -> None:
        super().__init__(rank, size, queues)
        self.all_gather = lambda value: QueueWorld.all_gather(self, (0, size) if value == (rank, size) else value)  # type: ignore[method-assign]


FAULTS = {
    # A rank that finds the fault ends, and the others may report first that they hear nothing from it.
    ByArrival: r"`all_gather` returns the values of all ranks, by rank: (.* in round 0|.* sends nothing)",
    OneRoundBehind: r"`all_gather` returns the values of all ranks, by rank: .* in round 7",
    EveryoneIsMe: r"A failure on one rank is an error on every rank.*: rank 0 hears .*rank 2: ValueError: planted on",
    ByReference: r"Values of other ranks are copies.*: another rank changed what rank 0 passed to .*send",
    TensorsByReference: r"Values of other ranks are copies.*: another rank changed a tensor of rank",
    Hasty: r"`barrier` returns only after every rank has called it: rank . leaves 0\.\d+ seconds before rank . comes",
    LeavesTheLast: r"`barrier` returns only after every rank has called it: rank 2 leaves 0\.\d+ seconds before",
    LosesErrors: r"A rank that passes a value that cannot be sent.*: all_gather and all_to_all of a lock raise",
    SendsHalf: r"A rank that passes a value that cannot be sent gets an error.*: the call after it returns .*half",
    FromZero: r"`broadcast` returns the root's value, whatever other ranks pass: .*9",
    PacksAll: r"`broadcast` returns the root's value, whatever other ranks pass: WorldError: rank 1 sends nothing",
    Transposed: r"`all_to_all` gives each rank the value that every other rank has for it: .* in round 0",
    LastInFirstOut: r"`recv` returns what `send` sent, in the order in which it was sent: .* was sent",
    Brief: r"`all_gather` returns the values of all ranks, by rank: gather returns .*brief",
    Rolled: r"`exchange` fills each buffer.*: rank 0 has other bytes than rank 1 sent",
    ReadsLater: r"`exchange` fills each buffer.*: rank 0 has other bytes than rank . sent",
    AllAreZero: r"Ranks are numbered from 0: rank and size are ",
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", FAULTS)
def test_a_planted_fault_is_named(kind: type[QueueWorld]) -> None:
    with pytest.raises(AssertionError, match=f"(?s)check_world: a world breaks these promises.*{FAULTS[kind]}"):
        check_world(partial(run_threads, kind, 3), hangs_after=20)


class Patient(QueueWorld):
    def recv(self, source: int) -> Any:
        return unpack("recv", self.queues[source, self.rank].get())


class GoesOnAlone(QueueWorld):
    patience = 1.0

    def barrier(self) -> None:
        for peer in self.others:
            self.send(None, peer)
        for peer in self.others:
            try:
                self.recv(peer)
            except WorldError:
                return


class OtherError(QueueWorld):
    patience = 1.0

    def recv(self, source: int) -> Any:
        return unpack("recv", self.queues[source, self.rank].get(timeout=self.timeout))


@pytest.mark.parametrize(
    ("kind", "said"), [(Patient, "it does not end"), (GoesOnAlone, "rank 0 goes on"), (OtherError, "Empty")]
)
def test_a_dead_rank_that_nobody_hears_of_is_told(kind: type[QueueWorld], said: str) -> None:
    check_world(partial(run_threads, kind, 3))
    with pytest.raises(AssertionError, match=f"Ranks that wait for a rank that has ended get a WorldError: {said}"):
        check_world(partial(run_threads, kind, 3), hears_of_the_dead=True, hangs_after=6)


def test_a_launcher_that_loses_errors_is_told() -> None:
    def run(function: Callable[[World], Any]) -> None:
        try:
            simulate(2, function)
        except Exception:
            return

    with pytest.raises(AssertionError, match="`run` raises the error of a rank that fails: nothing is raised"):
        check_world(run)


def test_ranks_that_make_other_calls_do_not_hang_it() -> None:
    class Deaf(Patient):
        def all_gather(self, value: Any) -> list[Any]:
            return super().all_gather(value) if self.rank else [value] * self.size

    with pytest.raises(
        AssertionError, match="Ranks are numbered from 0: it does not end within 2 seconds; pass hangs_after="
    ):
        check_world(partial(run_threads, Deaf, 3), hangs_after=2)


HANGING = """
import time
from functools import partial
from shardtree.live import run_processes
from shardtree.testing import check_world

def wait(function, world):
    time.sleep(600 if world.rank else 0)

def run(function):
    run_processes(2, partial(wait, function))

if __name__ == "__main__":
    try:
        check_world(run, hangs_after=5)
    except AssertionError as error:
        print(error)
"""


@pytest.mark.slow
@pytest.mark.torchrun
def test_processes_that_hang_end_with_the_program(tmp_path: Path) -> None:
    script = tmp_path / "hangs.py"
    script.write_text(HANGING)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0 and "it does not end within 5 seconds" in done.stdout, done.stdout + done.stderr


def test_a_world_of_one_cannot_be_checked() -> None:
    with pytest.raises(AssertionError, match="it has one rank, but checks need several"):
        check_world(lambda function: simulate(1, function))


def test_what_interrupts_is_passed_on() -> None:
    def run(function: Callable[[World], Any]) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        check_world(run)
