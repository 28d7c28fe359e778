"""fingerprint: one number for each tensor of a tree or a checkpoint, the same in every layout and format."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from os import PathLike
from typing import Any

import numpy as np
import torch

from ..core.ambient import shielded
from ..core.fingerprints import (
    PartialFingerprint,
    add_fingerprints,
    column_parts,
    piece_total,
    shard_totals,
    unlike_replicas,
)
from ..core.layouts import ShardColumns, check_access, join_columns, select_rows, shard_columns
from ..core.mapping import ShardedTensor
from ..core.trees import leaves_with_paths
from ..errors import IntegrityError, TreeError, error_text, render_path
from ..maintenance import stored_parts
from ..shell.checkpoint import open_together, sharded_backend, sharded_metadata, strategy_of
from ..shell.storage import Directory, Hashes, Storage, in_threads
from ..shell.table import Checkpoint, LoadOptions, Strategies, StrategyAction, unreplaced
from ..shell.world import World, agree, current_world, gather
from ._replicas import tree_shards, unlike_text

Parts = Mapping[str, PartialFingerprint]


@shielded
def fingerprint(tree: Any | Directory, *, world: Any = None, strategies: Strategies | None = None) -> dict[str, int]:
    """Return one number for each tensor of a tree, or of a checkpoint; collective.

    The number depends only on the tensor's key, dtype, global shape and elements, bit for bit: not on how the tensor is
    sharded, replicated or stored. A single changed element always changes it. Ranks exchange only these numbers and
    descriptions of their shards. Objects and the common state have no fingerprint.

    Args:
        tree: Dicts, lists and tuples of shards, factories and plain values, each rank's own. Tensors are read where
            they are, on an accelerator too, and replicas must be equal. Or a path, URL or `Storage` of a checkpoint of
            any format; each rank then reads a part of it.
        world: World of the ranks that take part; by default torch.distributed's default group, or else this process
            alone.
        strategies: Dispatch table, for a checkpoint.

    Returns:
        Numbers below 2**64 by key, sorted by key, the same on all ranks.

    Raises:
        IntegrityError: Some element doesn't have exactly one main replica, or replicas of the same box differ.
        TreeError: The argument is neither a tree nor a checkpoint, or its tensors aren't in shards.
        NotACheckpoint: There is no checkpoint at the path.
        CorruptCheckpoint: The checkpoint is damaged.

    Examples:
        >>> import torch, shardtree as st
        >>> weight = torch.arange(24.0).reshape(4, 6)
        >>> def by_rows(world):
        ...     return [st.ShardedTensor.from_rank_offsets("w", weight.chunk(2)[world.rank], (0, world.rank, 2))]
        >>> trained, _ = st.simulate(2, lambda world: st.fingerprint(by_rows(world), world=world))
        >>> served = st.fingerprint({"w": st.ShardedTensor.from_rank_offsets("w", weight)})
        >>> trained == served
        True
        >>> folder = st.storage.MemoryStorage()
        >>> _ = st.simulate(2, lambda world: st.save(by_rows(world), folder, world=world))
        >>> st.fingerprint(folder) == served
        True
    """
    ranks = current_world(world)
    if isinstance(tree, (str, PathLike, Storage)):
        return _of_checkpoint(tree, ranks, strategies)
    shards = agree(ranks, "fingerprint: find the shards", partial(tree_shards, "fingerprint", tree))
    parts = gather(ranks, "fingerprint: describe shards", partial(shard_columns, shards, ranks.rank))
    columns = agree(ranks, "fingerprint: check integrity", partial(_checked_columns, parts, tree))
    # Only a number for each shard travels, never elements: totals of disjoint shards add up to the tensor's
    # fingerprint.
    totals = gather(ranks, "fingerprint: add up", partial(shard_totals, shards, in_usual_threads))
    return agree(ranks, "fingerprint: join", partial(_of_columns, columns, np.concatenate(totals)))


def in_usual_threads(pieces: Iterable[Any]) -> Sequence[int]:
    """Return each piece's contribution to its tensor's fingerprint, computed by the default number of threads."""
    return in_threads(piece_total, pieces)


def _checked_columns(parts: Sequence[ShardColumns], tree: Any) -> ShardColumns:
    columns = join_columns(parts)
    if not len(columns):
        # Without this check, all trees without shards would have the same, empty result.
        plain = [render_path(path) for path, leaf in leaves_with_paths(tree) if isinstance(leaf, torch.Tensor)]
        if plain:
            fix = "Make each a shard by ShardedTensor.from_rank_offsets(key, tensor): a plain tensor has no key."
            raise TreeError(
                error_text("fingerprint: the tree has tensors, but no rank has a shard", offenders=plain, fix=fix)
            )
    check_access(columns)
    return columns


def _of_columns(columns: ShardColumns, totals: Hashes) -> dict[str, int]:
    # Replicas are compared before main replicas alone are counted: the choice between two unequal ones is arbitrary.
    unlike = unlike_replicas(columns, totals)
    if unlike:
        pairs = [(groups[0], group) for groups in unlike for group in groups[1:]]
        problems = [unlike_text(columns, group, main) for main, group in pairs]
        fix = "Copy the main replicas' elements to the others: a save could store either. See check_replicas."
        raise IntegrityError(error_text("fingerprint: replicas differ", offenders=problems, fix=fix))
    main = np.flatnonzero(columns.main)
    return add_fingerprints([column_parts(select_rows(columns, main), totals[main])])


def _of_checkpoint(directory: Directory, world: World, strategies: Strategies | None) -> dict[str, int]:
    checkpoint = open_together(directory, world, LoadOptions(), strategies)
    # Each rank reads its share of the checkpoint, in the layout in which it was saved: sums don't depend on the reader.
    parts = gather(world, "fingerprint: read", partial(_own_parts, checkpoint, strategies))
    return agree(world, "fingerprint: join", partial(add_fingerprints, [part for own in parts for part in own]))


def _own_parts(checkpoint: Checkpoint, strategies: Strategies | None) -> list[Parts]:
    backend, world = sharded_backend(checkpoint.fields), checkpoint.world
    metadata = sharded_metadata(checkpoint, None, None, strategies)
    tensors = (shard for shard in metadata.values() if isinstance(shard, ShardedTensor))
    load = strategy_of(StrategyAction.LOAD_SHARDED, None, backend, strategies)
    return list(stored_parts(tensors, partial(unreplaced, checkpoint, load), rank=world.rank, ranks=world.size))
