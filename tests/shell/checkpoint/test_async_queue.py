"""Saves on their way: each is the moment of its call, they commit in order, and failures surface on every rank."""

from __future__ import annotations

import io
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as draw

import shardtree as st
from shardtree.shell.storage import _buffers
from shardtree.shell.table import safetensors
from shardtree.storage import MemoryStorage, Storage
from shardtree.strategies import StrategyAction, default_strategies
from shardtree.testing import watched
from shardtree.world import World
from tests.options import save_keywords
from tests.shell.checkpoint.parts import ALL_FORMATS, FORMATS


def shard(key: str, data: torch.Tensor, rank: int = 0, ranks: int = 1) -> st.ShardedTensor:
    return st.ShardedTensor.from_rank_offsets(key, data, (0, rank, ranks))


def request(folder: Storage, value: float = 1.0, world: World | None = None, **options: Any) -> st.AsyncRequest[Any]:
    own = world or st.world.one_process()
    tree = {"w": shard("w", torch.full((2, 3), value), own.rank, own.size), "step": value}
    made = st.save(tree, folder, async_sharded_save=True, world=own, **save_keywords(**options))
    assert made is not None
    return made


def value_in(folder: Storage) -> float | None:
    if not st.is_checkpoint(folder):
        return None
    values = {
        float(value) for value in st.load_plain_tensors(folder, options=st.LoadOptions(verify="all"))["w"].flatten()
    }
    assert values == {st.load_common_state_dict(folder)["step"]}
    return values.pop()


# The moment of the call.


class Mutating:
    """Tensors that a thread changes all the time, but while they are held."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.weight = torch.zeros(64, 8)
        self.tree: dict[str, Any] = {
            "w": shard("w", self.weight, world.rank, world.size),
            "t": shard("t", self.weight.t(), world.rank, world.size),
            "buffer": bytearray(8),
            "log": {"losses": [0.0], "array": np.zeros(3), "tensor": torch.zeros(3)},
        }
        self.lock = threading.Lock()
        self.is_over = False

    def change(self, number: int) -> None:
        with self.lock:
            self.weight.add_(1)
            self.tree["buffer"][number % 8] = number % 251
            log = self.tree["log"]
            log["losses"].append(float(number)) if len(log["losses"]) < 5 else log["losses"].clear()
            log["array"] += 1
            log["tensor"].add_(1)

    def hammer(self) -> None:
        number = 0
        while not self.is_over:
            number += 1
            self.change(number)
            time.sleep(0.0005)

    def now(self) -> dict[str, Any]:
        """Return what a checkpoint of this rank's must hold, as bytes and texts."""
        log = self.tree["log"]
        return {
            "w": self.weight.numpy().tobytes(),
            "t": self.weight.t().contiguous().numpy().tobytes(),
            # Ranks' threads change on their own; what is common to them is compared where there is one.
            "common": repr((bytes(self.tree["buffer"]), log)) if self.world.size == 1 else None,
        }


def loaded(folder: Storage, world: World) -> dict[str, Any]:
    target = {
        "w": shard("w", torch.empty(64, 8), world.rank, world.size),
        "t": shard("t", torch.empty(8, 64), world.rank, world.size),
    }
    tree = st.load(target, folder, world=world, options=st.LoadOptions(verify="all"))
    common = repr((bytes(tree["buffer"]), tree["log"])) if world.size == 1 else None
    return {"w": tree["w"].numpy().tobytes(), "t": tree["t"].numpy().tobytes(), "common": common}


