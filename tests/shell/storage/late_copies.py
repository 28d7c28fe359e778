"""A device that isn't there: its copies are made when they are waited for, and not before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from weakref import finalize

import torch

from shardtree.shell.storage._buffers import DeviceCopies, Pair


def new_memory(nbytes: int) -> torch.Tensor:
    return torch.full((nbytes,), 0xEE, dtype=torch.uint8)


def memory_used_again(buffers: int, nbytes: int) -> Callable[[int], torch.Tensor]:
    """Return what lends a few buffers again and again, whoever still uses them: what mustn't be done."""
    ring = cycle([new_memory(nbytes) for _ in range(buffers)])
    return lambda size: next(ring)[:size]


@dataclass(eq=False)
class LateDevice:
    """Copies that come as late as they may.

    Attributes:
        memory: makes the host's memory.
        log: what was done, in order: "start" and "wait".
        most: bytes of the host's memory that somebody had at once, at the most.
    """

    memory: Callable[[int], torch.Tensor] = new_memory
    log: list[str] = field(default_factory=list)
    most: int = 0
    _held: list[int] = field(default_factory=list)

    def copies(self, device: torch.device) -> DeviceCopies:
        return DeviceCopies(self._host_memory, self._start, self._wait)

    def _host_memory(self, nbytes: int) -> torch.Tensor:
        memory = self.memory(nbytes)
        self._held.append(nbytes)
        self.most = max(self.most, sum(self._held))
        finalize(memory, self._held.remove, nbytes)
        return memory

    def _start(self, pairs: Sequence[Pair]) -> list[Pair]:
        self.log.append("start")
        return list(pairs)

    def _wait(self, token: list[Pair]) -> None:
        self.log.append("wait")
        while token:
            target, source = token.pop()
            target.copy_(source)
