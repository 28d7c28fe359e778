"""What each rank of a load reads, sends and receives, found out before a byte moves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from ...layouts import ShardColumns, join_columns, shard_columns
from ...mapping import ShardedTensor
from ...plans import ExchangePlan, RankReads, ReadCost, plan_exchange
from ...strategies import Checkpoint, StrategyAction, get_default_strategy
from .._dispatch import backend_of, sharded_backend
from ._ask import Choices
from ._auto import ExchangeChoice, cheaper_choice, exchange_choice, recalled
from ._checks import Kinds
from ._exchange import by_sharing, cuts_shards, parts_to_read
from ._read import by_dtype, columns_of, common_rounds
from ._targets import Target

Shards = Sequence[ShardedTensor]


@dataclass(frozen=True, slots=True, eq=False)
class PlannedReads:
    """What ranks read, group by group, since a load reads what it converts in separate rounds.

    Attributes:
        groups: of each, what each rank reads; None where each reads all at once, by itself.
        exchange: of each, what they send to each other; () where they don't.
        why: what decided whether they do.
    """

    groups: Sequence[Sequence[Shards]] | None = None
    exchange: tuple[ExchangePlan, ...] = ()
    why: str = ""


def planned_reads(
    checkpoint: Checkpoint,
    choices: Choices,
    targets: Sequence[Shards],
    kinds: Kinds,
    ranks: int,
    *,
    is_described: bool,
) -> PlannedReads:
    """Return what each rank reads at once, group by group, and the plans by which they send it to each other.

    A load reads what it converts in separate rounds.

    Args:
        checkpoint: what is loaded.
        choices: the caller's strategies.
        targets: what fits of each rank's target that can be taken apart.
        kinds: what is stored.
        ranks: how many there are.
        is_described: whether all say to each other what they want.
    """
    is_cut = partial(cuts_shards, checkpoint, choices)
    columns = None
    if is_described and not callable(choices[0]):
        columns = join_columns([shard_columns(shards, rank) for rank, shards in enumerate(targets)])
    exchange = _foretold_exchange(checkpoint, ranks, columns, is_cut)
    # The same plans as the load's, made for all ranks at once, so that the bytes foretold are the bytes read.
    split = [by_dtype(shards, kinds) for shards in targets]
    exchanged = exchange.together
    if not exchanged and not any(others for _, others in split):
        return PlannedReads(why=exchange.why)
    groups: list[list[Shards]] = [[alike for alike, _ in split]]
    described = [columns_of(others, kinds, rank) for rank, (_, others) in enumerate(split)]
    rounds = [common_rounds(described if exchanged else [one], rank)[0] for rank, one in enumerate(described)]
    for number in range(max((max(own, default=-1) for own in rounds), default=-1) + 1):
        pairs = zip(split, rounds, strict=True)
        groups.append([[s for s, its in zip(others, own, strict=True) if its == number] for (_, others), own in pairs])
    if not exchanged:
        return PlannedReads(groups, why=exchange.why)
    divided = is_cut()
    shared = [_shares(group, kinds, is_cut=divided) for group in groups]
    return PlannedReads([[*reads] for reads, _ in shared], tuple(plan for _, plan in shared), exchange.why)


def _shares(ranks: Sequence[Shards], kinds: Kinds, *, is_cut: bool) -> tuple[list[Shards], ExchangePlan]:
    """Return what each rank reads of what it wants, without memory, and the plan by which they send it on."""
    # Without memory: a target's own may be a view, of which no flat range can be taken.
    bare = [[replace(one, data=None) for one in shards] for shards in ranks]
    own, alike = zip(*map(by_sharing, bare), strict=True)
    columns = join_columns([columns_of(shards, kinds, rank) for rank, shards in enumerate(alike)])
    plan = plan_exchange(columns, len(ranks), is_cut=is_cut)
    return [[*mine, *parts_to_read(plan, columns, rank, alike[rank])] for rank, mine in enumerate(own)], plan


def _foretold_exchange(
    checkpoint: Checkpoint, ranks: int, columns: ShardColumns | None, is_cut: Callable[[], bool]
) -> ExchangeChoice:
    """Return whether ranks will read for each other, by speeds if an earlier load of this process measured them."""
    choice = exchange_choice(checkpoint.options.exchange, checkpoint.storage, ranks, columns)
    if choice.undecided is None:
        return choice
    speeds = recalled(checkpoint.storage, ranks)
    if speeds is None:
        return replace(choice, why=f"{choice.why} A load will measure speeds first, and may decide otherwise.")
    return cheaper_choice(plan_exchange(choice.undecided, ranks, is_cut=is_cut()), choice.undecided, speeds)


def rank_reads(
    checkpoint: Checkpoint,
    choices: Choices,
    ranks: int,
    fits: Mapping[int, tuple[Target, Callable[[], ReadCost] | None]],
    planned: PlannedReads,
) -> Iterator[RankReads]:
    """Yield what each rank reads, sends and receives.

    Args:
        checkpoint: what is loaded.
        choices: the caller's strategies.
        ranks: how many there are.
        fits: their targets, and what finds out what loading all of one at once takes; without those that can't be
            taken apart.
        planned: their reads.
    """
    costs = _read_costs(checkpoint, choices, {rank: cost for rank, (_, cost) in fits.items()}, planned)
    sent = sum((plan.bytes_sent for plan in planned.exchange), np.zeros(len(fits), dtype=np.int64))
    received = sum((plan.bytes_received for plan in planned.exchange), np.zeros(len(fits), dtype=np.int64))
    # The plans number the ranks that have a target, one after the other.
    moved = dict(zip(fits, zip(sent.tolist(), received.tolist(), strict=True), strict=True))
    for rank in range(ranks):
        target, _ = fits.get(rank, (None, None))
        asked_for = (0, 0) if target is None else (len(target.tensors), len(target.objects))
        yield RankReads(rank, *asked_for, costs.get(rank), *moved.get(rank, (0, 0)))


def _read_costs(
    checkpoint: Checkpoint,
    choices: Choices,
    costs: Mapping[int, Callable[[], ReadCost] | None],
    planned: PlannedReads,
) -> dict[int, ReadCost | None]:
    """Return what each rank reads, group by group where it doesn't read all at once."""
    found = {rank: None if cost is None else cost() for rank, cost in costs.items()}
    if planned.groups is None or None in found.values():
        return found
    choice, _, strategies = choices
    row = (StrategyAction.EXPLAIN, *backend_of(choice, sharded_backend(checkpoint.fields)))
    explain_shards = get_default_strategy(*row, strategies=strategies)
    parts = [
        [explain_shards(checkpoint, shards, True).cost() for shards in group if shards]
        for group in zip(*planned.groups, strict=True)
    ]
    return {rank: sum(own, ReadCost()) for rank, own in zip(costs, parts, strict=True)}
