"""Lenses for rotary embeddings: rows of a head whose two halves turn together, or whose neighbours do."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ...errors import MetadataError, ShapeError, error_text
from ...geometry import Column, refuse
from ._axis_runs import AxisRuns
from ._boxes import positive
from ._lens import Lens
from ._mapped import mapped_axis


def rotary_halves(*, head_size: int, rotary_size: int | None = None, axis: int = 0) -> Lens:
    """Return the lens from rows of which neighbours turn together, to rows of which halves of a head do.

    Meta's Llama holds the first form, Hugging Face's the second. It is about queries and keys, not about values: behind
    `attention_qkv`, give it those keys alone, with `lenses_by_pattern`.

    Args:
        head_size: rows of one head; how many heads there are follows from the axis.
        rotary_size: how many of a head's rows turn, from its first one; all by default.
        axis: along which the rows lie.

    Raises:
        MetadataError: the numbers aren't positive, or an odd number of rows would turn.
        ShapeError: the axis isn't made of such heads.

    Examples:
        >>> import torch
        >>> from shardtree.mapping import ShardedTensor
        >>> shard = ShardedTensor.from_rank_offsets("q", torch.arange(8))
        >>> rotary_halves(head_size=4)(shard).shards[0].data
        tensor([0, 2, 1, 3, 4, 6, 5, 7])

    References:
        transformers 5.23, `PermuteForRope`.
    """
    return _rotary("rotary_halves", _halves, head_size, rotary_size, axis)


def rotary_pairs(*, head_size: int, rotary_size: int | None = None, axis: int = 0) -> Lens:
    """Return the lens the other way round: from rows of which halves turn together, to rows of which neighbours do.

    The arguments and errors are those of `rotary_halves`.

    Examples:
        >>> import torch
        >>> from shardtree.mapping import ShardedTensor
        >>> shard = ShardedTensor.from_rank_offsets("q", torch.arange(6))
        >>> rotary_pairs(head_size=6)(shard).shards[0].data
        tensor([0, 3, 1, 4, 2, 5])
    """
    return _rotary("rotary_pairs", _pairs, head_size, rotary_size, axis)


def _halves(turning: int) -> Column:
    """Return where each of a head's rows goes when pairs become halves."""
    return np.arange(turning).reshape(2, -1).T.reshape(-1)


def _pairs(turning: int) -> Column:
    return np.arange(turning).reshape(-1, 2).T.reshape(-1)


def _rotary(doing: str, places: Callable[[int], Column], head_size: int, rotary_size: int | None, axis: int) -> Lens:
    size = positive(doing, "head_size", head_size)
    turning = size if rotary_size is None else positive(doing, "rotary_size", rotary_size)
    if turning % 2 or turning > size:
        fix = "Rows turn in pairs."
        refuse(doing, "rotary_size", turning, f"an even number up to {size}", fix, error=MetadataError)
    head = np.concatenate([places(turning), np.arange(turning, size)])

    def runs(length: int) -> AxisRuns:
        if length % size:
            raise ShapeError(error_text("an axis that isn't made of heads", found=length, expected=f"heads of {size}"))
        start = (np.arange(0, length, size)[:, None] + head).reshape(-1)
        return AxisRuns(np.ones_like(start), np.zeros_like(start), start, (length,))

    return mapped_axis(axis, runs, doing=doing)
