"""The explanation of a load by several ranks: its checks run in one process, with errors recorded instead of raised."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..core import plans
from ..core.geometry import Column
from ..core.layouts import ShardColumns, join_checked, shard_columns, sharding_problems
from ..core.mapping import given_tensor
from ..live import cuts_shards, foretold_exchange, foretold_groups
from ..shell.checkpoint import AlikeColumns, KnownLayout, LayoutDescription, check_together, describe
from ..shell.checkpoint.loading import (
    RAISING,
    RANK_VALUES,
    ExchangeChoice,
    Kinds,
    LoadRequest,
    ObjectsFit,
    Omissions,
    Shards,
    Stored,
    StrictHandling,
    Target,
    asking_whole,
    check_tensors,
    fit_objects,
    groups_of,
    in_common_state,
    join_common,
    leave_out,
    matched_target,
    mismatched_keys,
    parse_strict,
    prospect,
    refuse_keys,
    refuse_omissions,
    take_apart,
    unexpected_keys,
    usable_device,
)
from ..shell.table import Checkpoint
from ..shell.table.index import stored_keys
from ._explained import Explanation, FailedCheck, RankReads
from ._findings import Findings
from ._undecided import find_undecided

_ONE_OF_SEVERAL = "This is one rank's target: if others load the rest, pass all of them to `explain_ranks`."
_UNCHECKED = plans.Prospect()
"""Placeholder for the fit of tensors whose check has failed."""


@dataclass(frozen=True, slots=True, eq=False)
class _Load:
    """A load to explain: everything that is the same for all ranks.

    Attributes:
        stored: Contents of the checkpoint.
        request: Load request, without any rank's target.
        trees: Targets, by rank.
        mode: The strict mode.
        ranks: Ranks whose targets can be flattened.
        target_keys: All keys that these ranks request.
        kinds: Stored dtype and global shape of each requested tensor, by key.
        exchange: Choice whether ranks would read for each other, and its reason.
    """

    stored: Stored
    request: LoadRequest
    trees: Sequence[Any]
    mode: StrictHandling
    ranks: Sequence[int]
    target_keys: set[str]
    kinds: Kinds
    exchange: ExchangeChoice

    def prospect(self, shards: Shards) -> plans.Prospect:
        """Return the problems and the cost of loading shards; both are unknown if the caller's function loads them."""
        # Such a strategy may load what the format doesn't hold, so missing keys are no problems then.
        if callable(self.request.choices[0]):
            return plans.Prospect()
        return prospect(self.stored, shards, cast=self.request.cast, plain=self.request.plain)

    def cost(self, groups: Sequence[Shards]) -> plans.ReadCost:
        """Return the total cost of reading groups of shards, each group by a plan of its own."""
        costs = (self.prospect(group).cost for group in groups if group)
        return sum((cost() for cost in costs if cost is not None), plans.ReadCost())

    def fitting(self, shards: Shards, problems: Iterable[plans.Misfit]) -> Shards:
        """Return the shards that would be read: those of stored tensors without problems.

        A gap (elements that aren't stored) doesn't exclude a shard, since its stored elements would be read.
        """
        wrong = {problem.key for problem in problems if not isinstance(problem, plans.Gap)}
        return [shard for shard in shards if shard.key in self.kinds and shard.key not in wrong]


def explanation(checkpoint: Checkpoint, request: LoadRequest, trees: Sequence[Any]) -> Explanation:
    """Return the outcome of a load of these targets. This process runs the checks of all ranks, one after the other.

    Args:
        checkpoint: The open checkpoint.
        request: Load request, without any rank's target.
        trees: Targets, by rank. Each is looked up several times, and not kept: a sequence that makes a target at each
            lookup needs memory for one at a time.
    """
    ranks, findings = range(len(trees)), Findings()
    load = _prepare(checkpoint, request, trees, findings)
    for rank in load.ranks:
        _check(load, findings, rank)
    omissions, raises = findings.omissions, load.mode in RAISING
    # A rank whose target fails may request all keys that no other rank requests.
    unasked_paths = omissions.unasked_paths(omissions.unasked_bits) if len(omissions.unasked_bits) == len(trees) else ()
    with findings.record(ranks):
        refuse_omissions(load.mode, RANK_VALUES, unasked_paths)
    findings.add_problems(findings.unexpected.values() if raises else ())
    if load.exchange.together:
        with findings.record(ranks):
            findings.reads = _reads_together(load, findings)
    reads = {rank_reads.rank: rank_reads for rank_reads in findings.reads}
    return Explanation(
        missing=tuple(sorted(load.stored.keys - load.target_keys)),
        problems=(
            *sorted(findings.problems.values(), key=lambda problem: not isinstance(problem, plans.Unexpected)),
            *(FailedCheck(tuple(sorted(on)), *error) for error, on in findings.failures.items()),
        ),
        reads=tuple(reads.get(rank, RankReads(rank, 0, 0, None)) for rank in ranks),
        undecided=tuple(findings.undecided),
        omitted=() if raises else tuple(findings.unexpected.values()),
        left_out=(*omissions.left_out, *unasked_paths),
        unfilled=omissions.unfilled,
        uncompared=tuple(sorted(findings.uncompared)),
        exchange=load.exchange.why,
        kept=omissions.kept,
    )