def check_each_is_the_moment_of_its_call(world: World, folders: Sequence[Storage], **options: Any) -> None:
    """Raise unless each of many saves, with the tensors changing all the time, is what they were at its call."""
    state = Mutating(world)
    thread = threading.Thread(target=state.hammer)
    moments = []
    preprocess = (lambda common: {}) if world.size > 1 else None
    with st.AsyncCallsQueue() as queue:
        thread.start()
        try:
            for number, folder in enumerate(folders):
                with state.lock:
                    moments.append(state.now())
                    made = st.save(
                        state.tree,
                        folder,
                        async_sharded_save=True,
                        preprocess_common_before_consistancy_check=preprocess,
                        world=world,
                        **save_keywords(**options),
                    )
                assert made is not None
                queue.schedule_async_request(made)
                state.change(number)
                if number % 7 == 0:
                    queue.maybe_finalize_async_calls()
            queue.maybe_finalize_async_calls(blocking=True)
        finally:
            state.is_over = True
            thread.join()
    for number, (moment, folder) in enumerate(zip(moments, folders, strict=True)):
        assert loaded(folder, world) == moment, f"save {number} is not the moment of its call"


@pytest.mark.slow
def test_200_saves_of_changing_tensors_are_each_the_moment_of_their_call() -> None:
    check_each_is_the_moment_of_its_call(st.world.one_process(), [st.storage.MemoryStorage() for _ in range(200)])


def test_so_are_those_of_two_ranks() -> None:
    folders = [st.storage.MemoryStorage() for _ in range(20)]
    st.simulate(2, lambda world: check_each_is_the_moment_of_its_call(world, folders))


def test_the_law_catches_tensors_that_are_not_copied() -> None:
    with pytest.raises(AssertionError, match="is not the moment of its call"):
        check_each_is_the_moment_of_its_call(
            st.world.one_process(), [st.storage.MemoryStorage() for _ in range(40)], snapshot=False
        )


@pytest.mark.parametrize("backend", FORMATS)
def test_every_format_keeps_the_moment(backend: tuple[str, int]) -> None:
    weight, rng, log = torch.zeros(3), {"state": [1]}, {"step": [1], "a": np.zeros(2), "t": torch.zeros(2)}
    tree = {"w": shard("w", weight), "rng": st.ShardedObject("rng", rng, (1,), (0,)), **log}
    made = st.save(tree, folder := st.storage.MemoryStorage(), backend, async_sharded_save=True)
    weight.add_(1), rng["state"].append(2), log["step"].append(2), log["t"].add_(1)
    log["a"] += 1
    assert made is not None
    made.execute_sync()
    found = st.load({"w": shard("w", torch.empty(3)), "rng": st.ShardedObject("rng", None, (1,), (0,))}, folder)
    assert found["w"].tolist() == [0, 0, 0] and found["rng"] == {"state": [1]}
    assert found["step"] == [1] and found["a"].tolist() == [0, 0] and found["t"].tolist() == [0, 0]


def test_common_values_are_kept_whatever_they_are() -> None:
    weight = torch.ones(4, requires_grad=True)
    product = weight * 2
    tree = {"grad": product, "part": torch.arange(10**6)[:3], "file": io.BytesIO(b"abc")}
    made = st.save(tree, folder := st.storage.MemoryStorage(), async_sharded_save=True)
    tree["file"].write(b"xyz")
    assert made is not None
    made.execute_sync()
    common = st.load_common_state_dict(folder)
    assert common["grad"].tolist() == [2.0] * 4 and common["part"].tolist() == [0, 1, 2]
    assert common["file"].getvalue() == b"abc"


# The queue.


def test_calls_are_counted_and_committed_in_order() -> None:
    queue, seen = st.AsyncCallsQueue(persistent=True), []
    folders = [st.storage.MemoryStorage() for _ in range(3)]
    for number, folder in enumerate(folders):
        made = request(folder, number).add_finalize_fn(lambda number=number: seen.append(number))
        assert queue.schedule_async_request(made) == number
    assert queue.get_num_unfinalized_calls() == 3
    assert queue.maybe_finalize_async_calls(blocking=True) == [0, 1, 2] == seen
    assert queue.get_num_unfinalized_calls() == 0 and queue.maybe_finalize_async_calls() == []
    assert [value_in(folder) for folder in folders] == [0, 1, 2]
    queue.close()
    last = queue.schedule_async_request(request(folder := st.storage.MemoryStorage(), 5))
    queue.close()
    assert last == 3 and value_in(folder) == 5


