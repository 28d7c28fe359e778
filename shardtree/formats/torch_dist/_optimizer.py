"""A distributed optimizer's buckets as states of the model's parameters: `optimizer.state.<state>.<key of the model>`.

Each stored chunk of a bucket lies within one parameter, so that it is a flat range of a box of the model. States are
read like other flat shards: in any layout, and only the bytes that are requested. As in the listing, the index's
offsets are those of a virtual file, which joins the payloads of all archives.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from math import prod
from operator import attrgetter

import numpy as np
import torch

from ...errors import CorruptCheckpoint, error_text
from ...kit import (
    Buffer,
    Checkpoint,
    Column,
    Copies,
    Index,
    ShardColumns,
    ShardedTensor,
    TensorKind,
    build_index,
    byte_buffer,
    digest,
    dtype_from_name,
    grouped,
    in_threads,
    join_columns,
    limits,
    stored_columns,
)
from ..rank_archives import Piece as Range
from ..rank_archives import piece_columns
from ._buckets import (
    MASTER,
    Bucket,
    BucketPiece,
    Candidate,
    Reading,
    Unit,
    buckets_of,
    halves,
    is_bucket,
    is_bucket_size,
    is_groups,
    pieces_of,
    read_bucket,
)
from ._listing import ArchiveListing
from ._parameter_order import Match, choose, decide, full_name, known_orders

Fill = Callable[[Sequence[ShardedTensor]], object]
"""Function that reads stored tensors into the memory of shards."""

_STEP = 32 * 1024
"""Number of elements rounded and hashed at a time: they fit the cache, and torch starts no threads for so few."""


STEP = "optimizer.state.step."
"""Prefix of the keys of steps: Megatron-Core has one step, which is listed as a tensor for each parameter."""


class States:
    """The memoised result of `optimizer_index` for an open checkpoint.

    Attributes:
        index: Index that lists the optimizer's states by parameter instead of by bucket; None until it is made.
    """

    __slots__ = ("index",)

    def __init__(self, _: Checkpoint) -> None:
        self.index: Index | None = None


def optimizer_index(checkpoint: Checkpoint, listing: ArchiveListing, fill: Fill) -> Index:
    """Return the index of a checkpoint, with optimizer states listed by parameter instead of by bucket.

    A bucket doesn't name its parameters. This reads all weights and master weights once, to find the parameters by
    value. Steps are listed too, but are read from the objects with param groups, not at the index's offsets.

    Args:
        checkpoint: The open checkpoint.
        listing: Listing of the checkpoint.
        fill: Function that reads stored tensors into the memory of shards.

    Raises:
        UnsupportedValue: A bucket can't be divided into parameters, or parameters with equal weights and different
            states can't be told apart.
        CorruptCheckpoint: Ranks' copies of a parameter's state differ.
    """
    states = checkpoint.once(States)
    if states.index is None:
        states.index = _index(listing, _one_of_each(fill, _matches(checkpoint, listing, fill)))
    return states.index


def state_copies(checkpoint: Checkpoint, listing: ArchiveListing, fill: Fill) -> Iterator[Copies]:
    """Yield the copies of each optimizer state that several data-parallel groups store, one `Copies` for each piece."""
    for matches in _by_pieces(_matches(checkpoint, listing, fill)).values():
        for state in sorted(
            {state for match in matches for state, _ in match.bucket.states} if len(matches) > 1 else ()
        ):
            begin = 0
            for piece in matches[0].pieces:
                copies = [(match.bucket.group, partial(_copy, fill, match, state, begin, piece)) for match in matches]
                yield Copies(f"optimizer.state.{state}.{piece.key}", piece.offset, copies)
                begin += _size(piece)


def _copy(fill: Fill, match: Match, state: str, begin: int, piece: BucketPiece) -> torch.Tensor | None:
    dtype = dict(match.bucket.states).get(state)
    if dtype is None:
        return None
    data = torch.empty(_size(piece), dtype=dtype, device="cpu")
    _read(fill, match.bucket, state, data, match.begin + begin)
    return data.view(piece.shape)


def _matches(checkpoint: Checkpoint, listing: ArchiveListing, fill: Fill) -> list[Match]:
    tensors = listing.contents.tensors
    buckets, pieces = buckets_of(tensors), pieces_of(tensors)
    dtypes = sorted({bucket.dtype for bucket in buckets})
    candidates = {dtype: _candidates(fill, dtype, pieces[dtype]) for dtype in dtypes}
    orders = known_orders(_flat(checkpoint.options.parameter_names))
    # All buckets use the same memory: getting new pages from the system takes longer than the read itself.
    memory = torch.empty(max((bucket.edges[-1] for bucket in buckets), default=0), dtype=torch.float32, device="cpu")
    units = choose([_readings(fill, bucket, pieces, candidates[bucket.dtype], memory) for bucket in buckets], orders)
    groups = [[*group] for _, group in groupby(units, key=attrgetter("bucket.group"))]
    return decide(groups, orders, lambda unit: tuple(_hashes(fill, unit)))


def _flat(names: Sequence[str] | Sequence[Sequence[str]] | None) -> list[str] | None:
    """Return names, which the caller may have given in groups, as one list; None for None."""
    return (
        None if names is None else [name for group in names for name in ([group] if isinstance(group, str) else group)]
    )


# This section looks up ranges of masters, rounded to the model's dtype, by the hashes of the model's pieces.

Candidates = Mapping[tuple[str, ...], Sequence[Candidate]]
"""Candidates by the hash of their piece, or by the hashes of their two pieces."""


def _candidates(fill: Fill, dtype: str, pieces: Sequence[BucketPiece]) -> Candidates:
    """Return the candidates for a bucket's parameters of a dtype, by the hashes of their values.

    A candidate is one of the model's stored chunks, or the two chunks of a gated `linear_fc1`.

    Args:
        fill: Function that reads stored tensors into the memory of shards.
        dtype: Name of the dtype.
        pieces: Stored chunks of the model that have this dtype.
    """
    kind, hashes = dtype_from_name(dtype), dict[BucketPiece, str]()
    groups = [*grouped(pieces, lambda piece: prod(piece.shape) * kind.itemsize, limits.CHECKED_BYTES)]
    memory = torch.empty(max((sum(map(_size, group)) for group in groups), default=0), dtype=kind, device="cpu")
    for group in groups:
        hashes.update(zip(group, _hashes_of(fill, group, memory), strict=True))
    by_hashes: dict[tuple[str, ...], list[Candidate]] = defaultdict(list)
    for candidate in (*((piece,) for piece in pieces), *halves(pieces)):
        by_hashes[tuple(hashes[piece] for piece in candidate)].append(candidate)
    return by_hashes


def _size(piece: BucketPiece) -> int:
    return prod(piece.shape)


def _hashes_of(fill: Fill, pieces: Sequence[BucketPiece], memory: torch.Tensor) -> list[str]:
    sizes = [*map(_size, pieces)]
    data = memory[: sum(sizes)].split_with_sizes(sizes)
    fill(
        [
            ShardedTensor(
                piece.key, values.view(piece.shape), values.dtype, piece.shape, piece.global_shape, piece.offset, None
            )
            for piece, values in zip(pieces, data, strict=True)
        ]
    )
    return in_threads(lambda values: _hash(values, values.dtype), data)


def _hash(values: torch.Tensor, dtype: torch.dtype) -> str:
    """Return the hash of a 1-D tensor's elements after conversion to a dtype."""
    return digest([byte_buffer(values)] if values.dtype == dtype else _rounded_bytes(values, dtype))


