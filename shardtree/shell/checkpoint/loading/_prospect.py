"""Problems and cost of loading tensors, found in the metadata; all ranks find the same for one tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from ....core.mapping import ShardedTensor
from ....core.plans import Prospect, ScaledValues, find_mismatches, find_scaled, find_unexpected
from ....core.trees import plain_matcher
from ...table import Checkpoint, Strategies, StrategyAction, get_default_strategy
from ...table.index import DeferredMetadata, IndexMetadata, explain_from_index, stored_keys, stored_kinds
from .._dispatch import Choice, backend_of, sharded_backend
from .._open import Metadata
from ._targets import Kinds


def prospect(
    checkpoint: Checkpoint,
    shards: Sequence[ShardedTensor],
    choice: Choice,
    strategies: Strategies | None,
    *,
    cast: bool,
    plain: Sequence[str] = (),
) -> Prospect:
    """Return the cost and the problems of loading some of a target's tensors; no cost if there is no index.

    Raises:
        StrategyError: the format can't list what it holds.
        KeyMismatch: a pattern of plain values fits nothing that is stored.
    """
    backend = backend_of(choice, sharded_backend(checkpoint.fields), strategies)
    metadata = get_default_strategy(StrategyAction.LOAD_METADATA, *backend, strategies=strategies)(checkpoint)
    keys = sorted({shard.key for shard in shards})
    kinds = stored_kinds(metadata, keys) if cast or not isinstance(metadata, IndexMetadata | DeferredMetadata) else {}
    scaled = without_scales(metadata, shards, kinds, plain) if cast else ()
    if isinstance(metadata, IndexMetadata | DeferredMetadata):
        found = explain_from_index(checkpoint, metadata, shards, cast=cast)
        return replace(found, problems=(*found.problems, *scaled)) if scaled else found
    stored_shards = [shard for shard in shards if shard.key in kinds]
    misfits = find_mismatches(stored_shards, kinds, cast=cast)
    return Prospect((*find_unexpected(keys, metadata), *misfits, *scaled))


def without_scales(
    metadata: Metadata, shards: Sequence[ShardedTensor], kinds: Kinds, plain: Sequence[str]
) -> tuple[ScaledValues, ...]:
    """Return which values would be converted without the scales that are stored beside them.

    Args:
        metadata: all that is stored.
        shards: what a rank asks for.
        kinds: what is stored of their keys.
        plain: patterns of keys of values that need no scales.

    Raises:
        KeyMismatch: a pattern of plain values fits nothing that is stored.
    """
    is_plain = plain_matcher("load", plain, lambda: stored_keys(metadata))
    # Names that only reading finds out aren't read for this: those of weights are in the files.
    listed = metadata.of(kinds) if isinstance(metadata, DeferredMetadata) else metadata
    return find_scaled(shards, kinds, partial(stored_kinds, listed), is_plain)
