"""Whether ranks read for each other: as the caller says, or whatever takes less time, by speeds that are measured."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ...errors import StrategyError, error_text
from ...geometry import distinct
from ...layouts import ShardColumns
from ...mapping import ShardedTensor
from ...plans import SharedReads, size_text
from ...storage import LocalStorage, MemoryStorage, Storage
from ...strategies import Exchange
from ...world import World, agree, gather
from ._exchange import flat_part
from ._targets import new_memory

_WORTH_BYTES = 128 * 1024 * 1024
"""Speeds are measured where an exchange saves that many bytes a rank; less is read before the measure ends."""

_WORTH_BYTES_A_SHARD = 16 * 1024
"""And that many for each shard of all ranks: comparing costs takes some microseconds for each."""

_LEAST_SAMPLE, _MOST_SAMPLE = 4 * 1024 * 1024, 64 * 1024 * 1024
_SAMPLED_PEERS = 8


@dataclass(frozen=True, slots=True, eq=False)
class ExchangeChoice:
    """Whether ranks read for each other.

    Attributes:
        together: whether they do.
        why: what decided it, as a sentence; empty where the caller did.
        undecided: whether speeds should decide, which may have to be measured.
    """

    together: bool
    why: str = ""
    undecided: bool = False


ALONE = ExchangeChoice(together=False)


def exchange_choice(
    exchange: Exchange, storage: Storage, ranks: int, wanted: Iterable[ShardColumns] | None = None
) -> ExchangeChoice:
    """Return whether ranks send each other what they read, as far as that is known without measuring.

    Args:
        exchange: what the caller says.
        storage: where the checkpoint is.
        ranks: how many read.
        wanted: what they want, where all ranks know it, in one part or several.

    Raises:
        StrategyError: no such choice.

    Examples:
        >>> exchange_choice("always", MemoryStorage(), 1).together
        False
    """
    if exchange not in ("auto", "always", "never"):
        expected = "'auto', 'always' or 'never'"
        raise StrategyError(error_text("load: no such exchange", found=repr(exchange), expected=expected))
    if ranks == 1 or exchange != "auto":
        return ExchangeChoice(ranks > 1 and exchange == "always")
    if isinstance(storage, MemoryStorage):
        return ExchangeChoice(False, "Each rank reads by itself, since the checkpoint is in memory.")
    undecided = wanted is not None and _is_worth_measuring(wanted, ranks)
    # Without speeds the rule is: a second read of a local file comes from the page cache, faster than a message.
    if isinstance(storage, LocalStorage):
        return ExchangeChoice(False, "Each rank reads by itself, since storage is local.", undecided)
    return ExchangeChoice(True, "Ranks read for each other, since storage is remote.", undecided)


def _is_worth_measuring(wanted: Iterable[ShardColumns], ranks: int) -> bool:
    saved = shards = 0
    for columns in wanted:
        # What others want too, at least: all but the main replicas.
        nbytes = columns.elements * columns.item_size[columns.key]
        saved += int(nbytes[~columns.main].sum())
        shards += len(columns)
    return saved >= ranks * max(_WORTH_BYTES, _WORTH_BYTES_A_SHARD * shards)


@dataclass(frozen=True, slots=True)
class Speeds:
    """What ranks do in a second, in bytes, all at the same time; by rank.

    Attributes:
        host: on which machine a rank is.
        read: how fast it reads, and checks, what nobody has read yet.
        reread: the same once more, which a local file system has in its cache.
        sent: how fast it sends while it receives as much.
    """

    host: tuple[str, ...]
    read: tuple[float, ...]
    reread: tuple[float, ...]
    sent: tuple[float, ...]


_measured: dict[tuple[str, int], Speeds] = {}
"""What was measured in this process, by place and number of ranks."""


def recalled(storage: Storage, ranks: int) -> Speeds | None:
    """Return the speeds that an earlier load by as many ranks has measured at that place, None if none has."""
    return _measured.get(_place(storage, ranks))


def _place(storage: Storage, ranks: int) -> tuple[str, int]:
    """Return where checkpoints are as fast as this one: a bucket, or the folder that this one's folder is in."""
    where = storage.where()
    scheme, found, rest = where.partition("://")
    return (f"{scheme}://{rest.split('/')[0]}" if found else where.rpartition("/")[0]), ranks


