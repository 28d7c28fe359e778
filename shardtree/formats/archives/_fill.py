"""Reads of stored tensors with any strides, in strips of a few MB: little memory beyond the result is needed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import prod
from operator import mul

import torch

from ...errors import CorruptCheckpoint, error_text
from ...kit import as_integers
from ._payload import StoredTensor
from ._tensors import MOST_EXPANDED_BYTES
from ._zip import Read

_SHORT_BYTES, _STRIP_BYTES = 64 * 1024, 4 * 1024 * 1024
_DENSE = 8
"""Upper bound of the bytes read for each byte wanted, in strips that are longer than the short ones."""

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offset and shape."""


def reach(tensor: StoredTensor) -> int:
    """Return the number of bytes from the beginning of a stored tensor's first element to the end of its last."""
    if 0 in tensor.shape:
        return 0
    steps = ((length - 1) * step for length, step in zip(tensor.shape, tensor.stride, strict=True))
    return (sum(steps) + 1) * tensor.dtype.itemsize


def box_of(tensor: StoredTensor, box: Box) -> StoredTensor:
    """Return the description of a part of a stored tensor, as a stored tensor of its own.

    Args:
        tensor: Stored tensor.
        box: Offset and shape of the part.
    """
    offset, shape = box
    begin = tensor.begin + sum(map(mul, offset, tensor.stride)) * tensor.dtype.itemsize
    return replace(tensor, begin=begin, shape=shape)


def strips(tensor: StoredTensor, what: str) -> Iterator[Box]:
    """Yield the boxes in which a stored tensor is read. One read gets all bytes from a box's first to its last element.

    A tensor is cut along the axis of its largest stride until each box spans at most 4 MB. Boxes of a transposed tensor
    are thus groups of columns. A tensor whose elements overlap is not cut.

    Args:
        tensor: Stored tensor.
        what: Description of the archive, for errors.

    Raises:
        CorruptCheckpoint: The tensor's elements overlap, and span more than 1 GiB.
    """
    if _overlaps(tensor):
        if (span := reach(tensor)) > MOST_EXPANDED_BYTES:
            found, expected = f"{span} bytes", f"at most {MOST_EXPANDED_BYTES} bytes"
            heading = f"{what}: a tensor with overlapping elements spans too many bytes"
            raise CorruptCheckpoint(error_text(heading, found=found, expected=expected))
        yield (0,) * len(tensor.shape), tensor.shape
    elif 0 not in tensor.shape:
        yield from _strips(tensor, (0,) * len(tensor.shape))


def _strips(tensor: StoredTensor, offset: tuple[int, ...]) -> Iterator[Box]:
    span, wanted = reach(tensor), prod(tensor.shape) * tensor.dtype.itemsize
    most = _STRIP_BYTES if wanted * _DENSE >= span else _SHORT_BYTES
    if span <= most:
        yield offset, tensor.shape
        return
    # The span is more than one element, so at least one axis longer than 1 has a stride that isn't 0.
    axis = max(range(len(tensor.shape)), key=lambda axis: (tensor.shape[axis] > 1, tensor.stride[axis]))
    inner = reach(replace(tensor, shape=_with(tensor.shape, axis, 1)))
    count = 1 + max(0, most - inner) // (tensor.stride[axis] * tensor.dtype.itemsize)
    for at in range(0, tensor.shape[axis], count):
        shape = _with(tensor.shape, axis, min(count, tensor.shape[axis] - at))
        yield from _strips(replace(tensor, shape=shape), _with(offset, axis, offset[axis] + at))


def _with(numbers: tuple[int, ...], axis: int, number: int) -> tuple[int, ...]:
    return (*numbers[:axis], number, *numbers[axis + 1 :])


def _overlaps(tensor: StoredTensor) -> bool:
    """Return whether elements may share bytes, other than by strides of 0.

    They may if a stride is shorter than the span of all axes with smaller strides.
    """
    axes = zip(tensor.stride, tensor.shape, strict=True)
    span = 1
    for step, length in sorted((step, length) for step, length in axes if step and length > 1):
        if step < span:
            return True
        span += (length - 1) * step
    return False


def fill_tensor(read: Read, tensor: StoredTensor, out: torch.Tensor, what: str) -> None:
    """Read a stored tensor's elements into another tensor. The boxes of `strips` are read one by one, to save memory.

    Args:
        read: Function that returns a byte range of the archive, by its first byte and one past its last.
        tensor: Stored tensor, or a box of one.
        out: Destination on the CPU, of the same dtype and shape, with any strides.
        what: Description of the archive, for errors.

    Raises:
        CorruptCheckpoint: Bytes of the tensor are missing, or its elements overlap and span more than 1 GiB.
    """
    for offset, shape in strips(tensor, what):
        target = out[tuple(slice(at, at + length) for at, length in zip(offset, shape, strict=True))]
        # Integers are copied, bit for bit, since torch can't copy all dtypes.
        as_integers(target).copy_(as_integers(_view(read, box_of(tensor, (offset, shape)), what)))


def filled_tensor(read: Read, tensor: StoredTensor, what: str) -> torch.Tensor:
    """Return the elements of a stored tensor, in new memory.

    Args:
        read: Function that returns a byte range of the archive, by its first byte and one past its last.
        tensor: Description of the tensor, from `describe_archive`.
        what: Description of the archive, for errors.

    Raises:
        CorruptCheckpoint: Bytes of the tensor are missing, or its elements overlap and span more than 1 GiB.
    """
    if prod(tensor.shape) * tensor.dtype.itemsize > reach(tensor):
        # An expanded tensor stays expanded: a file of a few bytes may have many of them, whose copies would fill the
        # memory.
        next(strips(tensor, what))
        return _view(read, tensor, what)
    out = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    fill_tensor(read, tensor, out, what)
    return out


def _view(read: Read, tensor: StoredTensor, what: str) -> torch.Tensor:
    data = bytearray(read(tensor.begin, tensor.begin + reach(tensor)))
    if len(data) != reach(tensor):
        found, expected = f"{len(data)} bytes", f"{reach(tensor)} bytes"
        raise CorruptCheckpoint(error_text(f"{what}: bytes of a tensor are missing", found=found, expected=expected))
    view = torch.frombuffer(data, dtype=tensor.dtype).as_strided(tensor.shape, tensor.stride)
    view = view.conj() if tensor.conj else view
    return torch._neg_view(view) if tensor.neg else view
