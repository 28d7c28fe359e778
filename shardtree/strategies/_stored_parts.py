"""What stored tensors add to their fingerprints: read back slab by slab, by whatever loads their format."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from ..fingerprints import FingerprintPart, piece_total, shard_parts
from ..geometry import slabs
from ..mapping import ShardedTensor
from ..plans import grouped
from ..storage import in_threads

_GROUP_BYTES = 32 * 1024 * 1024  # about the most that is in memory at a time
_SLAB_BYTES = _GROUP_BYTES // 2

Load = Callable[[Sequence[ShardedTensor]], object]
"""Fills the shards' data in place, as LOAD_SHARDED does."""


def stored_parts(
    tensors: Iterable[ShardedTensor], load: Load, *, rank: int = 0, ranks: int = 1, threads: int | None = None
) -> Iterator[dict[str, FingerprintPart]]:
    """Yield what stored tensors add to their fingerprints, a group of slabs at a time.

    Args:
        tensors: whole ones, without data.
        load: reads them.
        rank: which share of the groups to read.
        ranks: how many shares there are.
        threads: how many add up at a time; None for the usual number.
    """
    for number, group in enumerate(_groups(tensors)):
        if number % ranks == rank:
            filled = [slab.init_data("cpu") for slab in group]
            load(filled)
            yield shard_parts(filled, lambda pieces: in_threads(piece_total, pieces, threads))


def _groups(tensors: Iterable[ShardedTensor]) -> Iterator[list[ShardedTensor]]:
    """Return slabs in groups that fit in memory: to plan a read takes longer than to read a small tensor."""
    slabs = (slab for tensor in tensors for slab in _slabs(tensor))
    return grouped(slabs, lambda slab: torch.Size(slab.local_shape).numel() * slab.dtype.itemsize, _GROUP_BYTES)


def _slabs(tensor: ShardedTensor) -> Iterator[ShardedTensor]:
    shape = tensor.global_shape
    if not torch.Size(shape).numel():
        yield ShardedTensor(tensor.key, None, tensor.dtype, shape, shape, (0,) * len(shape), None)
    for offset, size in slabs(shape, max(1, _SLAB_BYTES // tensor.dtype.itemsize)):
        yield ShardedTensor(tensor.key, None, tensor.dtype, size, shape, offset, None)
