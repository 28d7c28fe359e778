"""Ranks as processes, joined by torch.distributed; nothing else in shardtree calls it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ._world import DEFAULT_TIMEOUT, World

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def is_initialised() -> bool:
    """Return whether torch.distributed has a default process group."""
    import torch.distributed as dist

    return dist.is_available() and dist.is_initialized()


def distributed(group: ProcessGroup | None = None, timeout: float = DEFAULT_TIMEOUT) -> World:
    raise NotImplementedError
