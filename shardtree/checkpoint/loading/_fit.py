"""Whether a target can be loaded from a checkpoint: asked of its metadata before any memory is made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...layouts import TensorKind
from ...mapping import ShardedObject
from ...plans import Misfit, Prospect, Refused, find_mismatches, find_unexpected
from ...strategies import (
    Checkpoint,
    Strategies,
    StrategyAction,
    check_fit,
    find_strategy,
    get_default_strategy,
    old_unique_key,
)
from .._dispatch import Choice, backend_of, common_backend, sharded_backend
from .._open import Metadata, stored_kinds
from ._taken_apart import Target

Kinds = Mapping[str, TensorKind]
"""What is stored of the tensors that a target asks for, by key."""


def check_target(
    checkpoint: Checkpoint, target: Target, choice: Choice, strategies: Strategies, *, cast: bool
) -> Kinds:
    """Return what is stored of a target's tensors, once it is known that they fit; not collective.

    Nothing is said of a format that doesn't tell what it holds, nor against a function of the caller's own.

    Args:
        checkpoint: what is loaded.
        target: what is asked for.
        choice: the caller's, of how shards are loaded.
        strategies: the dispatch table.
        cast: whether dtypes are converted.

    Raises:
        KeyMismatch: something isn't stored; all else that is wrong is told too.
        ShapeError: something is stored with another global shape or dtype, or not whole.
        StrategyError: dtypes are to be converted, and the format doesn't tell what it holds.
    """
    backend = backend_of(choice, sharded_backend(checkpoint.fields))
    row = (StrategyAction.LOAD_METADATA, *backend)
    if find_strategy(*row, strategies=strategies) is None and not cast:
        return {}
    metadata: Metadata = get_default_strategy(*row, strategies=strategies)(checkpoint)
    kinds = stored_kinds(metadata, sorted({shard.key for shard in target.tensors}))
    known = [shard for shard in target.tensors if shard.key in kinds]
    fits = len(known) == len(target.tensors) and not find_mismatches(known, kinds, cast=cast)
    objects = unexpected_objects(checkpoint, target.objects, metadata, choice, strategies)
    if (objects or not fits) and not callable(choice):
        problems = (*prospect(checkpoint, target, choice, strategies, cast=cast).problems, *objects)
        if not all(isinstance(problem, Refused) for problem in problems):
            check_fit(problems)  # what is refused, loading it says better
    return kinds


def prospect(checkpoint: Checkpoint, target: Target, choice: Choice, strategies: Strategies, *, cast: bool) -> Prospect:
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


def unexpected_objects(
    checkpoint: Checkpoint,
    objects: Sequence[ShardedObject],
    metadata: Metadata,
    choice: Choice,
    strategies: Strategies,
) -> tuple[Misfit, ...]:
    """Return the objects that aren't stored, as far as the format that holds them tells.

    Args:
        checkpoint: what is loaded.
        objects: what is asked for.
        metadata: what the format of the tensors holds.
        choice: the caller's, of how shards are loaded.
        strategies: the dispatch table.
    """
    backend = backend_of(choice, sharded_backend(checkpoint.fields))
    if not objects:
        return ()
    if find_strategy(StrategyAction.LOAD_OBJECTS, *backend, strategies=strategies) is None:
        row = (StrategyAction.LOAD_METADATA, *common_backend(checkpoint.fields))
        fallback = find_strategy(*row, strategies=strategies)
        if fallback is None:
            return ()
        metadata = fallback(checkpoint)
    absent = [
        item.unique_key for item in objects if item.unique_key not in metadata and old_unique_key(item) not in metadata
    ]
    return find_unexpected(absent, metadata, is_object=True) if absent else ()
