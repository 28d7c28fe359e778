"""The tensor that a leaf was given: whether it has one, whether it is still the leaf's, whether it may be written."""

from __future__ import annotations

from typing import Any

import torch

from ...errors import ShapeError, error_text
from .._tensor import ShardedTensor


def given_tensor(shard: ShardedTensor) -> torch.Tensor | None:
    """Return a shard's tensor; None where it has no memory of its own: no data, a meta, fake or lazy tensor.

    Examples:
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
    is_plain = type(data) in (torch.Tensor, torch.nn.Parameter) and data.layout is torch.strided
    return is_plain and not data.untyped_storage().nbytes() and data.numel() > 0


def check_unchanged(doing: str, shard: ShardedTensor, tensor: torch.Tensor) -> None:
    """Raise unless a tensor has the shape and dtype that its shard says, and memory.

    Args:
        doing: what is being done, for the message.
        shard: whose.
        tensor: its data.

    Raises:
        ShapeError: it was changed since the shard was built.

    Examples:
        >>> shard = ShardedTensor.from_rank_offsets("w", torch.zeros(2))
        >>> check_unchanged("load", shard, shard.data)
    """
    shape = tuple(tensor.shape)
    freed = lacks_memory(tensor)
    if (shape, tensor.dtype) == (shard.data_shape, shard.dtype) and not freed:
        return
    what = f"{doing}: the tensor of {shard.key!r} was changed after its shard was built"
    found, expected = f"{shape} {tensor.dtype}{', freed' * freed}", f"{shard.data_shape} {shard.dtype}"
    fix = "Build the shard from the tensor as it is now."
    raise ShapeError(error_text(what, found=found, expected=expected, fix=fix))


def check_writable(doing: str, shard: ShardedTensor, tensor: torch.Tensor) -> None:
    """Raise unless each element of a tensor that is given away has a place of its own.

    Args:
        doing: what is being done, for the message.
        shard: whose.
        tensor: its data.

    Raises:
        ShapeError: the tensor isn't dense, or elements of it share memory.

    Examples:
        >>> shard = ShardedTensor.from_rank_offsets("w", torch.zeros(1).expand(4))
        >>> check_writable("load", shard, shard.data)
        Traceback (most recent call last):
        shardtree.errors.ShapeError: load: elements of the donated tensor of 'w' share memory
          Donate tensors with memory of their own; expand() and unfold() make views that have none.
    """
    if tensor.layout is not torch.strided:
        fix = "Donate a dense tensor, as .to_dense() gives, or don't donate this one."
        raise ShapeError(error_text(f"{doing}: the donated tensor of {shard.key!r} is {tensor.layout}", fix=fix))
    if _may_overlap(tensor):
        fix = "Donate tensors with memory of their own; expand() and unfold() make views that have none."
        raise ShapeError(error_text(f"{doing}: elements of the donated tensor of {shard.key!r} share memory", fix=fix))


def _may_overlap(tensor: torch.Tensor) -> bool:
    """Return whether two elements may be at one place: some axis' step doesn't pass what the finer axes reach."""
    if tensor.is_contiguous():
        return False
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride <= reach:
            return True
        reach += stride * (size - 1) if size > 1 else 0
    return False
