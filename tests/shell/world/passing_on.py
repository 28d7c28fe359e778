"""A rank of another world, through which tests see or stop what it says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardtree.world import World


class PassingOn(World):
    """What a rank calls is passed on to its own world, once `told` has heard of it."""

    def __init__(self, inner: World) -> None:
        super().__init__(inner.rank, inner.size, inner.timeout)
        self.inner = inner

    def told(self, call: str, value: Any = None) -> Any:
        """Return the value to be passed on; what it raises is raised in place of the call."""
        return value

    def all_gather(self, value: Any) -> list[Any]:
        return self.inner.all_gather(self.told("all_gather", value))

    def broadcast(self, value: Any, root: int = 0) -> Any:
        return self.inner.broadcast(self.told("broadcast", value), root)

    def barrier(self) -> None:
        self.told("barrier")
        self.inner.barrier()

    def all_to_all(self, values: Sequence[Any]) -> list[Any]:
        return self.inner.all_to_all(self.told("all_to_all", values))

    def send(self, value: Any, to: int) -> None:
        self.inner.send(self.told("send", value), to)

    def recv(self, source: int) -> Any:
        self.told("recv")
        return self.inner.recv(source)
