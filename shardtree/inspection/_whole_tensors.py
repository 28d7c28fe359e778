"""load_plain_tensors: every stored tensor, whole and by key, without a target."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Set
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

import torch

from ..core.ambient import shielded
from ..core.mapping import ShardedTensor
from ..errors import error_text
from ..shell.checkpoint import open_together, sharded_metadata, tensors_of
from ..shell.checkpoint.loading import (
    Destination,
    Reading,
    deliver,
    destination_of,
    exchange_choice,
    place_of,
    read_into,
    resolve,
)
from ..shell.storage import Directory
from ..shell.table import Checkpoint, LoadOptions, Strategies
from ..shell.table.index import untaken_of
from ..shell.world import agree, current_world, share
from ._opened import refuse_unproven

logger = logging.getLogger("shardtree")


@shielded
def load_plain_tensors(
    checkpoint_dir: Directory,
    *,
    world: Any = None,
    strategies: Strategies | None = None,
    options: LoadOptions | None = None,
) -> dict[str, torch.Tensor]:
    """Return every stored tensor whole, by key, on each rank of the world.

    Ranks share work beyond reading metadata, such as comparing copies of a tensor in several files. They read tensors
    as in `load`: from remote storage, each only once for all ranks.

    Examples:
        >>> import tempfile, torch, shardtree as st
        >>> folder = tempfile.mkdtemp()
        >>> st.save({"model": [st.ShardedTensor.from_rank_offsets("w", torch.arange(3))], "step": 7}, folder)
        >>> st.load_plain_tensors(folder)
        {'w': tensor([0, 1, 2])}
    """
    ranks = current_world(world)
    how = LoadOptions() if options is None else options
    checkpoint = open_together(checkpoint_dir, ranks, how, strategies)
    resolve(checkpoint, None, strategies, partial(_all_keys, checkpoint, strategies))

    def list_tensors() -> dict[str, ShardedTensor]:
        tensors = tensors_of(checkpoint, None, strategies)
        refuse_unproven("load", sharded_metadata(checkpoint, None, None, strategies), tensors)
        return tensors

    target, places = share(ranks, "load: metadata", list_tensors, lambda _: place_of(checkpoint.storage, ranks.size))
    twice = (ranks.size - 1) * sum(prod(tensor.data_shape) * tensor.dtype.itemsize for tensor in target.values())

    def with_memory() -> tuple[Reading, Destination]:
        exchange = exchange_choice(how.exchange, places, twice)
        reading = Reading(checkpoint, None, strategies, exchange=exchange)
        return reading, destination_of(reading, list(target.values()))

    reading, destination = agree(ranks, "load: make memory", with_memory)
    objects, amount = read_into(reading, destination)
    tensors = agree(ranks, "load: deliver", partial(deliver, reading, destination, objects))
    reasons = untaken_of(sharded_metadata(checkpoint, None, None, strategies))
    _log_untaken(reasons)
    if how.report is not None:
        how.report(replace(amount, left_out=tuple(reasons), exchange=reading.exchange.why))
    return dict(zip(target, tensors, strict=True))


def _all_keys(checkpoint: Checkpoint, strategies: Strategies | None) -> tuple[Set[str], bool]:
    """Return the names of all stored tensors, and True: the load needs all of them. `resolve` calls this."""
    metadata = sharded_metadata(checkpoint, None, None, strategies)
    return {*getattr(metadata, "stored", metadata)}, True


def _log_untaken(reasons: Mapping[str, str]) -> None:
    """Log the stored tensors that can't be loaded, each with its reason, if there are any."""
    if reasons:
        lines = [error_text(f"{name!r}: {why}") for name, why in sorted(reasons.items())]
        logger.warning("\n  ".join(["load: stored tensors are left out, as they cannot be read", *lines]))
