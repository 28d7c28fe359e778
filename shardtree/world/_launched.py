"""The ranks of a program that a launcher such as torchrun has started, as a world that lasts as long as its work."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

from ..errors import WorldError, error_text
from ._distributed import distributed
from ._world import World, one_process


def launched_rank() -> int:
    """Return this process's rank, as its launcher has put it into the environment; 0 where the process is alone."""
    return int(os.environ["RANK"]) if _is_one_of_several() else 0


@contextmanager
def launched_world(timeout: float) -> Iterator[World]:
    """Yield the world of the processes that a launcher has started, or of one process where there is no launcher.

    Their gloo group is the default one until the work is done.

    Args:
        timeout: seconds after which a silent peer counts as dead.

    Raises:
        WorldError: the processes can't meet.

    Examples:
        >>> with launched_world(600.0) as world:
        ...     world.size
        1
    """
    if not _is_one_of_several():
        yield one_process()
        return
    import torch.distributed as dist

    try:
        dist.init_process_group("gloo", timeout=timedelta(seconds=timeout))
    except (RuntimeError, ValueError) as error:
        what = f"WORLD_SIZE is {os.environ['WORLD_SIZE']}, and the processes can't meet"
        fix = "Start them with torchrun, or unset WORLD_SIZE and RANK for a process by itself."
        raise WorldError(error_text(what, found=f"{type(error).__name__}: {error}", fix=fix)) from error
    try:
        yield distributed(timeout=timeout)
    finally:
        dist.destroy_process_group()


def _is_one_of_several() -> bool:
    # Both, since some platforms set the size alone.
    return int(os.environ.get("WORLD_SIZE") or 1) > 1 and bool(os.environ.get("RANK"))
