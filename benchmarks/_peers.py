"""Everybody in the round trip: who is always there, and peers that have to be installed."""

from __future__ import annotations

from . import _orbax, _torchsnapshot
from ._contenders import Contender, contenders

PEERS = (_orbax, _torchsnapshot)
NAMES = tuple(name for peer in PEERS for name in peer.NAMES)
TERMS = {name: terms for peer in PEERS for name, terms in peer.TERMS.items()}


def everybody(ranks: int) -> tuple[Contender, ...]:
    """Return all contenders that can take part with that many processes."""
    return (*contenders(ranks), *(one for peer in PEERS for one in peer.contenders(ranks)))


def missing(ranks: int) -> dict[str, str]:
    """Return the rows that there can't be with that many processes, and why."""
    return {name: peer.missing(ranks) for peer in PEERS for name in peer.NAMES if peer.missing(ranks)}
