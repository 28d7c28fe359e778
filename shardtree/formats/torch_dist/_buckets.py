"""Buckets of Megatron-Core's distributed optimizer (`dp_reshardable`), and the parameters stored in their ranges.

A bucket is a 1-D tensor of a data-parallel group's float32 master weights, or of their moments, without names. The
offsets of its chunks say which ranges can be parameters. Which parameter a range holds is found by value: its master
weights, rounded to the weight's dtype, equal the weights of a piece of the model. Pieces with equal values, such as
fresh norms, are distinguished by the order of modules.

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

# This section finds the buckets and the pieces of the model that `.metadata` lists.

_BUCKET = re.compile(
    r"(?P<group>(?:chained_\d+\.)?optimizer\.distributed\.dp_group_idx_\d+)\.gbuf_idx_(?P<buffer>\d{1,18})"
    r"\.dtype_\(torch\.(?P<dtype>\w+), torch\.\w+\)\.bucket_idx_(?P<bucket>\d{1,18})\.(?P<state>\w+)"
)

_GROUPS = re.compile(r"(?:chained_\d+\.)?optimizer\.distributed\.dp_group_idx_\d+\.optimizer/.*")
_SIZES = re.compile(r"(?:chained_\d+\.)?optimizer\.distributed\.dp_group_idx_\d+\.per_bucket_numel\w*/.*")

MASTER = "param"
"""Name of the state that holds the float32 master weights."""

_ALIGNMENT = 64
"""Alignment of parameters in a bucket, in elements."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Consecutive parameters of a model-parallel rank, in the reverse order of the model's modules.

    Attributes:
        name: Key of the bucket's states without the last part, which names the state.
        group: Name of the model-parallel rank that the bucket belongs to.
        buffer: Number of the buffer that contains the bucket, and its parameters' dtype by torch's name.
        number: Number of the bucket in its buffer.
        dtype: Dtype of the parameters, by torch's name.
        states: Name and dtype of each stored state, master weights and moments; ascending.
        edges: Offsets of stored chunks in the bucket, and the bucket's length; ascending.
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
"""Pieces that a parameter may consist of: one, or the two halves of a gated fc1 one after the other."""


def is_bucket(key: str) -> bool:
    """Return whether a key names a tensor that holds a bucket's master weights or moments.

    Examples:
        >>> group = "optimizer.distributed.dp_group_idx_0"
        >>> is_bucket(group + ".gbuf_idx_0.dtype_(torch.bfloat16, torch.float32).bucket_idx_3.exp_avg")
        True
    """
    return _BUCKET.fullmatch(key) is not None


def is_bucket_size(unique_key: str) -> bool:
    """Return whether a unique key names an object with the lengths of buckets."""
    return _SIZES.fullmatch(unique_key) is not None


def is_groups(unique_key: str) -> bool:
    """Return whether a unique key names an object with a model-parallel rank's param groups."""
    return _GROUPS.fullmatch(unique_key) is not None


def buckets_of(tensors: Mapping[str, TensorEntry]) -> list[Bucket]:
    """Return the buckets that `.metadata` lists, sorted by group, buffer and number.

    Raises:
        CorruptCheckpoint: States of a bucket have different chunks, or a bucket has no float32 master weights.
        UnsupportedValue: A bucket has 16-bit remainders instead of master weights.
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
        heading = (
            f"open: the optimizer's bucket {name!r} has only the low 16 bits of its fp32 master weights, "
            "so it cannot be divided into parameters"
        )
        fix = (
            "Load the model without its optimizer, or resume in Megatron-Core and save there "
            "with store_param_remainders=False."
        )
        raise UnsupportedValue(error_text(heading, fix=fix))
    if len(edges) != 1 or len(dtypes) != len(states) or dtypes.get(MASTER) is not torch.float32:
        fix = "The checkpoint was damaged or made by another program; load another one."
        expected = f"{MASTER} in torch.float32, and all states with the same chunks"
        found = ", ".join(
            f"{state} in {dtypes.get(state, 'an unknown dtype')} with {len(states[state].boxes)} chunks"
            for state in sorted(states)
        )
        heading = f"open: the optimizer states of bucket {name!r} have wrong dtypes or different chunks"
        raise CorruptCheckpoint(error_text(heading, found=found, expected=expected, fix=fix))
    buffer = (int(match["buffer"]), match["dtype"])
    return Bucket(
        name, match["group"], buffer, int(match["bucket"]), match["dtype"], (*sorted(dtypes.items()),), edges.pop()
    )


def _place(bucket: Bucket) -> tuple[str, tuple[int, str], int]:
    return bucket.group, bucket.buffer, bucket.number


def pieces_of(tensors: Mapping[str, TensorEntry]) -> dict[str, list[BucketPiece]]:
    """Return the model's stored chunks that may be parameters, all of floating-point dtypes, by the dtype's name."""
    by_dtype: dict[str, list[BucketPiece]] = defaultdict(list)
    for key, entry in tensors.items():
        if entry.dtype is not None and entry.dtype.is_floating_point and not is_bucket(key):
            by_dtype[str(entry.dtype).removeprefix("torch.")] += [
                BucketPiece(key, *box, entry.shape) for box in entry.boxes
            ]
    return by_dtype


def halves(pieces: Sequence[BucketPiece]) -> Iterator[Candidate]:
    """Yield the pairs of chunks that a rank may hold as one parameter: the gate and up rows of a gated `linear_fc1`.

    Megatron-Core stores the two as chunks r and r + n / 2 of n along an axis, or under two keys, which end in `_w` and
    `_v`.
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
    """Return whether a chunk may be the gate or up half of a rank's parameter."""
    return "linear_fc1" in piece.key


