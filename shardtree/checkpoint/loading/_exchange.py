"""Ranks that read for each other: which part each reads, and how the others get it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch

from ...codec import bit_view
from ...layouts import ShardColumns
from ...mapping import ShardedTensor
from ...plans import Cells, ExchangePlan, SharedReads
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
from ...world import World
from .._dispatch import Choice, sharded_backend, strategy_of
from ._targets import new_memory


def cuts_shards(checkpoint: Checkpoint, choices: tuple[Choice, Choice, Strategies | None]) -> bool:
    """Return whether shards that ranks read for each other may be cut between them."""
    cuts = traits_of_load(checkpoint, choices[0], choices[2]).cuts_chunks
    # A checksum of a whole chunk couldn't be compared by ranks that each read a part, or each would read all of it.
    return cuts == "always" or (cuts == "unchecked" and checkpoint.options.verify is None)


def parts_to_read(
    plan: SharedReads, columns: ShardColumns, rank: int, shards: Sequence[ShardedTensor]
) -> list[ShardedTensor]:
    """Return what a rank reads itself, in the order of the plan's reads; in its shards' memory where it is consecutive.

    What isn't, such as some columns of a matrix, gets new memory.

    Args:
        plan: who reads what.
        columns: all ranks' shards, each rank's rows together and in the order of its shards; those of alike ranks once.
        rank: which.
        shards: the rank's, with contiguous data or none.
    """
    first = int(np.searchsorted(columns.rank, plan.number[rank]))
    mine = np.flatnonzero(plan.reader == rank)
    row, cell = plan.row[mine], plan.cell[mine]
    item_size = columns.item_size[columns.key[row]]
    start, stop = plan.read_start[mine] // item_size, plan.read_stop[mine] // item_size
    reads = zip((row - first).tolist(), cell.tolist(), start.tolist(), stop.tolist(), strict=True)
    return [_part(shards[own], plan.cells, number, slice(low, high)) for own, number, low, high in reads]


def _part(shard: ShardedTensor, cells: Cells, number: int, flat: slice) -> ShardedTensor:
    """Return the elements of a cell in a flat range of it, as a shard."""
    if _is_whole(shard, cells, number):
        return flat_part(shard, flat)
    offset, shape = _box_of(shard, cells, number)
    prepended = shard.prepend_axis_num
    cell = replace(shard, data=None, local_shape=shape[prepended:], global_offset=offset, axis_fragmentations=None)
    if not isinstance(shard.data, torch.Tensor):
        return flat_part(cell, flat)
    data = shard.data[_inside(shard, offset, shape)]
    if data.is_contiguous():
        return flat_part(replace(cell, data=data), flat)
    part = flat_part(cell, flat)
    return replace(part, data=new_memory(part.key, part.data_shape, part.dtype))


def _is_whole(shard: ShardedTensor, cells: Cells, number: int) -> bool:
    """Return whether a cell that a shard wants is all of it."""
    if shard.flattened_range is not None or not shard.global_shape:
        return True
    return _box_of(shard, cells, number) == (shard.global_offset, (1,) * shard.prepend_axis_num + shard.local_shape)


def _box_of(shard: ShardedTensor, cells: Cells, number: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return offset and shape of a cell, with the axes of a shard."""
    first = cells.shape.shape[1] - len(shard.global_shape)
    return tuple(cells.offset[number, first:].tolist()), tuple(cells.shape[number, first:].tolist())


def _inside(shard: ShardedTensor, offset: tuple[int, ...], shape: tuple[int, ...]) -> tuple[slice, ...]:
    begin = [at - low for at, low in zip(offset, shard.global_offset, strict=True)]
    slices = [slice(at, at + size) for at, size in zip(begin, shape, strict=True)]
    return tuple(slices[shard.prepend_axis_num :])


