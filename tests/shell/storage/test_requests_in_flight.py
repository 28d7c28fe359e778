"""How many requests of a load are in flight: few where the store answers at once, many where it lets one wait."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from shardtree.core import limits
from shardtree.core.plans import Runs, runs_plan
from shardtree.shell.storage import Buffer, _requests, _transports, fetch
from shardtree.storage import Capabilities, ReadReport, StoredFile

COUNT, NBYTES = 40, 4096


class Store:
    """Answers when so many requests are in flight together, or none is to come any more."""

    def __init__(self, latency: float | None, together: int) -> None:
        self.capabilities, self.most = Capabilities(read_range=self.read_range, latency=latency), 0
        self._together, self._now, self._changed = together, 0, threading.Condition()

    def where(self, name: str = "") -> str:
        return f"store:{name}"

    def read_range(self, name: str, begin: int, end: int) -> tuple[Buffer, int]:
        with self._changed:
            self._now += 1
            self.most = max(self.most, self._now)
            self._changed.notify_all()
            enough = self._changed.wait_for(lambda: self.most >= self._together, 60)
            self._now -= 1
        assert enough
        return memoryview(np.arange(begin, end).astype(np.uint8)), COUNT * NBYTES


def load(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "REQUEST_BYTES", NBYTES)
    monkeypatch.setattr(_requests, "_GAP_BYTES", 0)
    length = COUNT * NBYTES
    runs = Runs(*(np.array([number]) for number in (0, 0, 0, 0, length)))
    memory = torch.zeros(length, dtype=torch.uint8)
    report = fetch(store, {0: StoredFile("w", length, None)}, runs_plan(runs), [memory])  # type: ignore[arg-type]
    assert report == ReadReport(length, 0, report.blocks_unchecked, 1)
    assert torch.equal(memory, torch.arange(length).to(torch.uint8))


@pytest.mark.parametrize("latency", [None, 0.05])
def test_a_store_that_lets_wait_has_many_at_once(latency: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_transports, "_LONG_WAIT", 60.0)
    load(Store(latency, together=32), monkeypatch)


def test_a_store_that_answers_at_once_has_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_transports, "_LONG_WAIT", 60.0)
    store = Store(0.001, together=1)
    load(store, monkeypatch)
    assert 1 <= store.most <= 8


def test_a_store_that_answers_at_once_and_sends_slowly_gets_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_transports, "_LONG_WAIT", 0.001)
    load(Store(0.001, together=32), monkeypatch)
