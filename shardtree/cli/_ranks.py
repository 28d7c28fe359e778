"""A command on several processes: torchrun's ranks do its work together, and the first of them prints."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from ..errors import CheckpointingException, RemoteError, WorldError
from ..world import World, launched_world
from ._output import INTERRUPTED, TROUBLE, complain

# As long as torch.distributed's own: a round of a conversion to a slow disk takes minutes, and torchrun ends
# the other ranks by itself when one dies.
_TIMEOUT = 1800.0


def run_together(command: str, work: Callable[[World], int]) -> int:
    """Return the exit status of a command's work on the ranks that torchrun has started, or of a process alone.

    What fails on all ranks is printed by the first, and all leave with the same status.

    Args:
        command: its name.
        work: takes the world, and returns the status. On several ranks it may print on the first only.

    Raises:
        CheckpointingException: the work failed, and this process is alone; or the ranks can't meet.
    """
    with launched_world(_TIMEOUT) as world:
        try:
            return work(world)
        except CheckpointingException as error:
            if world.size == 1:
                raise
            is_lost = isinstance(error, WorldError) and not isinstance(error, RemoteError)
            # Where a peer is lost, that may be the rank that prints.
            if is_lost or not world.rank:
                complain(command, error)
            if not is_lost:
                # torchrun ends the others when one leaves: not before the error is printed.
                with suppress(WorldError):
                    world.barrier()
            return TROUBLE
        except KeyboardInterrupt:
            if not world.rank:
                raise
            return INTERRUPTED
