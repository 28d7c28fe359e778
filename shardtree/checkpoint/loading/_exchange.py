"""What a load reads at once, and whether ranks read for each other: which part each reads, how the others get it.

`load` reads by what is said here, and `explain` says it. Where ranks read for each other, the groups are planned from
what all ranks want: what one reads for several has to be in the same group of each.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any, NamedTuple

import numpy as np

from ...errors import StrategyError, error_text
from ...geometry import Column
from ...layouts import ShardColumns, select_rows, shard_columns
from ...live import Route, long_pieces_apart, make_buffers
from ...mapping import ShardedTensor
from ...plans import ExchangePlan, SharedReads, plan_reads, read_rounds
from ...storage import ReadReport, Storage, crosses_network
from ...strategies import (
    Checkpoint,
    Exchange,
    FormatTraits,
    Strategies,
    StrategyAction,
    default_strategies,
    find_strategy,
    traits_of,
)
from .._dispatch import Choice, sharded_backend, strategy_of
from .._packed import AlikeColumns
from ._targets import CPU, Kinds, new_memory

# Whether ranks read for each other: as the caller says, or by where they and the checkpoint are.

_WORTH_BYTES = 128 * 1024 * 1024
"""An exchange takes a few more collectives: what it saves a rank has to be worth them."""


class Place(NamedTuple):
    """From where a rank reads.

    Attributes:
        host: the name of its machine.
        crosses_network: whether what it reads comes through a network.
    """

    host: str
    crosses_network: bool


def place_of(storage: Storage, ranks: int) -> Place:
    """Return from where this rank reads a storage; of a single rank nobody asks.

    Examples:
        >>> from shardtree.storage import MemoryStorage
        >>> place_of(MemoryStorage(), 2).crosses_network
        False
    """
    return Place(socket.gethostname(), crosses_network(storage)) if ranks > 1 else Place("", False)


@dataclass(frozen=True, slots=True, eq=False)
class ExchangeChoice:
    """Whether ranks read for each other.

    Attributes:
        together: whether they do.
        why: what decided it, as a sentence; empty where the caller did.
    """

    together: bool
    why: str = ""


ALONE = ExchangeChoice(together=False)


def exchange_choice(
    exchange: Exchange, places: Sequence[Place], saved_bytes: Callable[[], int] | None = None
) -> ExchangeChoice:
    """Return whether ranks send each other what they read.

    Args:
        exchange: what the caller says.
        places: of all ranks, by rank.
        saved_bytes: returns how many bytes fewer all ranks together would read; None where ranks don't know what others
            want.

    Raises:
        StrategyError: no such choice.

    Examples:
        >>> places = [Place("node-0", True), Place("node-1", True)]
        >>> exchange_choice("auto", places, lambda: 2**30).why
        'Ranks read for each other, since they are on several machines, and storage is remote.'
    """
    if exchange not in ("auto", "always", "never"):
        expected = "'auto', 'always' or 'never'"
        raise StrategyError(error_text("load: no such exchange", found=repr(exchange), expected=expected))
    if len(places) == 1 or exchange != "auto":
        return ExchangeChoice(len(places) > 1 and exchange == "always")
    alone = "Each rank reads by itself, since"
    if not any(place.crosses_network for place in places):
        return ExchangeChoice(False, f"{alone} storage is local.")
    # Of what one machine reads twice, the second read comes from its cache, or at least from its own connection.
    if len({place.host for place in places}) == 1:
        return ExchangeChoice(False, f"{alone} all are on one machine.")
    if saved_bytes is not None and saved_bytes() < len(places) * _WORTH_BYTES:
        return ExchangeChoice(False, f"{alone} an exchange would save less than {_WORTH_BYTES >> 20} MiB a rank.")
    why = "Ranks read for each other, since they are on several machines, and storage is remote."
    return ExchangeChoice(True, why)


def foretold_exchange(checkpoint: Checkpoint, ranks: int, columns: Iterable[ShardColumns] | None) -> ExchangeChoice:
    """Return whether ranks that are on several machines read for each other, which one process can't know of them."""
    remote = crosses_network(checkpoint.storage)
    places = [Place(str(rank), remote) for rank in range(ranks)]
    saved_bytes = None if columns is None else partial(bytes_wanted_twice, columns)
    choice = exchange_choice(checkpoint.options.exchange, places, saved_bytes)
    others = " On one machine, each would read by itself."
    return replace(choice, why=choice.why + others) if choice.together and choice.why else choice


def bytes_wanted_twice(columns: Iterable[ShardColumns]) -> int:
    """Return how many bytes are wanted by several ranks at least, all but the main replicas.

    Args:
        columns: what all ranks want, in one part or several.
    """
    return sum(int(one.nbytes[~one.main].sum()) for one in columns)


# Ranks that read for each other: which part each reads, and how the others get it.

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
    default = default_strategies.get((StrategyAction.LOAD_SHARDED, *backend), own)
    return traits_of(*backend, strategies) if load_sharded is own is default else FormatTraits()


