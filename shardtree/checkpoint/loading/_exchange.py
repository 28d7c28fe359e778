"""Ranks that read for each other: which part each reads, and how the others get it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np

from ...geometry import Column
from ...layouts import select_rows
from ...live import Route, long_pieces_apart, make_buffers
from ...mapping import ShardedTensor
from ...plans import ExchangePlan, SharedReads
from ...storage import ReadReport
from ...strategies import (
    Checkpoint,
    FormatTraits,
    Strategies,
    StrategyAction,
    default_strategies,
    find_strategy,
    traits_of,
)
from .._dispatch import Choice, sharded_backend, strategy_of
from ._targets import CPU, new_memory

BYTES_IN_FLIGHT = 64 * 1024 * 1024
"""What a rank sends and gets in one step. Long parts go from and to where they lie: large steps take little memory."""


def cuts_shards(checkpoint: Checkpoint, choices: tuple[Choice, Choice, Strategies | None]) -> bool:
    """Return whether shards that ranks read for each other may be cut between them."""
    cuts = traits_of_load(checkpoint, choices[0], choices[2]).cuts_chunks
    # A checksum of a whole chunk couldn't be compared by ranks that each read a part, or each would read all of it.
    return cuts == "always" or (cuts == "unchecked" and checkpoint.options.verify is None)


def parts_to_read(
    shared: SharedReads, rank: int, shards: Sequence[ShardedTensor], element: Column | None = None
) -> list[ShardedTensor]:
    """Return what a rank reads itself, in the order of its reads.

    Args:
        shared: who reads what.
        rank: which.
        shards: the rank's, as they are wanted, with contiguous data or none.
        element: the element of its shard that each read begins at; what is at -1, such as some columns of a matrix,
            gets new memory; None for parts without data.
    """
    mine = np.flatnonzero(shared.reads.rank == rank)
    reads = select_rows(shared.reads, mine)
    at = reads.key * 0 if element is None else element[mine]
    columns = (shared.row[mine] - shared.first[rank], shared.is_whole[mine], at, reads.start, reads.stop)
    rows = zip(reads.offset.tolist(), reads.shape.tolist(), *(column.tolist() for column in columns), strict=True)
    return [
        shards[own] if is_whole else _part(shards[own], offset, shape, slice(start, stop), begin, element is not None)
        for offset, shape, own, is_whole, begin, start, stop in rows
    ]


def _part(shard: ShardedTensor, offset: Any, shape: Any, flat: slice, begin: int, has_data: bool) -> ShardedTensor:
    """Return a box in a shard, or a flat range of one, as a shard: in its memory from an element on, or in new one."""
    axes = len(shard.global_shape)
    box = tuple(shape[len(shape) - axes + shard.prepend_axis_num :])
    size, data = box if flat.start < 0 else (flat.stop - flat.start,), None
    if has_data and begin < 0:
        data = new_memory(shard.key, size, shard.dtype)
    elif has_data:
        data = shard.data.view(-1)[begin : begin + prod(size)].view(size)
    first = len(offset) - axes
    place: dict[str, Any] = {"local_shape": box, "global_offset": tuple(offset[first:]), "axis_fragmentations": None}
    return replace(shard, data=data, flattened_range=None if flat.start < 0 else flat, **place)


def route_of(plan: ExchangePlan, rank: int, shards: Sequence[ShardedTensor]) -> tuple[list[ShardedTensor], Route]:
    """Return what a rank reads itself, and how it takes part when ranks pass on what they have read.

    Args:
        plan: of all ranks.
        rank: which.
        shards: the rank's, as they are wanted, with contiguous memory on the CPU.
    """
    parts = parts_to_read(plan.shared, rank, shards, plan.element)
    mine = np.flatnonzero(plan.shared.reads.rank == rank).tolist()
    sources = dict(zip(mine, (part.data for part in parts), strict=True))
    targets = dict(enumerate((shard.data for shard in shards), int(plan.shared.first[rank])))
    schedule = long_pieces_apart(plan.passed_on.schedule(max_bytes_in_flight=BYTES_IN_FLIGHT))
    buffers = make_buffers(schedule, rank, CPU, doing="load")
    return parts, Route(plan.passed_on, schedule, rank, sources, targets, buffers, is_direct=True, doing="load")


def bytes_moved(failure: Exception | None, plan: ExchangePlan, rank: int) -> ReadReport:
    """Return how much a rank sent and received, or raise the failure of that."""
    if failure is not None:
        raise failure
    return ReadReport(
        bytes_sent=int(plan.shared.bytes_sent[rank]), bytes_received=int(plan.shared.bytes_received[rank])
    )


def by_sharing(shards: Sequence[ShardedTensor]) -> tuple[list[ShardedTensor], list[ShardedTensor]]:
    """Return the shards that each rank reads itself, and those that ranks read for each other."""
    # Where a shape mismatch is allowed, elements that aren't stored keep each rank's own values.
    own = [shard for shard in shards if shard.allow_shape_mismatch]
    return own, [shard for shard in shards if not shard.allow_shape_mismatch]


def traits_of_load(checkpoint: Checkpoint, choice: Choice, strategies: Strategies | None) -> FormatTraits:
    """Return the traits of the function that loads shards, the defaults if it isn't the format's own."""
    backend = sharded_backend(checkpoint.fields)
    load_sharded = strategy_of(StrategyAction.LOAD_SHARDED, choice, backend, strategies)
    # The traits are those of the format's own function, not of one that was put into its place for this call.
    own = find_strategy(StrategyAction.LOAD_SHARDED, *backend, strategies=strategies)
    registered = default_strategies.get((StrategyAction.LOAD_SHARDED, *backend), own)
    return traits_of(*backend, strategies) if load_sharded is own is registered else FormatTraits()
