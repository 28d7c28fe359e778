"""What the ranks tell each other before a save or load, and whether it fits together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..codec import encode_tree
from ..errors import IntegrityError, TreePath, error_text, render_path
from ..layouts import ShardColumns, check_access, join_columns, shard_columns
from ..mapping import ShardedObject, ShardedTensor, is_main_replica
from ..storage import digest
from ..trees import diff, without_holes


@dataclass(frozen=True, slots=True, eq=False)
class Description:
    """One rank's part of a layout, without data.

    Attributes:
        columns: its tensor shards.
        objects: unique key of each of its objects, and whether it is the main replica.
        common: the hash of its common tree, None where that doesn't matter.
    """

    columns: ShardColumns
    objects: tuple[tuple[str, bool], ...]
    common: str | None = None


def describe(
    tensors: Sequence[ShardedTensor], objects: Sequence[ShardedObject], rank: int, common: str | None = None
) -> Description:
    """Return what a rank tells the others about its shards."""
    held = tuple((item.unique_key, is_main_replica(item.replica_id)) for item in objects)
    return Description(shard_columns(tensors, rank), held, common)


def common_digest(common: Any, *, allow_pickle: bool) -> str:
    """Return the hash of a common tree; holes in dicts don't count, since ranks may hold different shards."""
    return digest(encode_tree(without_holes(common), allow_pickle=allow_pickle))


def check_together(descriptions: Sequence[Description]) -> ShardColumns:
    """Return all ranks' shards, after checking that they fit together.

    Raises:
        IntegrityError: ranks disagree about a tensor, an element or an object has no main replica, or more than one.
    """
    columns = join_columns([part.columns for part in descriptions])
    check_access(columns)
    _check_objects(descriptions)
    return columns


def _check_objects(descriptions: Sequence[Description]) -> None:
    mains: dict[str, list[int]] = defaultdict(list)
    for rank, part in enumerate(descriptions):
        for key, main in part.objects:
            mains[key] += [rank] if main else []
    wrong = [
        f"{key!r}: main replicas on ranks {ranks}" if ranks else f"{key!r}: no main replica"
        for key, ranks in sorted(mains.items())
        if len(ranks) != 1
    ]
    if wrong:
        fix = "Give exactly one rank replica_id 0 for each object."
        raise IntegrityError(error_text("sharding integrity: objects", offenders=wrong, fix=fix))


def check_common(commons: Sequence[Any]) -> None:
    """Raise unless all ranks have the same common tree; holes in dicts don't count.

    Args:
        commons: each rank's common tree, by rank.

    Raises:
        IntegrityError: names every path, the ranks and both values.
    """
    first = without_holes(commons[0])
    wrong: dict[str, str] = {}
    for rank, common in enumerate(commons[1:], start=1):
        other = without_holes(common)
        found = diff(first, other)
        for path in (*found.only_left, *found.only_right, *found.mismatch):
            values = f"rank 0 has {_value_at(first, path)}, rank {rank} has {_value_at(other, path)}"
            wrong.setdefault(render_path(path), f"{render_path(path)}: {values}")
    if wrong:
        fix = (
            "Wrap what belongs to a rank in a ShardedObject or LocalNonpersistentObject, or pass "
            "preprocess_common_before_consistency_check to leave it out of the comparison."
        )
        raise IntegrityError(error_text("save: the ranks' common states differ", offenders=wrong.values(), fix=fix))


def _value_at(tree: Any, path: TreePath) -> str:
    try:
        for entry in path:
            tree = tree[entry]
    except (KeyError, IndexError, TypeError):
        return "nothing"
    shown = repr(tree) if isinstance(tree, (bool, int, float, str, bytes, type(None))) else type(tree).__name__
    return shown if len(shown) <= 60 else f"{shown[:60]}…"
