"""The proof that received data equals sent data: hashes for each pair of ranks and, if these differ, for each piece.

The hashes travel through the world's own messages, never through the transport that they check.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

import numpy as np
import torch
import xxhash

from ..core.fingerprints import bytes_total
from ..core.geometry import box_slices
from ..core.layouts import place_text
from ..errors import IntegrityError, error_text, shorten
from ..shell.world import World, agree, gather, share
from ._memory import DOING
from ._move import MessagePieces, Route, Transport, first_failure, pack

_FACTOR, _MODULUS = 0x9E3779B97F4A7C15, 1 << 64
Sums = dict[int, int]
T = TypeVar("T")


def hash_for(devices: Iterable[str]) -> Callable[[torch.Tensor], int]:
    """Return the function that hashes a message, the same on all ranks.

    If all buffers are in host memory, the hash is XXH3-64. A sum would take 1.5 times as long there, and several times
    as long without a compiler. Otherwise the hash is a sum, which a device computes without copying the message.

    Args:
        devices: Kind of device of each rank's buffers.
    """
    return _xxh3 if set(devices) == {"cpu"} else bytes_total


def _xxh3(message: torch.Tensor) -> int:
    return xxhash.xxh3_64_intdigest(message.numpy())


@dataclass(frozen=True, slots=True, eq=False)
class HashingTransport:
    """A wrapper of a transport that hashes each message before it is sent and after it is received, without copies.

    Attributes:
        transport: The wrapped transport.
        hash: Hash function of a message.
        sums_out: Combined hash of all messages sent to each peer so far.
        sums_in: Combined hash of all messages received from each peer so far.
        failures: Errors of `hash`; the transport's calls go on, since other ranks wait for them.
    """

    transport: Transport
    hash: Callable[[torch.Tensor], int]
    sums_out: Sums = field(default_factory=dict)
    sums_in: Sums = field(default_factory=dict)
    failures: list[Exception] = field(default_factory=list)

    def __call__(self, outgoing: Mapping[int, torch.Tensor], incoming: Mapping[int, torch.Tensor], /) -> None:
        """Call the wrapped transport; add the hashes of messages to `sums_out` and `sums_in`.

        Args:
            outgoing: Message for each receiving rank.
            incoming: Buffer to fill for each sending rank.
        """
        self._add(self.sums_out, outgoing)
        self.transport(outgoing, incoming)
        self._add(self.sums_in, incoming)

    def _add(self, sums: Sums, messages: Mapping[int, torch.Tensor]) -> None:
        try:
            for peer, message in messages.items():
                # The factor is odd, so that no bit of an earlier message is lost, and swapped steps give another hash.
                sums[peer] = (sums.get(peer, 0) * _FACTOR + self.hash(message)) % _MODULUS
        except Exception as error:
            self.failures.append(error)

    def sums(self) -> tuple[Sums, Sums]:
        """Return the hashes of sent and of received messages, both by peer; or raise the first of `failures`."""
        if self.failures:
            raise self.failures[0]
        return self.sums_out, self.sums_in


def join_with_proof(world: World, route: Route, transport: HashingTransport, join: Callable[[], T]) -> T:
    """Return the result of `join` after it succeeded on all ranks and hashes proved that data arrived unchanged.

    A link is a pair of a sender and a receiver. One collective gathers both ends' hash of each link. If the two hashes
    of a link differ, another collective gathers both ends' hashes of each piece that went over the link.

    Args:
        world: World of the ranks that take part.
        route: Route of this rank, after its last step.
        transport: Transport that moved the messages.
        join: Function that finishes the result, without a collective; its errors count only if all data arrived.

    Raises:
        IntegrityError: Some data arrived changed; raised on every rank, with the boxes that may have changed.
        RemoteError: `join` failed on some rank; raised on every rank.
    """
    results: list[T] = []

    def attempt() -> tuple[Sums, Sums, Exception | None]:
        failure = first_failure(None, lambda: results.append(join()))
        return *transport.sums(), failure

    mine, ranks = share(world, "redistribute: compare sums", attempt, lambda own: (*own[:2], own[2] is None))
    links = [
        (one, other) for one, (out, *_) in enumerate(ranks) for other in out if out[other] != ranks[other][1].get(one)
    ]
    if links:
        sums = gather(world, "redistribute: find what differs", partial(_own_sums, route, links))
        lines = [_link_line(route, link, sums[link[0]][0], sums[link[1]][1]) for link in links]
        heading = f"{DOING}: received data differs from sent data"
        fix = "Do not use the targets: redistribute again. If this recurs, check the transport and these ranks' memory."
        raise IntegrityError(error_text(heading, offenders=lines, fix=fix))
    if not all(succeeded for _, _, succeeded in ranks):
        agree(world, "redistribute: join", partial(_raise, mine[2]))
    return results[0]


def _raise(failure: Exception | None) -> None:
    if failure is not None:
        raise failure


def _own_sums(route: Route, links: Sequence[tuple[int, int]]) -> tuple[Sums, Sums]:
    """Return hashes of the pieces that this rank sent, and of those that it received, over some links.

    Args:
        route: Route of this rank.
        links: Pairs of a sender and a receiver.

    Returns:
        Two dicts, of sent and of received pieces, from a piece's row in the schedule to its hash.
    """
    rows = [row for link in links if route.rank in link for row in _rows(route, link)]
    out = [row for row in rows if route.schedule.from_rank[row] == route.rank]
    into = [row for row in rows if route.schedule.to_rank[row] == route.rank]
    return dict(_piece_sums(route, out)), dict(_piece_sums(_sending_targets(route), into))


def _rows(route: Route, link: tuple[int, int]) -> list[int]:
    one, other = link
    rows: list[int] = np.flatnonzero((route.schedule.from_rank == one) & (route.schedule.to_rank == other)).tolist()
    return rows


def _piece_sums(route: Route, rows: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield pairs ``(row, hash)``: the row of each piece in the schedule, and the hash of its bytes.

    The bytes are packed from the shards' current content, as for sending.
    """
    plan, schedule, start = route.plan, route.schedule, np.zeros(1, dtype=np.int64)
    for row in rows:
        transfer, first, last = (column[row : row + 1] for column in (schedule.transfer, schedule.start, schedule.stop))
        size = plan.target.item_size[plan.transfers.key[transfer]]
        messages = {0: route.buffers.memory[: int(schedule.nbytes[row])]}
        pack(route, MessagePieces(start, transfer, first, last, size, start), messages)
        yield row, bytes_total(messages[0])


def _sending_targets(route: Route) -> Route:
    """Return a copy of a route for hashing what the rank received.

    Each transfer has its target shard as source, so that `pack` reads received elements.
    """
    plan = route.plan
    transfers = plan.transfers
    onward = replace(
        transfers,
        hop=np.ones_like(transfers.hop),
        source=transfers.target,
        source_element=transfers.target_element,
        source_stride=transfers.target_stride,
    )
    return replace(route, plan=replace(plan, transfers=onward))


def _link_line(route: Route, link: tuple[int, int], out: Sums, into: Sums) -> str:
    plan, rows = route.plan, _rows(route, link)
    # Both sides' memory may be equal by now; then any piece of the link may have differed.
    differing = [row for row in rows if out[row] != into[row]] or rows
    boxes: dict[str, None] = {}
    for row in route.schedule.transfer[differing].tolist():
        key = int(plan.transfers.key[row])
        axes = len(plan.target.kinds[key].global_shape)
        box = place_text(box_slices(plan.transfers.offset[row], plan.transfers.shape[row], axes))
        boxes[f"{plan.target.keys[key]!r} {box}"] = None
    return f"rank {link[0]} → rank {link[1]}: {', '.join(shorten(boxes))}"
