"""Shared reads of a load: if several ranks want the same bytes, one rank reads them and sends them to the others.

A shard is shared if other ranks may read its bytes, which all shards are unless they allow a shape mismatch.

Shards are read in groups. The first group has the unconverted shards, whose dtype is the stored one. Converted shards
follow in further groups of bounded size, called rounds. Every rank plans the groups from the shards of all ranks, since
a part that one rank reads for several must be in the same group on each of them. The last functions of this module
predict groups and reads for `explain`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

import numpy as np

from ..core import limits
from ..core.geometry import Column
from ..core.layouts import ShardColumns, join_columns, select_rows, shard_columns
from ..core.mapping import ShardedTensor
from ..core.plans import read_rounds
from ..shell.checkpoint import (
    AlikeColumns,
    Choice,
    PackedColumns,
    pack_columns,
    send_tables,
    unpack_columns,
    without_long_table,
)
from ..shell.checkpoint.loading import (
    CPU,
    ExchangeChoice,
    Kinds,
    Reading,
    ReadPlace,
    Shards,
    as_stored,
    by_dtype,
    bytes_wanted_twice,
    convert_all,
    exchange_choice,
    groups_of,
    new_memory,
    read_shards,
    stored_shard,
    traits_of_load,
)
from ..shell.storage import ReadReport, crosses_network
from ..shell.table import Checkpoint, Strategies
from ..shell.world import agree, share
from ._memory import make_buffers
from ._move import Route, long_pieces_apart, move
from .resharding._exchange import ExchangePlan, SharedReads, plan_exchange, plan_reads


def read_together(reading: Reading, shards: Sequence[ShardedTensor]) -> ReadReport:
    """Fill shards; if several ranks want the same bytes, one of them reads and sends them. Collective.

    Args:
        reading: Parameters of the load, such as the checkpoint and the stored dtypes.
        shards: Shards of this rank, with memory.

    Returns:
        Numbers of bytes that this rank has read, sent and received.
    """
    world, kinds, layout = reading.checkpoint.world, reading.kinds, reading.layout
    choices = (reading.sharded_strategy, None, reading.strategies)

    def terms(group: Sequence[ShardedTensor]) -> tuple[bool, bool]:
        # The caller's layout is usable if it is exactly the layout of the shared shards: none left out, none converted.
        is_known = layout is not None and len(by_sharing(group)[1]) == layout.order.size
        return cuts_shards(reading.checkpoint, choices), is_known

    # Ranks may verify differently, or have strategies of their own, but the plan must be the same on all.
    alike, all_terms = share(world, "load: compare reads", lambda: by_dtype(shards, kinds)[0], terms)
    is_cut = all(cuts for cuts, _ in all_terms)
    if layout is not None and all(is_known for _, is_known in all_terms):
        return _read_once(reading, [alike[number] for number in layout.order.tolist()], layout.columns, is_cut)
    groups, columns_by_group = _common_groups(reading, shards)
    report = _read_once(reading, groups[0], columns_by_group[0], is_cut)
    for part, columns in zip(groups[1:], columns_by_group[1:], strict=True):
        staging = agree(world, "load: make room", partial(as_stored, part, kinds))
        report += _read_once(reading, staging, columns, is_cut)
        agree(world, "load: convert", partial(convert_all, part, staging, kinds))
    return report


def _common_groups(
    reading: Reading, shards: Sequence[ShardedTensor]
) -> tuple[list[list[ShardedTensor]], list[ShardColumns]]:
    """Return this rank's shards in groups to read one after another, and a table for each group; collective.

    The table of a group lists the shared shards of all ranks in it: those that other ranks may read.
    """
    world, kinds = reading.checkpoint.world, reading.kinds

    def describe() -> list[PackedColumns]:
        return [pack_columns(columns, world.rank) for columns in shared_columns(shards, kinds, world.rank)]

    def brief(own: Sequence[PackedColumns]) -> list[PackedColumns]:
        return [without_long_table(columns, world.size) for columns in own]

    own, briefs = share(world, "load: describe reads", describe, brief)
    parts = [send_tables(world, mine, theirs) for mine, theirs in zip(own, zip(*briefs, strict=True), strict=True)]

    def plan() -> tuple[list[list[ShardedTensor]], list[ShardColumns]]:
        alike, others = (join_columns(unpack_columns(part)) for part in parts)
        rounds, columns = common_groups(alike, others)
        return groups_of(shards, kinds, rounds[others.rank == world.rank], len(columns) - 1), columns

    return agree(world, "load: plan reads", plan)


def _read_once(reading: Reading, shards: Sequence[ShardedTensor], columns: ShardColumns, is_cut: bool) -> ReadReport:
    """Fill one group of shards: read this rank's share, and exchange it with the other ranks; collective.

    Args:
        reading: Parameters of the load.
        shards: Shards of this rank in the group, with memory.
        columns: Table of the group's shared shards on all ranks: those that other ranks may read.
        is_cut: Whether several ranks may each read a part of the same shard.

    Returns:
        Numbers of bytes that this rank has read, sent and received.
    """
    world = reading.checkpoint.world
    own, shared = by_sharing(shards)
    plan = agree(world, "load: plan exchange", partial(plan_exchange, columns, world.size, is_cut=is_cut))
    parts, route = agree(world, "load: choose reads", partial(route_of, plan, world.rank, shared))
    report = agree(world, "load: read", partial(read_shards, reading, [*own, *parts]))
    failure = move(route, world.exchange)
    return report + agree(world, "load: pass on", partial(bytes_moved, failure, plan, world.rank))


def cuts_shards(checkpoint: Checkpoint, choices: tuple[Choice, Choice, Strategies | None]) -> bool:
    """Return whether a shared shard may be cut into parts that different ranks read.

    Args:
        checkpoint: The opened checkpoint.
        choices: Strategy for shards, strategy for the common state, and dispatch table, as the caller passed them.
    """
    cuts = traits_of_load(checkpoint, choices[0], choices[2]).cuts_chunks
    # Ranks that each read a part of a chunk couldn't verify its checksum, unless each read all of the chunk.
    return cuts == "always" or (cuts == "unchecked" and checkpoint.options.verify is None)


def parts_to_read(
    shared: SharedReads, rank: int, shards: Sequence[ShardedTensor], element: Column | None = None
) -> list[ShardedTensor]:
    """Return the shards, and parts of shards, that a rank reads itself, in the order of its reads.

    Args:
        shared: Plan of the reads of all ranks.
        rank: Number of the rank.
        shards: Wanted shards of the rank, with contiguous data or none.
        element: Index of the element in the shard's data at which each read begins, int64 (reads,); the part then is a
            view of that data. Where it is -1, since the read isn't contiguous there (some columns of a matrix, for
            example), the part gets new memory. If the whole argument is None, parts get no data.
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
    """Return a part of a shard as a shard of its own.

    Args:
        shard: The whole shard.
        offset: Global offset of the part's box.
        shape: Shape of the box.
        flat: Range of the box's elements that the part has; a negative start for all.
        begin: First element in the shard's memory that the part shares; -1 for new memory.
        has_data: Whether the part gets data.
    """
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
    """Return the parts of shards that a rank reads itself, and the `Route` that passes them on to other ranks.

    Args:
        plan: Exchange plan of all ranks.
        rank: Number of the rank.
        shards: Wanted shards of the rank, with contiguous memory on the CPU.
    """
    parts = parts_to_read(plan.shared, rank, shards, plan.element)
    mine = np.flatnonzero(plan.shared.reads.rank == rank).tolist()
    sources = dict(zip(mine, (part.data for part in parts), strict=True))
    targets = dict(enumerate((shard.data for shard in shards), int(plan.shared.first[rank])))
    schedule = long_pieces_apart(plan.passed_on.schedule(max_bytes_in_flight=limits.EXCHANGE_BYTES))
    buffers = make_buffers(schedule, rank, CPU, doing="load")
    return parts, Route(plan.passed_on, schedule, rank, sources, targets, buffers, is_direct=True, doing="load")


