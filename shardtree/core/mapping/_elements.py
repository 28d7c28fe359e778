"""A leaf's tensor: its bits, and whether it has elements and memory of its own."""

from __future__ import annotations

from typing import Any

import torch

from ._leaves import ShardedBase


def given_tensor(shard: ShardedBase) -> torch.Tensor | None:
    """Return a shard's tensor; None where it has no memory of its own: no data, a meta, fake or lazy tensor.

    Examples:
        >>> from shardtree.mapping import ShardedTensor
        >>> given_tensor(ShardedTensor.from_rank_offsets("w", torch.empty(2, device="meta"))) is None
        True
    """
    data = shard.data
    return data if isinstance(data, torch.Tensor) and has_elements(data) else None


def has_elements(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has elements: it isn't a meta tensor, nor a fake one, as ``torch.export`` makes them.

    Examples:
        >>> has_elements(torch.zeros(2)), has_elements(torch.zeros(2, device="meta"))
        (True, False)
    """
    return not tensor.is_meta and not hasattr(tensor, "fake_mode")


def lacks_memory(data: Any) -> bool:
    """Return whether data is a tensor whose storage was freed, as FSDP does between steps: elements without memory.

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
    """Return whether data is a wrapper subclass: a tensor whose elements follow from other tensors that it holds.

    Its own memory says nothing, so that it can't be read, filled or cut as memory. DTensors, and the quantised tensors
    of torchao and quanto, are such; tensors without elements (meta, fake) count as what they stand for.

    Examples:
        >>> is_wrapper(torch.zeros(2)), is_wrapper(None)
        (False, False)
    """
    if type(data) in (torch.Tensor, torch.nn.Parameter) or not isinstance(data, torch.Tensor) or not has_elements(data):
        return False
    if data.layout is not torch.strided:
        return False
    # Subclasses may answer for `data_ptr` themselves. No real memory begins at address 0, where these count from.
    with torch._C.DisableTorchFunctionSubclass():
        try:
            return data.numel() > 0 and data.data_ptr() == data.storage_offset() * data.itemsize
        except RuntimeError:  # torch refuses to tell where a FunctionalTensor's memory is
            return True
