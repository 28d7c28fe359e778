"""The world that a call takes part in."""

from __future__ import annotations

import torch

from ._distributed import distributed
from ._groups import is_initialised
from ._one import one_process
from ._world import World


def current_world(world: World | torch.distributed.ProcessGroup | None = None, *, purpose: str | None = None) -> World:
    """Return the world that a caller named, or the one that this process is in.

    Args:
        world: a world, which is returned as it is; a process group of torch.distributed; or None, for the default
            group where it is initialised, and one process where it isn't.
        purpose: as in `distributed`; of no account where the world is given, or is one process.

    Examples:
        >>> current_world(None).size
        1
    """
    if isinstance(world, World):
        return world
    if world is not None or is_initialised():
        return distributed(world, purpose=purpose)
    return one_process()
