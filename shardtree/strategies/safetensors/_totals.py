"""Fingerprints of what a save writes: added up from the bytes on their way to the file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from ...fingerprints import add_fingerprints, column_parts, piece_total, run_pieces
from ...layouts import ShardColumns
from ...mapping import ShardedTensor
from ...storage import Buffer, Hashes, in_threads


def with_total(buffers: Iterator[Buffer], shard: ShardedTensor, totals: list[int]) -> Iterator[Buffer]:
    """Yield a shard's buffers as they are, and append what they add to its tensor's fingerprint.

    Args:
        buffers: the row-major bytes of the shard, whole elements in each.
        shard: whose they are.
        totals: what the shard adds goes to the end of this list, once the last buffer was taken.
    """
    box = (1,) * shard.prepend_axis_num + shard.local_shape
    first = 0 if shard.flattened_range is None else shard.flattened_range.start
    total = 0
    for buffer in buffers:
        elements = torch.frombuffer(buffer, dtype=torch.uint8).view(shard.dtype)
        total += sum(in_threads(piece_total, run_pieces(elements, shard.global_offset, box, first)))
        first += elements.numel()
        yield buffer
    totals.append(total % 2**64)


def fingerprint_column(columns: ShardColumns, totals: Sequence[Hashes | None]) -> Hashes | None:
    """Return the fingerprint of each key, uint64 (keys,), or None where no rank added up.

    Args:
        columns: all ranks' shards, which cover their tensors once.
        totals: what each rank's shards add, in the order of the columns' rows.

    Raises:
        IntegrityError: the shards don't make whole tensors.
    """
    known = [each for each in totals if each is not None]
    if not known:
        return None
    found = add_fingerprints([column_parts(columns, np.concatenate(known))])
    return np.array([found[key] for key in columns.keys], dtype=np.uint64)