def test_the_result_is_waited_for_and_stays() -> None:
    with st.AsyncCallsQueue() as queue:
        first, second = (request(st.storage.MemoryStorage(), value) for value in (1, 2))
        for each in (first, second):
            queue.schedule_async_request(each)
        fields = second.result()
        assert queue.get_num_unfinalized_calls() == 0 and value_in(first.folder) == 1
    assert fields["sharded_backend"] == "safetensors" and second.result() is fields
    assert first.result()["save_id"] != fields["save_id"]


def test_the_result_of_a_request_that_nobody_scheduled_is_saved_now() -> None:
    made = request(folder := st.storage.MemoryStorage())
    fields = made.add_finalize_fn(lambda: None).result()
    assert value_in(folder) == 1 and made.result() is fields, "they are one save"


def test_a_result_raises_what_failed_and_then_its_own() -> None:
    with st.AsyncCallsQueue() as queue:
        bad = request(st.storage.MemoryStorage(), progress=failing)
        good = request(folder := st.storage.MemoryStorage(), 2)
        queue.schedule_async_request(bad)
        queue.schedule_async_request(good)
        with pytest.raises(FullDisk) as caught:
            good.result()
        assert caught.value.__notes__ == ["async save 0 to 'memory:'"]
        with pytest.raises(FullDisk):
            bad.result()
        assert good.result()["save_id"] and value_in(folder) == 2


def held(storage: Storage, gate: threading.Event) -> Storage:
    """Return a storage on which a file is written when the gate is open."""

    def before(call: Any) -> None:
        if call.method == "write" and threading.current_thread().name.startswith("shardtree"):
            assert gate.wait(60)

    return watched(storage, before=before)


def test_nothing_is_committed_before_all_ranks_have_written() -> None:
    folder, gate = st.storage.MemoryStorage(), threading.Event()

    def on_rank(world: World) -> list[list[int]]:
        queue = st.AsyncCallsQueue()
        own = held(folder, gate) if world.rank == 1 else folder
        call = queue.schedule_async_request(request(own, 2.0, world))
        seen = []
        for _ in range(3):
            time.sleep(0.01)
            seen.append(queue.maybe_finalize_async_calls())
            assert not st.is_checkpoint(folder)
        world.barrier()
        gate.set()
        seen.append(queue.maybe_finalize_async_calls(blocking=True))
        assert seen[-1] == [call]
        queue.close()
        return seen

    assert st.simulate(2, on_rank) == [[[], [], [], [0]]] * 2
    assert value_in(folder) == 2


def test_without_asking_the_others_a_rank_that_has_written_waits_for_them() -> None:
    folder = st.storage.MemoryStorage()

    def on_rank(world: World) -> list[int]:
        with st.AsyncCallsQueue() as queue:
            queue.schedule_async_request(request(folder, 2.0, world))
            while not (done := queue.maybe_finalize_async_calls(no_dist=True)):
                time.sleep(0.001)
        return done

    assert st.simulate(2, on_rank) == [[0], [0]]
    assert value_in(folder) == 2


def test_a_rank_that_waits_meets_one_that_looks_in_passing() -> None:
    folders = [st.storage.MemoryStorage() for _ in range(4)]

    def on_rank(world: World) -> list[int]:
        queue, done = st.AsyncCallsQueue(), []
        for folder in folders:
            queue.schedule_async_request(request(folder, 1.0, world))
        while queue.get_num_unfinalized_calls():
            done += queue.maybe_finalize_async_calls(blocking=world.rank == 0)
        queue.close()
        return done

    assert st.simulate(2, on_rank) == [[0, 1, 2, 3]] * 2


class FullDisk(OSError):
    pass


def failing(size: int) -> None:
    raise FullDisk("no space left on device")


