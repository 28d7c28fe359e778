"""Warnings about a saved step whose tensors equal those of the step before, or differ from those in memory."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from ..errors import CheckpointingException, shorten
from ..inspection import fingerprint
from ..shell.checkpoint import open_together, sharded_metadata
from ..shell.storage import Storage, folder_in
from ..shell.table import LoadOptions, Strategies, stored_fingerprints
from ..shell.world import World, one_process
from ._listing import list_steps
from ._save import SavePlace

logger = logging.getLogger("shardtree")


def progress_check(tree: Any, place: SavePlace, names: str, number: int, world: World) -> Callable[[], None]:
    """Return a function for rank 0 to call once a step is committed; it logs warnings if the step looks wrong.

    The returned function warns if the stored tensors differ from the tensors that were in memory when `progress_check`
    was called, or equal those of the step before. Tensors are compared by fingerprints. All ranks must call
    `progress_check`.

    Args:
        tree: This rank's tree, as passed to `save`.
        place: Destination of the save.
        names: Format string of the steps' folder names.
        number: Number of the step.
        world: World of the ranks that save.
    """
    try:
        numbers = fingerprint(tree, world=world)
    except CheckpointingException as error:  # the same on all ranks; the save reports the tree's problem
        logger.warning("series: step %d is not compared with memory: %s", number, error)
        numbers = {}
    return partial(_warn, place, names, number, numbers)


def _warn(place: SavePlace, names: str, number: int, in_memory: Mapping[str, int]) -> None:
    """Log warnings about a step that was just committed, if it looks wrong; log problems, too, instead of raising them.

    Args:
        place: Destination of the save.
        names: Format string of the steps' folder names.
        number: Number of the step.
        in_memory: Fingerprints of the tensors in memory when the save began, by key.
    """
    try:
        stored = _stored(place.root, place.folder, place.strategies)
        earlier = [step for step in list_steps(place.root, names, place.strategies) if step.number < number]
        before = _stored(place.root, earlier[-1].folder, place.strategies) if earlier else {}
    except CheckpointingException as error:
        logger.warning("series: step %d is not compared with the one before: %s", number, error)
        return
    if stored and stored == before:
        logger.warning(
            "series: step %d has the tensors of step %d, all %d of them; was an older step's copy saved?",
            number,
            earlier[-1].number,
            len(stored),
        )
    changed = [key for key in in_memory if key in stored and stored[key] != in_memory[key]]
    if changed:
        logger.warning(
            "series: step %d holds other values than memory did when save was called: %s; change no tensor before a"
            " save without a snapshot is finished",
            number,
            ", ".join(shorten(map(repr, changed))),
        )


def _stored(root: Storage, folder: str, strategies: Strategies | None) -> dict[str, int]:
    """Return the fingerprints stored with a step's tensors, by key; empty if none were stored."""
    checkpoint = open_together(folder_in(root, folder), one_process(), LoadOptions(), strategies)
    return stored_fingerprints(sharded_metadata(checkpoint, None, None, strategies))
