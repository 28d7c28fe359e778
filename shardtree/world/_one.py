"""The world of a program that runs alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

from ..errors import WorldError, error_text
from ._world import DEFAULT_TIMEOUT, T, World, check_one_each, check_rank


class OneProcess(World):
    """A world of one rank, where every collective is the identity."""

    __slots__ = ()

    def all_gather(self, value: T) -> list[T]:
        return [value]

    def broadcast(self, value: T, root: int = 0) -> T:
        check_rank(self, "broadcast", root)
        return value

    def barrier(self) -> None:
        pass

    def all_to_all(self, values: Sequence[T]) -> list[T]:
        check_one_each(self, values)
        return list(values)

    def send(self, value: Any, to: int) -> NoReturn:
        raise WorldError(error_text(f"send(to={to}): a world of one has no other rank"))

    def recv(self, source: int) -> NoReturn:
        raise WorldError(error_text(f"recv(source={source}): a world of one has no other rank"))


def one_process() -> World:
    """Return the world of one rank.

    Examples:
        >>> world = one_process()
        >>> world.rank, world.size, world.all_gather("here")
        (0, 1, ['here'])
    """
    return OneProcess(0, 1, DEFAULT_TIMEOUT)
