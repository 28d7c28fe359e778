"""Comparison of a target with a checkpoint: requests that are absent, incomplete, or of another shape or dtype."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from types import MappingProxyType

import numpy as np
import torch

from ..geometry import Column, intersect, slices
from ..layouts import TensorKind, shard_boxes, shard_columns
from ..mapping import ShardedTensor
from ..trees import differing_prefix, near_names
from ._convert import convertible
from ._misfits import Gap, Mismatch, Unexpected, by_number

# The overlap of a shard with a tensor that is stored with another global shape.


@dataclass(frozen=True, slots=True)
class Overlap:
    """A part of a shard that lies within another global shape.

    A shard's data are one box or, if the shard is a flat range, several boxes, one after another. The part lies in one
    of these boxes.

    Attributes:
        start: Offset of the box in the shard's flattened data, in elements.
        shape: Shape of the box.
        part: The part as slices of the box, one for each axis.
    """

    start: int
    shape: tuple[int, ...]
    part: tuple[slice, ...]

    def of(self, data: torch.Tensor) -> torch.Tensor:
        """Return the overlap's elements as a view of the shard's contiguous data."""
        return data.reshape(-1)[self.start : self.start + prod(self.shape)].view(self.shape)[self.part]


def overlaps(shard: ShardedTensor, global_shape: tuple[int, ...]) -> tuple[Overlap, ...]:
    """Return the parts of a shard that lie within another global shape; empty if the shard lies outside of it.

    Args:
        shard: Shard to cut. A box has at most one such part, a flat range may have several, since it consists of boxes.
        global_shape: The other global shape, with as many axes as the shard's.

    Examples:
        >>> shard = ShardedTensor.from_rank_offsets("w", torch.arange(6).view(3, 2))
        >>> [overlap.of(shard.data).tolist() for overlap in overlaps(shard, (2, 9))]
        [[[0, 1], [2, 3]]]
    """
    columns = shard_columns([shard])
    # Columns describe a scalar as one axis of length one, so the whole tensor must be described in the same way.
    whole = np.array(global_shape or (1,), dtype=np.int64)[None]
    boxes = shard_boxes(columns.offset, columns.shape, columns.start, columns.stop)
    offset, shape = intersect(boxes.offset, boxes.shape, np.zeros_like(whole), whole)
    parts = []
    for row in np.flatnonzero((shape > 0).all(axis=1)).tolist():
        begin = (offset[row] - boxes.offset[row]).tolist()
        part = slices(begin, shape[row].tolist())
        parts.append(Overlap(int(boxes.position[row]), tuple(boxes.shape[row].tolist()), part))
    return tuple(parts)


def stored_elements(shard: ShardedTensor, global_shape: tuple[int, ...]) -> int:
    """Return the number of a shard's elements that lie within `global_shape`, the shape of the stored tensor.

    Examples:
        >>> stored_elements(ShardedTensor.from_rank_offsets("w", torch.zeros(3, 2)), (2, 9))
        4
    """
    return sum(prod(span.stop - span.start for span in overlap.part) for overlap in overlaps(shard, global_shape))


def find_unexpected(keys: Iterable[str], names: Collection[str], *, is_object: bool = False) -> tuple[Unexpected, ...]:
    """Return a problem for each requested key that isn't stored, sorted by key.

    Each problem suggests a similar stored key, if there is one that isn't requested itself.

    Args:
        keys: Requested keys.
        names: Stored keys.
        is_object: Whether the keys are unique keys of sharded objects.

    Examples:
        >>> print(*find_unexpected(["decoder.bais"], ["decoder.bias"]))
        'decoder.bais': not stored (did you mean 'decoder.bias'?)
    """
    requests = set(keys)
    absent = sorted(requests.difference(names))
    if not absent:
        return ()
    others = {name for name in names if name not in requests}
    # A common prefix of all keys is tried first: a wrapped model is the usual cause. The closest match of each key
    # could belong to another part of the model.
    prefix = differing_prefix(absent, others)
    if prefix is not None:
        too_much, lacking = prefix
        return tuple(Unexpected(key, lacking + key[len(too_much) :], is_object) for key in absent)
    near = near_names(absent, others)
    return tuple(Unexpected(key, by_number(key, others) or near.get(key), is_object) for key in absent)


def find_mismatches(
    shards: Iterable[ShardedTensor], kinds: Mapping[str, TensorKind], *, cast: bool = False
) -> tuple[Mismatch, ...]:
    """Return a mismatch for each requested tensor that is stored with another global shape or dtype.

    The global shape may differ if the shard has `allow_shape_mismatch` and as many axes; the dtype may differ if `cast`
    is set and the stored dtype can be converted.

    Args:
        shards: Requested shards.
        kinds: Stored dtype and global shape of each of their keys.
        cast: Whether the load converts dtypes.

    Examples:
        >>> import torch
        >>> shard = ShardedTensor.from_rank_offsets("w", torch.zeros(2))
        >>> print(*find_mismatches([shard], {"w": TensorKind(torch.float32, (3,), 0)}))
        'w': checkpoint has (3,) float32, target asks for (2,) float32
    """
    mismatches: dict[str, Mismatch] = {}
    for shard in shards:
        kind = kinds[shard.key]
        same_dtype = shard.dtype == kind.dtype or (cast and convertible(kind.dtype, shard.dtype))
        may_differ = shard.allow_shape_mismatch and len(shard.global_shape) == len(kind.global_shape)
        if not (same_dtype and (shard.global_shape == kind.global_shape or may_differ)):
            # The number of prepended axes is left out: it makes no difference to the stored tensor.
            request = TensorKind(shard.dtype, shard.global_shape, 0)
            mismatches.setdefault(
                shard.key, Mismatch(shard.key, TensorKind(kind.dtype, kind.global_shape, 0), request, cast)
            )
    return tuple(mismatches.values())


def find_gaps(
    shards: Sequence[ShardedTensor],
    counts: Column,
    kinds: Mapping[str, TensorKind],
    reasons: Mapping[str, str] = MappingProxyType({}),
) -> tuple[Gap, ...]:
    """Return a gap for each requested shard that is stored only in part.

    If a shard has `allow_shape_mismatch`, its elements beyond the stored global shape don't count as missing.

    Args:
        shards: Requested shards, for which `find_mismatches` found nothing.
        counts: Number of stored elements of each shard, int64 (shards,).
        kinds: Stored dtype and global shape of each of their keys.
        reasons: Known reasons for missing elements, by key.

    Examples:
        >>> import numpy as np, torch
        >>> shard = ShardedTensor.from_rank_offsets("w", torch.zeros(4))
        >>> print(*find_gaps([shard], np.array([3]), {"w": TensorKind(torch.float32, (4,), 0)}))
        'w' at (0,): 3 of 4 elements are stored
    """
    gaps = []
    for shard, count in zip(shards, counts.tolist(), strict=True):
        need = prod(shard.data_shape)
        if count != need and shard.allow_shape_mismatch:
            need = stored_elements(shard, kinds[shard.key].global_shape)
        if count != need:
            gaps.append(Gap(shard.key, shard.global_offset, count, need, reasons.get(shard.key, "")))
    return tuple(gaps)
