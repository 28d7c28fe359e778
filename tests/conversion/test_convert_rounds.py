"""A conversion between stores makes two requests in a row a batch: counted, not timed."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable
from functools import partial
from itertools import count
from typing import Any

import pytest
import torch

import shardtree as st
from shardtree.conversion import _passage, _write, convert
from shardtree.errors import StorageError
from shardtree.storage import MemoryStorage, wrapped

COUNT, ROWS = 12, 256  # batches, of a tensor each
TREE = {f"w{n:02}": st.ShardedTensor.from_rank_offsets(f"w{n:02}", torch.arange(ROWS) + n) for n in range(COUNT)}
NBYTES = 8 * ROWS


class Rounds:
    """A store to read from and one to write to, in which steps wait for what may go on beside them."""

    def __init__(self, patience: float) -> None:
        self.patience = patience
        self.begun: set[int] = set()  # batches of which something was read
        self.looks, self.reads = Counter[str](), Counter[int]()
        self.written, self.noted = count(), count()
        self._changed = threading.Condition()
        self.source, self.folder = MemoryStorage(), MemoryStorage()

    def _wait(self, batches: int) -> None:
        """Wait until so many batches are read."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.begun) >= min(batches, COUNT), self.patience), "it waits"

    def read_from(self) -> Any:
        inner, (name,) = self.source, [each for each in self.source.names() if each.endswith(".distcp")]
        each = (inner.length(name) or 0) / COUNT

        def read_range(file: str, begin: int, end: int) -> tuple[memoryview, int]:
            data = inner.read(file)
            if file == name:
                with self._changed:
                    self.begun.add(int((begin + end) / 2 / each))
                    self.reads[int((begin + end) / 2 / each)] += 1
                    self._changed.notify_all()
            return memoryview(data)[begin:end], len(data)

        def length(file: str) -> int | None:
            self.looks[file] += 1
            return inner.length(file)

        return wrapped(inner, read_range=read_range, length=length)

    def write_to(self) -> Any:
        inner = self.folder

        def read_range(name: str, begin: int, end: int) -> tuple[memoryview, int]:
            return memoryview(inner.read(name))[begin:end], inner.length(name) or 0

        def write(name: str, buffers: Iterable[Any], *, durable: bool) -> int:
            length = inner.write(name, buffers, durable=durable)
            if "-of-" in name:  # its bytes are read: the next batch is, while they are sent
                self._wait(next(self.written) + 2)
            return length

        def replace(name: str, data: bytes, *, durable: bool) -> None:
            if name.endswith(".done"):  # and the one after that, while this one is noted
                self._wait(next(self.noted) + 3)
            inner.replace(name, data, durable=durable)

        return wrapped(inner, read_range=read_range, write=write, replace=replace)


def run(rounds: Rounds) -> None:
    st.save(TREE, rounds.source, sharded_strategy="torch_dist", common_strategy="torch_dist")
    report = convert(
        rounds.read_from(), rounds.write_to(), backend="safetensors", max_bytes_in_flight=NBYTES, verify=False
    )
    assert report.batches == COUNT
    assert not st.compare(rounds.source, rounds.folder)


def test_a_batch_waits_for_its_reads_alone() -> None:
    rounds = Rounds(60)
    run(rounds)
    (name,) = [each for each in rounds.source.names() if each.endswith(".distcp")]
    # Where each archive's payload begins, and the payload: the second is known by the first alone.
    assert set(rounds.reads.values()) <= {2, 3} and rounds.looks[name] <= 3


def test_the_count_catches_batches_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_write, "_AT_ONCE", 1)
    with pytest.raises(AssertionError, match="it waits"):
        run(Rounds(0.1))


def test_what_fails_lets_the_others_read() -> None:
    rounds = Rounds(60)
    st.save(TREE, rounds.source, sharded_strategy="torch_dist", common_strategy="torch_dist")
    source = rounds.read_from()  # alone enough for batches side by side

    def write(name: str, buffers: Iterable[Any], *, durable: bool) -> int:
        if "00005-of-" in name:
            raise StorageError("no room")
        return rounds.folder.write(name, buffers, durable=durable)

    with pytest.raises(StorageError, match="no room"):
        convert(source, wrapped(rounds.folder, write=write), backend="safetensors", max_bytes_in_flight=NBYTES)
    report = convert(source, rounds.folder, backend="safetensors", max_bytes_in_flight=NBYTES)
    assert 0 < report.resumed < COUNT
    assert not st.compare(rounds.source, rounds.folder)


def test_one_batch_is_read_at_a_time() -> None:
    gate, order = threading.Lock(), list[str]()
    first, second = (_passage.ReadTurn(gate, partial(order.append, name), 4) for name in ("first", "second"))
    first.wait()
    other = threading.Thread(target=second.wait)
    other.start()
    first.count(3)
    assert gate.locked() and order == ["first"]
    first.count(1)
    other.join(60)
    assert order == ["first", "second"]
    first.wait()  # what reads again waits for nobody: others may wait for it
    first.count(4)
    first.end()
    assert gate.locked()
    second.end()
    assert not gate.locked()


def test_what_is_read_for_a_request_that_is_not_run_keeps_no_other_batch_waiting() -> None:
    row = (st.strategies.StrategyAction.SAVE_SHARDED, "safetensors", 1)

    def save_sharded(pending: Any, shards: Any) -> Any:
        for shard in shards:
            if isinstance(shard.data, st.LazyTensor):
                shard.data[:1].read()
        return st.default_strategies[row](pending, shards)

    rounds, table = Rounds(60), st.default_strategies | {row: save_sharded}
    st.save(TREE, rounds.source)
    options: dict[str, Any] = {"backend": "safetensors", "max_bytes_in_flight": NBYTES, "strategies": table}

    def replace(name: str, data: bytes, *, durable: bool) -> None:
        rounds.folder.replace(name, data, durable=durable)
        if name.endswith("000000.done"):
            raise StorageError("killed")

    with pytest.raises(StorageError, match="killed"):
        convert(rounds.source, wrapped(rounds.folder, replace=replace), **options)
    assert convert(rounds.source, rounds.folder, **options).resumed == 1
