"""The choice whether ranks read for each other: made by the caller, or from the ranks' machines and the storage."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ....core.layouts import ShardColumns
from ....errors import StrategyError, error_text
from ...storage import Storage, crosses_network
from ...table import Exchange

_WORTH_BYTES = 128 * 1024 * 1024
"""Minimum of bytes saved for each rank that is worth the additional collectives of an exchange."""


class ReadPlace(NamedTuple):
    """A rank's machine and its connection to the storage, from which ranks choose whether to read for each other.

    Attributes:
        host: The name of its machine.
        crosses_network: Whether its reads cross a network.
    """

    host: str
    crosses_network: bool


def place_of(storage: Storage, ranks: int) -> ReadPlace:
    """Return this rank's machine, and whether its reads of a storage cross a network.

    A single rank gets an empty name and False, since no other rank can read for it.

    Examples:
        >>> from shardtree.storage import MemoryStorage
        >>> place_of(MemoryStorage(), 2).crosses_network
        False
    """
    return ReadPlace(socket.gethostname(), crosses_network(storage)) if ranks > 1 else ReadPlace("", False)


@dataclass(frozen=True, slots=True, eq=False)
class ExchangeChoice:
    """The choice whether ranks read for each other.

    Attributes:
        together: Whether ranks read for each other.
        why: The reason, as a sentence; empty if the caller decided.
    """

    together: bool
    why: str = ""


ALONE = ExchangeChoice(together=False)


def exchange_choice(exchange: Exchange, places: Sequence[ReadPlace], saved_bytes: int | None = None) -> ExchangeChoice:
    """Return the choice whether ranks send each other the bytes that they read.

    Args:
        exchange: `LoadOptions.exchange`: "always", "never", or "auto" to decide here.
        places: The place from which each rank reads, by rank.
        saved_bytes: The bytes of reads that an exchange avoids, summed over all ranks; None if ranks do not know the
            targets of the others.

    Raises:
        StrategyError: `exchange` has an unknown value.

    Examples:
        >>> places = [ReadPlace("node-0", True), ReadPlace("node-1", True)]
        >>> exchange_choice("auto", places, 2**30).why
        'Ranks read for each other, since they are on several machines, and storage is remote.'
    """
    if exchange not in ("auto", "always", "never"):
        expected = "'auto', 'always' or 'never'"
        raise StrategyError(error_text("load: invalid options.exchange", found=repr(exchange), expected=expected))
    if len(places) == 1 or exchange != "auto":
        return ExchangeChoice(len(places) > 1 and exchange == "always")
    alone = "Each rank reads by itself, since"
    if not any(place.crosses_network for place in places):
        return ExchangeChoice(False, f"{alone} storage is local.")
    # A machine's second read of the same bytes is served by its cache.
    if len({place.host for place in places}) == 1:
        return ExchangeChoice(False, f"{alone} all are on one machine.")
    if saved_bytes is not None and saved_bytes < len(places) * _WORTH_BYTES:
        return ExchangeChoice(False, f"{alone} an exchange would save less than {_WORTH_BYTES >> 20} MiB a rank.")
    why = "Ranks read for each other, since they are on several machines, and storage is remote."
    return ExchangeChoice(True, why)


def bytes_wanted_twice(columns: Iterable[ShardColumns]) -> int:
    """Return the number of bytes in the replicas that aren't main replicas.

    If ranks read for each other, at least these bytes need not be read, since each element is then read once.

    Args:
        columns: The shards of all ranks, in one or several sets of columns.
    """
    return sum(int(part.nbytes[~part.main].sum()) for part in columns)
