"""What each rank of a load reads, sends and receives, and what only values decide, found out before a byte moves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import compress
from math import prod
from typing import Any

import numpy as np

from ...geometry import Column
from ...layouts import ShardColumns, select_rows
from ...mapping import ShardedTensor
from ...mapping.memory import given_tensor, tied
from ...objects import drop_objects
from ...plans import (
    Gap,
    Misfit,
    RankReads,
    ReadCost,
    SharedReads,
    Undecided,
    plan_reads,
    read_rounds,
    stored_elements,
    wanted_apart,
)
from ...storage import crosses_network
from ...strategies import Checkpoint, StrategyAction, find_strategy, get_default_strategy
from .._dispatch import backend_of, sharded_backend
from .._packed import AlikeColumns
from ._ask import Choices
from ._auto import ExchangeChoice, Place, bytes_wanted_twice, exchange_choice
from ._checks import ObjectsFit
from ._exchange import by_sharing, cuts_shards, parts_to_read
from ._plain import asking_whole
from ._read import by_dtype, columns_of, may_overflow, own_rounds
from ._targets import Kinds, Target, take_apart

Shards = Sequence[ShardedTensor]


@dataclass(frozen=True, slots=True, eq=False)
class PlannedReads:
    """What ranks read, group by group, since a load reads what it converts in separate rounds.

    Attributes:
        groups: of what fits of a rank's target, what it reads itself, given its number among the ranks; None where each
            rank reads all at once, by itself.
        exchange: of each group, what ranks read for each other; () where they don't.
        why: what decided whether they do.
    """

    groups: Callable[[int, Shards], Sequence[Shards]] | None = None
    exchange: tuple[SharedReads, ...] = ()
    why: str = ""


def planned_reads(
    checkpoint: Checkpoint,
    choices: Choices,
    targets: Callable[[], Iterable[Shards]],
    asked: AlikeColumns | None,
    kinds: Kinds,
    ranks: int,
    *,
    converts: bool,
) -> PlannedReads:
    """Return what each rank reads at once, group by group, and what ranks read for each other.

    The plans are the load's, made for all ranks at once, so that the bytes foretold are the bytes read. Only what is
    passed on to whom isn't listed: with the replicas of a large model that would be most of the memory.

    Args:
        checkpoint: what is loaded.
        choices: the caller's strategies.
        targets: yields what fits of each rank's target that can be taken apart.
        asked: all ranks' shards; None where they don't say to each other what they want.
        kinds: what is stored.
        ranks: how many there are.
        converts: whether any of them has shards in another dtype than is stored.
    """
    known = None if callable(choices[0]) else asked
    wanted = None if known is None else bytes_wanted_twice(columns for columns, alike in known for _ in alike)
    exchange = foretold_exchange(checkpoint, ranks, wanted)
    if exchange.together:
        groups, plans = _exchanged_groups(targets, kinds, is_cut=cuts_shards(checkpoint, choices))
        return PlannedReads(groups, plans, exchange.why)
    return PlannedReads(partial(_own_groups, kinds) if converts else None, why=exchange.why)


def _own_groups(kinds: Kinds, _: int, shards: Shards) -> list[Shards]:
    """Return what a rank that reads alone reads at once."""
    alike, others = by_dtype(shards, kinds)
    rounds = own_rounds(others, kinds)
    return [alike, *_by_round(others, rounds, max(rounds, default=-1) + 1)]


def _exchanged_groups(
    targets: Callable[[], Iterable[Shards]], kinds: Kinds, *, is_cut: bool
) -> tuple[Callable[[int, Shards], list[Shards]], tuple[SharedReads, ...]]:
    """Return what each rank reads at once of what ranks read for each other, and the plans of that."""
    # Replicas differ in which of them is the main one, which no plan asks for: of converted shards, that column says
    # instead which are shared.
    alike, others, ranks = AlikeColumns(), AlikeColumns(), 0
    for number, shards in enumerate(targets()):
        same, converted = by_dtype(shards, kinds)
        shared = columns_of(by_sharing(same)[1], kinds, number)
        alike.add(replace(shared, main=np.zeros_like(shared.main)), number)
        is_shared = np.array([not one.allow_shape_mismatch for one in converted], dtype=np.bool_)
        others.add(replace(columns_of(converted, kinds, number), main=is_shared), number)
        ranks += 1
    joined = others.joined()
    rounds = read_rounds(joined)
    count = int(rounds.max(initial=-1)) + 1
    of_round = (select_rows(joined, np.flatnonzero((rounds == each) & joined.main)) for each in range(count))
    columns, apart, besides = _without_apart(alike, ranks)
    parts = [(columns, alike.alike), *((each, others.alike) for each in of_round)]
    plans = tuple(
        plan_reads(each, ranks, is_cut=is_cut, alike=of, besides=None if turn else besides)
        for turn, (each, of) in enumerate(parts)
    )
    number_of = {rank: number for number, members in enumerate(others.alike) for rank in members.tolist()}

    def groups(number: int, shards: Shards) -> list[Shards]:
        # Without memory: a target's own may be a view, of which no flat range can be taken.
        own, converted = by_dtype([one if one.data is None else replace(one, data=None) for one in shards], kinds)
        of_rank = rounds[joined.rank == number_of[number]].tolist()
        shared = [one for one in own if one.key not in apart]
        split = zip([shared, *_by_round(converted, of_rank, count)], plans, strict=True)
        first, *rest = (_share(group, plan, number) for group, plan in split)
        return [[*(one for one in own if one.key in apart), *first], *rest]

    return groups, plans


def _without_apart(asked: AlikeColumns, ranks: int) -> tuple[ShardColumns, set[str], Column]:
    """Return what is to be planned, the tensors whose elements one rank wants each, and how much each reads of these.

    Cells and reads of sharded tensors would be as many as their shards on all ranks, though there is nothing to choose.
    """
    columns, several = asked.joined(), np.array([members.size > 1 for members in asked.alike], dtype=np.bool_)
    apart = wanted_apart(columns)
    apart[columns.key[several[columns.rank]]] = False
    alone = apart[columns.key]
    rows = np.flatnonzero(alone)
    besides = np.zeros(ranks, dtype=np.int64)
    rank = np.array([members[0] for members in asked.alike], dtype=np.int64)[columns.rank[rows]]
    np.add.at(besides, rank, columns.elements[rows] * columns.item_size[columns.key[rows]])
    return select_rows(columns, np.flatnonzero(~alone)), set(compress(columns.keys, apart)), besides


def _share(shards: Shards, plan: SharedReads, number: int) -> Shards:
    """Return what a rank reads of shards itself."""
    own, shared = by_sharing(shards)
    return [*own, *parts_to_read(plan, number, shared)]


def _by_round(shards: Shards, rounds: Sequence[int], count: int) -> list[list[ShardedTensor]]:
    groups: list[list[ShardedTensor]] = [[] for _ in range(count)]
    for shard, number in zip(shards, rounds, strict=True):
        groups[number].append(shard)
    return groups


def foretold_exchange(checkpoint: Checkpoint, ranks: int, saved_bytes: int | None) -> ExchangeChoice:
    """Return whether ranks that are on several machines read for each other, which one process can't know of them."""
    remote = crosses_network(checkpoint.storage)
    choice = exchange_choice(
        checkpoint.options.exchange, [Place(str(rank), remote) for rank in range(ranks)], saved_bytes
    )
    others = " On one machine, each would read by itself."
    return replace(choice, why=choice.why + others) if choice.together and choice.why else choice


