"""The comparison of float32 masters with the weights, before any optimizer state under the model's names is read.

Megatron-Core 0.15.0 to 0.19.2 silently writes a wrong `fully_reshardable` optimizer if a bucket other than the last
ends with padding: it stores the elements of all later buckets under other parameters' names. Then masters differ from
the weights.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import prod

import numpy as np
import torch

from ...errors import CorruptCheckpoint, error_text
from ...kit import Checkpoint, Column, Index, ReadReport, ShardedTensor, dtype_name
from ..rank_archives import Comparison, first_difference
from ._listing import TORCH_DIST, ArchiveListing, read_listing


class Comparisons:
    """Result of comparing the optimizer's float32 masters with the weights of an open checkpoint.

    Attributes:
        all_alike: True if all masters have been compared, and equal their weights after rounding; False before.
    """

    __slots__ = ("all_alike",)

    def __init__(self, _: Checkpoint) -> None:
        self.all_alike = False


_STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.(?:(?P<master>param|fp32_param)\.)?(?P<weight>.+)", re.DOTALL)
_GATHERED = re.compile(r"(?:chained_\d+\.)?optimizer\.distributed\.dp_group_idx_\d+\.param_state/shard_")
_IN_OBJECTS = (
    "the optimizer was saved as dp_zero_gather_scatter, in one object without names for each model-parallel rank: "
    "load it with Megatron-Core, and save it as dp_reshardable"
)
Read = Callable[[Sequence[ShardedTensor]], ReadReport]
"""Function that fills the data of shards in place, and returns a report."""

_ROUNDED = frozenset({torch.bfloat16, torch.float16, torch.float32})


def states_among(checkpoint: Checkpoint, listing: ArchiveListing, keys: Iterable[str]) -> list[str]:
    """Return the keys of those optimizer states that need a comparison of masters with weights, sorted.

    These are all optimizer states in `keys`. The list is empty if no master in the checkpoint can be compared with its
    weight, or if Megatron-Core didn't write the checkpoint.
    """
    if (checkpoint.fields.get("sharded_backend"), checkpoint.fields.get("sharded_backend_version")) != TORCH_DIST:
        return []  # Keys of other programs may mean something else.
    states = sorted(key for key in keys if _STATE.fullmatch(key))
    pairs: Mapping[str, Comparison] = checkpoint.once(_pairs) if states else {}
    return states if pairs else []


def refused_among(listing: ArchiveListing, keys: Iterable[str]) -> Mapping[str, str]:
    """Return the reasons that tensors cannot be read, by key.

    To the listing's reasons this adds one for states that were saved inside of objects (dp_zero_gather_scatter).
    """
    if not any(map(_GATHERED.match, listing.values)):
        return listing.unknown
    absent = [key for key in keys if key not in listing.contents.tensors and _STATE.fullmatch(key)]
    return {**listing.unknown, **dict.fromkeys(absent, _IN_OBJECTS)}


def _pairs(checkpoint: Checkpoint) -> Mapping[str, Comparison]:
    """Return each pair of a float32 master and its weight of the same shape, by the master's key.

    Weights of scaled dtypes, such as float8, are left out, since they can't be compared.
    """
    return dict(_comparable(read_listing(checkpoint).index))


def _comparable(index: Index) -> Iterator[tuple[str, Comparison]]:
    names = index.keys()
    number = {name: position for position, name in enumerate(names)}
    for name in names:
        match = _STATE.fullmatch(name)
        weight = match["weight"] if match and match["master"] else None
        if weight not in number:
            continue  # The key isn't a master's, or the weights are in another checkpoint.
        master, kind = index.kind(number[name]), index.kind(number[weight])
        # Weights of scaled dtypes, such as float8, don't equal the rounded master.
        if master.global_shape == kind.global_shape and master.dtype is torch.float32 and kind.dtype in _ROUNDED:
            yield name, Comparison(name, weight)


def differing(
    checkpoint: Checkpoint,
    listing: ArchiveListing,
    read: Read,
    share: int = 0,
    shares: int = 1,
) -> dict[str, str]:
    """Return the float32 masters that differ from their weights after rounding: a text about the difference, by key.

    The text names the first differing element. Chunks are compared one at a time, in bounded memory. The comparison is
    split into shares with about equally many elements.

    Args:
        checkpoint: The open checkpoint.
        listing: Listing of the checkpoint.
        read: Function that reads stored tensors.
        share: Index of the share that this call compares.
        shares: Count of all shares.
    """
    pairs, index = checkpoint.once(_pairs), listing.index
    keys, reasons = index.keys(), dict[str, str]()
    for row in _rows(index, list(pairs), share, shares).tolist():
        box = _box(index, keys, row)
        if box.key in reasons or not prod(box.data_shape):
            continue
        pair = pairs[box.key]
        (number,) = index.find_keys([pair.weight])
        dtype = index.kind(number).dtype
        place, _ = first_difference(read, pair, box, dtype)
        if place is not None:
            reasons[box.key] = f"in {dtype_name(dtype)} it is not {pair.weight!r}, first at {place}"
    return reasons


def _rows(index: Index, masters: Sequence[str], share: int, shares: int) -> Column:
    """Return the indices of the masters' chunks that one share of the comparison covers.

    A chunk belongs to the share that has its middle element.
    """
    numbers = index.find_keys(masters)
    rows = np.flatnonzero(np.isin(index.chunk_key, numbers))
    volume = np.where(
        index.chunk_start[rows] >= 0,
        index.chunk_stop[rows] - index.chunk_start[rows],
        index.chunk_shape[rows].prod(axis=1),
    )
    end = np.cumsum(volume, dtype=np.float64)
    middle = end - volume / 2
    owner = (middle * shares / max(float(volume.sum()), 1.0)).astype(np.int64)
    return np.asarray(rows[owner == share], dtype=np.int64)


def _box(index: Index, keys: Sequence[str], row: int) -> ShardedTensor:
    """Return a stored chunk as a shard without data."""
    number = int(index.chunk_key[row])
    kind = index.kind(number)
    first = index.chunk_shape.shape[1] - len(kind.global_shape)
    start, stop = int(index.chunk_start[row]), int(index.chunk_stop[row])
    return ShardedTensor(
        keys[number],
        None,
        kind.dtype,
        local_shape=tuple(index.chunk_shape[row, first:].tolist()),
        global_shape=kind.global_shape,
        global_offset=tuple(index.chunk_offset[row, first:].tolist()),
        axis_fragmentations=None,
        flattened_range=slice(start, stop) if start >= 0 else None,
    )


def refuse(checkpoint: Checkpoint, wrong: Mapping[str, str]) -> None:
    """Raise if masters differ from their weights.

    Args:
        checkpoint: The open checkpoint.
        wrong: Text about the difference of each such master, by key.

    Raises:
        CorruptCheckpoint: There are such masters; the error names them.
    """
    if not wrong:
        return
    heading = f"load: optimizer states in {checkpoint.storage.where()!r} do not belong to the weights beside them"
    offenders = (f"{key!r}: {reason}" for key, reason in sorted(wrong.items()))
    raise CorruptCheckpoint(error_text(heading, offenders=offenders, fix=FIX))


FIX = (
    "Megatron-Core 0.15.0 to 0.19.2 saves wrong fully_reshardable optimizers if a bucket ends with padding: masters "
    "and moments then belong to other parameters. Save the run again as dp_reshardable. The weights alone can be "
    "loaded from here. If they were edited, LoadOptions(verify=None) skips the comparison. 16-bit remainders of the "
    "weights (store_param_remainders) cannot be compared, so that their states are refused too."
)
