"""The default world of a call: the caller's, that of torch.distributed, or one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch

from ..errors import WorldError, error_text
from ._distributed import distributed, is_initialised
from ._world import DEFAULT_TIMEOUT, T, World, check_one_each, check_rank

# The world of one process.


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


# The default world.


def current_world(world: World | torch.distributed.ProcessGroup | None = None, *, purpose: str | None = None) -> World:
    """Return the world that the caller passed, or the one that this process is in.

    Args:
        world: a world, which is returned unchanged; a process group of torch.distributed; or None, for the default
            group if it is initialised, else one process.
        purpose: as in `distributed`; ignored if a world is passed, or it is one process.

    Examples:
        >>> current_world(None).size
        1
    """
    if isinstance(world, World):
        return world
    if world is not None or is_initialised():
        return distributed(world, purpose=purpose)
    return one_process()