def _rounded_bytes(values: torch.Tensor, dtype: torch.dtype) -> Iterator[Buffer]:
    """Yield the bytes of elements after conversion to a dtype, in steps that share one buffer."""
    memory = torch.empty(_STEP, dtype=dtype, device="cpu")
    buffer = byte_buffer(memory)
    for begin in range(0, len(values), _STEP):
        part = values[begin : begin + _STEP]
        memory[: len(part)].copy_(part)
        yield buffer[: len(part) * dtype.itemsize]


def _readings(
    fill: Fill,
    bucket: Bucket,
    pieces: Mapping[str, Sequence[BucketPiece]],
    candidates: Candidates,
    memory: torch.Tensor,
) -> list[Reading]:
    """Return the readings of a bucket, that is, its possible divisions into parameters.

    A range of the bucket may be a parameter if its masters, after rounding, have the values of a candidate.

    Args:
        fill: Function that reads stored tensors into the memory of shards.
        bucket: Bucket to divide.
        pieces: Stored chunks of the model, by the name of their dtype; they give the possible sizes of parameters.
        candidates: Chunks, or pairs of chunks, that parameters of the bucket's dtype may be, by hashes of their values.
        memory: Buffer that the masters are read into.
    """
    masters, dtype = memory[: bucket.edges[-1]], dtype_from_name(bucket.dtype)
    _read(fill, bucket, MASTER, masters)
    sizes = {_size(piece) for piece in pieces[bucket.dtype]}
    of_two = {2 * _size(pieces[0]) for same in candidates.values() for pieces in same if len(pieces) == 2}

    def matches(begin: int, end: int) -> list[Candidate]:
        values, middle = masters[begin:end], (end - begin) // 2
        splits: list[tuple[torch.Tensor, ...]] = [(values,)] if len(values) in sizes else []
        splits += [(values[:middle], values[middle:])] if len(values) in of_two else []
        hashes = (tuple(_hash(part, dtype) for part in parts) for parts in splits)
        return [candidate for key in hashes for candidate in candidates.get(key, ())]

    return read_bucket(bucket, sizes | of_two, matches)


