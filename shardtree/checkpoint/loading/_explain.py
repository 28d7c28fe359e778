"""explain: what a load would do, found out from metadata alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...layouts import ObjectRule, join_columns
from ...mapping import ShardedTensor
from ...plans import Explanation, Gap, Misfit, RankReads, ReadCost, Unexpected, plan_exchange
from ...storage import Directory, Verify
from ...strategies import (
    Checkpoint,
    LoadOptions,
    Strategies,
    StrategyAction,
    get_default_strategy,
)
from ...world import one_process
from .._dispatch import Choice, backend_of, sharded_backend
from .._open import open_at, sharded_metadata, stored_keys, stored_kinds
from ._cast import by_dtype, columns_of, common_rounds
from ._exchange import Exchange, exchanges
from ._fit import Kinds, prospect
from ._objects import fit_objects, objects_metadata
from ._taken_apart import Target, take_apart

Shards = Sequence[ShardedTensor]


def explain(
    sharded_state_dict: Any,
    checkpoint_dir: Directory,
    sharded_strategy: Choice = None,
    *,
    cast: bool = False,
    object_rules: Mapping[str, ObjectRule] | None = None,
    verify: Verify = "whole",
    strategies: Strategies | None = None,
) -> Explanation:
    """Return what `load` would do with a target: what doesn't fit, and how much would be read.

    Nothing is read but metadata, no memory is made, and no other rank takes part: `missing` is what this target doesn't
    ask for. See `explain_ranks` for the targets of all ranks.

    Args:
        sharded_state_dict: the target. The data of its shards counts for nothing, and may be None or on any device.
        checkpoint_dir: where the checkpoint is.
        sharded_strategy: as in `load`. Of a function, nobody knows what it reads.
        cast: whether dtypes would be converted.
        object_rules: for objects in another shape, as in `load`.
        verify: which blocks would be checked against their hashes.
        strategies: the dispatch table; None for the process's.

    Returns:
        The explanation; its text is a table.

    Raises:
        NotACheckpoint: there is none.
        CorruptCheckpoint: metadata isn't what was saved, or a file isn't there, or has another length.
        StrategyError: the format doesn't tell what it holds.

    Examples:
        >>> import tempfile, torch, shardtree as st
        >>> folder = tempfile.mkdtemp()
        >>> st.save({"w": st.ShardedTensor.from_rank_offsets("weight", torch.arange(4.0))}, folder)
        >>> print(explain({"w": st.ShardedTensor.from_rank_offsets("wieght", torch.zeros(4))}, folder))
        The target doesn't fit the checkpoint.
        1 problem:
          not stored: 'wieght' (did you mean 'weight'?)
        1 key:
          stored, not asked for: 'weight'
        <BLANKLINE>
        rank  shards  objects  asked for  read  over-read  pieces  files
           0       1        0        0 B   0 B       1.00       0      0
    """
    checkpoint = open_at(checkpoint_dir, one_process(), LoadOptions(verify), strategies)
    asking = _Asking(checkpoint, sharded_strategy, strategies, cast, object_rules)
    return _explanation(asking, [take_apart(sharded_state_dict)], passes_on=False)


def explain_ranks(
    sharded_state_dicts: Sequence[Any],
    checkpoint_dir: Directory,
    sharded_strategy: Choice = None,
    *,
    cast: bool = False,
    object_rules: Mapping[str, ObjectRule] | None = None,
    exchange: Exchange = "auto",
    verify: Verify = "whole",
    strategies: Strategies | None = None,
) -> Explanation:
    """Return what a `load` by several ranks would do, found out in this process, given the targets of all of them.

    Args:
        sharded_state_dicts: each rank's target, by rank.
        checkpoint_dir: where the checkpoint is.
        sharded_strategy: as in `load`.
        cast: whether dtypes would be converted.
        object_rules: for objects in another shape, as in `load`.
        exchange: whether ranks that want the same shard would read it once between them, as in `load`.
        verify: which blocks would be checked against their hashes.
        strategies: the dispatch table; None for the process's.

    Returns:
        The explanation, with what each rank would read from storage.

    Raises:
        IntegrityError: ranks differ about a tensor, and would exchange it.

    Examples:
        >>> import tempfile, torch, shardtree as st
        >>> folder = tempfile.mkdtemp()
        >>> st.save({"w": st.ShardedTensor.from_rank_offsets("w", torch.zeros(4, 6))}, folder)
        >>> columns = [st.ShardedTensor.from_rank_offsets("w", torch.zeros(4, 2), (1, rank, 3)) for rank in range(3)]
        >>> explanation = explain_ranks([{"w": shard} for shard in columns], folder, verify=None)
        >>> explanation.ok, [one.cost.bytes_wanted for one in explanation.reads], explanation.over_read
        (True, [32, 32, 32], 2.5)
    """
    checkpoint = open_at(checkpoint_dir, one_process(), LoadOptions(verify), strategies)
    asking = _Asking(checkpoint, sharded_strategy, strategies, cast, object_rules)
    passes_on = exchanges(exchange, checkpoint.storage, len(sharded_state_dicts))
    return _explanation(asking, [take_apart(tree) for tree in sharded_state_dicts], passes_on=passes_on)


@dataclass(frozen=True, slots=True, eq=False)
class _Asking:
    checkpoint: Checkpoint
    choice: Choice
    strategies: Strategies | None
    cast: bool
    rules: Mapping[str, ObjectRule] | None


def _explanation(asking: _Asking, targets: Sequence[Target], *, passes_on: bool) -> Explanation:
    checkpoint, choice, strategies = asking.checkpoint, asking.choice, asking.strategies
    listing = None if callable(choice) else choice  # a function that loads shards isn't one that lists them
    metadata = sharded_metadata(checkpoint, listing, None, strategies)
    found = [prospect(checkpoint, target, choice, strategies, cast=asking.cast) for target in targets]
    holding = objects_metadata(checkpoint, metadata, choice, strategies)
    asked = {leaf.key for target in targets for leaf in (*target.tensors, *target.objects)}
    objects = (fit_objects(target.objects, holding, asking.rules, asked) for target in targets)
    problems = _each_once([*(one.problems for one in found), *(one.problems for one in objects)])
    kinds = stored_kinds(metadata, sorted({shard.key for target in targets for shard in target.tensors}))
    fit = [_fitting(target.tensors, problems, kinds) for target in targets]
    costs = [None if one.cost is None else one.cost() for one in found]
    if None not in costs and (passes_on or any(by_dtype(shards, kinds)[1] for shards in fit)):
        costs = [_sum_of_costs(asking, parts) for parts in zip(*_groups(fit, kinds, passes_on=passes_on), strict=True)]
    rows = zip(targets, costs, strict=True)
    reads = (RankReads(rank, len(one.tensors), len(one.objects), cost) for rank, (one, cost) in enumerate(rows))
    return Explanation(tuple(sorted(stored_keys(metadata) - asked)), problems, tuple(reads))


def _each_once(parts: Iterable[Sequence[Misfit]]) -> tuple[Misfit, ...]:
    """Return the problems of all ranks, each once: what isn't stored first, then the rest in the ranks' order."""
    found: dict[tuple[Any, ...], Misfit] = {}
    for problem in (problem for part in parts for problem in part):
        found.setdefault((type(problem), problem.key, getattr(problem, "offset", None)), problem)
    return tuple(sorted(found.values(), key=lambda problem: not isinstance(problem, Unexpected)))


def _fitting(shards: Shards, problems: Sequence[Misfit], kinds: Kinds) -> Shards:
    """Return the shards of which something would be read."""
    wrong = {problem.key for problem in problems if not isinstance(problem, Gap)}
    return [shard for shard in shards if shard.key in kinds and shard.key not in wrong]


def _groups(ranks: Sequence[Shards], kinds: Kinds, *, passes_on: bool) -> list[list[Shards]]:
    """Return what each rank reads at once, group by group: a load reads what it converts in rounds of its own."""
    split = [by_dtype(shards, kinds) for shards in ranks]
    groups: list[list[Shards]] = [[alike for alike, _ in split]]
    described = [columns_of(others, kinds, rank) for rank, (_, others) in enumerate(split)]
    rounds = [common_rounds(described if passes_on else [one], rank)[0] for rank, one in enumerate(described)]
    for number in range(max((max(own, default=-1) for own in rounds), default=-1) + 1):
        pairs = zip(split, rounds, strict=True)
        groups.append([[s for s, its in zip(others, own, strict=True) if its == number] for (_, others), own in pairs])
    return [_shares(group, kinds) for group in groups] if passes_on else groups


def _shares(ranks: Sequence[Shards], kinds: Kinds) -> list[Shards]:
    """Return what each rank reads of a group itself, where ranks pass on what several of them want."""
    alike = [[shard for shard in shards if not shard.allow_shape_mismatch] for shards in ranks]
    columns = join_columns([columns_of(shards, kinds, rank) for rank, shards in enumerate(alike)])
    reads = iter(plan_exchange(columns, len(ranks)).reads.tolist())
    chosen = [[shard for shard in shards if next(reads)] for shards in alike]
    own = ([shard for shard in shards if shard.allow_shape_mismatch] for shards in ranks)
    return [[*mine, *share] for mine, share in zip(own, chosen, strict=True)]


def _sum_of_costs(asking: _Asking, parts: Sequence[Shards]) -> ReadCost:
    backend = backend_of(asking.choice, sharded_backend(asking.checkpoint.fields))
    row = get_default_strategy(StrategyAction.EXPLAIN, *backend, strategies=asking.strategies)
    costs = (row(asking.checkpoint, shards, True).cost() for shards in parts if shards)
    return sum(costs, ReadCost())
