"""Buckets of Megatron-Core's distributed optimizer (`dp_reshardable`): which parameter each range of one is.

A bucket is a 1-D tensor of a data-parallel group's float32 masters, or of their moments, without names. Where its
chunks begin says which ranges can be parameters; a parameter is then a piece of the model whose values its masters
have, rounded to the weight's dtype. Pieces with equal values, such as fresh norms, are told apart by the order of
modules.

References:
    megatron.core.optimizer.distrib_optimizer, megatron.core.distributed.param_and_grad_buffer, megatron-core 0.16.1.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import chain, islice
from math import lcm
from typing import NamedTuple

import torch

from ...errors import CorruptCheckpoint, UnsupportedValue, error_text
from ._metadata_content import TensorEntry
from ._pickled_columns import Ints

# What `.metadata` lists: buckets of several states, and pieces of the model

_BUCKET = re.compile(
    r"(?P<group>(?:chained_\d+\.)?optimizer\.distributed\.dp_group_idx_\d+)\.gbuf_idx_(?P<buffer>\d{1,18})"
    r"\.dtype_\(torch\.(?P<dtype>\w+), torch\.\w+\)\.bucket_idx_(?P<bucket>\d{1,18})\.(?P<state>\w+)"
)

_GROUPS = re.compile(r"(?:chained_\d+\.)?optimizer\.distributed\.dp_group_idx_\d+\.optimizer/.*")
_SIZES = re.compile(r"(?:chained_\d+\.)?optimizer\.distributed\.dp_group_idx_\d+\.per_bucket_numel\w*/.*")

MASTER = "param"
"""The state that holds the float32 masters."""

_ALIGNMENT = 64
"""In elements: each parameter begins at a multiple of it within its bucket."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Consecutive parameters of a model-parallel rank, in the reverse order of its modules.

    Attributes:
        name: the bucket's key without its last part.
        group: the model-parallel rank that it belongs to.
        buffer: the buffer that it is a part of, by number and dtype.
        number: Number of the bucket in its buffer.
        dtype: Dtype of the parameters, by torch's name.
        states: what is stored of them, masters and moments, each with its dtype; ascending.
        edges: where stored chunks begin, and the bucket's length; ascending.
    """

    name: str
    group: str
    buffer: tuple[int, str]
    number: int
    dtype: str
    states: tuple[tuple[str, torch.dtype], ...]
    edges: Ints


class BucketPiece(NamedTuple):
    """A stored chunk of a tensor of the model.

    Attributes:
        key: Key of the tensor.
        offset: Offset of the chunk.
        shape: Shape of the chunk.
        global_shape: Global shape of the tensor.
    """

    key: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    global_shape: tuple[int, ...]


Candidate = tuple[BucketPiece, ...]
"""What a parameter may be: one piece, or two that the parameter holds one after the other (a gated fc1's halves)."""


def is_bucket(key: str) -> bool:
    """Return whether a key is that of a state of a bucket.

    Examples:
        >>> group = "optimizer.distributed.dp_group_idx_0"
        >>> is_bucket(group + ".gbuf_idx_0.dtype_(torch.bfloat16, torch.float32).bucket_idx_3.exp_avg")
        True
    """
    return _BUCKET.fullmatch(key) is not None


def is_bucket_size(unique_key: str) -> bool:
    """Return whether an object holds the lengths of buckets."""
    return _SIZES.fullmatch(unique_key) is not None


def is_groups(unique_key: str) -> bool:
    """Return whether an object holds a model-parallel rank's groups of parameters."""
    return _GROUPS.fullmatch(unique_key) is not None


def buckets_of(tensors: Mapping[str, TensorEntry]) -> list[Bucket]:
    """Return the buckets that `.metadata` lists, by group, buffer and place in it.

    Raises:
        CorruptCheckpoint: states of a bucket are cut differently, or one has no float32 masters.
        UnsupportedValue: one has remainders in the masters' place.
    """
    states: dict[str, dict[str, TensorEntry]] = defaultdict(dict)
    names = {}
    for key, entry in tensors.items():
        if match := _BUCKET.fullmatch(key):
            names[key.rpartition(".")[0]] = match
            states[key.rpartition(".")[0]][match["state"]] = entry
    return sorted((_bucket(name, names[name], states[name]) for name in names), key=_place)


def _bucket(name: str, match: re.Match[str], states: Mapping[str, TensorEntry]) -> Bucket:
    edges = {(*sorted(at for ((at,), _) in entry.boxes), entry.shape[0]) for entry in states.values()}
    dtypes = {state: entry.dtype for state, entry in states.items() if entry.dtype is not None}
    if dtypes.get(MASTER) is torch.int16:
        what = f"open: {name!r} has 16-bit remainders in place of masters, which don't show whose states they are"
        fix = "Load the model alone, go on with the same model parallelism, or save with store_param_remainders=False."
        raise UnsupportedValue(error_text(what, fix=fix))
    if len(edges) != 1 or len(dtypes) != len(states) or dtypes.get(MASTER) is not torch.float32:
        fix = "The checkpoint was damaged or made by another program; load another one."
        expected = f"{MASTER} in float32, and moments, cut alike"
        raise CorruptCheckpoint(
            error_text(f"open: bucket {name!r} is not sound", found=sorted(states), expected=expected, fix=fix)
        )
    buffer = (int(match["buffer"]), match["dtype"])
    return Bucket(
        name, match["group"], buffer, int(match["bucket"]), match["dtype"], (*sorted(dtypes.items()),), edges.pop()
    )


def _place(bucket: Bucket) -> tuple[str, tuple[int, str], int]:
    return bucket.group, bucket.buffer, bucket.number


def pieces_of(tensors: Mapping[str, TensorEntry]) -> dict[str, list[BucketPiece]]:
    """Return the pieces that may be parameters, by dtype as torch names it."""
    by_dtype: dict[str, list[BucketPiece]] = defaultdict(list)
    for key, entry in tensors.items():
        if entry.dtype is not None and entry.dtype.is_floating_point and not is_bucket(key):
            by_dtype[str(entry.dtype).removeprefix("torch.")] += [
                BucketPiece(key, *box, entry.shape) for box in entry.boxes
            ]
    return by_dtype


def halves(pieces: Sequence[BucketPiece]) -> Iterator[Candidate]:
    """Yield the pairs of pieces that a rank may hold as one parameter: gate rows, then up rows of a `linear_fc1`.

    Megatron-Core stores them as chunks r and r + n / 2 of n along an axis, or under two keys that end in `_w` and `_v`.
    """
    at = {(piece.key, piece.offset): piece for piece in pieces}
    for piece in filter(may_be_gated, pieces):
        if piece.key.endswith("_w"):
            others = [at.get((piece.key[:-1] + "v", piece.offset))]
        else:
            axis = next((axis for axis, size in enumerate(piece.shape) if size > 1), None)
            others = [] if axis is None else [at.get((piece.key, _half_further(piece, axis)))]
        yield from ((piece, other) for other in others if other is not None and other.shape == piece.shape)


def may_be_gated(piece: BucketPiece) -> bool:
    """Return whether a piece may be one half of what a rank holds as one parameter."""
    return "linear_fc1" in piece.key


def _half_further(piece: BucketPiece, axis: int) -> Ints:
    offset = piece.offset
    return (*offset[:axis], offset[axis] + piece.global_shape[axis] // 2, *offset[axis + 1 :])


# Reading a bucket from left to right


class Unit(NamedTuple):
    """A parameter in a bucket.

    Attributes:
        bucket: that it lies in.
        begin: First element in the bucket.
        end: one past its last one.
        candidates: what it may be, by its values.
    """

    bucket: Bucket
    begin: int
    end: int
    candidates: tuple[Candidate, ...]


Reading = tuple[Unit, ...]
"""The parameters of a bucket, in order."""

MOST_READINGS = 64
"""Of a bucket: where there are as many, there may be more."""


def read_bucket(bucket: Bucket, sizes: Set[int], matches: Callable[[int, int], Sequence[Candidate]]) -> list[Reading]:
    """Return the ways to read a bucket, each with all parameters in order; mostly there is one.

    Args:
        bucket: what is read.
        sizes: Sizes of all candidates, in elements, each once.
        matches: returns the candidates whose values are those of a range of masters, rounded.

    Raises:
        UnsupportedValue: no reading has a parameter at each aligned place.
    """
    length, cuts = bucket.edges[-1], _slice_edges(bucket.edges)
    # A chunk that isn't cut by the end of a data-parallel rank's slice is one parameter, or the padding after one.
    edges, fixed_edges = set(bucket.edges), [edge for edge in bucket.edges if edge not in cuts]
    units: dict[int, list[Unit]] = {}
    ahead = [0]
    while ahead:
        at = ahead.pop()
        if at in units or at == length:
            continue
        units[at] = []
        nearest = fixed_edges[bisect_right(fixed_edges, at)]
        ends = (at + size for size in sorted(sizes, reverse=True) if at + size <= nearest)
        for end in ends if at in edges and at % _ALIGNMENT == 0 else ():
            is_padding = bisect_left(fixed_edges, _after(end, length)) <= bisect_right(fixed_edges, end)
            if end in edges and is_padding and (candidates := tuple(matches(at, end))):
                units[at].append(Unit(bucket, at, end, candidates))
        ahead += [_after(unit.end, length) for unit in units[at]]
    readings: dict[int, list[Reading]] = {length: [()]}
    for at in sorted(units, reverse=True):
        tails = ((unit, *tail) for unit in units[at] for tail in readings.get(_after(unit.end, length), ()))
        readings[at] = [*islice(tails, MOST_READINGS)]
    if readings[0]:
        return readings[0]
    fix = "Weights and optimizer aren't of one step, or were edited since. Load the model alone, or another checkpoint."
    what = f"open: {bucket.name!r}, from element {max(units)}: no parameter of the model has the values"
    raise UnsupportedValue(error_text(what, fix=fix))


def _slice_edges(edges: Ints) -> set[int]:
    """Return where slices of data-parallel ranks may end: at the multiples of a length, if all of these are edges."""
    multiples, all_edges, length = set[int](), set(edges), edges[-1]
    for size in edges[1:-1]:
        ends = range(size, length, size)
        if all_edges.issuperset(ends) and _is_slice(size, length):
            multiples.update(ends)
    return multiples


def _is_slice(size: int, length: int) -> bool:
    """Return whether some number of ranks cut a bucket into slices of a size.

    Megatron-Core pads a bucket to a multiple of 128 and of the ranks, or of 65,536 as well, before it is cut.
    """
    if size <= 128:
        return True  # where ranks are many
    least = -(-length // size)
    more = ((lcm(ranks, 128), ranks) for ranks in range(least, length // (size - 128) + 2))
    return any(-(-length // unit) * unit == size * ranks for unit, ranks in chain([(lcm(least, 65536), least)], more))


def _after(end: int, length: int) -> int:
    """Return where the parameter after one that ends somewhere begins, after the padding."""
    return min(-(-end // _ALIGNMENT) * _ALIGNMENT, length)
