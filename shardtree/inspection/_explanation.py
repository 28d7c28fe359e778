"""What a load of several ranks would do: its steps run in one process, with errors recorded instead of raised."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import numpy as np

from ..core import plans
from ..core.layouts import ShardColumns, shard_columns
from ..live import cuts_shards, foretold_exchange, foretold_groups
from ..shell.checkpoint import AlikeColumns, Description, KnownLayout, Metadata, check_columns, describe, unions_of
from ..shell.checkpoint.loading import (
    RAISING,
    RANK_VALUES,
    CommonOf,
    ExchangeChoice,
    Keys,
    Kinds,
    LoadRequest,
    ObjectsFit,
    Run,
    Shards,
    StrictHandling,
    Target,
    asking_whole,
    check_rank,
    check_tensors,
    fit_objects,
    groups_of,
    in_common_state,
    listing,
    matched_target,
    mismatched_keys,
    objects_metadata,
    parse_strict,
    prospect,
    refuse_omissions,
    stored_common,
    take_apart,
    unexpected_keys,
    usable_device,
)
from ..shell.table import Checkpoint
from ..shell.table.index import stored_keys, stored_kinds, untaken_of
from ._explained import Explanation, FailedCheck, RankReads
from ._findings import Findings
from ._undecided import find_undecided

_ONE_OF_SEVERAL = "This is one rank's target: if others load the rest, pass all of them to `explain_ranks`."


@dataclass(frozen=True, slots=True, eq=False)
class _Load:
    """A load that is explained: what is the same for all ranks.

    Attributes:
        checkpoint: what would be loaded.
        request: how, with no rank's target.
        trees: the targets, by rank.
        mode: what is done about keys that don't match.
        ranks: those whose targets can be taken apart.
        target_keys: of all that they ask for.
        checkpoint_keys: of all that is stored.
        kinds: what is stored of the tensors that they ask for.
        objects: what is in the format that holds objects, as far as it lists that.
        common_of: returns the stored common tree for a target's namedtuple classes.
        exchange: whether ranks would read for each other.
    """

    checkpoint: Checkpoint
    request: LoadRequest
    trees: Sequence[Any]
    mode: StrictHandling
    ranks: Sequence[int]
    target_keys: set[str]
    checkpoint_keys: set[str]
    kinds: Kinds
    objects: Metadata | None
    common_of: CommonOf
    exchange: ExchangeChoice

    def prospect(self, shards: Shards) -> plans.Prospect:
        """Return why loading shards would fail, and what it would read; of a function of the caller's nothing."""
        sharded, _, strategies = self.request.choices
        # It may load what the format doesn't hold, so missing keys are no problems then.
        if callable(sharded):
            return plans.Prospect()
        return prospect(self.checkpoint, shards, sharded, strategies, cast=self.request.cast, plain=self.request.plain)

    def cost(self, groups: Sequence[Shards]) -> plans.ReadCost:
        """Return what reading groups of shards takes, one after the other."""
        costs = (self.prospect(group).cost for group in groups if group)
        return sum((cost() for cost in costs if cost is not None), plans.ReadCost())

    def fitting(self, shards: Shards, problems: Iterable[plans.Misfit]) -> Shards:
        """Return the shards of which something would be read: of a tensor with gaps, what is stored."""
        wrong = {problem.key for problem in problems if not isinstance(problem, plans.Gap)}
        return [shard for shard in shards if shard.key in self.kinds and shard.key not in wrong]


