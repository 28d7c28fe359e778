"""Snapshots of shards' tensors, so that the caller may change the originals while a save writes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ....core.mapping import ShardedTensor
from ....core.trees import with_data
from ...storage import DeviceCopies, HostMemory, copies_of, host_memory, in_threads

_ALIGNMENT = 64

_PART_BYTES = 4 * 1024 * 1024
"""Size of the parts that threads copy."""

_LEAST_PART_BYTES = 256 * 1024
"""Size below which a copy isn't worth handing to another thread."""

_Pair = tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]
"""Destination and source of a copy, as bytes."""

_Identity = tuple[Any, ...]
"""The memory of a copy's source and its view of that memory; equal sources are copied once."""


@dataclass(frozen=True, slots=True, eq=False)
class _Source:
    """The memory to copy for a tensor's snapshot.

    Attributes:
        elements: Bytes of the tensor's memory, uint8 (bytes,), if its elements fill a contiguous range; otherwise the
            tensor itself, in a dtype that torch can copy.
        is_range: Whether `elements` is such a range of bytes.
    """

    elements: torch.Tensor
    is_range: bool

    @property
    def identity(self) -> _Identity:
        data = self.elements
        view = () if self.is_range else (data.dtype, data.shape, data.stride(), data.is_conj(), data.is_neg())
        return (data.device, data.data_ptr(), data.nbytes, *view)


def snapshot_shards(shards: Sequence[ShardedTensor], memory: HostMemory = host_memory) -> tuple[ShardedTensor, ...]:
    """Return the shards with copies of their tensors in host memory; lazy tensors stay unchanged.

    Memory that several tensors share is copied once, and expanded tensors aren't materialised.

    Args:
        shards: Shards with data.
        memory: Pool of memory for copies of tensors in the host's memory.

    Examples:
        >>> weight = torch.arange(4)
        >>> snapshot, = snapshot_shards([ShardedTensor.from_rank_offsets("w", weight)])
        >>> weight += 1
        >>> snapshot.data
        tensor([0, 1, 2, 3])
    """
    tensors = [shard.data.detach() for shard in shards if _is_copied(shard.data)]
    sources = [_source(tensor) for tensor in tensors]
    copies = _copy_all({source.identity: source for source in sources}, memory)
    snapshots = iter(
        [_as_tensor(copies[source.identity], tensor, source) for tensor, source in zip(tensors, sources, strict=True)]
    )
    return tuple(with_data(shard, next(snapshots)) if _is_copied(shard.data) else _clone(shard) for shard in shards)


def _as_tensor(copy: torch.Tensor, tensor: torch.Tensor, source: _Source) -> torch.Tensor:
    """Return a view of copied bytes with the dtype, shape and strides of the tensor that they were copied from."""
    elements = copy.view(tensor.dtype)
    return elements.as_strided(tensor.shape, tensor.stride()) if source.is_range else elements.view(tensor.shape)


def _clone(shard: ShardedTensor) -> ShardedTensor:
    """Return a snapshot of a shard whose data is empty, lazy, quantised or an instance of a tensor subclass."""
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


def _copy_all(sources: dict[_Identity, _Source], memory: HostMemory) -> dict[_Identity, torch.Tensor]:
    """Copy all sources to host memory, and return the copy of each, uint8 (bytes,), by the source's identity."""
    by_device: dict[torch.device, dict[_Identity, _Source]] = {}
    for name, source in sources.items():
        by_device.setdefault(source.elements.device, {})[name] = source
    copies: dict[_Identity, torch.Tensor] = {}
    in_progress: list[tuple[DeviceCopies, Any]] = []
    try:
        for device, part in by_device.items():
            copier = copies_of(device)
            if copier is None:
                copies |= _copy_here(part, memory)
                continue
            room = _room(part, copier.host_memory(_aligned_bytes(part)))
            in_progress.append(
                (copier, copier.start([(_like(room[name], item), item.elements) for name, item in part.items()]))
            )
            copies |= room
    finally:
        # Only these copies are waited for, not all work of the device. This holds after an exception too: the block may
        # be lent again at once, and a copy in flight would write into it.
        for copier, token in in_progress:
            copier.wait(token)
    return copies


def _aligned_bytes(sources: dict[_Identity, _Source]) -> int:
    """Return the size in bytes of a memory block for the copies of all sources, each aligned."""
    return sum(-(-source.elements.nbytes // _ALIGNMENT) * _ALIGNMENT for source in sources.values())


def _room(sources: dict[_Identity, _Source], block: torch.Tensor) -> dict[_Identity, torch.Tensor]:
    """Divide a memory block: return the part of it for each source's copy, aligned, by the source's identity."""
    room, begin = {}, 0
    for name, source in sources.items():
        room[name] = block[begin : begin + source.elements.nbytes]
        begin += -(-source.elements.nbytes // _ALIGNMENT) * _ALIGNMENT
    return room


def _like(copy: torch.Tensor, source: _Source) -> torch.Tensor:
    return copy.view(source.elements.dtype).view(source.elements.shape)


def _copy_here(sources: dict[_Identity, _Source], memory: HostMemory) -> dict[_Identity, torch.Tensor]:
    """Copy sources to pooled host memory, synchronously, and return the copies by the sources' identities.

    The sources are in host memory, or on a device for which `copies_of` returns None.
    """
    copies = _room(sources, memory.lend(_aligned_bytes(sources)))
    ranges = list[_Pair]()
    for name, source in sources.items():
        if source.is_range and source.elements.is_cpu:
            ranges.append((copies[name].numpy(), source.elements.numpy()))
        else:
            _like(copies[name], source).copy_(source.elements)
    _copy_ranges(ranges)
    return copies


def _copy_ranges(pairs: Sequence[_Pair]) -> None:
    """Copy bytes in a few threads; a thread that has finished a part takes the next one.

    Torch's own threads synchronise after every tensor, and would wait for a thread whose core another program uses.
    """
    parts: list[_Pair] = []
    for target, source in pairs:
        if source.size < _LEAST_PART_BYTES:
            np.copyto(target, source)
        else:
            starts = range(0, source.size, _PART_BYTES)
            parts += [(target[at : at + _PART_BYTES], source[at : at + _PART_BYTES]) for at in starts]
    in_threads(lambda pair: np.copyto(*pair), parts)
