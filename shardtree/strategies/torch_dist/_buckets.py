"""Buckets of Megatron-Core's distributed optimizer (`dp_reshardable`): which parameter each range of one is.

A bucket is a 1-D tensor of a data-parallel group's float32 masters, or of their moments, without names. What it
holds is read from left to right: a master, rounded to the weight's dtype, equals a stored piece of the model bit for
bit. Pieces with equal values, such as fresh norms, are told apart by the order of modules.

References:
    megatron.core.optimizer.distrib_optimizer, megatron.core.distributed.param_and_grad_buffer, megatron-core 0.16.1.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import NamedTuple

from ...errors import CorruptCheckpoint, UnsupportedValue, error_text
from ._metadata_content import TensorEntry
from ._pickled_columns import Ints

# What `.metadata` lists: buckets of several states, and pieces of the model

_BUCKET = re.compile(
    r"(?P<group>(?:chained_\d+\.)?optimizer\.distributed\.dp_group_idx_\d+)\.gbuf_idx_(?P<buffer>\d+)"
    r"\.dtype_\(torch\.(?P<dtype>\w+), torch\.\w+\)\.bucket_idx_(?P<bucket>\d+)\.(?P<state>\w+)"
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
        number: its place in the buffer.
        dtype: of the parameters, as torch names it.
        states: what is stored of them: masters and moments.
        edges: where stored chunks begin, and the bucket's length; ascending.
    """

    name: str
    group: str
    buffer: tuple[int, str]
    number: int
    dtype: str
    states: tuple[str, ...]
    edges: Ints


class Piece(NamedTuple):
    """A stored chunk of a tensor of the model.

    Attributes:
        key: of the tensor.
        offset: of the chunk.
        shape: of the chunk.
        global_shape: of the tensor.
    """

    key: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    global_shape: tuple[int, ...]


Candidate = tuple[Piece, ...]
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
        CorruptCheckpoint: states of a bucket are cut differently, or one has no masters.
    """
    states: dict[str, dict[str, TensorEntry]] = defaultdict(dict)
    names = {}
    for key, entry in tensors.items():
        if found := _BUCKET.fullmatch(key):
            names[key.rpartition(".")[0]] = found
            states[key.rpartition(".")[0]][found["state"]] = entry
    return sorted((_bucket(name, names[name], states[name]) for name in names), key=_place)


def _bucket(name: str, found: re.Match[str], states: Mapping[str, TensorEntry]) -> Bucket:
    edges = {(*sorted(at for ((at,), _) in entry.boxes), entry.shape[0]) for entry in states.values()}
    if len(edges) != 1 or MASTER not in states:
        fix = "The checkpoint was damaged or made by another program; load another one."
        expected = f"{MASTER} and moments, cut alike"
        raise CorruptCheckpoint(
            error_text(f"open: bucket {name!r} is not sound", found=sorted(states), expected=expected, fix=fix)
        )
    buffer = (int(found["buffer"]), found["dtype"])
    return Bucket(name, found["group"], buffer, int(found["bucket"]), found["dtype"], tuple(states), edges.pop())


def _place(bucket: Bucket) -> tuple[str, tuple[int, str], int]:
    return bucket.group, bucket.buffer, bucket.number


def pieces_of(tensors: Mapping[str, TensorEntry]) -> dict[str, list[Piece]]:
    """Return the pieces that may be parameters, by dtype as torch names it."""
    found: dict[str, list[Piece]] = defaultdict(list)
    for key, entry in tensors.items():
        if entry.dtype is not None and entry.dtype.is_floating_point and not is_bucket(key):
            found[str(entry.dtype).removeprefix("torch.")] += [Piece(key, *box, entry.shape) for box in entry.boxes]
    return found


def halves(pieces: Sequence[Piece]) -> Iterator[Candidate]:
    """Yield the pairs of pieces that a rank may hold as one parameter: gate rows, then up rows.

    Megatron-Core stores them as chunks r and r + n / 2 of n along an axis, or under two keys that end in `_w` and `_v`.
    """
    at = {(piece.key, piece.offset): piece for piece in pieces}
    for piece in pieces:
        if piece.key.endswith("_w"):
            others = [at.get((piece.key[:-1] + "v", piece.offset))]
        else:
            axis = next((axis for axis, size in enumerate(piece.shape) if size > 1), None)
            others = [] if axis is None else [at.get((piece.key, _half_further(piece, axis)))]
        yield from ((piece, other) for other in others if other is not None and other.shape == piece.shape)


def _half_further(piece: Piece, axis: int) -> Ints:
    offset = piece.offset
    return (*offset[:axis], offset[axis] + piece.global_shape[axis] // 2, *offset[axis + 1 :])


# Reading a bucket from left to right


class Unit(NamedTuple):
    """A parameter in a bucket.

    Attributes:
        bucket: that it lies in.
        begin: its first element there.
        end: one past its last one.
        candidates: what it may be, by its values.
    """

    bucket: Bucket
    begin: int
    end: int
    candidates: tuple[Candidate, ...]


def read_bucket(bucket: Bucket, sizes: Set[int], matches: Callable[[int, int], Sequence[Candidate]]) -> list[Unit]:
    """Return the parameters of a bucket, in order.

    Args:
        bucket: what is read.
        sizes: of all candidates, in elements, each once.
        matches: returns the candidates whose values are those of a range of masters, rounded.

    Raises:
        UnsupportedValue: no reading, or more than one, has a parameter at each aligned place.
    """
    edges, length = set(bucket.edges), bucket.edges[-1]
    found: dict[int, list[Unit]] = {}
    ahead = [0]
    while ahead:
        at = ahead.pop()
        if at in found or at == length:
            continue
        found[at] = [] if at % _ALIGNMENT else _units_at(bucket, at, sizes, edges, matches)
        ahead += [_after(unit, length) for unit in found[at]]
    readings: dict[int, list[list[Unit]]] = {length: [[]]}
    for at in sorted(found, reverse=True):
        # Two of each are enough to know that there is more than one.
        tails = ([unit, *tail] for unit in found[at] for tail in readings.get(_after(unit, length), ()))
        readings[at] = [reading for reading, _ in zip(tails, range(2), strict=False)]
    if len(readings[0]) == 1:
        return readings[0][0]
    fix = "Weights and optimizer aren't of one step, or were edited since. Load the model alone, or another checkpoint."
    reached = max(found)
    what = "no parameter of the model has the values" if not readings[0] else "several ways to read its values"
    raise UnsupportedValue(error_text(f"open: {bucket.name!r}, from element {reached}: {what}", fix=fix))


def _units_at(
    bucket: Bucket,
    begin: int,
    sizes: Set[int],
    edges: set[int],
    matches: Callable[[int, int], Sequence[Candidate]],
) -> list[Unit]:
    """Return what may begin at an element, the longest first."""
    units: list[Unit] = []
    for end in (begin + size for size in sorted(sizes, reverse=True) if begin + size in edges):
        found = tuple(matches(begin, end))
        # Where a data-parallel rank's slice ends between a pair's halves, the first of them is no parameter of its own.
        first_of_two = {pieces[:1] for unit in units for pieces in unit.candidates if len(pieces) == 2}
        if found and first_of_two.isdisjoint(found):
            units.append(Unit(bucket, begin, end, found))
    return units


def _after(unit: Unit, length: int) -> int:
    """Return where the next parameter begins, after the padding."""
    return min(-(-unit.end // _ALIGNMENT) * _ALIGNMENT, length)
