"""Copies of shards' tensors, so that the caller may change his own while they are written."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any
from weakref import finalize

import numpy as np
import numpy.typing as npt
import torch

from ...mapping import ShardedTensor
from ...storage import empty_tensor, in_threads
from ...trees import with_data

# The memory of snapshots is kept between saves: getting new memory takes many times longer than filling it. A lent
# block comes back when the last tensor in it is collected, so nothing is overwritten while somebody may read it.

_UNIT = 2 * 1024 * 1024  # a huge page


class SnapshotMemory:
    """Blocks of host memory; all together never more than was lent out at one time since `release`."""

    def __init__(self) -> None:
        self._idle: list[torch.Tensor] = []
        # Filled by a finalizer, which may interrupt any code of any thread, also one that holds the lock: a deque needs
        # none.
        self._back: deque[torch.Tensor] = deque()
        self._lent = 0
        self._most = 0
        self._lock = Lock()

    @property
    def nbytes(self) -> int:
        """Bytes that are lent out or kept for the next save."""
        with self._lock:
            self._take_back()
            return self._lent + sum(block.nbytes for block in self._idle)

    def lend(self, nbytes: int, *, pinned: bool = False) -> torch.Tensor:
        """Return at least that many bytes of memory, uint8, uninitialised.

        Args:
            nbytes: how many.
            pinned: whether it is page-locked, so that an accelerator can copy to it asynchronously.
        """
        with self._lock:
            self._take_back()
            block = self._fitting(nbytes, pinned)
            if block is None:
                block = self._new(-(-nbytes // _UNIT) * _UNIT, pinned)
            self._lent += block.nbytes
            self._most = max(self._most, self._lent)
        # Tensors made from an array keep the array alive, not the block: its finalizer knows when the last one is gone.
        array = block.numpy()
        finalize(array, self._back.append, block).atexit = False
        return torch.from_numpy(array)

    def release(self) -> None:
        """Give back to the system what isn't lent out."""
        with self._lock:
            self._take_back()
            self._idle.clear()
            self._most = self._lent

    def _take_back(self) -> None:
        while self._back:
            block = self._back.popleft()
            self._lent -= block.nbytes
            self._idle.append(block)

    def _fitting(self, nbytes: int, pinned: bool) -> torch.Tensor | None:
        """Return the smallest idle block that is large enough, None if there is none or it is much too large."""
        fitting = [
            number
            for number, block in enumerate(self._idle)
            if nbytes <= block.nbytes <= 2 * nbytes + _UNIT and block.is_pinned() == pinned
        ]
        return self._idle.pop(min(fitting, key=lambda number: self._idle[number].nbytes)) if fitting else None

    def _new(self, nbytes: int, pinned: bool) -> torch.Tensor:
        most = max(self._most, self._lent + nbytes)
        while self._idle and self._lent + nbytes + sum(block.nbytes for block in self._idle) > most:
            del self._idle[0]
        if pinned:
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        return empty_tensor(nbytes, dtype=torch.uint8)


snapshot_memory = SnapshotMemory()
"""This process's."""

_ALIGNMENT = 64

_PART_BYTES = 4 * 1024 * 1024
"""What one of several threads copies at a time."""

_LEAST_PART_BYTES = 256 * 1024
"""Less isn't worth handing to another thread."""

_Pair = tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]
"""Where bytes go to, and where they come from."""

_Identity = tuple[Any, ...]
"""The memory of a copy's source and how it is viewed: equal ones are copied once."""


@dataclass(frozen=True, slots=True, eq=False)
class _Source:
    """What has to be copied of a tensor.

    Attributes:
        elements: a contiguous range of memory, uint8 of (bytes,); or the tensor itself, if its elements don't fill one,
            but in a dtype that torch can copy.
        is_range: which of the two.
    """

    elements: torch.Tensor
    is_range: bool

    @property
    def identity(self) -> _Identity:
        own = self.elements
        view = () if self.is_range else (own.dtype, own.shape, own.stride(), own.is_conj(), own.is_neg())
        return (own.device, own.data_ptr(), own.nbytes, *view)