def explanation(checkpoint: Checkpoint, request: LoadRequest, trees: Sequence[Any]) -> Explanation:
    """Return what a load of these targets would do: the checks of every rank run in this process, one after the other.

    Trees are taken apart anew for each step and not kept, so that a sequence that makes them takes the memory of one.
    """
    ranks, findings = range(len(trees)), Findings()
    load = _prepare(checkpoint, request, trees, findings)
    for rank in load.ranks:
        _check(load, findings, rank)
    omissions, raises = findings.omissions, load.mode in RAISING
    # A rank whose target fails may ask for all that no other asks for.
    unasked_paths = omissions.unasked_paths(omissions.unasked_bits) if len(omissions.unasked_bits) == len(trees) else ()
    with findings.record(ranks):
        refuse_omissions(load.mode, RANK_VALUES, unasked_paths)
    findings.add_problems(findings.unexpected.values() if raises else ())
    if load.exchange.together:
        with findings.record(ranks):
            findings.reads = _reads_together(load, findings)
    reads = {one.rank: one for one in findings.reads}
    return Explanation(
        missing=tuple(sorted(load.checkpoint_keys - load.target_keys)),
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
    """Return the load, once it is known what ranks ask for, and whether that fits together."""
    mode, choices = parse_strict(request.strict), request.choices
    foretold_exchange(checkpoint, len(trees), None)  # an unknown choice is an error at once
    with findings.record(range(len(trees))):
        usable_device(request.device)
    metadata = listing(checkpoint, choices)
    checkpoint_keys, ranks, descriptions = stored_keys(metadata), list[int](), list[Description]()
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
            check_columns("load", columns, descriptions, layouts[0], tiling=request.validate)
            wanted_columns = None if callable(choices[0]) else [part for part, alike in columns for _ in alike]
    return _Load(
        checkpoint,
        request,
        trees,
        mode,
        ranks,
        target_keys,
        checkpoint_keys,
        stored_kinds(metadata, sorted(tensors)),
        objects_metadata(checkpoint, metadata, choices[0], choices[2]),
        cache(partial(stored_common, checkpoint, choices)),
        foretold_exchange(checkpoint, len(trees), wanted_columns),
    )


def _untaken(load: _Load) -> Mapping[str, str]:
    return untaken_of(listing(load.checkpoint, load.request.choices))


def _check(load: _Load, findings: Findings, rank: int) -> None:
    """Find out how a rank's target fits, by the checks of a load, and what the rank reads if it does so by itself."""
    request, kinds, tree = load.request, load.kinds, load.trees[rank]
    target, otherwise = take_apart(tree, donate=request.donate), (plans.Prospect(), ObjectsFit())
    # If any rank's target failed, a missing key may be one that it asks for: none is reported.
    everywhere = load.target_keys if len(load.ranks) == len(load.trees) else load.checkpoint_keys
    differing = mismatched_keys(load.mode, target.keys_among(load.checkpoint_keys), load.checkpoint_keys, everywhere)
    keys = Keys(
        load.mode,
        *differing,
        checkpoint_keys=lambda: load.checkpoint_keys,
        kinds=lambda _: kinds,
        unions=unions_of(load.checkpoint.fields),
        untaken=partial(_untaken, load),
    )
    run: Run = partial(findings.record, [rank])

    def fit(target: Target) -> tuple[plans.Prospect, ObjectsFit]:
        prospects, objects = otherwise
        with run("load: check the target"):
            prospects = load.prospect(target.tensors)
        with run("load: check the target"):
            objects = fit_objects(target.objects, load.objects, request.options.object_rules, keys.unexpected)
        return prospects, objects

    rest, (whole, objects), _, omissions = check_rank(run, tree, target, keys, fit, load.common_of, otherwise)
    with run("load: make memory"):
        check_tensors(rest.tensors, donate=request.donate)
    findings.add_problems(in_common_state((*whole.problems, *objects.problems), rest, load.common_of))
    findings.unexpected |= {one.key: one for one in unexpected_keys(keys, target, load.common_of)}
    findings.omissions = findings.omissions.with_those_of(omissions)
    findings.uncompared |= set(whole.uncompared)
    # Where the check has failed, that is said already.
    is_known = whole is otherwise[0] or whole.cost is not None
    findings.undecided |= dict.fromkeys(find_undecided(request, rest, objects, kinds, is_known=is_known))
    # Where ranks read for each other, what a rank reads is known once all are checked.
    groups = [] if load.exchange.together else groups_of(load.fitting(rest.tensors, whole.problems), kinds)
    cost = None if whole.cost is None else load.cost(groups) if len(groups) > 1 else whole.cost()
    findings.reads.append(RankReads(rank, len(rest.tensors), len(rest.objects), cost))


def _reads_together(load: _Load, findings: Findings) -> list[RankReads]:
    """Return what each rank that has a target reads, sends and receives where ranks read for each other."""

    def targets() -> Iterator[Shards]:
        for rank in load.ranks:
            shards = asking_whole(take_apart(load.trees[rank]), load.kinds).tensors
            yield load.fitting(shards, findings.problems.values())

    groups, read_plans = foretold_groups(targets, load.kinds, is_cut=cuts_shards(load.checkpoint, load.request.choices))
    sent_bytes = np.sum([plan.bytes_sent for plan in read_plans], axis=0).tolist()
    received_bytes = np.sum([plan.bytes_received for plan in read_plans], axis=0).tolist()
    rows = zip(findings.reads, sent_bytes, received_bytes, strict=True)
    reads = [replace(one, sent=sent, received=received) for one, sent, received in rows]
    if any(one.cost is None for one in reads):
        return reads
    return [
        replace(one, cost=load.cost(groups(number, shards)))
        for number, (one, shards) in enumerate(zip(reads, targets(), strict=True))
    ]
