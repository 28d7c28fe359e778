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

# The memory that snapshots lie in, kept between saves: to get new memory takes many times longer than to fill it.
#
# What is lent out comes back when no tensor lies in it any more, so nothing can be overwritten that somebody still
# reads.

_UNIT = 2 * 1024 * 1024  # a huge page


class SnapshotMemory:
    """Blocks of host memory. They never take more than what was lent out at once, at the most, since `release`."""

    def __init__(self) -> None:
        self._idle: list[torch.Tensor] = []
        # Filled by whichever thread drops the last tensor, in the midst of anything: it may not wait for a lock.
        self._back: deque[torch.Tensor] = deque()
        self._lent = 0
        self._most = 0
        self._lock = Lock()

    @property
    def nbytes(self) -> int:
        """Bytes that are lent out, and that wait for the next save."""
        with self._lock:
            self._take_back()
            return self._lent + sum(block.nbytes for block in self._idle)

    def lend(self, nbytes: int, *, pinned: bool = False) -> torch.Tensor:
        """Return at least that many bytes of memory, uint8, with anything in them.

        Args:
            nbytes: how many.
            pinned: whether an accelerator shall copy to it without waiting.
        """
        with self._lock:
            self._take_back()
            block = self._fitting(nbytes, pinned)
            if block is None:
                block = self._new(-(-nbytes // _UNIT) * _UNIT, pinned)
            self._lent += block.nbytes
            self._most = max(self._most, self._lent)
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
        """Return the smallest idle block that is large enough, unless all of those are much too large."""
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
"""Less isn't worth another thread's attention."""

_Pair = tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]
"""Where bytes go to, and where they come from."""

# What a copy is made of: the same memory, seen in the same way, is copied once.
_Identity = tuple[Any, ...]


@dataclass(frozen=True, slots=True, eq=False)
class _Source:
    """What has to be copied of a tensor.

    Attributes:
        elements: a stretch of memory, uint8 of (bytes,); or the tensor itself, where its elements don't fill one, but
            in a dtype that torch can copy.
        is_stretch: which of the two.
    """

    elements: torch.Tensor
    is_stretch: bool

    @property
    def identity(self) -> _Identity:
        own = self.elements
        view = () if self.is_stretch else (own.dtype, own.shape, own.stride(), own.is_conj(), own.is_neg())
        return (own.device, own.data_ptr(), own.nbytes, *view)


def snapshot_shards(
    shards: Sequence[ShardedTensor], memory: SnapshotMemory = snapshot_memory
) -> tuple[ShardedTensor, ...]:
    """Return the shards with copies of their tensors, in host memory; what is lazy stays as it is.

    Memory that several tensors share is copied once, and an expanded tensor isn't blown up.

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
        [_seen(copies[source.identity], tensor, source) for tensor, source in zip(tensors, sources, strict=True)]
    )
    return tuple(with_data(shard, next(made)) if _is_copied(shard.data) else _cloned(shard) for shard in shards)


def _seen(copy: torch.Tensor, tensor: torch.Tensor, source: _Source) -> torch.Tensor:
    """Return copied bytes as the tensor that they were copied from."""
    typed = copy.view(tensor.dtype)
    return typed.as_strided(tensor.shape, tensor.stride()) if source.is_stretch else typed.view(tensor.shape)


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
        # Also after an exception: the memory is lent again by then, and a copy still on its way would go into that.
        for device in {source.elements.device for source in sources.values() if source.elements.is_cuda}:
            torch.cuda.current_stream(device).synchronize()
    return copies


def _copied_together(
    sources: dict[_Identity, _Source], memory: SnapshotMemory, pinned: bool
) -> dict[_Identity, torch.Tensor]:
    room = [-(-source.elements.nbytes // _ALIGNMENT) * _ALIGNMENT for source in sources.values()]
    block = memory.lend(sum(room), pinned=pinned)
    copies, begin, stretches = {}, 0, list[_Pair]()
    for (name, source), size in zip(sources.items(), room, strict=True):
        elements = source.elements
        copies[name] = block[begin : begin + elements.nbytes]
        begin += size
        if source.is_stretch and elements.is_cpu:
            stretches.append((copies[name].numpy(), elements.numpy()))
        else:
            copies[name].view(elements.dtype).view(elements.shape).copy_(elements, non_blocking=pinned)
    _copy_stretches(stretches)
    return copies


def _copy_stretches(pairs: Sequence[_Pair]) -> None:
    """Copy bytes by a few threads, each of which takes the next part when it is done with one.

    Torch's own threads meet after every tensor, and wait there for one that another program keeps from running.
    """
    parts: list[_Pair] = []
    for target, source in pairs:
        if source.size < _LEAST_PART_BYTES:
            np.copyto(target, source)
        else:
            starts = range(0, source.size, _PART_BYTES)
            parts += [(target[at : at + _PART_BYTES], source[at : at + _PART_BYTES]) for at in starts]
    in_threads(lambda pair: np.copyto(*pair), parts)