def _read(fill: Fill, bucket: Bucket, state: str, data: torch.Tensor, begin: int = 0) -> None:
    """Fill memory with the elements of a bucket's state from `begin` on."""
    shape, whole = tuple(data.shape), (bucket.edges[-1],)
    fill([ShardedTensor(f"{bucket.name}.{state}", data, data.dtype, shape, whole, (begin,), None)])


def _one_of_each(fill: Fill, matches: Sequence[Match]) -> list[Match]:
    """Return one `Match` for each parameter, after comparing the states of parameters that several ranks store.

    Raises:
        CorruptCheckpoint: Ranks' states of a parameter aren't equal bit for bit.
    """
    by_pieces = _by_pieces(matches)
    differing = [
        full_name(pieces[0]) for pieces, copies in by_pieces.items() if len(copies) > 1 and not _agree(fill, copies)
    ]
    if differing:
        fix = (
            "The checkpoint was damaged, or its ranks had diverged when it was saved; load an earlier one. "
            "check_replicas shows the differences."
        )
        heading = "open: ranks' copies of optimizer states differ"
        raise CorruptCheckpoint(error_text(heading, offenders=sorted(differing), fix=fix))
    return [copies[0] for copies in by_pieces.values()]


def _by_pieces(matches: Sequence[Match]) -> dict[Candidate, list[Match]]:
    by_pieces: dict[Candidate, list[Match]] = defaultdict(list)
    for match in matches:
        by_pieces[match.pieces].append(match)
    return by_pieces


def _agree(fill: Fill, copies: Sequence[Match]) -> bool:
    return len({tuple(_hashes(fill, match)) for match in copies}) == 1


def _hashes(fill: Fill, unit: Unit | Match) -> Iterator[str]:
    for state, dtype in unit.bucket.states:
        data = torch.empty(unit.end - unit.begin, dtype=dtype, device="cpu")
        _read(fill, unit.bucket, state, data, unit.begin)
        yield _hash(data, data.dtype)


# In the index, each stored chunk of a bucket is a range of one or two of the model's boxes.


