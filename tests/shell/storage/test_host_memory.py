"""Host memory that is kept: lent to one at a time, for one kind of device, no more than was needed; forks take none."""

from __future__ import annotations

import os

import pytest
import torch

from shardtree.errors import StorageError
from shardtree.shell.storage import HostMemory, _buffers


def test_memory_is_kept_for_the_next_time_and_no_more_than_was_needed_at_once() -> None:
    memory = HostMemory()
    unit = 2**21
    first = memory.lend(5)
    place = first.data_ptr()
    second = memory.lend(unit)
    assert memory.nbytes == 2 * unit
    del first
    assert memory.nbytes == 2 * unit and memory.lend(7).data_ptr() == place
    del second
    larger = memory.lend(2 * unit)  # what lies idle makes room
    assert memory.nbytes == 2 * unit
    memory.release()
    assert memory.nbytes == 2 * unit
    del larger
    memory.release()
    assert memory.nbytes == 0


def test_memory_that_is_still_read_is_not_lent_again() -> None:
    memory = HostMemory()
    kept = memory.lend(100)[10:20].view(2, 5)
    kept.fill_(7)
    for _ in range(3):
        memory.lend(100).fill_(1)
    assert kept.eq(7).all()


def test_of_equal_blocks_the_one_used_last_is_lent_again() -> None:
    memory = HostMemory()
    first, second = memory.lend(100), memory.lend(100)
    place = first.data_ptr()
    del second, first
    assert memory.lend(100).data_ptr() == place  # what is in it may still be in the processor's cache


def test_pinned_memory_is_lent_again_for_its_own_kind_of_device() -> None:
    memory, made = HostMemory(), list[int]()

    def new(nbytes: int) -> torch.Tensor:
        made.append(nbytes)
        return torch.empty(nbytes, dtype=torch.uint8)

    pinned, pageable = memory.lend(5, "cuda", new), memory.lend(5)
    del pinned, pageable
    memory.lend(5, "cuda", new)
    memory.lend(5, "xpu", new)
    assert made == [2**21] * 2


def in_a_fork(check: object) -> bool:
    """Return whether a check holds in a forked process."""
    pid = os.fork()
    if not pid:
        os._exit(0 if check() else 1)  # type: ignore[operator]
    return os.waitpid(pid, 0)[1] == 0


def test_a_forked_process_uses_no_memory_that_was_pinned_before() -> None:
    memory = HostMemory()
    new = lambda nbytes: torch.empty(nbytes, dtype=torch.uint8)  # noqa: E731
    lent, idle, pageable = memory.lend(5, "cuda", new), memory.lend(2**23, "cuda", new), memory.lend(2**24)
    parents = {lent.data_ptr(), idle.data_ptr()}
    del idle

    def check() -> bool:
        nonlocal lent, pageable
        memory.after_fork()
        place = pageable.data_ptr()
        del lent, pageable
        pinned = [memory.lend(5, "cuda", new), memory.lend(2**23, "cuda", new)]
        return parents.isdisjoint(one.data_ptr() for one in pinned) and memory.lend(2**24).data_ptr() == place

    assert in_a_fork(check)


def test_a_fork_while_another_thread_takes_memory_is_no_deadlock() -> None:
    memory = HostMemory()
    with memory._lock:
        assert in_a_fork(lambda: memory.after_fork() is None and memory.lend(1).numel() == 1)


def test_memory_is_never_pinned_in_a_fork_of_a_process_that_did(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[int]()

    def empty(nbytes: int, **options: object) -> torch.Tensor:
        asked.append(nbytes)
        return torch.zeros(nbytes, dtype=torch.uint8)

    monkeypatch.setattr(_buffers, "_first_process", [])
    monkeypatch.setattr(torch, "empty", empty)
    memory = HostMemory()

    def refused() -> bool:
        with pytest.raises(StorageError, match="forked from one that pinned memory"):
            memory.lend(5, "cuda", _buffers._pin)
        return asked == [2**21]

    assert in_a_fork(lambda: memory.lend(5, "cuda", _buffers._pin).numel() == 5)  # the parent hasn't asked yet
    memory.lend(5, "cuda", _buffers._pin)
    memory.release()
    assert in_a_fork(refused)
