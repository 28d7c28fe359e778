"""The fit of a target's tensors and objects to those that are stored: problems and cost, found in metadata alone."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

import torch

from ....core.layouts import ShapeChange
from ....core.mapping import ShardedTensor
from ....core.plans import (
    Misfit,
    Prospect,
    Refusal,
    ScaledValues,
    Unexpected,
    find_mismatches,
    find_scaled,
    find_unexpected,
)
from ....core.trees import leaves_with_paths, path_key, plain_matcher
from ....errors import CheckpointingException, TreePath, render_path
from ...table import check_fit
from ...table.index import DeferredMetadata, IndexMetadata, explain_from_index, stored_keys, stored_kinds
from ._ask import LoadRequest
from ._objects import ObjectsFit, fit_objects
from ._stored import Stored
from ._targets import Kinds, Target

P = TypeVar("P", bound=Misfit)


def fit_target(
    stored: Stored, target: Target, request: LoadRequest, left_out: Collection[str]
) -> tuple[Kinds, ObjectsFit]:
    """Return the stored kinds of a target's tensors, and the fit of its objects, once all are known to fit.

    Nothing is checked of a format that can't list its contents, nor if a function of the caller's loads the shards.

    Args:
        stored: The checkpoint's contents.
        target: The rank's target, without what isn't stored.
        request: The caller's request.
        left_out: Keys that aren't stored, and that the target asked for too.

    Raises:
        KeyMismatch: Something isn't stored; all else that is wrong is in the error too. Or a pattern fits no key.
        ShapeError: Something is stored with another global shape or dtype, or not whole, or would be converted without
            its scales; objects of another shape have no rule.
        StrategyError: Dtypes are to be converted, or objects resharded, and the format can't list its contents.
        TreeError: The pattern of a rule fits no key.
    """
    rules, is_function = request.options.object_rules, callable(request.choices[0])
    if not (stored.can_list or request.cast or rules):
        return {}, ObjectsFit()
    keys = sorted({shard.key for shard in target.tensors})
    kinds = stored_kinds(stored.tensors, keys)
    tensors = [shard for shard in target.tensors if shard.key in kinds] if len(kinds) < len(keys) else target.tensors
    fits = len(tensors) == len(target.tensors) and not find_mismatches(tensors, kinds, cast=request.cast)
    scaled = find_without_scales(stored, tensors, kinds, request.plain) if request.cast else ()
    objects = fit_objects(target.objects, stored.objects, rules, left_out) if target.objects or rules else ObjectsFit()
    if (objects.problems or not fits or scaled) and not is_function:
        found = prospect(stored, target.tensors, cast=request.cast, plain=request.plain)
        problems = (*found.problems, *objects.problems)
        # What the format itself refuses is left to the load, whose own error explains it better.
        if not all(isinstance(problem, Refusal) for problem in problems):
            check_fit(in_common_state(stored, problems, target))
    # Objects are read by the format even where a caller's function loads the tensors, and what this one loads is
    # converted like all else.
    changed = [problem for problem in objects.problems if isinstance(problem, ShapeChange)]
    if misfits := changed or scaled:
        check_fit(misfits)
    return kinds, objects


def prospect(stored: Stored, shards: Sequence[ShardedTensor], *, cast: bool, plain: Sequence[str]) -> Prospect:
    """Return the problems and the cost of loading some of a target's tensors; no cost if there is no index.

    Raises:
        StrategyError: The format can't list its contents.
        KeyMismatch: A pattern of plain values fits nothing that is stored.
    """
    metadata, keys = stored.tensors, sorted({shard.key for shard in shards})
    has_index = isinstance(metadata, IndexMetadata | DeferredMetadata)
    kinds = stored_kinds(metadata, keys) if cast or not has_index else {}
    scaled = find_without_scales(stored, shards, kinds, plain) if cast else ()
    if isinstance(metadata, IndexMetadata | DeferredMetadata):
        found = explain_from_index(stored.checkpoint, metadata, shards, cast=cast)
        return replace(found, problems=(*found.problems, *scaled)) if scaled else found
    misfits = find_mismatches([shard for shard in shards if shard.key in kinds], kinds, cast=cast)
    return Prospect((*find_unexpected(keys, metadata), *misfits, *scaled))


def find_without_scales(
    stored: Stored, shards: Sequence[ShardedTensor], kinds: Kinds, plain: Sequence[str]
) -> tuple[ScaledValues, ...]:
    """Return the values that would be converted without the scales that are stored beside them.

    Args:
        stored: The checkpoint's contents.
        shards: The rank's shards.
        kinds: The stored kinds of their keys.
        plain: Patterns of keys of values that need no scales.

    Raises:
        KeyMismatch: A pattern of plain values fits nothing that is stored.
    """
    metadata = stored.tensors
    is_plain = plain_matcher("load", plain, lambda: stored_keys(metadata))
    # Names that only reading finds out aren't read for this: those of weights are in the files.
    listed = metadata.of(kinds) if isinstance(metadata, DeferredMetadata) else metadata
    return find_scaled(shards, kinds, partial(stored_kinds, listed), is_plain)


# What isn't stored as a shard, and may be in the common state


def unexpected_keys(stored: Stored, target: Target, unexpected: Collection[str]) -> tuple[Unexpected, ...]:
    """Return the unexpected keys of a target, each with the stored name that may be meant.

    Args:
        stored: The checkpoint's contents.
        target: The rank's target.
        unexpected: The target's keys that aren't stored, as far as a strict mode looks for them.
    """
    if not unexpected:
        return ()
    absent, untaken = find_unexpected(target.keys, stored.keys), stored.untaken
    known = [replace(one, near=None, refusal=untaken[one.key]) if one.key in untaken else one for one in absent]
    return in_common_state(stored, known, target)


def in_common_state(stored: Stored, problems: Iterable[P], target: Target) -> tuple[P, ...]:
    """Return problems, with the path of each missing tensor that the common state holds, at its path or by its name.

    Args:
        stored: The checkpoint's contents; if the common state can't be read, problems stay as they are.
        problems: The problems of the target.
        target: The rank's target.
    """
    problems = tuple(problems)
    # Only where something is missing: decoding the common state may be most of a small load.
    if not any(isinstance(problem, Unexpected) and not problem.is_object for problem in problems):
        return problems
    try:
        leaves = leaves_with_paths(stored.common(target.types))
        plain = {path for path, leaf in leaves if isinstance(leaf, torch.Tensor)}
        paths = {path_key(path): path for path in plain}
    except (CheckpointingException, ValueError):  # ValueError: an integer of more digits than Python converts to text
        return problems
    pairs = leaves_with_paths(target.rebuild(target.leaves)) if plain else []
    paths |= {leaf.key: path for path, leaf in pairs if isinstance(leaf, ShardedTensor) and path in plain}
    return tuple(_in_common_state(problem, paths) for problem in problems)


def _in_common_state(problem: P, paths: Mapping[str, TreePath]) -> P:
    if isinstance(problem, Unexpected) and problem.key in paths and not problem.is_object:
        return replace(problem, near=None, path=render_path(paths[problem.key]))
    return problem