def speeds_of(
    world: World,
    storage: Storage,
    shards: Sequence[ShardedTensor],
    read: Callable[[Sequence[ShardedTensor]], object],
    *,
    share_bytes: int,
    is_cut: bool,
) -> Speeds:
    """Return how fast ranks read and send: recalled if all remember the same, else measured; collective.

    Args:
        world: the ranks.
        storage: where the checkpoint is.
        shards: what this rank wants, in the dtypes that they are stored in.
        read: reads shards into their memory.
        share_bytes: what a rank reads if each byte is read once; a sixteenth of it is read twice, as a sample.
        is_cut: whether a part of a shard may be read.
    """
    known = gather(world, "load: recall speeds", partial(recalled, storage, world.size))
    found = known[0]
    if found is None or any(each != found for each in known):
        size = min(max(share_bytes // 16, _LEAST_SAMPLE), _MOST_SAMPLE)

        def make() -> tuple[list[ShardedTensor], _Messages, _Messages]:
            return _sample(shards, world, size, is_cut=is_cut), *_messages(world, size)

        sample, outgoing, incoming = agree(world, "load: make a sample", make)
        found = _measure(world, partial(read, sample), sum(map(data_bytes, sample)), outgoing, incoming)
    _measured[_place(storage, world.size)] = found
    return found


def _sample(shards: Sequence[ShardedTensor], world: World, size: int, *, is_cut: bool) -> list[ShardedTensor]:
    """Return about so many bytes of what a rank wants, with memory of their own; other bytes than other ranks do."""
    held = [shard for shard in shards if data_bytes(shard)]
    if not is_cut:
        # Whole shards, but no much larger ones, if there are others.
        held = [shard for shard in held if data_bytes(shard) <= 4 * size] or held[:1]
    first = world.rank * len(held) // world.size
    chosen, missing = [], size
    for shard in (*held[first:], *held[:first]):
        if missing <= 0:
            break
        count = prod(shard.data_shape)
        wanted = min(-(-missing // shard.dtype.itemsize), count) if is_cut else count
        # Ranks that want the same shard sample other parts of it, or all but one would find theirs in a cache.
        start = world.rank * wanted % (count - wanted + 1)
        part = flat_part(replace(shard, data=None), slice(start, start + wanted))
        chosen.append(replace(part, data=new_memory(part.key, part.data_shape, part.dtype)))
        missing -= data_bytes(part)
    return chosen


def data_bytes(shard: ShardedTensor) -> int:
    """Return how many bytes a shard's data takes."""
    return prod(shard.data_shape) * shard.dtype.itemsize


_Messages = dict[int, torch.Tensor]


def _messages(world: World, size: int) -> tuple[_Messages, _Messages]:
    """Return what a rank sends to some peers, so many bytes in all, and memory for what it gets from as many."""
    peers = min(world.size - 1, _SAMPLED_PEERS)
    outgoing = torch.ones(size // peers, dtype=torch.uint8, device="cpu")
    after = [(world.rank + step) % world.size for step in range(1, peers + 1)]
    before = [(world.rank - step) % world.size for step in range(1, peers + 1)]
    return dict.fromkeys(after, outgoing), {peer: torch.zeros_like(outgoing) for peer in before}


def _measure(world: World, read: Callable[[], object], size: int, outgoing: _Messages, incoming: _Messages) -> Speeds:
    """Return how fast all ranks read a sample of so many bytes and send messages, at the same time; collective."""
    # Each phase ends with a meeting, so that ranks start the next one together.
    first = agree(world, "load: read a sample", partial(_seconds, read))
    again = agree(world, "load: read the sample again", partial(_seconds, read))
    moved = _seconds(partial(world.exchange, outgoing, incoming))
    sent = sum(map(len, outgoing.values()))
    host = socket.gethostname()
    own = (host, size / first, size / again, sent / moved)
    return Speeds(*map(tuple, zip(*gather(world, "load: compare speeds", lambda: own), strict=True)))


def _seconds(work: Callable[[], object]) -> float:
    """Return how long work takes."""
    begun = time.perf_counter()
    work()
    return max(time.perf_counter() - begun, 1e-9)


def cheaper_choice(plan: SharedReads, speeds: Speeds) -> ExchangeChoice:
    """Return whether it takes less time if ranks read by a plan, and pass on what they read.

    On one machine, what a rank reads a second time, or after another one, is read as fast as a sample was again.

    Args:
        plan: for all ranks.
        speeds: of the same ranks.

    Examples:
        >>> import torch, shardtree as st
        >>> whole = st.ShardedTensor.from_rank_offsets("w", torch.zeros(500))
        >>> columns = st.layouts.join_columns([st.layouts.shard_columns([whole], rank) for rank in range(2)])
        >>> speeds = Speeds(("a", "b"), (1000.0, 1000.0), (1000.0, 1000.0), (4000.0, 4000.0))
        >>> print(cheaper_choice(st.plans.plan_exchange(columns, 2, stripe_bytes=4), speeds).why)
        Ranks read for each other: that takes 1.25 s, alone 2.00 s (1.0 kB/s read, 1.0 kB/s again, 4.0 kB/s sent).
    """
    read, reread, sent = (np.array(each) for each in (speeds.read, speeds.reread, speeds.sent))
    wanted = plan.bytes_wanted
    _, host = np.unique(speeds.host, return_inverse=True)
    # Of what ranks of one machine want, each byte comes from storage once, if that has a cache: reread tells.
    first = _bytes_by_host(plan, host)
    part = np.minimum(first[host] / np.bincount(host)[host], wanted)
    alone = _most(part, read) + _most(wanted - part, reread)
    together = _most(plan.bytes_read, read) + _most(np.maximum(plan.bytes_sent, plan.bytes_received), sent)
    chosen = bool(together < alone)
    who, other = "Each rank reads by itself", "an exchange"
    if chosen:
        who, other = "Ranks read for each other", "alone"
    less, more = sorted((alone, together))
    speed, again, moved = (f"{size_text(int(np.median(each)))}/s" for each in (read, reread, sent))
    rates = f"{speed} read, {again} again, {moved} sent"
    return ExchangeChoice(chosen, f"{who}: that takes {less:.2f} s, {other} {more:.2f} s ({rates}).")


def _bytes_by_host(plan: SharedReads, host: NDArray[Any]) -> NDArray[Any]:
    """Return how many bytes the ranks of each machine want between them, each byte once; given each rank's machine."""
    hosts = int(host.max()) + 1
    who, where = np.divmod(distinct(plan.number * hosts + host), hosts)
    count = np.bincount(who, minlength=len(plan.alike))
    # Each want stands for one on every machine that has a rank of those that want it.
    times = count[plan.holder]
    turn = np.arange(times.sum()) - np.repeat(np.cumsum(times) - times, times)
    on = where[np.repeat((np.cumsum(count) - count)[plan.holder], times) + turn]
    on, cell = np.divmod(distinct(on * plan.size.size + np.repeat(plan.cells.cell, times)), max(plan.size.size, 1))
    return np.bincount(on, weights=plan.size[cell], minlength=hosts)


def _most(nbytes: NDArray[Any], speed: NDArray[Any]) -> float:
    """Return how long the slowest rank takes; one without bytes takes no time, whatever its speed."""
    return float(np.divide(nbytes, speed, out=np.zeros(nbytes.size), where=nbytes > 0).max(initial=0.0))