def _half_further(piece: BucketPiece, axis: int) -> Ints:
    offset = piece.offset
    return (*offset[:axis], offset[axis] + piece.global_shape[axis] // 2, *offset[axis + 1 :])


# This section reads a bucket from left to right.


class Unit(NamedTuple):
    """A parameter's range in a bucket, and the stored chunks of the model that have the same values.

    Attributes:
        bucket: Bucket that contains the parameter.
        begin: Index of the parameter's first element in the bucket.
        end: One past the index of its last element.
        candidates: Alternatives: each is a chunk with all values of the parameter, or two chunks with the gate and up
            halves of a gated `linear_fc1`.
    """

    bucket: Bucket
    begin: int
    end: int
    candidates: tuple[Candidate, ...]


Reading = tuple[Unit, ...]
"""The parameters of a bucket, in order."""

MOST_READINGS = 64
"""Upper bound of the readings of a bucket that are compared; a bucket may have more."""


def read_bucket(bucket: Bucket, sizes: Set[int], matches: Callable[[int, int], Sequence[Candidate]]) -> list[Reading]:
    """Return the readings of a bucket: its possible divisions into consecutive parameters. Usually there is one.

    Args:
        bucket: Bucket to read.
        sizes: Sizes that a parameter may have, in elements.
        matches: Function from the begin and end of a range in the bucket to the candidates: chunks of the model that
            equal the range's master weights, rounded to the model's dtype.

    Raises:
        UnsupportedValue: The model's parameters don't fill the bucket in any way.
    """
    length, cuts = bucket.edges[-1], _slice_edges(bucket.edges)
    # A chunk that no data-parallel rank's slice cuts is a whole parameter, or the padding after one.
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
    fix = (
        "Weights and optimizer belong to different steps, or were edited. Load the model alone, or another checkpoint."
    )
    heading = f"open: {bucket.name!r}: its fp32 master weights from element {max(units)} on match no model parameter"
    raise UnsupportedValue(error_text(heading, fix=fix))


def _slice_edges(edges: Ints) -> set[int]:
    """Return the offsets in a bucket at which data-parallel ranks' slices may end.

    All slices have one length, which isn't stored. A length is possible if all its multiples are in `edges`, and if
    some number of ranks would cut the bucket into slices of this length.

    Args:
        edges: Offsets of stored chunks, and the bucket's length; ascending.
    """
    multiples, all_edges, length = set[int](), set(edges), edges[-1]
    for size in edges[1:-1]:
        ends = range(size, length, size)
        if all_edges.issuperset(ends) and _is_slice(size, length):
            multiples.update(ends)
    return multiples


def _is_slice(size: int, length: int) -> bool:
    """Return whether some number of ranks would cut a bucket of `length` elements into slices of `size` elements.

    Before the cut, Megatron-Core pads a bucket to a common multiple of 128 and the number of ranks. With the option
    `pad_buckets_for_high_nccl_busbw`, the common multiple includes 65,536.
    """
    if size <= 128:
        return True  # There may be as many ranks as needed.
    least = -(-length // size)
    more = ((lcm(ranks, 128), ranks) for ranks in range(least, length // (size - 128) + 2))
    return any(-(-length // unit) * unit == size * ranks for unit, ranks in chain([(lcm(least, 65536), least)], more))


def _after(end: int, length: int) -> int:
    """Return the offset of the parameter that follows one that ends at `end`, in a bucket of `length` elements.

    This is the next aligned offset, or the end of the bucket.
    """
    return min(-(-end // _ALIGNMENT) * _ALIGNMENT, length)