def _prepare(checkpoint: Checkpoint, request: LoadRequest, trees: Sequence[Any], findings: Findings) -> _Load:
    """Flatten all ranks' targets, check that they fit together, and return the load with the keys that they request."""
    mode, choices = parse_strict(request.strict), request.choices
    foretold_exchange(checkpoint, len(trees), None)  # an unknown choice is an error at once
    with findings.record(range(len(trees))):
        usable_device(request.device)
    stored = Stored(checkpoint, choices)
    checkpoint_keys, ranks, descriptions = stored_keys(stored.listing), list[int](), list[LayoutDescription]()
    target_keys, tensors, layouts, columns = set[str](), set[str](), list[KnownLayout | None](), AlikeColumns()
    for rank in range(len(trees)):
        with findings.record([rank]):
            target, layout = matched_target(replace(request, tree=trees[rank]), rank, len(trees))
            ranks.append(rank)
            target_keys |= target.keys_among(checkpoint_keys)
            tensors.update((shard.key for shard in target.tensors), target.plain_keys)
            layouts = layouts or [layout]
            if request.describes:
                columns.add(shard_columns(target.tensors, rank), rank)
                descriptions.append(describe((), target.objects, rank, layout=layout, ranks=len(trees)))
    wanted_columns: list[ShardColumns] | None = None
    if descriptions and len(descriptions) == len(trees):
        with findings.record(range(len(trees)), note=_ONE_OF_SEVERAL if len(trees) == 1 else ""):
            check_alike(columns, descriptions, layouts[0], tiling=request.validate)
            wanted_columns = None if callable(choices[0]) else [part for part, alike in columns for _ in alike]
    exchange = foretold_exchange(checkpoint, len(trees), wanted_columns)
    return _Load(stored, request, trees, mode, ranks, target_keys, stored.kinds(tensors), exchange)


def check_alike(
    alike: AlikeColumns,
    descriptions: Sequence[LayoutDescription],
    layout: KnownLayout | None = None,
    *,
    tiling: bool = True,
) -> None:
    """Raise the errors of `check_together`, in less memory: equal shards of several ranks are stored once.

    Args:
        alike: Tensor shards of all ranks.
        descriptions: Descriptions of the ranks' targets, by rank, without tensor shards.
        layout: Layout of all ranks that the caller passed to `load`, if any.
        tiling: Whether each element and object must have exactly one main replica.

    Raises:
        IntegrityError: The targets don't fit together.
    """
    if layout is not None or not tiling:
        check_together("load", descriptions, layout, tiling=tiling)
        return
    objects = [part.objects for part in descriptions]
    # Main replicas alone decide whether there is a problem. Its text also needs the other replicas of its tensors.
    problems = sharding_problems(alike.select(lambda columns: np.flatnonzero(columns.main)), objects)
    if problems:
        wrong = {problem.key for problem in problems}

        def main_or_wrong(columns: ShardColumns) -> Column:
            of_wrong = np.array([key in wrong for key in columns.keys], dtype=np.bool_)
            return np.flatnonzero(columns.main | of_wrong[columns.key])

        join_checked(alike.select(main_or_wrong), objects)


