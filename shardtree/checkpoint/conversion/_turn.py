"""A world whose ranks one process plays, one after the other: each writes its part when it has its turn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

from ...errors import WorldError, error_text
from ...world import World


class Turn(World):
    """One rank's turn; every other rank would say the same, so that collectives are identities.

    Examples:
        >>> turn = Turn(2, 4)
        >>> turn, turn.broadcast("here"), turn.all_gather(1)
        (<Turn: rank 2 of 4>, 'here', [1, 1, 1, 1])
    """

    __slots__ = ()

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size, 0.0)

    def all_gather(self, value: Any) -> list[Any]:
        """Return the value for every rank."""
        return [value] * self.size

    def broadcast(self, value: Any, root: int = 0) -> Any:
        """Return the value."""
        return value

    def barrier(self) -> None:
        """Do nothing."""

    def all_to_all(self, values: Sequence[Any]) -> list[Any]:
        """Return what each rank would have for this one, were it to say the same."""
        return [values[self.rank]] * self.size

    def send(self, value: Any, to: int) -> NoReturn:
        """Raise: no other rank is there to receive."""
        raise WorldError(error_text(f"send(to={to}): the ranks of a conversion take turns"))

    def recv(self, source: int) -> NoReturn:
        """Raise: no other rank is there to send."""
        raise WorldError(error_text(f"recv(source={source}): the ranks of a conversion take turns"))