def test_a_failure_surfaces_on_every_rank_and_the_old_checkpoint_stays() -> None:
    folder, later = st.storage.MemoryStorage(), st.storage.MemoryStorage()
    st.simulate(2, lambda world: request(folder, 1.0, world).execute_sync())
    before = folder.names()

    def on_rank(world: World) -> list[int]:
        queue = st.AsyncCallsQueue()
        options = {"progress": failing} if world.rank == 1 else {}
        queue.schedule_async_request(request(folder, 2.0, world, overwrite=True, **options))
        queue.schedule_async_request(request(later, 3.0, world))
        with pytest.raises(st.errors.RemoteError, match=r"rank 1: FullDisk: no space") as caught:
            queue.maybe_finalize_async_calls(blocking=True)
        assert caught.value.__notes__ == ["async save 0 to 'memory:'"]
        world.barrier()
        assert value_in(folder) == 1 and folder.names() == before, "what was written is removed"
        assert queue.get_num_unfinalized_calls() == 1, "the next one is for the next time"
        done = queue.maybe_finalize_async_calls(blocking=True)
        queue.close()
        return done

    assert st.simulate(2, on_rank) == [[1], [1]]
    assert value_in(later) == 3


def test_close_commits_what_it_can_and_raises_the_first_failure() -> None:
    queue, folders = st.AsyncCallsQueue(), [st.storage.MemoryStorage() for _ in range(4)]
    for number, folder in enumerate(folders):
        options = {"progress": failing} if number % 2 else {}
        queue.schedule_async_request(request(folder, number, **options))
    with pytest.raises(FullDisk) as caught:
        queue.close()
    assert caught.value.__notes__ == ["async save 1 to 'memory:'", "Committed before it: 0"]
    assert [value_in(folder) for folder in folders] == [0, None, 2, None]


def test_close_with_abort_drops_what_is_not_committed_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    gate, folders = threading.Event(), [st.storage.MemoryStorage() for _ in range(3)]
    queue = st.AsyncCallsQueue()
    for folder in folders:
        queue.schedule_async_request(request(held(folder, gate)))
    threading.Timer(0.05, gate.set).start()
    queue.close(abort=True)
    assert [folder.names() for folder in folders] == [()] * 3
    assert [record.message for record in caplog.records] == [
        f"async save {number} to 'memory:' was abandoned before it was committed" for number in range(3)
    ]
    assert queue.get_num_unfinalized_calls() == 0


def test_a_finalizer_may_schedule_the_next_save() -> None:
    queue, folders = st.AsyncCallsQueue(), [st.storage.MemoryStorage() for _ in range(2)]
    later = request(folders[1], 2.0)
    queue.schedule_async_request(
        request(folders[0]).add_finalize_fn(lambda: ignored(queue.schedule_async_request(later)))
    )
    queue.maybe_finalize_async_calls(blocking=True)
    queue.close()
    assert [value_in(folder) for folder in folders] == [1, 2]


def ignored(_: object) -> None:
    pass


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("backend", ALL_FORMATS, ids=str)
def test_an_interrupt_right_after_the_commit_leaves_the_new_checkpoint(
    backend: tuple[str, int], overwrite: bool, tmp_path: Path
) -> None:
    def save(value: float, **options: Any) -> st.AsyncRequest[Any]:
        tree = {"w": shard("w", torch.full((3,), value))}
        return st.save(tree, tmp_path / "it", backend, async_sharded_save=True, **save_keywords(**options))

    def publish(fields: Any) -> None:
        made.publish(fields)
        raise KeyboardInterrupt

    if overwrite:
        save(1.0).execute_sync()
    made = save(2.0, overwrite=overwrite)
    with pytest.raises(KeyboardInterrupt):
        replace(made, publish=publish).execute_sync()
    assert st.load_plain_tensors(tmp_path / "it", options=st.LoadOptions(verify="all"))["w"].tolist() == [2.0] * 3
    with pytest.raises(st.errors.CheckpointReplaced):
        made.execute_sync()
    assert st.load_plain_tensors(tmp_path / "it", options=st.LoadOptions(verify="all"))["w"].tolist() == [2.0] * 3


