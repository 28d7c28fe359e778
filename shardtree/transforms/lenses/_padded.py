"""A lens for padded axes, as that of a vocabulary: the padding isn't stored, so that it may differ between layouts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ...errors import ShapeError, error_text
from ...geometry import integer, refuse
from ...mapping import ShardedTensor
from ._axis_runs import PADDING, AxisRuns
from ._boxes import check_box
from ._lens import Built, Lens
from ._mapped import mapped_axis


def padded_axis(size: int, *, axis: int = 0, fill: float = 0) -> Lens:
    """Return the lens of a tensor that is longer along an axis than what is stored; what is behind is padding.

    Megatron-Core pads a vocabulary to a multiple that depends on the number of tensor-parallel ranks. A rank may hold
    nothing but padding: it stores nothing.

    Args:
        size: how much is stored, in elements along the axis.
        axis: of the tensor that the model holds; prepended axes don't count.
        fill: what the padding is when it is merged; it isn't looked at when it is built.

    Raises:
        MetadataError: the size isn't an integer of at least 0.
        ShapeError: the tensor has no such axis, or is shorter.

    Examples:
        >>> import torch
        >>> lens = padded_axis(5)
        >>> built = lens(ShardedTensor.from_rank_offsets("embedding", torch.arange(4), (0, 1, 2)))  # rows 4 to 7 of 8
        >>> [(part.global_shape, part.global_offset, part.data) for part in built.shards]
        [((5,), (4,), tensor([0]))]
        >>> built.merge([torch.tensor([9])])
        tensor([9, 0, 0, 0])
    """
    kept = integer("padded_axis", "size", size)
    if kept < 0:
        refuse("padded_axis", "size", kept, "0 or more", "Pass what the axis has without padding.", error=ShapeError)

    def runs(length: int) -> AxisRuns:
        if length < kept:
            raise ShapeError(error_text("an axis that isn't padded", found=length, expected=f"{kept} or more"))
        return AxisRuns(np.array([kept, length - kept]), np.array([0, PADDING]), np.zeros(2, dtype=np.int64), (kept,))

    inner = mapped_axis(axis, runs, fill=fill, doing="padded_axis")
    return lambda shard: _with_any_shape(shard, inner)


def _with_any_shape(shard: ShardedTensor, lens: Lens) -> Built:
    """Return what the lens builds, where the stored tensor may have another shape if the held one may."""
    check_box("padded_axis", shard)
    if not shard.allow_shape_mismatch:
        return lens(shard)
    built = lens(replace(shard, allow_shape_mismatch=False))
    return replace(built, shards=tuple(replace(part, allow_shape_mismatch=True) for part in built.shards))
