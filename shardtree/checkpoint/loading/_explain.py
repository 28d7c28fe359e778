"""explain: what a load would do, found out from metadata and the common state alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial, reduce
from typing import Any, TypeVar

import torch

from ... import plans
from ..._shielded import shielded
from ...errors import CheckpointReplaced, CorruptCheckpoint, IntegrityError, NotACheckpoint, StorageError
from ...layouts import ShardColumns, shard_columns
from ...mapping import ShardedTensor
from ...storage import Directory
from ...strategies import Checkpoint, LoadOptions, Strategies, unless_replaced
from ...world import one_process
from .._consistency import Description, KnownLayout, check_held, describe
from .._dispatch import Choice
from .._open import Metadata, open_at, stored_keys, stored_kinds
from .._packed import AlikeColumns
from .._united import united_of
from ._ask import LoadRequest, listing, matched_target, stored_common
from ._checks import (
    CommonOf,
    Keys,
    ObjectsFit,
    Run,
    check_rank,
    fit_objects,
    in_common_state,
    named_unexpected,
    objects_metadata,
    prospect,
)
from ._foretell import PlannedReads, fitting_shards, foretold_exchange, planned_reads, rank_reads, undecided
from ._read import by_dtype
from ._strict import RAISING, UNASKED, Omissions, StrictHandling, mismatched_keys, parse_strict, refuse_omitted
from ._targets import Kinds, Target, check_given, take_apart, usable_device

Shards = Sequence[ShardedTensor]
P = TypeVar("P", bound=plans.Misfit)


@dataclass(slots=True, eq=False)
class _Failures:
    """Errors of checks, recorded instead of raised.

    Attributes:
        ranks: on which ranks, by class and text of the error.
    """

    ranks: dict[tuple[type[Exception], str], list[int]] = field(default_factory=dict)

    @contextmanager
    def recorded(self, ranks: Sequence[int], step: str = "") -> Iterator[None]:
        """Record an error of the check inside instead of raising it; with the ranks bound, this is a `Run`."""
        try:
            yield
        except (NotACheckpoint, CorruptCheckpoint, CheckpointReplaced, StorageError):
            raise  # what is stored is at fault, not the target: nothing can be explained
        except Exception as error:  # any class: a factory's build function may raise what it likes, and fails the load
            text = "\n".join([str(error), *getattr(error, "__notes__", ())])
            self.ranks.setdefault((type(error), text), []).extend(ranks)

    @property
    def checks(self) -> tuple[plans.FailedCheck, ...]:
        return tuple(plans.FailedCheck(tuple(ranks), error, text) for (error, text), ranks in self.ranks.items())


@dataclass(frozen=True, slots=True, eq=False)
class _Asked:
    """What ranks ask for, as far as they say it to each other.

    Attributes:
        ranks: those whose targets can be taken apart.
        keys: of all that they ask for.
        tensors: the keys of the tensors among that.
        columns: the tensor shards of each; None where ranks don't say what they want, or that doesn't fit.
    """

    ranks: Sequence[int]
    keys: set[str]
    tensors: set[str]
    columns: AlikeColumns | None


@dataclass(frozen=True, slots=True, eq=False)
class _Fit:
    """How the targets of some ranks fit what is stored.

    Attributes:
        reads: what loading the tensors of each would take, if it reads by itself.
        problems: why what they ask for can't be loaded, each once.
        unexpected: what isn't stored, where a strict mode looks for that beforehand.
        omitted: what isn't returned of what is stored, and not filled of the targets.
        uncompared: keys of states that aren't compared with weights.
        undecided: what may fail when values are read.
        converts: whether some tensors are stored in another dtype.
    """

    reads: tuple[plans.RankReads, ...] = ()
    problems: tuple[plans.Misfit, ...] = ()
    unexpected: tuple[plans.Unexpected, ...] = ()
    omitted: Omissions = field(default_factory=Omissions)
    uncompared: tuple[str, ...] = ()
    undecided: tuple[plans.Undecided, ...] = ()
    converts: bool = False


def explanation(checkpoint: Checkpoint, request: LoadRequest, trees: Sequence[Any]) -> plans.Explanation:
    """Return what a load of these targets would do: the checks of every rank run in this process, one after the other.

    Trees are taken apart anew for each step and not kept, so that a sequence that makes them takes the memory of one.
    """
    ranks, failed, mode = range(len(trees)), _Failures(), parse_strict(request.strict)
    foretold_exchange(checkpoint, len(trees), None)  # an unknown choice is an error at once
    with failed.recorded(ranks):
        usable_device(request.device)
    choices, metadata = request.choices, listing(checkpoint, request.choices)
    stored = stored_keys(metadata)
    asked = _asked(request, trees, stored, failed)
    kinds = stored_kinds(metadata, sorted(asked.tensors))
    # If any rank's target failed above, a missing key may be one that this rank asks for: none is reported.
    claimed = asked.keys if len(asked.ranks) == len(trees) else stored
    common_of, united = cache(partial(stored_common, checkpoint, choices)), united_of(checkpoint.fields)

    def fits() -> Iterator[_Fit]:
        for rank in asked.ranks:
            own = replace(request, tree=trees[rank])
            target = take_apart(own.tree, donate=own.donate)
            differing = mismatched_keys(mode, target.asked_of(stored), stored, claimed)
            keys = Keys(mode, *differing, lambda: stored, lambda _: kinds, united)
            yield _rank_fit(failed, rank, checkpoint, own, target, keys, metadata, kinds, common_of)

    fit = _with_unasked(reduce(_both, fits(), _Fit()), mode, ranks, failed)
    problems = _each_once([fit.problems, fit.unexpected if mode in RAISING else ()])

    def fitting() -> Iterator[Shards]:
        yield from (fitting_shards(trees[rank], problems, kinds) for rank in asked.ranks)

    planned, columns = PlannedReads(), None if failed.ranks else asked.columns
    with failed.recorded(ranks):
        planned = planned_reads(checkpoint, choices, fitting, columns, kinds, len(trees), converts=fit.converts)
    reads = {one.rank: one for one in rank_reads(checkpoint, choices, fit.reads, fitting, planned)}
    return plans.Explanation(
        missing=tuple(sorted(stored - asked.keys)),
        problems=(*problems, *failed.checks),
        reads=tuple(reads.get(rank, plans.RankReads(rank, 0, 0, None)) for rank in ranks),
        undecided=fit.undecided,
        omitted=() if mode in RAISING else fit.unexpected,
        left_out=fit.omitted.left_out,
        unfilled=fit.omitted.unfilled,
        uncompared=tuple(sorted(fit.uncompared)),
        exchange=planned.why,
    )


@contextmanager
def _said_of_one(ranks: int) -> Iterator[None]:
    try:
        yield
    except IntegrityError as error:
        if ranks == 1:
            error.add_note("This is one rank's target: if others load the rest, pass all of them to `explain_ranks`.")
        raise


def _with_unasked(fit: _Fit, mode: StrictHandling, ranks: Sequence[int], failed: _Failures) -> _Fit:
    """Return how all targets fit, with what is left out since none of them names it."""
    omitted = fit.omitted
    # A rank whose target fails may ask for all of it.
    unasked = omitted.unasked_by_all(omitted.unasked) if len(omitted.unasked) == len(ranks) else ()
    with failed.recorded(ranks):
        refuse_omitted(mode, UNASKED, unasked)
    return replace(fit, omitted=replace(omitted, left_out=(*omitted.left_out, *unasked)))


def _both(one: _Fit, other: _Fit) -> _Fit:
    """Return how the targets of some ranks and of others fit; ranks mostly have problems in common, kept once."""
    return _Fit(
        (*one.reads, *other.reads),
        _each_once([one.problems, other.problems]),
        _each_once([one.unexpected, other.unexpected]),
        one.omitted.with_those_of(other.omitted),
        tuple(dict.fromkeys((*one.uncompared, *other.uncompared))),
        tuple(dict.fromkeys((*one.undecided, *other.undecided))),
        one.converts or other.converts,
    )


def _asked(request: LoadRequest, trees: Sequence[Any], stored: set[str], failed: _Failures) -> _Asked:
    """Return what ranks ask for, once it is known whether that fits together."""
    ranks, said, columns = list[int](), list[Description](), AlikeColumns()
    keys, tensors, layouts, faults = set[str](), set[str](), list[KnownLayout | None](), list[Exception]()
    for rank in range(len(trees)):
        with failed.recorded([rank]):
            target, known = matched_target(replace(request, tree=trees[rank]), rank, len(trees))
            ranks.append(rank)
            keys |= target.asked_of(stored)
            tensors.update((shard.key for shard in target.tensors), target.plain_keys)
            layouts = layouts or [known]
            try:
                columns.add(shard_columns(target.tensors, rank), rank)
                said.append(describe((), target.objects, rank, known=known, ranks=len(trees)))
            except Exception as error:  # counts only if ranks say to each other what they ask for
                faults.append(error)
    agreed = False
    if ranks and len(ranks) == len(trees) and request.describes:
        with failed.recorded(ranks):
            if faults:
                raise faults[0]
            with _said_of_one(len(trees)):
                check_held("load", columns, said, layouts[0], tiling=request.validate)
            agreed = True
    return _Asked(ranks, keys, tensors, columns if agreed else None)


def _rank_fit(
    failed: _Failures,
    rank: int,
    checkpoint: Checkpoint,
    request: LoadRequest,
    target: Target,
    keys: Keys,
    metadata: Metadata,
    kinds: Kinds,
    common_of: CommonOf,
) -> _Fit:
    choice, _, strategies = request.choices
    run: Run = partial(failed.recorded, [rank])
    listed = objects_metadata(checkpoint, metadata, choice, strategies)

    def fit(target: Target) -> tuple[plans.Prospect, ObjectsFit]:
        found, objects = plans.Prospect(), ObjectsFit()
        # A caller's function may load what the format doesn't hold, so missing keys are no problems then.
        if not callable(choice):
            with run("load: check the target"):
                found = prospect(checkpoint, target, choice, strategies, cast=request.cast)
        with run("load: check the target"):
            objects = fit_objects(target.objects, listed, request.options.object_rules, keys.unexpected)
        return found, objects

    fitted = (plans.Prospect(), ObjectsFit())
    kept, (found, objects), _, omitted = check_rank(run, request.tree, target, keys, fit, common_of, fitted)
    with run("load: make memory"):
        check_given(kept.tensors, donate=request.donate)
    cost = None if found.cost is None else found.cost()
    return _Fit(
        (plans.RankReads(rank, len(kept.tensors), len(kept.objects), cost),),
        in_common_state((*found.problems, *objects.problems), kept, common_of),
        named_unexpected(keys, target, common_of),
        omitted,
        found.uncompared,
        tuple(undecided(checkpoint, request.choices, kept, objects, kinds if request.cast else {})),
        bool(by_dtype(kept.tensors, kinds)[1]),
    )


def _each_once(parts: Iterable[Sequence[P]]) -> tuple[P, ...]:
    """Return the problems of all ranks, each once: what isn't stored first, then the rest in the ranks' order."""
    found = dict[tuple[Any, ...], P]()
    for problem in (problem for part in parts for problem in part):
        found.setdefault((type(problem), problem.key, getattr(problem, "offset", None)), problem)
    return tuple(sorted(found.values(), key=lambda problem: not isinstance(problem, plans.Unexpected)))


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
    layout: ShardColumns | None = None,
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
        layout: the tensor shards that all ranks ask for, as in `load`.
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
        layout=layout,
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
    layout: ShardColumns | None = None,
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

    Returns:
        The explanation, with what each rank would read from storage.

    Raises:
        NotACheckpoint, CorruptCheckpoint, StrategyError, KeyMismatch: as `explain`.

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
    validate = validate_access_integrity
    request = LoadRequest(
        None, choices, layout, strict, validate=validate, cast=cast, donate=donate, device=device, options=options
    )
    with unless_replaced(checkpoint):
        return explanation(checkpoint, request, sharded_state_dicts)
