"""`Fields`, the base class of `Trace`: modules that `Trace` itself imports take it instead."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ._moves import Move, Moves
from ._steps import Kind


@dataclass(frozen=True, slots=True, eq=False)
class Fields:
    """Sources and outputs of code, and the moves between them; `Trace` documents these fields."""

    sources: Mapping[str, Kind]
    outputs: Mapping[str, Kind]
    moves: Mapping[str, Moves]
    tied: Mapping[str, str] = field(default_factory=dict)
    overwritten: Mapping[str, Moves] = field(default_factory=dict)

    def root_shape(self, move: Move) -> tuple[int, ...]:
        """Return the shape of a move's root, the tensor that it reads; constants and computed tensors are flat."""
        return self.sources[move.root].shape if isinstance(move.root, str) else (move.last + 1,)