def flat_part(shard: ShardedTensor, flat: slice) -> ShardedTensor:
    """Return so many elements of a shard's data, as a shard that shares its memory."""
    if (flat.start, flat.stop) == (0, prod(shard.data_shape)):
        return shard
    data = shard.data.view(-1)[flat] if isinstance(shard.data, torch.Tensor) else None
    base = 0 if shard.flattened_range is None else shard.flattened_range.start
    return replace(shard, data=data, flattened_range=slice(base + flat.start, base + flat.stop))


def by_sharing(shards: Sequence[ShardedTensor]) -> tuple[list[ShardedTensor], list[ShardedTensor]]:
    """Return the shards that each rank reads itself, and those that ranks read for each other."""
    # Where a shape mismatch is allowed, elements that aren't stored keep each rank's own values.
    own = [shard for shard in shards if shard.allow_shape_mismatch]
    return own, [shard for shard in shards if not shard.allow_shape_mismatch]


class _Transfer(NamedTuple):
    """Consecutive bytes of a cell that one rank has read and a shard wants: a row of a plan."""

    sender: int
    receiver: int
    read: int
    target: int
    start: int
    stop: int


_ByPeer = Mapping[int, Sequence[_Transfer]]


def message_buffers(plan: ExchangePlan, rank: int) -> tuple[Any, Any]:
    """Return memory for what a rank sends to others in any one round, and for what it gets: bytes, as NumPy arrays."""
    moved = np.where(plan.sender == plan.receiver, 0, plan.stop - plan.start)
    sent, received = (np.bincount(plan.round, moved * (end == rank)) for end in (plan.sender, plan.receiver))
    return np.empty(int(sent.max(initial=0)), dtype=np.uint8), np.empty(int(received.max(initial=0)), dtype=np.uint8)


def pass_on(
    world: World,
    plan: ExchangePlan,
    columns: ShardColumns,
    shards: Sequence[ShardedTensor],
    read: Sequence[ShardedTensor],
    buffers: tuple[Any, Any],
) -> ReadReport:
    """Fill what this rank didn't read of its shards with what other ranks read, and report how much moved; collective.

    Args:
        world: the ranks that take part.
        plan: who read what.
        columns: all ranks' shards, each rank's rows together and in the order of its shards.
        shards: this rank's, with contiguous memory on the CPU.
        read: what this rank read, as `parts_to_read` returned it.
        buffers: this rank's, as `message_buffers` returned them; they are written.
    """
    first = int(np.searchsorted(columns.rank, world.rank))
    # Bytes, not elements: any dtype can be sent, also those that NumPy lacks.
    sources = dict(zip(np.flatnonzero(plan.reader == world.rank).tolist(), map(_bytes_of, read), strict=True))

    def region(row: int, number: int) -> Any:
        return _region(shards[row - first], plan.cells, int(plan.cell[number]))

    def source(transfer: _Transfer) -> Any:
        base = int(plan.read_start[transfer.read])
        return sources[transfer.read][transfer.start - base : transfer.stop - base]

    def place(transfer: _Transfer) -> Any:
        """Return the memory that a transfer fills, None if it isn't consecutive."""
        inside = region(transfer.target, transfer.read)
        return inside.reshape(-1)[transfer.start : transfer.stop] if inside.flags.c_contiguous else None

    for number, part in sources.items():
        own = region(int(plan.row[number]), number)
        # What was read into the shard's own memory is there already.
        if not np.may_share_memory(part, own):
            _fill(own, int(plan.read_start[number]), part)
    sent = received = 0
    for kept, sends, gets in _rounds(plan, world.rank):
        outgoing, packed = _messages(sends, source, buffers[0])
        for transfer, part in packed:
            np.copyto(part, source(transfer))
        incoming, staged = _messages(gets, place, buffers[1])
        world.exchange(outgoing, incoming)
        for transfer, part in (*((each, source(each)) for each in kept), *staged):
            _fill(region(transfer.target, transfer.read), transfer.start, part)
        sent += sum(map(len, outgoing.values()))
        received += sum(map(len, incoming.values()))
    return ReadReport(bytes_sent=sent, bytes_received=received)


