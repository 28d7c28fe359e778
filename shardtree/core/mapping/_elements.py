"""Access to a leaf's tensor, and tests for tensors without readable memory: meta, fake, freed and wrapper tensors."""

from __future__ import annotations

from typing import Any

import torch

from ._leaves import ShardedBase


def given_tensor(shard: ShardedBase) -> torch.Tensor | None:
    """Return a shard's tensor, or None if the shard has no elements in memory.

    Meta, fake and lazy tensors have no elements in memory, nor do shards without data.

    Examples:
        >>> from shardtree.mapping import ShardedTensor
        >>> given_tensor(ShardedTensor.from_rank_offsets("w", torch.empty(2, device="meta"))) is None
        True
    """
    data = shard.data
    return data if isinstance(data, torch.Tensor) and has_elements(data) else None


def has_elements(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has elements, unlike a meta tensor or a fake tensor of ``torch.export``.

    Examples:
        >>> has_elements(torch.zeros(2)), has_elements(torch.zeros(2, device="meta"))
        (True, False)
    """
    return not tensor.is_meta and not hasattr(tensor, "fake_mode")


def lacks_memory(data: Any) -> bool:
    """Return whether data is a tensor whose storage was freed, as FSDP does between steps.

    Such a tensor keeps its shape, but has no memory to read or write.

    Examples:
        >>> freed = torch.zeros(2)
        >>> nothing = freed.untyped_storage().resize_(0)
        >>> lacks_memory(torch.zeros(2)), lacks_memory(freed)
        (False, True)
    """
    # Wrapper subclasses have no storage of their own, and would look freed.
    is_plain = type(data) in (torch.Tensor, torch.nn.Parameter) and data.layout is torch.strided
    return is_plain and not data.untyped_storage().nbytes() and data.numel() > 0


def is_wrapper(data: Any) -> bool:
    """Return whether data is a wrapper subclass: a tensor whose value is computed from inner tensors that it holds.

    Examples are DTensors, and the quantised tensors of torchao and quanto. A wrapper has no memory of its own that
    could be read, written or sliced. A tensor without elements (meta, fake) does not count, whatever its class.

    Examples:
        >>> is_wrapper(torch.zeros(2)), is_wrapper(None)
        (False, False)
    """
    if type(data) in (torch.Tensor, torch.nn.Parameter) or not isinstance(data, torch.Tensor) or not has_elements(data):
        return False
    if data.layout is not torch.strided:
        return False
    # Subclasses may override `data_ptr`, so torch's own method is called. A tensor without memory has base address 0.
    with torch._C.DisableTorchFunctionSubclass():
        try:
            return data.numel() > 0 and data.data_ptr() == data.storage_offset() * data.itemsize
        except RuntimeError:  # torch doesn't give the address of a FunctionalTensor
            return True
