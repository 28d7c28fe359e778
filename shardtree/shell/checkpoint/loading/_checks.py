"""The checks of a load of one rank's target before it reads: `load` and `explain` run the same ones.

None is collective. Each returns what the next one needs, or raises what `load` raises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch

from ....core.layouts import ObjectRule, ShapeChange
from ....core.mapping import LocalNonpersistentObject, ShardedTensor
from ....core.plans import Misfit, Refusal, Unexpected, find_mismatches, find_unexpected
from ....core.trees import (
    HOLE,
    United,
    join,
    leaves_with_paths,
    left_out,
    path_key,
    refuse_too_deep,
    restrict,
)
from ....errors import CheckpointingException, TreePath, render_path
from ...table import Checkpoint, Strategies, StrategyAction, check_fit, find_strategy, get_default_strategy
from ...table.index import stored_kinds
from .._dispatch import Choice, backend_of, sharded_backend
from .._open import Metadata
from ._kept import kept_paths, own_values
from ._objects import ObjectsFit, fit_objects, objects_metadata
from ._plain import asking_whole, refuse_other_keys, unfilled_paths
from ._prospect import prospect, without_scales
from ._strict import (
    LEAVING_OUT,
    RAISING,
    STORED_VALUES,
    TARGET_TENSORS,
    Omissions,
    StrictHandling,
    refuse_keys,
    refuse_omissions,
)
from ._targets import Kinds, Target, is_sharded, keys_of, without_unexpected

# Whether a target can be loaded, by metadata alone: checked before any memory is made

P = TypeVar("P", bound=Misfit)

CommonOf = Callable[[tuple[type, ...]], Any]
"""Returns the stored common tree, with instances of given namedtuple classes."""


def check_target(
    checkpoint: Checkpoint,
    target: Target,
    choice: Choice,
    strategies: Strategies | None,
    *,
    cast: bool,
    plain: Sequence[str],
    rules: Mapping[str, ObjectRule] | None,
    left_out: Iterable[str],
    common_of: CommonOf,
) -> tuple[Kinds, ObjectsFit]:
    """Return what is stored of a target's tensors, and how its objects fit, once it is known that all do.

    Not collective. Nothing is checked of a format that can't list what it holds, nor if a function of the caller's
    loads the shards.

    Args:
        checkpoint: what is loaded.
        target: what is asked for.
        choice: the caller's, of how shards are loaded.
        strategies: the dispatch table; None for the process's.
        cast: whether dtypes are converted.
        plain: patterns of keys of values that need no scales.
        rules: for objects that change their shape, by patterns of keys.
        left_out: keys that the target asked for too, and that aren't stored.
        common_of: returns the stored common state, in which a tensor may be that isn't stored as shards.

    Raises:
        KeyMismatch: something isn't stored; all else that is wrong is in the error too. Or a pattern fits no key.
        ShapeError: something is stored with another global shape or dtype, or not whole, or would be converted without
            its scales; objects of another shape have no rule.
        StrategyError: dtypes are to be converted, or objects resharded, and the format can't list what it holds.
        TreeError: the pattern of a rule fits no key.
    """
    backend = backend_of(choice, sharded_backend(checkpoint.fields), strategies)
    row = (StrategyAction.LOAD_METADATA, *backend)
    if find_strategy(*row, strategies=strategies) is None and not (cast or rules):
        return {}, ObjectsFit()
    metadata: Metadata = get_default_strategy(*row, strategies=strategies)(checkpoint)
    keys = sorted({shard.key for shard in target.tensors})
    kinds = stored_kinds(metadata, keys)
    tensors = target.tensors if len(kinds) == len(keys) else [one for one in target.tensors if one.key in kinds]
    fits = len(tensors) == len(target.tensors) and not find_mismatches(tensors, kinds, cast=cast)
    scaled = without_scales(metadata, tensors, kinds, plain) if cast else ()
    objects = ObjectsFit()
    if target.objects or rules:
        listing = objects_metadata(checkpoint, metadata, choice, strategies)
        objects = fit_objects(target.objects, listing, rules, left_out)
    if (objects.problems or not fits or scaled) and not callable(choice):
        found = prospect(checkpoint, target.tensors, choice, strategies, cast=cast, plain=plain)
        problems = (*found.problems, *objects.problems)
        # What the format itself refuses is left to the load, whose own error explains it better.
        if not all(isinstance(problem, Refusal) for problem in problems):
            check_fit(in_common_state(problems, target, common_of))
    if objects.problems:  # objects are read by the format even where a caller's function loads the tensors
        check_fit([problem for problem in objects.problems if isinstance(problem, ShapeChange)])
    check_fit(scaled)  # what a caller's function loads is converted like all else
    return kinds, objects


def in_common_state(problems: Sequence[P], target: Target, common_of: CommonOf) -> tuple[P, ...]:
    """Return problems, with the path of each missing tensor that the common state holds, at its path or by its name.

    Args:
        problems: what is wrong with the target.
        target: what is asked for.
        common_of: returns the stored common state; if that can't be read, problems stay as they are.
    """
    # Only where something is missing: decoding the common state may be most of a small load.
    if not any(isinstance(problem, Unexpected) and not problem.is_object for problem in problems):
        return tuple(problems)
    try:
        leaves = leaves_with_paths(common_of(target.types))
        plain = {path for path, leaf in leaves if isinstance(leaf, torch.Tensor)}
        paths = {path_key(path): path for path in plain}
    except (CheckpointingException, ValueError):  # ValueError: an integer of more digits than Python converts to text
        return tuple(problems)
    pairs = leaves_with_paths(target.rebuild(target.leaves)) if plain else []
    paths |= {leaf.key: path for path, leaf in pairs if isinstance(leaf, ShardedTensor) and path in plain}
    return tuple(_in_common_state(problem, paths) for problem in problems)


def _in_common_state(problem: P, paths: Mapping[str, TreePath]) -> P:
    if isinstance(problem, Unexpected) and problem.key in paths and not problem.is_object:
        return replace(problem, near=None, path=render_path(paths[problem.key]))
    return problem


T = TypeVar("T")

Run = Callable[[str], AbstractContextManager[None]]
"""How a check is run, by the name of its step: a load lets its error through, an explanation records it and goes on."""


@dataclass(frozen=True, slots=True, eq=False)
class Keys:
    """How the keys of a rank's target compare with those that are stored, as far as a mode needs that.

    Attributes:
        mode: what is done about keys that don't match.
        missing: stored, and asked for by no rank.
        unexpected: asked for by this rank, and not stored.
        checkpoint_keys: returns all that are stored.
        kinds: returns what is stored of the tensors among some keys; asked where the target has plain tensors.
        unions: where the common state is the union of dicts of ranks that had keys of their own.
        untaken: returns why something that is stored can't be read, by its key.
    """

    mode: StrictHandling
    missing: set[str]
    unexpected: set[str]
    checkpoint_keys: Callable[[], set[str]]
    kinds: Callable[[Set[str]], Kinds]
    unions: United
    untaken: Callable[[], Mapping[str, str]]


def check_rank(
    run: Run,
    tree: Any,
    target: Target,
    keys: Keys,
    fit: Callable[[Target], T],
    common_of: CommonOf,
    otherwise: T,
) -> tuple[Target, T, Any, Omissions]:
    """Run the checks of one rank's target, in the order of a load, and return what comes of them.

    Args:
        run: runs each check.
        tree: the rank's target.
        target: the same, taken apart.
        keys: how its keys compare with those that are stored.
        fit: checks that tensors and objects are stored as they are asked for.
        common_of: returns the stored common tree for a target's namedtuple classes.
        otherwise: taken in place of the result of `fit` where that fails and is only recorded.

    Returns:
        The target without what isn't stored and with shards in place of the plain tensors that are, what `fit`
        returned, the stored common tree, and what the load leaves out.
    """
    # Keys first, since the other checks are of what is left once unexpected ones are dropped. On every rank a mode that
    # raises does so in this phase: Megatron-Core raises on one rank, and the others wait in the next collective.
    with run("load: strict"):
        if keys.mode in RAISING:
            refuse_keys(keys.missing, unexpected_keys(keys, target, common_of))
    rest, fits, common, omissions = target, otherwise, HOLE, Omissions()
    with run("load: leave out"):
        if keys.unexpected:
            rest = without_unexpected(target, tree, keys.unexpected)
        if keys.mode in LEAVING_OUT:
            rest = replace(rest, own=own_values(tree, keys.unexpected, keys_of))
    with run("load: check the target"):
        if rest.plain:
            rest = asking_whole(rest, keys.kinds(rest.plain_keys))
        fits = fit(rest)
    with run("load: common state"):
        whole = common_of(rest.types)
        common = restrict(whole, target.rebuild(target.leaves), keys.unions) if keys.unions else whole
        omissions = check_join(common, rest, keys)
        if keys.unions:
            values, absent = left_out(whole, HOLE), {*left_out(whole, common)}
            # As bits: of thousands of ranks, each may lack the values of thousands of parameters.
            bits = np.packbits([path in absent for path in values]).tobytes()
            omissions = replace(omissions, union_paths=values, unasked_bits=(bits,))
    return rest, fits, common, omissions


def unexpected_keys(keys: Keys, target: Target, common_of: CommonOf) -> tuple[Unexpected, ...]:
    """Return the unexpected keys of a target, each with the stored name that may be meant."""
    absent = find_unexpected(target.keys, keys.checkpoint_keys()) if keys.unexpected else ()
    untaken = keys.untaken() if absent else {}
    known = [replace(one, near=None, refusal=untaken[one.key]) if one.key in untaken else one for one in absent]
    return in_common_state(known, target, common_of)


def check_join(common: Any, target: Target, keys: Keys) -> Omissions:
    """Return what a load leaves out of the stored common tree and of the target; called before a tensor is read.

    Raises:
        TreeError: the target doesn't fit it.
        KeyMismatch: something is left out, and the mode raises for all that isn't loaded; or a plain tensor is stored
            under another key than that of its path, and the mode doesn't leave out what isn't stored.
    """
    # A trial of the last step's join, with the target's own leaves. An optimizer's state in tuples, or a list with
    # shards beside values, can't come back without its shards: it is left out, so that a load of a part can succeed.
    local = LocalNonpersistentObject
    leaves = [leaf if is_sharded(leaf) or isinstance(leaf, local) else HOLE for leaf in target.leaves]
    tree = join_leaves(common, target, leaves)
    lacking = unfilled_paths(target, tree) if target.plain else []
    if not lacking:
        pass
    elif keys.mode is StrictHandling.ASSUME_OK_UNEXPECTED or keys.mode in RAISING:
        refuse_other_keys(lacking, common, keys.checkpoint_keys)
    kept = kept_paths(common, tree, target.own or {})
    absent, empty, own = (tuple(map(render_path, paths)) for paths in (left_out(common, tree), lacking, kept))
    omissions = Omissions(absent, empty, own)
    refuse_omissions(keys.mode, STORED_VALUES, omissions.left_out)
    refuse_omissions(keys.mode, TARGET_TENSORS, omissions.unfilled)
    return omissions


def join_leaves(common: Any, target: Target, leaves: Sequence[Any]) -> Any:
    """Return the stored common tree joined by what was loaded for each leaf of a target.

    Raises:
        TreeError: they don't fit.
    """
    tree = target.rebuild(leaves)
    with refuse_too_deep("load"):
        return join(common, tree, target.own)