def _rounds(plan: ExchangePlan, rank: int) -> Iterator[tuple[Sequence[_Transfer], _ByPeer, _ByPeer]]:
    """Yield what a rank has for its own shards, what it sends to each peer and gets from each, round by round."""
    for begin, end in pairwise(np.searchsorted(plan.round, np.arange(plan.rounds + 1)).tolist()):
        rows = begin + np.flatnonzero((plan.sender[begin:end] == rank) | (plan.receiver[begin:end] == rank))
        columns = (plan.sender, plan.receiver, plan.read, plan.target, plan.start, plan.stop)
        kept: list[_Transfer] = []
        sends: dict[int, list[_Transfer]] = {}
        gets: dict[int, list[_Transfer]] = {}
        for transfer in map(_Transfer, *(column[rows].tolist() for column in columns)):
            if transfer.sender == transfer.receiver:
                kept.append(transfer)
            elif transfer.sender == rank:
                sends.setdefault(transfer.receiver, []).append(transfer)
            else:
                gets.setdefault(transfer.sender, []).append(transfer)
        yield kept, sends, gets


def _messages(
    transfers: _ByPeer, place: Callable[[_Transfer], Any], buffer: Any
) -> tuple[dict[int, torch.Tensor], list[tuple[_Transfer, Any]]]:
    """Return each peer's message, and the parts of a buffer that stand for transfers.

    A message of one transfer is the memory itself that it comes from or goes to, if that is consecutive. Others are
    parts of the buffer, with one transfer after another.
    """
    messages, staged, at = {}, [], 0
    for peer, each in transfers.items():
        memory = place(each[0]) if len(each) == 1 else None
        if memory is None:
            begin = at
            for transfer in each:
                staged.append((transfer, buffer[at : at + transfer.stop - transfer.start]))
                at += transfer.stop - transfer.start
            memory = buffer[begin:at]
        messages[peer] = torch.from_numpy(memory)
    return messages, staged


def _bytes_of(shard: ShardedTensor) -> Any:
    return bit_view(shard.data).numpy()


def _region(shard: ShardedTensor, cells: Cells, number: int) -> Any:
    """Return the bytes of a cell in a shard's memory, as a NumPy array with an axis more than the cell."""
    memory = _bytes_of(shard)
    if _is_whole(shard, cells, number):
        return memory
    return memory.reshape(*shard.local_shape, shard.dtype.itemsize)[_inside(shard, *_box_of(shard, cells, number))]


def _fill(region: Any, start: int, part: Any) -> None:
    """Put bytes where they belong in a region, counted from its first byte in row-major order."""
    if region.flags.c_contiguous:
        region.reshape(-1)[start : start + part.size] = part
        return
    row = region[0].size
    while part.size:
        at, begin = divmod(start, row)
        # The rest of a row, or a part of one, or as many whole ones as there are.
        size = min(row - begin, part.size) if begin or part.size < row else part.size // row * row
        if size < row or begin:
            _fill(region[at], begin, part[:size])
        else:
            region[at : at + size // row] = part[:size].reshape(-1, *region.shape[1:])
        start, part = start + size, part[size:]


def traits_of_load(checkpoint: Checkpoint, choice: Choice, strategies: Strategies | None) -> FormatTraits:
    """Return the traits of the function that loads shards, the defaults if it isn't the format's own."""
    backend = sharded_backend(checkpoint.fields)
    load_sharded = strategy_of(StrategyAction.LOAD_SHARDED, choice, backend, strategies)
    # The traits are those of the format's own function, not of one that was put into its place for this call.
    own = find_strategy(StrategyAction.LOAD_SHARDED, *backend, strategies=strategies)
    registered = default_strategies.get((StrategyAction.LOAD_SHARDED, *backend), own)
    return traits_of(*backend, strategies) if load_sharded is own is registered else FormatTraits()