def _check(load: _Load, findings: Findings, rank: int) -> None:
    """Run the checks of a load on a rank's target, and predict the rank's reads unless ranks read for each other.

    The checks are those that a load makes before it reads, in the same order. Failures are recorded in `findings`; a
    check that fails leaves the target as it was for the next check.
    """
    stored, request, mode, tree = load.stored, load.request, load.mode, load.trees[rank]
    target = remaining = take_apart(tree, donate=request.donate)
    missing, unexpected = _differing_keys(load, target)
    named = unexpected_keys(stored, target, unexpected)
    if mode in RAISING:
        with findings.record([rank]):
            refuse_keys(missing, named)
    with findings.record([rank]):
        remaining = leave_out(target, tree, unexpected, mode)
    fit, objects, omissions = _UNCHECKED, ObjectsFit(), Omissions()
    with findings.record([rank]):
        remaining = asking_whole(remaining, load.kinds)
        with findings.record([rank]):
            fit = load.prospect(remaining.tensors)
        with findings.record([rank]):
            objects = fit_objects(remaining.objects, stored.objects, request.options.object_rules, unexpected)
    with findings.record([rank]):
        _, omissions = join_common(stored, target, remaining, mode)
    with findings.record([rank]):
        check_tensors([(shard, given_tensor(shard)) for shard in remaining.tensors], donate=request.donate)
    findings.add_problems(in_common_state(stored, (*fit.problems, *objects.problems), remaining))
    findings.unexpected |= {unexpected_key.key: unexpected_key for unexpected_key in named}
    findings.add_omissions(omissions)
    _foretell_reads(load, findings, rank, remaining, fit, objects)


def _differing_keys(load: _Load, target: Target) -> tuple[set[str], set[str]]:
    """Return the stored keys that no rank requests, and the rank's requested keys that aren't stored.

    Either set is empty if the strict mode doesn't need it.
    """
    all_stored = load.stored.keys
    # If any rank's target failed, that rank might request any key, so no key is reported as missing.
    everywhere = load.target_keys if len(load.ranks) == len(load.trees) else all_stored
    return mismatched_keys(load.mode, target.keys_among(all_stored), all_stored, everywhere)


def _foretell_reads(
    load: _Load, findings: Findings, rank: int, target: Target, fit: plans.Prospect, objects: ObjectsFit
) -> None:
    """Add a rank's reads, and its possible failures that only stored values can decide, to the findings.

    These are the reads of the rank by itself; if ranks read for each other, `_reads_together` replaces them.

    Args:
        load: Load to explain.
        findings: Findings to add to.
        rank: Number of the rank.
        target: The rank's target.
        fit: Problems and cost of the target's tensors.
        objects: Fit of the target's objects to the stored ones.
    """
    findings.uncompared |= set(fit.uncompared)
    # If the check has failed, that is recorded already.
    is_known = fit is _UNCHECKED or fit.cost is not None
    findings.undecided |= dict.fromkeys(find_undecided(load.request, target, objects, load.kinds, is_known=is_known))
    # If ranks read for each other, a rank's reads are known only once all ranks are checked.
    fitting = [] if load.exchange.together else load.fitting(target.tensors, fit.problems)
    groups = groups_of(fitting, load.kinds)
    cost = None if fit.cost is None else load.cost(groups) if len(groups) > 1 else fit.cost()
    findings.reads.append(RankReads(rank, len(target.tensors), len(target.objects), cost))


def _reads_together(load: _Load, findings: Findings) -> list[RankReads]:
    """Return the reads of each rank, with the bytes that it sends and receives, for ranks that read for each other."""

    def targets() -> Iterator[Shards]:
        for rank in load.ranks:
            shards = asking_whole(take_apart(load.trees[rank]), load.kinds).tensors
            yield load.fitting(shards, findings.problems.values())

    is_cut = cuts_shards(load.stored.checkpoint, load.request.choices)
    groups, read_plans = foretold_groups(targets, load.kinds, is_cut=is_cut)
    sent_bytes = np.sum([plan.bytes_sent for plan in read_plans], axis=0).tolist()
    received_bytes = np.sum([plan.bytes_received for plan in read_plans], axis=0).tolist()
    rows = zip(findings.reads, sent_bytes, received_bytes, strict=True)
    reads = [replace(rank_reads, sent=sent, received=received) for rank_reads, sent, received in rows]
    if any(rank_reads.cost is None for rank_reads in reads):
        return reads
    return [
        replace(rank_reads, cost=load.cost(groups(number, shards)))
        for number, (rank_reads, shards) in enumerate(zip(reads, targets(), strict=True))
    ]
