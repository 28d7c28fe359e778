"""Converting what is stored in another dtype: read beside the target, a bounded part at a time, and copied over."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from ...layouts import ShardColumns, join_columns, shard_columns
from ...mapping import ShardedTensor
from ...plans import overlaps, read_rounds
from ...plans.moving import convert
from ._fit import Kinds
from ._targets import new_memory


def by_dtype(shards: Sequence[ShardedTensor], kinds: Kinds) -> tuple[list[ShardedTensor], list[ShardedTensor]]:
    """Return the shards that are stored in their own dtype, as far as is known, and the others."""
    others = [shard for shard in shards if shard.key in kinds and kinds[shard.key].dtype != shard.dtype]
    chosen = set(map(id, others))
    return [shard for shard in shards if id(shard) not in chosen], others


def columns_of(shards: Sequence[ShardedTensor], kinds: Kinds, rank: int) -> ShardColumns:
    """Return shards as columns, in the dtypes that they are stored in."""
    return shard_columns([_described(shard, kinds) for shard in shards], rank)


def own_rounds(shards: Sequence[ShardedTensor], kinds: Kinds) -> list[int]:
    """Return the round in which each shard is read where this rank reads alone."""
    rounds: list[int] = read_rounds(columns_of(shards, kinds, 0)).tolist()
    return rounds


def common_rounds(parts: Sequence[ShardColumns], rank: int) -> tuple[list[int], int]:
    """Return the round in which each of a rank's shards is read, alike on all ranks, and how many rounds there are."""
    columns = join_columns(parts)
    rounds = read_rounds(columns)
    return rounds[columns.rank == rank].tolist(), int(rounds.max(initial=-1)) + 1


def rounds_of(shards: Sequence[ShardedTensor], rounds: Sequence[int]) -> Iterator[list[ShardedTensor]]:
    """Yield the shards of each round."""
    for number in sorted(set(rounds)):
        yield [shard for shard, its in zip(shards, rounds, strict=True) if its == number]


def as_stored(shards: Sequence[ShardedTensor], kinds: Kinds) -> list[ShardedTensor]:
    """Return shards with new memory of the dtypes that they are stored in."""
    described = (_described(shard, kinds) for shard in shards)
    return [replace(one, data=new_memory(one.key, one.data_shape, one.dtype)) for one in described]


def _described(shard: ShardedTensor, kinds: Kinds) -> ShardedTensor:
    return replace(shard, data=None, dtype=kinds[shard.key].dtype)


def convert_all(shards: Sequence[ShardedTensor], read: Sequence[ShardedTensor], kinds: Kinds) -> None:
    """Copy what was read into shards' memory, in their dtype; what wasn't stored of a padded one stays as it is.

    Args:
        shards: with contiguous memory, written in place.
        read: the same shards as they are stored.
        kinds: what is stored.

    Raises:
        ShapeError: an integer doesn't fit the target's dtype.
    """
    for shard, stored in zip(shards, read, strict=True):
        for overlap in overlaps(shard, kinds[shard.key].global_shape):
            convert(shard.key, overlap.of(stored.data), overlap.of(shard.data))


def may_overflow(stored: torch.dtype, target: torch.dtype) -> bool:
    """Return whether a conversion depends on values: some of the stored dtype's integers don't fit the target's.

    Examples:
        >>> may_overflow(torch.int64, torch.uint8), may_overflow(torch.uint8, torch.int64)
        (True, False)
    """
    if stored == target or not (_is_integer(stored) and _is_integer(target)):
        return False
    own, other = torch.iinfo(stored), torch.iinfo(target)
    return own.min < other.min or own.max > other.max


def _is_integer(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)