# Groups: what is stored in its own dtype, then, round by round, what is converted.

Shards = Sequence[ShardedTensor]


def by_dtype(shards: Shards, kinds: Kinds) -> tuple[list[ShardedTensor], list[ShardedTensor]]:
    """Return the shards that are stored in their own dtype, as far as is known, and the others."""
    # By identity: shards of one key in a target may ask for different dtypes.
    others = [shard for shard in shards if shard.key in kinds and kinds[shard.key].dtype != shard.dtype]
    ids = set(map(id, others))
    return [shard for shard in shards if id(shard) not in ids], others


def stored_shard(shard: ShardedTensor, kinds: Kinds) -> ShardedTensor:
    """Return a shard without data, in the dtype that it is stored in."""
    return replace(shard, data=None, dtype=kinds[shard.key].dtype)


def groups_of(shards: Shards, kinds: Kinds, rounds: Column | None = None, count: int = 0) -> list[list[ShardedTensor]]:
    """Return what a rank reads at once: what is stored in its own dtype, then what is converted in each round.

    Args:
        shards: the rank's.
        kinds: what is stored.
        rounds: in which round each that is converted is read, int64; None where the rank reads by itself.
        count: how many rounds there are at least.
    """
    alike, others = by_dtype(shards, kinds)
    if rounds is None and others:
        rounds = read_rounds(shard_columns([stored_shard(shard, kinds) for shard in others]))
        count = int(rounds.max()) + 1
    parts: list[list[ShardedTensor]] = [[] for _ in range(count)]
    for shard, number in zip(others, [] if rounds is None else rounds.tolist(), strict=True):
        parts[number].append(shard)
    return [alike, *parts]


def shared_columns(shards: Shards, kinds: Kinds, rank: int) -> tuple[ShardColumns, ShardColumns]:
    """Return what ranks that read for each other have to know of a rank's shards, in the dtypes that are stored.

    That is what is stored in its own dtype, without what each rank reads itself; and all that is converted, where the
    column of main replicas, which no plan of reads asks for, says instead what ranks share.
    """
    alike, others = by_dtype(shards, kinds)
    other_columns = shard_columns([stored_shard(shard, kinds) for shard in others], rank)
    is_shared = np.array([not shard.allow_shape_mismatch for shard in others], dtype=np.bool_)
    return shard_columns(by_sharing(alike)[1], rank), replace(other_columns, main=is_shared)


def common_groups(alike: ShardColumns, others: ShardColumns) -> tuple[Column, list[ShardColumns]]:
    """Return the round of each shard that is converted, and what ranks share of each group: of `alike`, of each round.

    Args:
        alike: all ranks' first `shared_columns`.
        others: the second ones.
    """
    rounds = read_rounds(others)
    count = int(rounds.max(initial=-1)) + 1
    parts = (select_rows(others, np.flatnonzero((rounds == each) & others.main)) for each in range(count))
    return rounds, [alike, *parts]


# The same for all ranks in one process, in the memory of few.


def foretold_groups(
    targets: Callable[[], Iterable[Shards]], kinds: Kinds, *, is_cut: bool
) -> tuple[Callable[[int, Shards], list[Shards]], list[SharedReads]]:
    """Return what each rank reads itself at once, where ranks read for each other, and the plan of each such group.

    Only what is passed on to whom isn't planned: with the replicas of a large model that would be most of the memory.

    Args:
        targets: yields each rank's shards; they are asked for anew, and not kept.
        kinds: what is stored.
        is_cut: whether shards may be cut between ranks.

    Returns:
        A function from a rank and its shards to its groups, and the plans.
    """
    alike, others, ranks = AlikeColumns(), AlikeColumns(), 0
    for rank, shards in enumerate(targets()):
        own_alike, own_others = shared_columns(shards, kinds, rank)
        # Replicas differ in which of them is the main one, and are alike else.
        alike.add(replace(own_alike, main=np.zeros_like(own_alike.main)), rank)
        others.add(own_others, rank)
        ranks += 1
    other_columns = others.join()
    rounds, parts = common_groups(alike.join(), other_columns)
    sources = [alike, *[others] * (len(parts) - 1)]
    plans = [plan_reads(part, ranks, is_cut=is_cut, alike=of.alike) for part, of in zip(parts, sources, strict=True)]
    number_of = {rank: number for number, members in enumerate(others.alike) for rank in members.tolist()}

    def groups(rank: int, shards: Shards) -> list[Shards]:
        # Without memory: a target's own may be a view, of which no flat range can be taken.
        bare = [one if one.data is None else replace(one, data=None) for one in shards]
        own_groups = groups_of(bare, kinds, rounds[other_columns.rank == number_of[rank]], len(parts) - 1)
        return [_share(group, plan, rank) for group, plan in zip(own_groups, plans, strict=True)]

    return groups, plans


def _share(shards: Shards, plan: SharedReads, rank: int) -> Shards:
    """Return what a rank reads of shards itself."""
    own, shared = by_sharing(shards)
    return [*own, *parts_to_read(plan, rank, shared)]
