"""What threads do while code is traced: recorded if started in it or given work; else found by changes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing.pool import ThreadPool
from queue import SimpleQueue
from random import Random
from typing import Any

import pytest
import torch

import shardtree as st
from shardtree.errors import TraceError
from shardtree.traces import _threads
from tests.traces.programs import ONE_TO_ONE, VALUES, given, program
from tests.traces.test_recording import Linear, Tensors, eager_and_traced, in_threads

GIVEN = {"w": torch.arange(12.0).reshape(4, 3), "v": torch.arange(4.0)}
Action = Callable[[], Any]


@contextmanager
def old_thread() -> Iterator[Callable[[Action], None]]:
    """Yield a function that has a thread run something which no trace has started."""
    todo: SimpleQueue[Action | None] = SimpleQueue()
    done: SimpleQueue[BaseException | None] = SimpleQueue()

    def work() -> None:
        while (action := todo.get()) is not None:
            try:
                action()
                done.put(None)
            except BaseException as error:
                done.put(error)

    def run(action: Action) -> None:
        todo.put(action)
        if error := done.get():
            raise error

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield run
    finally:
        todo.put(None)
        thread.join()


def in_a_pool(action: Action) -> None:
    with ThreadPoolExecutor(2) as pool:
        pool.submit(action).result()


def mapped_by_a_pool(action: Action) -> None:
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(lambda _: action(), [0])) == [None]


def as_a_callback(action: Action) -> None:
    go = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(go.wait).add_done_callback(lambda _: action())  # not yet done: the pool's thread calls it
        go.set()


def by_asyncio(action: Action) -> None:
    asyncio.run(asyncio.to_thread(action))


def by_multiprocessing(action: Action) -> None:
    with ThreadPool(1) as pool:
        pool.apply(action)


def by_a_class(action: Action) -> None:
    class Own(threading.Thread):
        def run(self) -> None:
            action()

    thread = Own()
    thread.start()
    thread.join()


def in_a_thread_of_a_thread(action: Action) -> None:
    in_threads(lambda: in_threads(action))


WAYS = (
    *(in_threads, in_a_pool, mapped_by_a_pool, as_a_callback, by_asyncio, by_multiprocessing, by_a_class),
    in_a_thread_of_a_thread,
)


@pytest.mark.parametrize("way", WAYS)
def test_what_a_thread_does_is_recorded(way: Callable[[Action], None]) -> None:
    def load(tensors: Tensors) -> Tensors:
        buffer, holder = torch.zeros(4, 3), Linear()
        buffer.copy_(tensors["w"])
        holder.weight.data.copy_(tensors["w"])

        def change() -> None:
            buffer.mul_(2)
            holder.weight.data = holder.weight.data.t().contiguous()

        way(change)
        return {"w": buffer, "turned": holder.weight.data, "scale": buffer + torch.zeros(1)}

    eager_and_traced(load, GIVEN)


@pytest.mark.parametrize("way", WAYS)
def test_a_thread_doesn_t_read_memory_either(way: Callable[[Action], None]) -> None:
    def load(tensors: Tensors) -> Tensors:
        buffer, found = torch.zeros(4), list[Any]()
        buffer.copy_(tensors["v"])

        def read() -> None:
            try:
                found.append(buffer.numpy().copy())
            except RuntimeError:
                found.append(buffer.new_zeros(1))

        way(read)
        return {"v": torch.as_tensor(found[0])}

    with pytest.raises(TraceError, match=r"(?s)caught trace errors.*numpy needs elements of 'v'.*in read"):
        st.trace(load, GIVEN)


def test_a_parameter_s_data_is_set_in_another_thread() -> None:
    model = Linear()
    found = st.trace(
        lambda tensors: in_threads(lambda: setattr(model.weight, "data", tensors["w"])), GIVEN, into=model.state_dict
    )
    assert [each.name for each in found.check()] == ["v"]
    assert torch.equal(found(GIVEN)["weight"], GIVEN["w"])


def test_a_pool_from_before_the_call_is_recorded_in_it_and_does_what_it_did_after() -> None:
    model, also = Linear(), Linear()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()

        def load(tensors: Tensors) -> None:
            pool.submit(model.weight.data.copy_, tensors["w"]).result()
            pool.submit(model.weight.data.mul_, 2).result()

        found = st.trace(load, GIVEN, into=model.state_dict)
        assert torch.equal(found(GIVEN)["weight"], GIVEN["w"] * 2)
        assert not model.weight.any()
        pool.submit(also.weight.data.copy_, GIVEN["w"]).result()
        assert torch.equal(also.weight, GIVEN["w"])


def test_a_thread_that_outlives_the_trace_does_what_it_did() -> None:
    model, go, pools = Linear(), threading.Event(), list[ThreadPoolExecutor]()

    def late() -> None:
        go.wait()
        model.weight.data.fill_(3.0)

    thread = threading.Thread(target=late)

    def load(tensors: Tensors) -> Tensors:
        thread.start()
        pools.append(ThreadPoolExecutor(1))
        return {"w": pools[0].submit(tensors["w"].clone).result()}

    found = st.trace(load, GIVEN)
    go.set()
    thread.join()
    with pools[0] as pool:
        assert pool.submit(torch._C._len_torch_dispatch_stack).result() == 0
        pool.submit(model.weight.data[:1].fill_, 4.0).result()
    assert torch.equal(found(GIVEN)["w"], GIVEN["w"])
    assert model.weight.tolist() == [[4.0] * 3, *[[3.0] * 3] * 3]


def test_other_threads_of_the_process_aren_t_recorded() -> None:
    weight, started = torch.zeros(3), list[threading.Thread]()

    def other() -> None:
        started.append(threading.Thread(target=weight.fill_, args=(2.0,)))
        started[0].start()
        started[0].join()

    with old_thread() as run:
        st.trace(lambda tensors: run(other) or dict(tensors), GIVEN)
    assert weight.tolist() == [2.0] * 3


def test_all_is_put_back_after_traces_within_traces_and_errors() -> None:
    places = [(threading.Thread, "start"), (ThreadPoolExecutor, "submit"), (torch, "frombuffer"), (torch, "to_dlpack")]
    before = [getattr(*place) for place in places]

    def fails(tensors: Tensors) -> Tensors:
        inner = st.trace(lambda given: {"x": given["w"].T}, GIVEN)
        in_threads(lambda: None)
        return {"x": inner.missing}  # type: ignore[attr-defined]

    with pytest.raises(AttributeError, match="missing"):
        st.trace(fails, GIVEN)
    assert [getattr(*place) for place in places] == before


def test_what_others_put_over_it_meanwhile_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(threading.Thread, "start", threading.Thread.start)  # so that this one is put back in the end

    def load(tensors: Tensors) -> Tensors:
        below = threading.Thread.start

        def start(thread: threading.Thread) -> None:
            seen.append(thread)
            below(thread)

        threading.Thread.start = start  # type: ignore[method-assign]
        return dict(tensors)

    st.trace(load, GIVEN)
    buffer = torch.zeros(3)
    in_threads(lambda: buffer.fill_(1.0))
    assert len(seen) == 1
    assert buffer.tolist() == [1.0] * 3
    eager_and_traced(lambda tensors: in_threads(lambda: None) or {"w": tensors["w"] * 2}, GIVEN)


# Threads that were there before, to which no pool gives work: they are found by what torch counts.


@pytest.mark.parametrize(
    "change",
    [
        lambda buffer: buffer.mul_(2),
        lambda buffer: buffer[1:].add_(1),
        lambda buffer: buffer.detach().zero_(),
        lambda buffer: torch.add(torch.ones(4, 3), 1, out=buffer),
    ],
)
@pytest.mark.parametrize("by", ["a copy", "views", "a read"])
def test_a_change_in_a_thread_from_before_is_refused(change: Callable[[torch.Tensor], Any], by: str) -> None:
    def load(tensors: Tensors) -> Tensors:
        buffer = torch.zeros(4, 3)
        if by == "a copy":
            buffer.copy_(tensors["w"])
        elif by == "views":
            for row in range(4):
                buffer[row].copy_(tensors["w"][row])
        read = torch.cat([buffer, tensors["w"]])
        run(lambda: change(buffer))
        return {"w": read + torch.cat([buffer, buffer])}

    with old_thread() as run, pytest.raises(TraceError, match="tensors were changed without being recorded"):
        st.trace(load, GIVEN)


def test_what_a_thread_from_before_does_to_tracers_is_recorded() -> None:
    def load(tensors: Tensors) -> Tensors:
        buffer, results = torch.zeros(4, 3), list[torch.Tensor]()
        run(lambda: buffer[1:].copy_(tensors["w"][1:]))
        run(lambda: results.append(tensors["w"] * 2))
        buffer[:1].copy_(results[0][:1])
        return {"w": buffer}

    with old_thread() as run:
        eager_and_traced(load, GIVEN)


def test_counts_of_changes_are_those_that_torch_has() -> None:
    """Parameters that were changed before, temporary `data`, inference, views and threads at once: no false alarm."""
    model = Linear()
    with torch.no_grad():
        model.weight.add_(1)

    def load(tensors: Tensors) -> None:
        with torch.no_grad():
            model.weight.copy_(tensors["w"])
            model.weight.data[1:].copy_(tensors["w"][1:])
            model.weight[0] += 1
        with torch.inference_mode():
            model.weight.copy_(tensors["w"])
            torch.mul(tensors["w"], 2, out=model.weight)
            inside = torch.zeros(4, 3)
            inside.copy_(tensors["w"])
        in_threads(*(lambda row=row: model.weight.data[row].copy_(tensors["w"][row]) for row in range(4)))
        in_threads(*(lambda row=row: model.weight.detach()[row].mul_(2) for row in range(4)))
        torch._foreach_zero_([torch.ones(2)])

    found = st.trace(load, GIVEN, into=model.state_dict)
    assert torch.equal(found(GIVEN)["weight"], GIVEN["w"] * 2)


def buffers_in_a_thread(seed: int) -> tuple[Tensors, st.Trace, st.Trace]:
    """Return sources, and the traces of a program on them, and of it in a thread on buffers filled before."""
    steps, sources = program(seed, (*ONE_TO_ONE, *VALUES)), given(Random(seed))

    def run(tensors: Tensors) -> Tensors:
        buffers = {name: torch.zeros(each.shape).copy_(each) for name, each in tensors.items()}
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(steps, buffers).result()

    return sources, st.trace(steps, sources), st.trace(run, sources)


@pytest.mark.parametrize("seed", range(24))
def test_programs_in_threads_do_what_they_do(seed: int) -> None:
    sources, alone, in_thread = buffers_in_a_thread(seed)
    outputs, expected = in_thread(sources), program(seed, (*ONE_TO_ONE, *VALUES))(sources)
    assert all(torch.equal(outputs[name], each) for name, each in expected.items())
    assert in_thread == alone


def test_the_law_of_threads_catches_one_that_isn_t_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_threads, "_REPLACEMENTS", ())
    _, alone, in_thread = buffers_in_a_thread(0)
    assert in_thread != alone


def test_a_thread_that_fails_to_start_again_runs_what_it_did() -> None:
    def load(tensors: Tensors) -> Tensors:
        thread = threading.Thread(target=list)
        thread.start()
        thread.join()
        with pytest.raises(RuntimeError, match="once"):
            thread.start()
        assert "run" not in thread.__dict__
        return dict(tensors)

    assert st.trace(load, GIVEN) == st.trace(dict, GIVEN)


def test_a_thread_keeps_the_run_that_was_set_in_it() -> None:
    ran = []

    def load(tensors: Tensors) -> Tensors:
        thread = threading.Thread()
        thread.run = own = lambda: ran.append(tensors["w"].sum)  # type: ignore[method-assign]
        thread.start()
        thread.join()
        assert thread.run is own
        return dict(tensors)

    assert st.trace(load, GIVEN) == st.trace(dict, GIVEN)
    assert len(ran) == 1
