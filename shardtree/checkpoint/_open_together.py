"""Opening a checkpoint on several ranks, so that all of them read the same one."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from operator import attrgetter

from ..storage import Directory
from ..strategies import Checkpoint, LoadOptions, Strategies, stamp
from ..world import World, share, step
from ._open import find, read_fields

OPEN_STEPS = ("load: find the folder", "load: open")


def open_together(
    directory: Directory, world: World, options: LoadOptions, strategies: Strategies | None
) -> Checkpoint:
    """Return a finished checkpoint, the same on all ranks even while a save replaces it: rank 0 reads metadata.json.

    Raises:
        NotACheckpoint: there is none.
        CorruptCheckpoint: metadata.json isn't what was written.
    """
    alone = partial(look, directory, world, options, strategies)
    found, fields = share(world, "load: open", alone, attrgetter("fields"), steps=OPEN_STEPS)
    opened: Checkpoint = replace(found, fields=fields[0])
    return opened


def look(directory: Directory, world: World, options: LoadOptions, strategies: Strategies | None) -> Checkpoint:
    """Return a checkpoint as a rank knows it before it hears of the others; its steps are `OPEN_STEPS`.

    Only rank 0's has fields. It looks for all: on network storage the others may know of its last change later.

    Raises:
        NotACheckpoint: there is none.
        CorruptCheckpoint: metadata.json isn't what was written.
        StrategyError: there is no such way to verify.
    """
    storage = step("load: find the folder", partial(find, directory, options))
    if world.rank != 0:
        return Checkpoint(storage, {}, world, options)
    found, fields = step("load: open", lambda: (stamp(storage), read_fields(storage, strategies)))
    return Checkpoint(storage, fields, world, options, stamp=found)
