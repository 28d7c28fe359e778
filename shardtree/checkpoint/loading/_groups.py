"""What a load reads at once: what is stored in its own dtype, then, round by round, what is converted.

`load` reads by what is said here, and `explain` says it. Where ranks read for each other, the groups are planned from
what all ranks want: what one reads for several has to be in the same group of each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np

from ...geometry import Column
from ...layouts import ShardColumns, select_rows, shard_columns
from ...mapping import ShardedTensor
from ...plans import SharedReads, plan_reads, read_rounds
from .._packed import AlikeColumns
from ._exchange import by_sharing, parts_to_read
from ._targets import Kinds

Shards = Sequence[ShardedTensor]


def by_dtype(shards: Shards, kinds: Kinds) -> tuple[list[ShardedTensor], list[ShardedTensor]]:
    """Return the shards that are stored in their own dtype, as far as is known, and the others."""
    # By identity: shards of one key in a target may ask for different dtypes.
    others = [shard for shard in shards if shard.key in kinds and kinds[shard.key].dtype != shard.dtype]
    chosen = set(map(id, others))
    return [shard for shard in shards if id(shard) not in chosen], others


def described(shard: ShardedTensor, kinds: Kinds) -> ShardedTensor:
    """Return a shard without data, in the dtype that it is stored in."""
    return replace(shard, data=None, dtype=kinds[shard.key].dtype)


def groups_of(shards: Shards, kinds: Kinds, rounds: Column | None = None, count: int = 0) -> list[list[ShardedTensor]]:
    """Return what a rank reads at once: what is stored in its own dtype, then what is converted in each round.

    Args:
        shards: the rank's.
        kinds: what is stored.
        rounds: in which round each that is converted is read, int64; None where the rank reads by itself.
        count: how many rounds there are at least.
    """
    alike, converted = by_dtype(shards, kinds)
    if rounds is None and converted:
        rounds = read_rounds(shard_columns([described(shard, kinds) for shard in converted]))
        count = int(rounds.max()) + 1
    parts: list[list[ShardedTensor]] = [[] for _ in range(count)]
    for shard, number in zip(converted, [] if rounds is None else rounds.tolist(), strict=True):
        parts[number].append(shard)
    return [alike, *parts]


def shared_columns(shards: Shards, kinds: Kinds, rank: int) -> tuple[ShardColumns, ShardColumns]:
    """Return what ranks that read for each other have to know of a rank's shards, in the dtypes that are stored.

    That is what is stored in its own dtype, without what each rank reads itself; and all that is converted, where the
    column of main replicas, which no plan of reads asks for, says instead what ranks share.
    """
    alike, converted = by_dtype(shards, kinds)
    others = shard_columns([described(shard, kinds) for shard in converted], rank)
    is_shared = np.array([not shard.allow_shape_mismatch for shard in converted], dtype=np.bool_)
    return shard_columns(by_sharing(alike)[1], rank), replace(others, main=is_shared)


def common_groups(alike: ShardColumns, converted: ShardColumns) -> tuple[Column, list[ShardColumns]]:
    """Return the round of each shard that is converted, and what ranks share of each group: of `alike`, of each round.

    Args:
        alike: all ranks' first `shared_columns`.
        converted: the second ones.
    """
    rounds = read_rounds(converted)
    count = int(rounds.max(initial=-1)) + 1
    parts = (select_rows(converted, np.flatnonzero((rounds == each) & converted.main)) for each in range(count))
    return rounds, [alike, *parts]


# The same for all ranks in one process, in the memory of few


def foretold_groups(
    targets: Callable[[], Iterable[Shards]], kinds: Kinds, *, is_cut: bool
) -> tuple[Callable[[int, Shards], list[Shards]], list[SharedReads]]:
    """Return what each rank reads itself at once, where ranks read for each other, and the plan of each such group.

    Only what is passed on to whom isn't planned: with the replicas of a large model that would be most of the memory.

    Args:
        targets: yields each rank's shards; they are asked for anew, and not kept.
        kinds: what is stored.
        is_cut: whether shards may be cut between ranks.

    Returns:
        A function from a rank and its shards to its groups, and the plans.
    """
    alike, converted, ranks = AlikeColumns(), AlikeColumns(), 0
    for rank, shards in enumerate(targets()):
        shared, others = shared_columns(shards, kinds, rank)
        # Replicas differ in which of them is the main one, and are alike else.
        alike.add(replace(shared, main=np.zeros_like(shared.main)), rank)
        converted.add(others, rank)
        ranks += 1
    joined = converted.joined()
    rounds, parts = common_groups(alike.joined(), joined)
    held = [alike, *[converted] * (len(parts) - 1)]
    plans = [plan_reads(part, ranks, is_cut=is_cut, alike=of.alike) for part, of in zip(parts, held, strict=True)]
    number_of = {rank: number for number, members in enumerate(converted.alike) for rank in members.tolist()}

    def groups(rank: int, shards: Shards) -> list[Shards]:
        # Without memory: a target's own may be a view, of which no flat range can be taken.
        bare = [one if one.data is None else replace(one, data=None) for one in shards]
        found = groups_of(bare, kinds, rounds[joined.rank == number_of[rank]], len(parts) - 1)
        return [_share(group, plan, rank) for group, plan in zip(found, plans, strict=True)]

    return groups, plans


def _share(shards: Shards, plan: SharedReads, rank: int) -> Shards:
    """Return what a rank reads of shards itself."""
    own, shared = by_sharing(shards)
    return [*own, *parts_to_read(plan, rank, shared)]
