"""Fingerprints of stored tensors, read back slab by slab with their format's strategy for LOAD_SHARDED."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from ..core import limits
from ..core.fingerprints import PartialFingerprint, piece_total, shard_parts
from ..core.geometry import slabs
from ..core.mapping import ShardedTensor
from ..core.plans import grouped
from ..shell.storage import in_threads

_SLAB_BYTES = limits.CHECKED_BYTES // 2

Load = Callable[[Sequence[ShardedTensor]], object]
"""Function that fills the shards' data in place, as LOAD_SHARDED does."""


def stored_parts(
    tensors: Iterable[ShardedTensor], load: Load, *, rank: int = 0, ranks: int = 1, threads: int | None = None
) -> Iterator[dict[str, PartialFingerprint]]:
    """Yield partial fingerprints of stored tensors, by key: one mapping for each group of slabs that is read.

    A slab is a contiguous box of a tensor, small enough for memory. Several ranks may share the work: rank `r` of `n`
    reads every group whose number `i` has ``i % n == r``.

    Args:
        tensors: Whole tensors without data.
        load: Function that reads slabs.
        rank: Number of this rank.
        ranks: Number of ranks that share the work.
        threads: Number of threads that compute fingerprints; None for the usual number.
    """
    for number, group in enumerate(_groups(tensors)):
        if number % ranks == rank:
            slabs = [slab.init_data("cpu") for slab in group]
            load(slabs)
            yield shard_parts(slabs, lambda pieces: in_threads(piece_total, pieces, threads))


def _groups(tensors: Iterable[ShardedTensor]) -> Iterator[list[ShardedTensor]]:
    """Yield the tensors' slabs (contiguous boxes) in groups of at most `limits.CHECKED_BYTES` bytes."""
    # Slabs are read in groups, since planning a read takes longer than reading a small tensor.
    slabs = (slab for tensor in tensors for slab in _slabs(tensor))
    return grouped(slabs, lambda slab: torch.Size(slab.local_shape).numel() * slab.dtype.itemsize, limits.CHECKED_BYTES)


def _slabs(tensor: ShardedTensor) -> Iterator[ShardedTensor]:
    shape = tensor.global_shape
    if not torch.Size(shape).numel():
        yield ShardedTensor(tensor.key, None, tensor.dtype, shape, shape, (0,) * len(shape), None)
    for offset, size in slabs(shape, max(1, _SLAB_BYTES // tensor.dtype.itemsize)):
        yield ShardedTensor(tensor.key, None, tensor.dtype, size, shape, offset, None)