def bytes_moved(failure: Exception | None, plan: ExchangePlan, rank: int) -> ReadReport:
    """Return the bytes that a rank sent and received, or raise the failure of the exchange."""
    if failure is not None:
        raise failure
    return ReadReport(
        bytes_sent=int(plan.shared.bytes_sent[rank]), bytes_received=int(plan.shared.bytes_received[rank])
    )


def by_sharing(shards: Sequence[ShardedTensor]) -> tuple[list[ShardedTensor], list[ShardedTensor]]:
    """Return a rank's shards in two lists: those that it must read itself, and those that other ranks may read."""
    # If a shape mismatch is allowed, elements that aren't stored keep each rank's own values.
    own = [shard for shard in shards if shard.allow_shape_mismatch]
    return own, [shard for shard in shards if not shard.allow_shape_mismatch]


def shared_columns(shards: Shards, kinds: Kinds, rank: int) -> tuple[ShardColumns, ShardColumns]:
    """Return two tables of a rank's shards, unconverted and converted, from which all ranks plan shared reads.

    The first table has the shards whose dtype is the stored one, except shards that the rank must read itself. The
    second table has all shards whose dtype isn't the stored one, described with the stored dtype. Its column `main`
    marks the shards that other ranks may read.
    """
    alike, others = by_dtype(shards, kinds)
    other_columns = shard_columns([stored_shard(shard, kinds) for shard in others], rank)
    is_shared = np.array([not shard.allow_shape_mismatch for shard in others], dtype=np.bool_)
    return shard_columns(by_sharing(alike)[1], rank), replace(other_columns, main=is_shared)


