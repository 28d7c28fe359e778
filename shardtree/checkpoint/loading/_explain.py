"""explain: what a load would do, found out from metadata and the common state alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import numpy as np
import torch

from ... import plans
from ..._ambient import shielded
from ...layouts import ShardColumns, shard_columns
from ...storage import Directory
from ...strategies import Checkpoint, LoadOptions, Strategies, unless_replaced
from ...strategies.index import stored_keys, stored_kinds, untaken_of
from ...trees import Transform, targets_through
from ...world import one_process
from .._consistency import Description, KnownLayout, check_columns, describe, unions_of
from .._dispatch import Choice
from .._open import Metadata, open_at
from .._packed import AlikeColumns
from . import (
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
from ._exchange import cuts_shards, foretold_exchange, foretold_groups
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


def explanation(checkpoint: Checkpoint, request: LoadRequest, trees: Sequence[Any]) -> plans.Explanation:
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
    return plans.Explanation(
        missing=tuple(sorted(load.checkpoint_keys - load.target_keys)),
        problems=(
            *sorted(findings.problems.values(), key=lambda problem: not isinstance(problem, plans.Unexpected)),
            *(plans.FailedCheck(tuple(sorted(on)), *error) for error, on in findings.failures.items()),
        ),
        reads=tuple(reads.get(rank, plans.RankReads(rank, 0, 0, None)) for rank in ranks),
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
    findings.reads.append(plans.RankReads(rank, len(rest.tensors), len(rest.objects), cost))


def _reads_together(load: _Load, findings: Findings) -> list[plans.RankReads]:
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


@shielded
def explain(
    sharded_state_dict: Any,
    checkpoint_dir: Directory,
    sharded_strategy: Choice = None,
    common_strategy: Choice = None,
    validate_access_integrity: bool = True,
    strict: str | StrictHandling = StrictHandling.ASSUME_OK_UNEXPECTED,
    *,
    donate: bool = False,
    device: str | torch.device | None = None,
    cast: bool = False,
    plain: Sequence[str] = (),
    layout: ShardColumns | None = None,
    transform: Transform | None = None,
    strategies: Strategies | None = None,
    options: LoadOptions | None = None,
) -> plans.Explanation:
    """Return what `load` would do with a target, in a world of one: what is wrong, and how much would be read.

    Its `ok` is what becomes of that load. Only metadata and the common state are read, and no memory is made. For one
    rank of several, pass ``validate_access_integrity=False``; `explain_ranks` takes the targets of all.

    Args:
        sharded_state_dict: the target. The data of its shards may be None or on any device.
        checkpoint_dir: where the checkpoint is.
        sharded_strategy: as in `load`. What a function makes of the shards isn't known before it runs.
        common_strategy: as in `load`. A function runs, since the target must fit what it returns.
        validate_access_integrity: whether every element must be asked for by exactly one main replica.
        strict: what would be done about keys that only the target or only the checkpoint has.
        donate: whether the target's tensors would be given away.
        device: where tensors would be put whose target has none.
        cast: whether dtypes would be converted.
        plain: patterns of keys of values that need no scales, as in `load`.
        layout: the tensor shards that all ranks ask for, as in `load`.
        transform: a trace of what makes the target's tensors of those that are stored, as in `load`.
        strategies: the dispatch table; None for the process's.
        options: how the checkpoint would be read, as in `load`.

    Returns:
        The explanation; its text is a table.

    Raises:
        NotACheckpoint: there is none.
        CorruptCheckpoint: metadata or the common state isn't what was saved, or a file isn't there, or has another
            length.
        StrategyError: the format can't list what it holds; or an option has no such choice.
        KeyMismatch: there is no such strict mode.

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
    return explain_ranks(
        [sharded_state_dict],
        checkpoint_dir,
        sharded_strategy,
        common_strategy,
        validate_access_integrity,
        strict,
        donate=donate,
        device=device,
        cast=cast,
        plain=plain,
        layout=layout,
        transform=transform,
        strategies=strategies,
        options=options,
    )


@shielded
def explain_ranks(
    sharded_state_dicts: Sequence[Any],
    checkpoint_dir: Directory,
    sharded_strategy: Choice = None,
    common_strategy: Choice = None,
    validate_access_integrity: bool = True,
    strict: str | StrictHandling = StrictHandling.ASSUME_OK_UNEXPECTED,
    *,
    donate: bool = False,
    device: str | torch.device | None = None,
    cast: bool = False,
    plain: Sequence[str] = (),
    layout: ShardColumns | None = None,
    transform: Transform | Sequence[Transform] | None = None,
    strategies: Strategies | None = None,
    options: LoadOptions | None = None,
) -> plans.Explanation:
    """Return what a `load` by several ranks would do, found out in this process, given the targets of all of them.

    Its `ok` is True if that load would succeed on every rank, and False if it would raise, for stored bytes that verify
    and factories that can merge what was loaded. It is None where only values can tell, which `undecided` lists.

    Args:
        sharded_state_dicts: each rank's target, by rank. They are asked for one at a time, more than once, and not
            kept: a sequence that makes them when it is asked takes the memory of one.
        checkpoint_dir: where the checkpoint is.
        sharded_strategy: this and all that follow are as in `explain`, and the same for all ranks.
        transform: one trace for all ranks, or each rank's.

    Returns:
        The explanation, with what each rank would read from storage.

    Raises:
        NotACheckpoint, CorruptCheckpoint, StrategyError, KeyMismatch: as `explain`.
        MetadataError: there aren't as many traces as targets.

    Examples:
        >>> import tempfile, torch, shardtree as st
        >>> folder = tempfile.mkdtemp()
        >>> st.save({"w": st.ShardedTensor.from_rank_offsets("w", torch.zeros(4, 6))}, folder)
        >>> columns = [st.ShardedTensor.from_rank_offsets("w", torch.zeros(4, 2), (1, rank, 3)) for rank in range(3)]
        >>> unchecked = st.LoadOptions(verify=None)
        >>> explanation = explain_ranks([{"w": shard} for shard in columns], folder, options=unchecked)
        >>> explanation.ok, [one.cost.bytes_wanted for one in explanation.reads], explanation.over_read
        (True, [32, 32, 32], 2.5)
    """
    options = LoadOptions() if options is None else options
    checkpoint = open_at(checkpoint_dir, one_process(), options, strategies)
    choices = (sharded_strategy, common_strategy, strategies)
    validate = validate_access_integrity and transform is None
    if transform is not None:
        sharded_state_dicts = targets_through(sharded_state_dicts, transform, cast=cast, plain=plain)
    request = LoadRequest(
        None,
        choices,
        layout,
        strict,
        validate=validate,
        cast=cast,
        plain=plain,
        donate=donate,
        device=device,
        options=options,
    )
    with unless_replaced(checkpoint):
        return explanation(checkpoint, request, sharded_state_dicts)