def rank_reads(
    checkpoint: Checkpoint,
    choices: Choices,
    reads: Sequence[RankReads],
    targets: Callable[[], Iterable[Shards]],
    planned: PlannedReads,
) -> Iterator[RankReads]:
    """Yield what each rank that has a target reads, sends and receives.

    Args:
        checkpoint: what is loaded.
        choices: the caller's strategies.
        reads: what each reads if it reads all at once, by itself.
        targets: yields what fits of each rank's target, in the same order.
        planned: their reads.
    """
    # The plans number the ranks that have a target, one after the other.
    none = np.zeros(len(reads), dtype=np.int64)
    sent = sum((plan.bytes_sent for plan in planned.exchange), none).tolist()
    received = sum((plan.bytes_received for plan in planned.exchange), none).tolist()
    moved = [replace(one, sent=out, received=come) for one, out, come in zip(reads, sent, received, strict=True)]
    if planned.groups is None or any(one.cost is None for one in reads):
        yield from moved
        return
    choice, _, strategies = choices
    row = (StrategyAction.EXPLAIN, *backend_of(choice, sharded_backend(checkpoint.fields), strategies))
    explain_shards = get_default_strategy(*row, strategies=strategies)
    for number, (one, shards) in enumerate(zip(moved, targets(), strict=True)):
        groups = planned.groups(number, shards)
        costs = (explain_shards(checkpoint, group, True).cost() for group in groups if group)
        yield replace(one, cost=sum(costs, ReadCost()))


def undecided(
    checkpoint: Checkpoint, choices: Choices, target: Target, objects: ObjectsFit, kinds: Kinds
) -> Iterator[Undecided]:
    """Yield what may fail when a rank's values are read, though all is stored as it should be.

    Args:
        checkpoint: what is loaded.
        choices: the caller's strategies.
        target: what the rank loads.
        objects: how its objects fit.
        kinds: what is stored of tensors that are converted where they differ.
    """
    choice, _, strategies = choices
    row = (StrategyAction.EXPLAIN, *backend_of(choice, sharded_backend(checkpoint.fields), strategies))
    # Everything here can fail only while bytes are read, so neither success nor failure can be promised.
    if callable(choice):
        yield Undecided("sharded_strategy", "a function of the caller's own loads the shards")
    elif find_strategy(*row, strategies=strategies) is None:
        for key in sorted({shard.key for shard in target.tensors}):
            yield Undecided(key, "the format doesn't say whether it is stored whole")
    for shard in target.tensors:
        kind = kinds.get(shard.key)
        if kind is not None and may_overflow(kind.dtype, shard.dtype) and _loaded(shard, kind.global_shape):
            yield Undecided(shard.key, f"whether its values, stored as {kind.dtype}, fit {shard.dtype}")
    for first, *others in tied([(shard, given_tensor(shard)) for shard in target.tensors if target.donate]):
        why = f"whether it is stored with the values of {target.tensors[first].key!r}, whose memory it shares"
        yield from (Undecided(target.tensors[other].key, why) for other in others)
    for item in target.objects:
        if not objects.changes(item):
            yield Undecided(item.key, "whether the object can be decoded")
        elif objects.rules.get(item.key) is not drop_objects:
            yield Undecided(item.key, "whether the rule can handle the objects")


def _loaded(shard: ShardedTensor, stored: tuple[int, ...]) -> int:
    """Return how many elements of a shard are loaded."""
    if shard.allow_shape_mismatch and len(shard.global_shape) == len(stored):
        return stored_elements(shard, stored)
    return prod(shard.data_shape)


def fitting_shards(tree: Any, problems: Sequence[Misfit], kinds: Kinds) -> Shards:
    """Return the shards of a target of which something would be read: of a tensor with gaps, what is stored."""
    wrong = {problem.key for problem in problems if not isinstance(problem, Gap)}
    asked = asking_whole(take_apart(tree), kinds).tensors
    return [shard for shard in asked if shard.key in kinds and shard.key not in wrong]