def common_groups(alike: ShardColumns, others: ShardColumns) -> tuple[Column, list[ShardColumns]]:
    """Return the round of each converted shard, and a table for each group in which ranks read.

    The first group has the unconverted shards; each round of converted shards is a further group.

    Args:
        alike: Unconverted shards of all ranks: their first tables from `shared_columns`, joined.
        others: Converted shards of all ranks: their second tables from `shared_columns`, joined.

    Returns:
        ``(rounds, groups)``: the round of each shard in `others`, int64 (shards,); and for each group, the table of its
        shared shards, which other ranks may read.
    """
    rounds = read_rounds(others)
    count = int(rounds.max(initial=-1)) + 1
    parts = (select_rows(others, np.flatnonzero((rounds == each) & others.main)) for each in range(count))
    return rounds, [alike, *parts]


# The same plans for all ranks in one process, in little memory.


def foretold_exchange(checkpoint: Checkpoint, ranks: int, columns: Iterable[ShardColumns] | None) -> ExchangeChoice:
    """Return the predicted choice of shared or separate reads, as if each rank were on a machine of its own.

    Args:
        checkpoint: The opened checkpoint.
        ranks: Number of ranks.
        columns: Tables of the shards that ranks want; None if unknown.
    """
    remote = crosses_network(checkpoint.storage)
    places = [ReadPlace(str(rank), remote) for rank in range(ranks)]
    saved_bytes = None if columns is None else bytes_wanted_twice(columns)
    choice = exchange_choice(checkpoint.options.exchange, places, saved_bytes)
    others = " On one machine, each would read by itself."
    return replace(choice, why=choice.why + others) if choice.together and choice.why else choice


def foretold_groups(
    targets: Callable[[], Iterable[Shards]], kinds: Kinds, *, is_cut: bool
) -> tuple[Callable[[int, Shards], list[Shards]], list[SharedReads]]:
    """Return the predicted groups of shards of a load with shared reads, and the plan of reads for each group.

    It isn't planned how ranks pass on what they read: for a large model with replicas, that plan would take most of the
    memory.

    Args:
        targets: Function that yields the shards of one rank after another; they are not kept.
        kinds: Stored dtype and shape of each tensor, by key.
        is_cut: Whether a shared shard may be cut into parts that different ranks read.

    Returns:
        ``(groups, plans)``: a function that takes a rank and its shards, and returns for each group the shards and
        parts of shards that the rank reads; and the plan of each group's reads.
    """
    alike, others, ranks = AlikeColumns(), AlikeColumns(), 0
    for rank, shards in enumerate(targets()):
        own_alike, own_others = shared_columns(shards, kinds, rank)
        # Replicas are alike except for which of them is the main one.
        alike.add(replace(own_alike, main=np.zeros_like(own_alike.main)), rank)
        others.add(own_others, rank)
        ranks += 1
    other_columns = others.join()
    rounds, parts = common_groups(alike.join(), other_columns)
    sources = [alike, *[others] * (len(parts) - 1)]
    plans = [plan_reads(part, ranks, is_cut=is_cut, alike=of.alike) for part, of in zip(parts, sources, strict=True)]
    number_of = {rank: number for number, members in enumerate(others.alike) for rank in members.tolist()}

    def groups(rank: int, shards: Shards) -> list[Shards]:
        # Data is dropped: a target's tensor may be a view, from which no flat range can be taken.
        bare = [shard if shard.data is None else replace(shard, data=None) for shard in shards]
        own_groups = groups_of(bare, kinds, rounds[other_columns.rank == number_of[rank]], len(parts) - 1)
        return [_share(group, plan, rank) for group, plan in zip(own_groups, plans, strict=True)]

    return groups, plans


def _share(shards: Shards, plan: SharedReads, rank: int) -> Shards:
    """Return the shards of one group, and parts of them, that a rank reads, for itself or also for other ranks."""
    own, shared = by_sharing(shards)
    return [*own, *parts_to_read(plan, rank, shared)]
