"""What moves bytes between ranks: the one thing that an executor of one's own has to bring."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch


class Exchange(Protocol):
    """A function that sends buffers to some ranks and fills buffers with what some ranks send.

    It is called once a step on every rank of the world, and returns when its own buffers may be used again: `incoming`
    is filled, and nothing reads `outgoing` any more. `World.exchange` is one. Every pair of ranks agrees about the
    bytes between them, because all ranks follow one schedule; no buffer is empty, and a rank that has nothing to do
    in a step gets two empty mappings. Buffers are reused from step to step.
    """

    def __call__(self, outgoing: Mapping[int, torch.Tensor], incoming: Mapping[int, torch.Tensor], /) -> None:
        """Send and receive.

        Args:
            outgoing: for each peer the bytes that it gets, uint8 (bytes,), contiguous. Ranks are the world's.
            incoming: for each peer the buffer that its bytes fill, uint8 (bytes,), contiguous.
        """