@pytest.mark.parametrize("ask", ["maybe_finalize_async_calls", "close"])
def test_a_finalizer_that_finalizes_is_refused_and_nothing_else_happens(ask: str) -> None:
    queue, folders = st.AsyncCallsQueue(), [st.storage.MemoryStorage() for _ in range(2)]
    queue.schedule_async_request(request(folders[0]).add_finalize_fn(getattr(queue, ask)))
    queue.schedule_async_request(request(folders[1], 2.0))
    with pytest.raises(st.errors.WorldError, match="In finalizers, only schedule saves"):
        queue.maybe_finalize_async_calls(blocking=True)
    assert queue.get_num_unfinalized_calls() == 1
    assert queue.maybe_finalize_async_calls(blocking=True) == [1]
    queue.close()
    assert [value_in(folder) for folder in folders] == [1, 2]


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Hear SIGINT, which a shell lets its background jobs ignore."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_a_wait_that_is_interrupted_can_be_tried_again(interruptible: None) -> None:
    queue, gate = st.AsyncCallsQueue(), threading.Event()
    queue.schedule_async_request(request(held(folder := st.storage.MemoryStorage(), gate)))
    interrupt = threading.Timer(0.1, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT))
    interrupt.start()
    with pytest.raises(KeyboardInterrupt):
        queue.maybe_finalize_async_calls(blocking=True)
    assert queue.get_num_unfinalized_calls() == 1 and not st.is_checkpoint(folder)
    gate.set()
    assert queue.maybe_finalize_async_calls(blocking=True) == [0] and value_in(folder) == 1
    queue.close()


def test_nothing_on_the_way_is_no_collective() -> None:
    def on_rank(world: World) -> list[int]:
        return st.AsyncCallsQueue().maybe_finalize_async_calls(blocking=True) if world.rank else []

    assert st.simulate(2, on_rank) == [[], []]


def test_ranks_that_differ_in_the_number_of_saves_are_told() -> None:
    folders = [st.storage.MemoryStorage() for _ in range(2)]

    def on_rank(world: World) -> None:
        queue = st.AsyncCallsQueue()
        made = [request(folder, 1.0, world) for folder in folders]
        for each in made[: 2 - world.rank]:
            queue.schedule_async_request(each)
        try:
            for _ in folders:
                queue.maybe_finalize_async_calls(blocking=True)
        finally:
            queue.close(abort=True)

    with pytest.raises(st.errors.WorldError, match="rank 1: returned"):
        st.simulate(2, on_rank)
    assert [value_in(folder) for folder in folders] == [1, None]


# What is refused.


def test_a_dropped_queue_is_loud_and_its_saves_stay_on_their_way(caplog: pytest.LogCaptureFixture) -> None:
    from shardtree.shell.checkpoint.async_saves._exit import calls_in_progress, finalize

    queue = st.AsyncCallsQueue()
    queue.schedule_async_request(request(folder := st.storage.MemoryStorage()))
    calls = queue._calls
    del queue
    assert "a queue was dropped with async save 0 to 'memory:' in progress" in caplog.text
    assert [call.request.folder for call in calls_in_progress()] == [folder]
    assert finalize(calls, blocking=True) == [0] and value_in(folder) == 1


def test_a_first_save_after_warming_up_takes_no_new_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    tree = {
        "w": st.ShardedTensor.from_rank_offsets("w", torch.ones(2**20)),
        "empty": st.ShardedTensor("e", None, torch.int8, (1,), (1,), (0,), None),
        "step": 1,
    }
    queue = st.AsyncCallsQueue()
    queue.warm_up(tree)
    monkeypatch.setattr(_buffers, "empty_tensor", None)  # a call would raise
    del tree["empty"]
    queue.schedule_async_request(st.save(tree, MemoryStorage(), async_sharded_save=True))
    queue.close()