def snapshot_shards(
    shards: Sequence[ShardedTensor], memory: SnapshotMemory = snapshot_memory
) -> tuple[ShardedTensor, ...]:
    """Return the shards with copies of their tensors, in host memory; lazy tensors stay as they are.

    Memory that several tensors share is copied once, and an expanded tensor isn't materialised.

    Args:
        shards: with data.
        memory: where copies lie.

    Examples:
        >>> weight = torch.arange(4)
        >>> kept, = snapshot_shards([ShardedTensor.from_rank_offsets("w", weight)])
        >>> weight += 1
        >>> kept.data
        tensor([0, 1, 2, 3])
    """
    tensors = [shard.data.detach() for shard in shards if _is_copied(shard.data)]
    sources = [_source(tensor) for tensor in tensors]
    copies = _copied({source.identity: source for source in sources}, memory)
    made = iter(
        [_as_tensor(copies[source.identity], tensor, source) for tensor, source in zip(tensors, sources, strict=True)]
    )
    return tuple(with_data(shard, next(made)) if _is_copied(shard.data) else _cloned(shard) for shard in shards)


def _as_tensor(copy: torch.Tensor, tensor: torch.Tensor, source: _Source) -> torch.Tensor:
    """Return copied bytes as the tensor that they were copied from."""
    typed = copy.view(tensor.dtype)
    return typed.as_strided(tensor.shape, tensor.stride()) if source.is_range else typed.view(tensor.shape)


def _cloned(shard: ShardedTensor) -> ShardedTensor:
    """Return the shard of what has no plain memory: nothing, a lazy tensor, or an instance of a subclass."""
    is_tensor = isinstance(shard.data, torch.Tensor) and shard.data.numel()
    return with_data(shard, shard.data.detach().clone()) if is_tensor else shard


def _is_copied(data: Any) -> bool:
    plain = type(data) in (torch.Tensor, torch.nn.Parameter) and not data.is_quantized
    return bool(plain and data.numel())


def _source(tensor: torch.Tensor) -> _Source:
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    if span > tensor.numel() or tensor.is_conj() or tensor.is_neg():
        return _Source(tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor, False)
    return _Source(tensor.as_strided((span,), (1,)).view(torch.uint8), True)


def _copied(sources: dict[_Identity, _Source], memory: SnapshotMemory) -> dict[_Identity, torch.Tensor]:
    """Return the bytes of each source, uint8 of (bytes,)."""
    copies: dict[_Identity, torch.Tensor] = {}
    try:
        for pinned in (False, True):
            part = {name: source for name, source in sources.items() if source.elements.is_cuda == pinned}
            if part:
                copies |= _copied_together(part, memory, pinned)
    finally:
        # Also after an exception: the block may be lent again at once, and a running copy would write into it.
        for device in {source.elements.device for source in sources.values() if source.elements.is_cuda}:
            torch.cuda.current_stream(device).synchronize()
    return copies


def _copied_together(
    sources: dict[_Identity, _Source], memory: SnapshotMemory, pinned: bool
) -> dict[_Identity, torch.Tensor]:
    room = [-(-source.elements.nbytes // _ALIGNMENT) * _ALIGNMENT for source in sources.values()]
    block = memory.lend(sum(room), pinned=pinned)
    copies, begin, ranges = {}, 0, list[_Pair]()
    for (name, source), size in zip(sources.items(), room, strict=True):
        elements = source.elements
        copies[name] = block[begin : begin + elements.nbytes]
        begin += size
        if source.is_range and elements.is_cpu:
            ranges.append((copies[name].numpy(), elements.numpy()))
        else:
            copies[name].view(elements.dtype).view(elements.shape).copy_(elements, non_blocking=pinned)
    _copy_ranges(ranges)
    return copies


def _copy_ranges(pairs: Sequence[_Pair]) -> None:
    """Copy bytes by a few threads, each of which takes the next part when it is done with one.

    Torch's own threads meet after every tensor, and wait there for a thread whose core another program keeps busy.
    """
    parts: list[_Pair] = []
    for target, source in pairs:
        if source.size < _LEAST_PART_BYTES:
            np.copyto(target, source)
        else:
            starts = range(0, source.size, _PART_BYTES)
            parts += [(target[at : at + _PART_BYTES], source[at : at + _PART_BYTES]) for at in starts]
    in_threads(lambda pair: np.copyto(*pair), parts)
