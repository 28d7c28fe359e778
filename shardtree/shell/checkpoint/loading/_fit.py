"""Comparison of a target's tensors and objects with the stored ones: problems and cost, from metadata alone."""

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
    """Check that a target fits the checkpoint; return its tensors' stored dtypes and shapes, and an `ObjectsFit`.

    Nothing is checked if the format can't list its contents and no conversion is requested. If a function of the caller
    loads the shards, only shapes of arrays of objects, and scales of tensors to convert, are checked.

    Args:
        stored: The checkpoint's contents.
        target: The rank's target, without values that aren't stored.
        request: The caller's request.
        left_out: Requested keys that aren't stored and were removed from the target.

    Raises:
        KeyMismatch: A key isn't stored (the error also lists all other problems), or a pattern matches no key.
        ShapeError: A tensor is stored with another global shape or dtype, or with gaps, or would be converted without
            its scales; or an array of objects has another shape and no rule.
        StrategyError: Dtypes should be converted, or objects resharded, and the format can't list its contents.
        TreeError: The pattern of a rule matches no key.
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
        outlook = prospect(stored, target.tensors, cast=request.cast, plain=request.plain)
        problems = (*outlook.problems, *objects.problems)
        # If the format refuses all of them, the load's own error explains it better.
        if not all(isinstance(problem, Refusal) for problem in problems):
            check_fit(in_common_state(stored, problems, target))
    # These checks apply even if a caller's function loads the tensors: the format still reads the objects, and loaded
    # tensors are converted in any case.
    changed = [problem for problem in objects.problems if isinstance(problem, ShapeChange)]
    if misfits := changed or scaled:
        check_fit(misfits)
    return kinds, objects


def prospect(stored: Stored, shards: Sequence[ShardedTensor], *, cast: bool, plain: Sequence[str]) -> Prospect:
    """Return the problems and the cost of loading tensors, from the stored metadata.

    The cost is left out if the format's metadata has no index of files and byte ranges.

    Args:
        stored: The checkpoint's contents.
        shards: The shards to load.
        cast: Whether dtypes are converted.
        plain: Patterns of the keys of plain values. These may be cast even if tensors named like scales are stored.

    Raises:
        StrategyError: The format can't list its contents.
        KeyMismatch: A pattern of plain values matches no stored key.
    """
    metadata, keys = stored.tensors, sorted({shard.key for shard in shards})
    has_index = isinstance(metadata, IndexMetadata | DeferredMetadata)
    kinds = stored_kinds(metadata, keys) if cast or not has_index else {}
    scaled = find_without_scales(stored, shards, kinds, plain) if cast else ()
    if isinstance(metadata, IndexMetadata | DeferredMetadata):
        outlook = explain_from_index(stored.checkpoint, metadata, shards, cast=cast)
        return replace(outlook, problems=(*outlook.problems, *scaled)) if scaled else outlook
    misfits = find_mismatches([shard for shard in shards if shard.key in kinds], kinds, cast=cast)
    return Prospect((*find_unexpected(keys, metadata), *misfits, *scaled))


def find_without_scales(
    stored: Stored, shards: Sequence[ShardedTensor], kinds: Kinds, plain: Sequence[str]
) -> tuple[ScaledValues, ...]:
    """Return a problem for each tensor that would be converted without the scales stored beside it.

    Args:
        stored: The checkpoint's contents.
        shards: The rank's shards.
        kinds: The stored kinds (dtype and shape) of the shards' tensors, by key.
        plain: Patterns of the keys of plain values. These may be cast even if tensors named like scales are stored.

    Raises:
        KeyMismatch: A pattern of plain values matches no stored key.
    """
    metadata = stored.tensors
    is_plain = plain_matcher("load", plain, lambda: stored_keys(metadata))
    # This reads no deferred names: weights have the same names in the files.
    listed = metadata.of(kinds) if isinstance(metadata, DeferredMetadata) else metadata
    return find_scaled(shards, kinds, partial(stored_kinds, listed), is_plain)


# Tensors that aren't stored as shards, but may be in the common state.


def unexpected_keys(stored: Stored, target: Target, unexpected: Collection[str]) -> tuple[Unexpected, ...]:
    """Return a problem for each key of a target that isn't stored, with a similar stored key if there is one.

    Args:
        stored: The checkpoint's contents.
        target: The rank's target.
        unexpected: The target's keys that are not stored; empty if the strict mode does not compare keys. Then the
            result is empty.
    """
    if not unexpected:
        return ()
    absent, untaken = find_unexpected(target.keys, stored.keys), stored.untaken
    known = [replace(item, near=None, refusal=untaken[item.key]) if item.key in untaken else item for item in absent]
    return in_common_state(stored, known, target)


def in_common_state(stored: Stored, problems: Iterable[P], target: Target) -> tuple[P, ...]:
    """Return the problems, with a hint added to each missing tensor that is stored in the common state.

    The hint is the tensor's path in that state.

    Args:
        stored: The checkpoint's contents; if the common state can't be read, the problems are unchanged.
        problems: The problems of the target.
        target: The rank's target.
    """
    problems = tuple(problems)
    # The common state is decoded only if a tensor is missing, since that may take most of a small load's time.
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
