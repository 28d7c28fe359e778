"""The weighted sum over a box on an accelerator: computed where the tensor is, so that only a number moves."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ..geometry import slabs, slices
from ._host import CONSTANT, FACTOR, MODULUS
from ._weights import LOW_BITS, Words, axis_weights, high_weights, low_weights

_MOST = 1 << 24  # words that are mixed at once
_HALF = 0xFFFFFFFF


def device_total(words: torch.Tensor, axes: Sequence[int], offset: Sequence[int]) -> int:
    """Return what `host_total` returns, computed by torch on the device where the words are.

    Args:
        words: the elements' bits as integers of 1, 2, 4 or 8 bytes.
        axes: the global axis that each axis of the box is.
        offset: the box's first index along each.

    Examples:
        >>> zero, weight = torch.zeros(1, dtype=torch.int32), int(axis_weights(0, 0, 1)[0])
        >>> device_total(zero, (0,), (0,)) == CONSTANT * weight % 2**64
        True
    """
    totals = []
    for start, shape in slabs(tuple(words.shape), _MOST):
        total = _mix(words[slices(start, shape)]) + _signed(CONSTANT)
        for axis in reversed(range(words.ndim)):
            first = offset[axis] + start[axis]
            total = (total * _weights(axes[axis], first, first + shape[axis], words.device)).sum(-1)
        totals.append(total)
    return int(torch.stack(totals).sum()) % MODULUS if totals else 0


def _mix(words: torch.Tensor) -> torch.Tensor:
    # Torch shifts signed integers alone, and copies the sign: masks take it away again.
    wide = words.to(torch.int64)
    if words.itemsize == 8:
        wide = wide ^ (wide >> 32 & _HALF)
    else:
        wide = wide & ((1 << 8 * words.itemsize) - 1)
    wide = wide * _signed(FACTOR)
    return wide ^ (wide >> 32 & _HALF)


def _weights(axis: int, start: int, stop: int, device: torch.device) -> torch.Tensor:
    if stop - start <= 1 << LOW_BITS:
        return _moved(axis_weights(axis, start, stop), device)
    index = torch.arange(start, stop, device=device)
    high = _moved(high_weights(axis, start, stop), device)[(index >> LOW_BITS) - (start >> LOW_BITS)]
    return high * _moved(low_weights(axis), device)[index & ((1 << LOW_BITS) - 1)]


def _moved(weights: Words, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(weights.view(np.int64).copy()).to(device)


def _signed(number: int) -> int:
    return number - MODULUS if number >= MODULUS // 2 else number
