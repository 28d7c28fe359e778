"""What the ranks tell each other before a save or load, and whether it fits together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..codec import encode_tree
from ..errors import IntegrityError, error_text
from ..layouts import (
    ObjectColumns,
    ShardColumns,
    common_problems,
    join_agreed,
    join_checked,
    object_columns,
    shard_columns,
)
from ..mapping import ShardedObject, ShardedTensor
from ..storage import digest
from ..trees import without_holes
from ._known_layout import KnownLayout, check_alike


@dataclass(frozen=True, slots=True, eq=False)
class Description:
    """One rank's part of a layout, without data.

    Attributes:
        columns: its tensor shards; nothing where all ranks know them already.
        objects: its sharded objects.
        common: the hash of its common tree, None where that doesn't matter.
        layout: the hash of all ranks' tensor shards, None where they aren't known.
    """

    columns: ShardColumns
    objects: ObjectColumns
    common: str | None = None
    layout: str | None = None


def describe(
    tensors: Sequence[ShardedTensor],
    objects: Sequence[ShardedObject],
    rank: int,
    common: str | None = None,
    known: KnownLayout | None = None,
) -> Description:
    """Return what a rank tells the others about its shards, without what they know."""
    columns = shard_columns(tensors if known is None else (), rank)
    return Description(columns, object_columns(objects, rank), common, None if known is None else known.digest)


def common_digest(common: Any, *, allow_pickle: bool) -> str:
    """Return the hash of a common tree; holes in dicts don't count, since ranks may hold different shards."""
    return digest(encode_tree(without_holes(common), allow_pickle=allow_pickle))


def check_together(
    doing: str, descriptions: Sequence[Description], known: KnownLayout | None = None, *, tiling: bool = True
) -> ShardColumns:
    """Return all ranks' shards, after checking that they fit together.

    Args:
        doing: "save" or "load".
        descriptions: by rank.
        known: the layout that this rank was given.
        tiling: whether each element and object must have one main replica; else only given layouts are compared.

    Raises:
        IntegrityError: ranks disagree about a tensor, an element or an object has no main replica, or more than one;
            or the ranks were given different layouts.
    """
    check_alike(doing, [part.layout for part in descriptions])
    parts = [part.columns for part in descriptions] if known is None else [known.columns]
    if tiling:
        return join_checked(parts, [part.objects for part in descriptions])
    return join_agreed(parts)


def check_common(commons: Sequence[Any]) -> None:
    """Raise unless all ranks have the same common tree; holes in dicts don't count.

    Args:
        commons: each rank's common tree, by rank.

    Raises:
        IntegrityError: names every path, the ranks and all values.
    """
    problems = common_problems(commons)
    if problems:
        fix = (
            "Wrap what belongs to a rank in a ShardedObject or LocalNonpersistentObject, or pass "
            "preprocess_common_before_consistancy_check to leave it out of the comparison."
        )
        lines = map(str, problems)
        raise IntegrityError(error_text("save: the ranks' common states differ", offenders=lines, fix=fix))