def test_a_fork_has_nothing_on_its_way() -> None:
    queue, gate = st.AsyncCallsQueue(), threading.Event()
    queue.schedule_async_request(made := request(held(st.storage.MemoryStorage(), gate)))
    pid = os.fork()
    if not pid:
        try:
            made.result()
        except st.errors.WorldError:
            os._exit(queue.get_num_unfinalized_calls() + len(queue.maybe_finalize_async_calls(blocking=True)))
        finally:
            os._exit(9)
    assert os.waitpid(pid, 0)[1] == 0
    gate.set()
    queue.close()


# The order of commits.


def watching(fn: Callable[..., st.AsyncRequest[Any]], rank: int, plan: Sequence[Sequence[int]]) -> Callable[..., Any]:
    """Return the strategy with a delay or failure on this rank for each save: milliseconds, or -1."""
    number = iter(range(len(plan)))

    def save_sharded(pending: Any, shards: Any) -> st.AsyncRequest[Any]:
        made, what = fn(pending, shards), plan[next(number)][rank]

        def write() -> Any:
            if what < 0:
                raise FullDisk("no space left on device")
            time.sleep(what / 1000)
            return made.async_fn()

        return replace(made, async_fn=write)

    return save_sharded


def check_order(plan: Sequence[Sequence[int]], ranks: int, queue_type: type[st.AsyncCallsQueue]) -> None:
    """Raise unless saves are committed in order on every rank, all but those that failed on some rank."""
    folders = [st.storage.MemoryStorage() for _ in plan]
    committed: list[list[int]] = [[] for _ in range(ranks)]

    def on_rank(world: World) -> tuple[list[int], int]:
        row = (StrategyAction.SAVE_SHARDED, "safetensors", 1)
        table = {**default_strategies, row: watching(safetensors.save_sharded, world.rank, plan)}
        queue, failures = queue_type(), 0
        for number, folder in enumerate(folders):
            made = request(folder, float(number), world, strategies=table)
            queue.schedule_async_request(
                made.add_finalize_fn(lambda number=number: committed[world.rank].append(number))
            )
            failures += polled(queue, blocking=False)
        while queue.get_num_unfinalized_calls():
            failures += polled(queue, blocking=True)
        queue.close()
        return committed[world.rank], failures

    expected = [number for number, row in enumerate(plan) if min(row) >= 0]
    assert st.simulate(ranks, on_rank) == [(expected, len(plan) - len(expected))] * ranks
    assert [value_in(folder) is not None for folder in folders] == [min(row) >= 0 for row in plan]


def polled(queue: st.AsyncCallsQueue, *, blocking: bool) -> int:
    try:
        queue.maybe_finalize_async_calls(blocking)
    except (FullDisk, st.errors.RemoteError):
        return 1
    return 0


WHATS = draw.sampled_from([0, 0, 1, 5, -1])


@pytest.mark.slow
@settings(max_examples=15)
@given(draw.data())
def test_saves_commit_in_order_on_every_rank_whatever_is_slow_or_fails(data: draw.DataObject) -> None:
    ranks = data.draw(draw.integers(1, 3))
    plan = data.draw(draw.lists(draw.lists(WHATS, min_size=ranks, max_size=ranks), min_size=1, max_size=5))
    check_order(plan, ranks, st.AsyncCallsQueue)


class LastFirst(st.AsyncCallsQueue):
    """The planted fault: what was scheduled last is committed first."""

    def maybe_finalize_async_calls(self, blocking: bool = False, no_dist: bool = False) -> list[int]:
        self._calls.reverse()
        return super().maybe_finalize_async_calls(blocking, no_dist)


def test_the_law_catches_another_order() -> None:
    with pytest.raises(AssertionError):
        check_order([[5, 5], [0, 0], [0, 0]], 2, LastFirst)