def _index(listing: ArchiveListing, matches: Sequence[Match]) -> Index:
    others, others_byte, objects = _without_buckets(listing.index)
    ranges = [span for match in matches for state in match.bucket.states for span in _ranges(listing, match, *state)]
    step = _step_byte(listing)
    ranges += [
        (TensorKind(torch.float32, (), 0), Range(STEP + key, 0, step, (), ()))
        for key in {piece.key for match in matches for piece in match.pieces}
    ]
    kinds = {span.key: kind for kind, span in ranges}
    if differing := sorted({span.key for kind, span in ranges if kind.dtype != kinds[span.key].dtype}):
        fix = "The checkpoint was damaged, or its ranks were configured differently; load an earlier one."
        raise CorruptCheckpoint(
            error_text("open: ranks' optimizer states have different dtypes", offenders=differing, fix=fix)
        )
    columns = join_columns([others, piece_columns(kinds, [span for _, span in ranges])])
    byte = np.concatenate([others_byte, np.array([span.byte for _, span in ranges])], dtype=np.int64)
    return build_index(columns, np.zeros_like(byte), byte, files=[listing.archives.virtual], objects=objects)


def _step_byte(listing: ArchiveListing) -> int:
    """Return the offset that the index lists for all steps: that of the first object with param groups, or else 0.

    Param groups contain the step; loads read it from them, not at this offset.
    """
    names, begins = listing.index.object_names(), listing.index.object_byte.tolist()
    return next((begin for name, begin in zip(names, begins, strict=True) if is_groups(name)), 0)


def _without_buckets(index: Index) -> tuple[ShardColumns, Column, list[tuple[str, int, int, int]]]:
    """Return the index's chunks and objects, without those of the optimizer's buckets.

    Returns:
        ``(columns, byte, objects)``: the chunks; their offsets in the virtual file, which joins all archives; and for
        each object ``(unique_key, file_number, offset, length)``. Objects with the lengths of buckets are left out.
    """
    names = index.keys()
    numbers = [number for number, key in enumerate(names) if not is_bucket(key)]
    chunks = np.flatnonzero(np.isin(index.chunk_key, numbers))
    columns = stored_columns(
        dict(zip((names[number] for number in numbers), index.kinds(numbers), strict=True)),
        np.searchsorted(numbers, index.chunk_key[chunks]),
        index.chunk_offset[chunks],
        index.chunk_shape[chunks],
        index.chunk_start[chunks],
        index.chunk_stop[chunks],
    )
    objects = zip(
        index.object_names(),
        index.object_file.tolist(),
        index.object_byte.tolist(),
        index.object_length.tolist(),
        strict=True,
    )
    # The sizes of buckets mean nothing once parameters have names.
    return columns, index.chunk_byte[chunks], [row for row in objects if not is_bucket_size(row[0])]


def _ranges(
    listing: ArchiveListing, match: Match, state: str, dtype: torch.dtype
) -> Iterator[tuple[TensorKind, Range]]:
    """Yield ``(kind, range)`` for each stored range of a parameter's state, in order.

    `kind` has the state's dtype, and the global shape of the model's tensor.
    """
    first = match.begin
    begins, bytes_at = _chunks(listing.index, f"{match.bucket.name}.{state}")
    for piece in match.pieces:
        size = prod(piece.shape)
        for begin, byte, end in zip(begins, bytes_at, (*begins[1:], match.bucket.edges[-1]), strict=True):
            low, high = max(begin, first), min(end, first + size)
            if low < high:
                whole = high - low == size
                start, stop = (-1, -1) if whole else (low - first, high - first)
                key, at = f"optimizer.state.{state}.{piece.key}", byte + dtype.itemsize * (low - begin)
                kind = TensorKind(dtype, piece.global_shape, 0)
                yield kind, Range(key, 0, at, piece.offset, piece.shape, start, stop)
        first += size


def _chunks(index: Index, key: str) -> tuple[list[int], list[int]]:
    """Return the offsets of a 1-D tensor's chunks, in order: in elements, and in bytes of the index's virtual file."""
    (number,) = index.find_keys([key])
    rows = slice(*index.chunk_key.searchsorted((number, number + 1)).tolist())
    return index.chunk_offset[rows, -1].tolist(), index.chunk_byte[rows].tolist()
