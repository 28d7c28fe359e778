"""Whether a target can be loaded from a checkpoint: asked of its metadata before any memory is made."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch

from ...errors import CheckpointingException, TreePath, render_path
from ...layouts import ObjectRule, Reshaped, TensorKind
from ...mapping import ShardedTensor
from ...plans import Misfit, Prospect, Refused, Unexpected, find_mismatches, find_unexpected
from ...strategies import Checkpoint, Strategies, StrategyAction, check_fit, find_strategy, get_default_strategy
from ...trees import leaves_with_paths, path_key, shard_leaves
from .._dispatch import Choice, backend_of, sharded_backend
from .._open import Metadata, stored_kinds
from ._objects import ObjectsFit, fit_objects, objects_metadata
from ._taken_apart import Target

P = TypeVar("P", bound=Misfit)

Kinds = Mapping[str, TensorKind]
"""What is stored of the tensors that a target asks for, by key."""

CommonOf = Callable[[tuple[type, ...]], Any]
"""Returns the stored common tree, with instances of given namedtuple classes."""


def check_target(
    checkpoint: Checkpoint,
    target: Target,
    choice: Choice,
    strategies: Strategies | None,
    *,
    cast: bool,
    rules: Mapping[str, ObjectRule] | None,
    left_out: Iterable[str],
    common_of: CommonOf,
) -> tuple[Kinds, ObjectsFit]:
    """Return what is stored of a target's tensors, and how its objects fit, once it is known that all do.

    Not collective.

    Nothing is said of a format that doesn't tell what it holds, nor against a function of the caller's own.

    Args:
        checkpoint: what is loaded.
        target: what is asked for.
        choice: the caller's, of how shards are loaded.
        strategies: the dispatch table; None for the process's.
        cast: whether dtypes are converted.
        rules: for objects that change their shape, by patterns of keys.
        left_out: keys that the target asked for too, and that aren't stored.
        common_of: the stored common state, asked where a tensor that isn't stored as shards may be in it.

    Raises:
        KeyMismatch: something isn't stored; all else that is wrong is told too.
        ShapeError: something is stored with another global shape or dtype, or not whole; objects of another shape
            have no rule.
        StrategyError: dtypes are to be converted, or objects resharded, and the format doesn't tell what it holds.
        TreeError: the pattern of a rule fits no key.
    """
    backend = backend_of(choice, sharded_backend(checkpoint.fields))
    row = (StrategyAction.LOAD_METADATA, *backend)
    if find_strategy(*row, strategies=strategies) is None and not (cast or rules):
        return {}, ObjectsFit()
    metadata: Metadata = get_default_strategy(*row, strategies=strategies)(checkpoint)
    keys = sorted({shard.key for shard in target.tensors})
    kinds = stored_kinds(metadata, keys)
    known = target.tensors if len(kinds) == len(keys) else [one for one in target.tensors if one.key in kinds]
    fits = len(known) == len(target.tensors) and not find_mismatches(known, kinds, cast=cast)
    listing = objects_metadata(checkpoint, metadata, choice, strategies)
    objects = fit_objects(target.objects, listing, rules, left_out)
    if (objects.problems or not fits) and not callable(choice):
        problems = (*prospect(checkpoint, target, choice, strategies, cast=cast).problems, *objects.problems)
        if not all(isinstance(problem, Refused) for problem in problems):
            check_fit(in_common_state(problems, target, common_of))  # what is refused, loading it says better
    check_fit([problem for problem in objects.problems if isinstance(problem, Reshaped)])  # whoever loads the tensors
    return kinds, objects


def in_common_state(problems: Sequence[P], target: Target, common_of: CommonOf) -> tuple[P, ...]:
    """Return problems, those tensors named by their path that the common state has instead, at their path or by name.

    Args:
        problems: what is wrong with the target.
        target: what is asked for.
        common_of: the stored common state; what can't be read has nothing to name.
    """
    if not any(isinstance(problem, Unexpected) and not problem.is_object for problem in problems):
        return tuple(problems)
    try:
        leaves = leaves_with_paths(common_of(target.types))
        plain = {path for path, leaf in leaves if isinstance(leaf, torch.Tensor)}
        found = {path_key(path): path for path in plain}
    except (CheckpointingException, ValueError):  # it has an integer of more digits than Python writes
        return tuple(problems)
    pairs = shard_leaves(target.rebuild(target.leaves))[0] if plain else []
    found |= {leaf.key: path for path, leaf in pairs if isinstance(leaf, ShardedTensor) and path in plain}
    return tuple(_in_common_state(problem, found) for problem in problems)


def _in_common_state(problem: P, found: Mapping[str, TreePath]) -> P:
    if isinstance(problem, Unexpected) and problem.key in found and not problem.is_object:
        return replace(problem, near=None, path=render_path(found[problem.key]))
    return problem


def prospect(
    checkpoint: Checkpoint, target: Target, choice: Choice, strategies: Strategies | None, *, cast: bool
) -> Prospect:
    """Return what loading a target's tensors would come to, without figures where the format gives none.

    Raises:
        StrategyError: the format doesn't tell what it holds.
    """
    backend = backend_of(choice, sharded_backend(checkpoint.fields))
    explain = None if callable(choice) else find_strategy(StrategyAction.EXPLAIN, *backend, strategies=strategies)
    if explain is not None:
        found: Prospect = explain(checkpoint, target.tensors, cast)
        return found
    metadata = get_default_strategy(StrategyAction.LOAD_METADATA, *backend, strategies=strategies)(checkpoint)
    keys = sorted({shard.key for shard in target.tensors})
    kinds = stored_kinds(metadata, keys)
    known = [shard for shard in target.tensors if shard.key in kinds]
    return Prospect((*find_unexpected(keys, metadata), *find_mismatches(known, kinds, cast=cast)))
