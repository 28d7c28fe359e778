"""What is asked of process groups by code that needs one and sends nothing."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Group:
    """What is asked of a process group: how many ranks there are, and which one this is."""

    ranks: int
    own: int = 0

    def size(self) -> int:
        return self.ranks

    def rank(self) -> int:
        return self.own
