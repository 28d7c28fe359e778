"""Process groups for code that needs one and sends nothing: what it asks of them, and a real one of one process."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch


@dataclass(frozen=True)
class Group:
    """What is asked of a process group: how many ranks there are, and which one this is."""

    ranks: int
    own: int = 0

    def size(self) -> int:
        return self.ranks

    def rank(self) -> int:
        return self.own


@pytest.fixture(scope="module")
def one_process() -> Iterator[None]:
    """Be the only rank of a process group."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()
