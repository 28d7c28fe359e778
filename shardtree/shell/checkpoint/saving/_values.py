"""A save under way: the value that the steps of `save` fill in."""

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
"""What rank 0 sends the others of a save that it has begun: its name, metadata.json as it was or None, and the stamp of
the checkpoint that it replaces as a whole, if it does."""


@dataclass(frozen=True, slots=True, eq=False)
class TreeParts:
    """A tree, taken apart for saving.

    Attributes:
        tensors: The tensor shards, factories applied.
        objects: The sharded objects.
        common: Everything else, with holes where shards and nonpersistent objects were.
        unions: Dicts in which ranks have keys of their own, where the common state is the union of ranks'.
    """

    tensors: tuple[ShardedTensor, ...]
    objects: tuple[ShardedObject, ...]
    common: Any
    unions: United = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class Save:
    """A save under way, as one rank knows it: the arguments of `save`, then what step 2 adds, from `parts` on.

    Attributes:
        world: The ranks that save together.
        where: The destination; a `Storage` from step 2 on.
        formats: The formats that the caller chose; their backends are known from step 2 on.
        validate: Whether shards must tile their tensors, and common states agree.
        common_view: Function that returns the part of the common state that is compared; None for all of it.
        options: How it is saved.
        overwrite: Whether a checkpoint that is already there may be replaced.
        layout: All ranks' shards, if the caller gave them.
        is_async: Whether the request is returned instead of run.
        parts: This rank's tree, taken apart; step 3 may exchange the common state.
        known: The caller's layout, matched with this rank's shards.
        descriptions: All ranks' descriptions of their shards, by rank; empty if ranks don't compare them.
        start: The destination as rank 0 found it.
        pending: The save that rank 0 has begun; None on the others until step 4.
        claim: Mark by which other saves know that this one is alive; on rank 0 alone.
        folder: The destination's own folder, if this save had to make it; on rank 0 alone.
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
