"""The state of a running save, which the steps of `save` fill in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ....core.layouts import ShardColumns
from ....core.mapping import ShardedObject, ShardedTensor
from ....core.trees import United
from ...storage import Claim, Directory, NewFolder
from ...table import PendingSave, SaveOptions, Stamp
from ...world import World
from .._consistency import KnownLayout, LayoutDescription
from ._formats import Formats

Start = tuple[str, bytes | None, Stamp | None]
"""Rank 0's message about a save that it has begun: the save's name, the previous metadata.json or None, and the stamp
of the checkpoint that is replaced as a whole, if any."""


@dataclass(frozen=True, slots=True, eq=False)
class TreeParts:
    """A tree, split into the values that are saved in different ways.

    Attributes:
        tensors: The tensor shards, including those that factories built.
        objects: The sharded objects.
        common: Everything else, with holes (placeholders) in place of shards and nonpersistent objects.
        unions: Keys that no rank lacks, for each dict whose keys differ between ranks, by the dict's path. Empty unless
            the common state is the union of the ranks' states.
    """

    tensors: tuple[ShardedTensor, ...]
    objects: tuple[ShardedObject, ...]
    common: Any
    unions: United = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class Save:
    """The state of a running save on one rank: the arguments of `save` and, from `parts` on, results of its steps.

    The steps that set fields are the functions `meet`, in which ranks describe their shards to each other, and
    `compare_common`.

    Attributes:
        world: The ranks that save together.
        where: The destination, as the caller passed it; `meet` makes it a `Storage`.
        formats: The formats that the caller chose; `meet` adds their backends.
        validate: Whether shards must tile their tensors, and common states agree.
        common_view: Function that returns the part of the common state that is compared; None for all of it.
        options: The options of the save.
        overwrite: Whether an existing checkpoint may be replaced.
        layout: All ranks' shards, if the caller passed them.
        is_async: Whether the request is returned instead of run.
        parts: This rank's tree, split; `compare_common` may replace its common state by the union of all ranks' states.
        known: The caller's layout, matched with this rank's shards; None without a layout.
        descriptions: All ranks' descriptions of their shards, by rank; empty if ranks don't compare them.
        start: The state of the destination that rank 0 found.
        pending: Description of the save for formats' functions, on rank 0; other ranks make theirs when they plan.
        claim: Claim that marks this save as alive; on rank 0 only.
        folder: Folder made at the destination, on rank 0; None on other ranks, and if none needs a sync.
    """

    world: World
    where: Directory
    formats: Formats
    validate: bool
    common_view: Callable[[Any], Any] | None
    options: SaveOptions
    overwrite: bool
    layout: ShardColumns | None
    is_async: bool
    parts: TreeParts = field(default_factory=lambda: TreeParts((), (), {}))
    known: KnownLayout | None = None
    descriptions: Sequence[LayoutDescription] = ()
    start: Start | None = None
    pending: PendingSave | None = None
    claim: Claim | None = None
    folder: NewFolder | None = None
