"""Consistency of ranks before a save or load: they exchange descriptions of their shards, and check them together.

The module also makes and reads the field of metadata.json for a common state that is the union of ranks' states.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import Any, TypeAlias

import numpy as np
import numpy.ma  # np.unique imports it at its first call, which a signal handler that saves could interrupt

from ...core import layouts
from ...core.geometry import Column, slices
from ...core.layouts import ObjectColumns, ShardColumns, TensorKind
from ...core.mapping import ShardedObject, ShardedTensor
from ...core.trees import United
from ...errors import CorruptCheckpoint, IntegrityError, MetadataError, error_text, rank_text
from ..storage import digest
from ..world import World
from ._packed import PackedColumns, pack_columns, send_tables, unpack_columns, without_long_table

# Layouts of all ranks that the caller passed; only their hash is exchanged.

_Row: TypeAlias = tuple[str, TensorKind, tuple[int, ...], tuple[int, ...], int, int, bool]


@dataclass(frozen=True, slots=True, eq=False)
class KnownLayout:
    """The layout of all ranks' shards, as the caller passed it on this rank; checked against this rank's tree.

    Attributes:
        columns: All ranks' shards, one row each, sorted by rank, key, offset, shape and flat range.
        order: For each of this rank's rows in `columns`, the index of the row's shard among the shards of this rank's
            tree, int64 (shards of this rank,).
        digest: Hash of the columns; the order in which the caller passed the rows has no influence.
    """

    columns: ShardColumns
    order: Column
    digest: str


def known_layout(doing: str, layout: object, shards: Sequence[ShardedTensor], rank: int, ranks: int) -> KnownLayout:
    """Return the caller's layout of all ranks, after checking that its rows for this rank are this rank's shards.

    Args:
        doing: "save" or "load".
        layout: `ShardColumns` with a row for each shard of each rank, in any order.
        shards: Shards of this rank's tree.
        rank: This rank.
        ranks: Number of ranks.

    Raises:
        MetadataError: the argument isn't a layout.
        IntegrityError: the layout has ranks outside of the world, or this rank's rows differ from its shards.
    """
    if not isinstance(layout, ShardColumns):
        expected, fix = "ShardColumns", "Pass a result of layout_of, dtensor_layout, mesh_columns or tree_columns."
        raise MetadataError(
            error_text(f"{doing}: invalid layout", found=type(layout).__name__, expected=expected, fix=fix)
        )
    beyond = sorted(set(layout.rank[(layout.rank < 0) | (layout.rank >= ranks)].tolist()))
    if beyond:
        expected, fix = f"ranks 0 to {ranks - 1}", "Leave out the shards of other ranks, or correct the rank numbers."
        heading = f"{doing}: the layout has shards of ranks that do not exist"
        raise IntegrityError(error_text(heading, found=rank_text(beyond), expected=expected, fix=fix))
    columns = _with_used_keys(layouts.join_columns([layout]))
    columns = layouts.select_rows(columns, _place_order(columns))
    tree_columns = layouts.shard_columns(shards, rank)
    order = _place_order(tree_columns)
    layout_rows = _rows(layouts.select_rows(columns, np.flatnonzero(columns.rank == rank)))
    tree_rows = _rows(layouts.select_rows(tree_columns, order))
    if layout_rows != tree_rows:
        fix = "Compute the layout for this tree and this number of ranks, with the rank numbers of this world."
        heading = f"{doing}: the layout differs from the tree on rank {rank}"
        raise IntegrityError(error_text(heading, offenders=_differences(layout_rows, tree_rows), fix=fix))
    return KnownLayout(columns, order, _digest(columns))


def _with_used_keys(columns: ShardColumns) -> ShardColumns:
    """Return columns without the keys that no row refers to, such as those that `select_rows` leaves."""
    is_used = np.bincount(columns.key, minlength=len(columns.keys)) > 0
    return replace(
        columns,
        keys=tuple(compress(columns.keys, is_used)),
        kinds=tuple(compress(columns.kinds, is_used)),
        key=(np.cumsum(is_used) - 1)[columns.key],
    )


def _place_order(columns: ShardColumns) -> Column:
    """Return the permutation that sorts rows by rank, key, offset, shape and flat range."""
    places = (*columns.shape.T[::-1], *columns.offset.T[::-1])
    return np.lexsort((columns.main, columns.stop, columns.start, *places, columns.key, columns.rank))


def _rows(columns: ShardColumns) -> list[_Row]:
    """Return each row as a tuple with the key itself instead of its index, so that rows of two layouts compare."""
    lists = (columns.key, columns.offset, columns.shape, columns.start, columns.stop, columns.main)
    rows = zip(*(column.tolist() for column in lists), strict=True)
    return [_row(columns, *row) for row in rows]


def _row(
    columns: ShardColumns, number: int, offset: list[int], shape: list[int], start: int, stop: int, main: bool
) -> _Row:
    kind = columns.kinds[number]
    first = len(offset) - len(kind.global_shape)
    return columns.keys[number], kind, tuple(offset[first:]), tuple(shape[first:]), start, stop, main


def _differences(layout_rows: list[_Row], tree_rows: list[_Row]) -> Iterator[str]:
    for where, left, right in (("tree", tree_rows, layout_rows), ("layout", layout_rows, tree_rows)):
        for key, kind, offset, shape, start, stop, main in (Counter(left) - Counter(right)).elements():
            place = layouts.place_text(slices(offset, shape), None if start < 0 else slice(start, stop))
            replica = "main replica" if main else "replica"
            yield f"{key!r}, {kind}: {place}, {replica}, is in the {where} alone"


def _digest(columns: ShardColumns) -> str:
    width = max((len(kind.global_shape) for kind in columns.kinds), default=0)
    # Leading axes of padding are dropped, since layouts of the same shards may have wider matrices.
    first = columns.offset.shape[1] - width
    boxes = columns.offset[:, first:], columns.shape[:, first:]
    names = repr([(key, str(kind)) for key, kind in zip(columns.keys, columns.kinds, strict=True)])
    others = columns.key, columns.start, columns.stop, columns.rank, columns.main
    return digest(b"".join([names.encode(), *(np.ascontiguousarray(part).tobytes() for part in (*others, *boxes))]))


@dataclass(frozen=True, slots=True, eq=False)
class LayoutDescription:
    """A rank's message about its shards to the other ranks, without data.

    Attributes:
        columns: The rank's tensor shards, packed if there are other ranks; empty if the caller passed a layout.
        objects: The rank's sharded objects.
        common: Hash of the rank's common tree; None if common trees are not compared.
        layout: Hash of the layout of all ranks that the caller passed; None if there is none.
    """

    columns: PackedColumns | ShardColumns
    objects: ObjectColumns
    common: str | None = None
    layout: str | None = None


def describe(
    tensors: Sequence[ShardedTensor],
    objects: Sequence[ShardedObject],
    rank: int,
    common: str | None = None,
    layout: KnownLayout | None = None,
    *,
    ranks: int,
) -> LayoutDescription:
    """Return the description of a rank's shards for the other ranks.

    Args:
        tensors: Tensor shards of the rank.
        objects: Sharded objects of the rank.
        rank: The rank.
        common: Hash of the rank's common tree; None if common trees are not compared.
        layout: Layout of all ranks that the caller passed. All ranks have it, so only its hash is sent.
        ranks: Number of ranks.
    """
    # All ranks have the known layout already, so only its hash is sent.
    plain = layouts.shard_columns(tensors if layout is None else (), rank)
    columns = pack_columns(plain, rank) if ranks > 1 else plain
    digest_of_all = None if layout is None else layout.digest
    return LayoutDescription(columns, layouts.object_columns(objects, rank), common, digest_of_all)


def brief(description: LayoutDescription | None, ranks: int) -> LayoutDescription | None:
    """Return the message that a rank sends first: its description, without the table of keys if this table is long.

    `complete` sends the table later.

    Args:
        description: The rank's description; None if it sends none.
        ranks: Number of ranks. With more ranks, shorter tables count as long.
    """
    if description is None or isinstance(description.columns, ShardColumns):
        return description
    return replace(description, columns=without_long_table(description.columns, ranks))


def complete(
    world: World, own: LayoutDescription | None, descriptions: Sequence[LayoutDescription | None]
) -> list[LayoutDescription | None]:
    """Return all ranks' descriptions, each with its table of keys.

    If `brief` has omitted tables, they are sent now, by one all-gather. Otherwise nothing is sent.

    Args:
        world: Ranks that take part.
        own: This rank's complete description.
        descriptions: Results of `brief` on all ranks, by rank; None for a rank that sent none.
    """
    parts = [description for description in descriptions if description is not None]
    messages = [part.columns for part in parts if not isinstance(part.columns, ShardColumns)]
    if own is None or isinstance(own.columns, ShardColumns) or len(messages) < len(descriptions):
        return list(descriptions)
    messages = send_tables(world, own.columns, messages)
    return [replace(part, columns=message) for part, message in zip(parts, messages, strict=True)]


def check_together(
    doing: str, descriptions: Sequence[LayoutDescription], layout: KnownLayout | None = None, *, tiling: bool = True
) -> ShardColumns:
    """Return all ranks' shards, after checking that they fit together.

    Args:
        doing: "save" or "load", for the error text.
        descriptions: Complete description of each rank, by rank.
        layout: Layout of all ranks that the caller passed on this rank; None if there is none.
        tiling: Whether each element and object must have exactly one main replica. Otherwise the only check is
            that the caller passed the same layout on all ranks, or none.

    Raises:
        IntegrityError: ranks disagree about a tensor, an element or object doesn't have exactly one main replica, or
            different layouts were passed to the ranks.
    """
    # Known layouts aren't exchanged, but their hashes are: a rank with another mesh in its configuration would write
    # other replicas than the ranks expect, and the checkpoint would have gaps.
    if len({part.layout for part in descriptions}) > 1:
        raise _different_layouts(doing, [part.layout for part in descriptions])
    columns = [part.columns for part in descriptions]
    if layout is not None:
        parts = [layout.columns]
    elif messages := [part for part in columns if not isinstance(part, ShardColumns)]:
        parts = unpack_columns(messages)
    else:
        parts = [part for part in columns if isinstance(part, ShardColumns)]
    if tiling:
        return layouts.join_checked(parts, [part.objects for part in descriptions])
    return layouts.join_agreed(parts)


def _different_layouts(doing: str, digests: Sequence[str | None]) -> IntegrityError:
    ranks: dict[str | None, list[int]] = defaultdict(list)
    for rank, layout in enumerate(digests):
        ranks[layout].append(rank)
    lines = [f"{rank_text(alike)}: {'none' if key is None else f'layout {key[:12]}'}" for key, alike in ranks.items()]
    fix = "Compute the layout from the same mesh and specs, or from the same DTensors, on every rank."
    return IntegrityError(error_text(f"{doing}: the ranks' layouts differ", offenders=lines, fix=fix))


def check_common(commons: Sequence[Any]) -> None:
    """Raise unless all ranks have equal common trees; holes in dicts, which stand for shards, may differ.

    Args:
        commons: Common trees by rank.

    Raises:
        IntegrityError: common trees differ; the error names every path, the ranks and all values.
    """
    # Megatron-Core logs a warning on the rank that differs and stores rank 0's state; here it is an error.
    problems = layouts.common_problems(commons)
    if problems:
        fix = (
            "Wrap a rank's own values in a ShardedObject, or in a LocalNonpersistentObject if they need not be stored. "
            "If ranks have different keys, as pipeline stages do, SaveOptions(common='union') stores all. "
            "preprocess_common_before_consistancy_check only excludes values from the comparison: rank 0's "
            "are stored, and the other ranks' are lost."
        )
        lines = map(str, problems)
        raise IntegrityError(error_text("save: the ranks' common states differ", offenders=lines, fix=fix))


# The field of metadata.json, in our own formats, for a common state that is the union of ranks' dicts.

_UNIONS = "united"
_MOST_ENTRIES = 10_000  # keeps metadata.json small; without the field, a load returns the whole union


def unions_field(unions: United) -> dict[str, Any]:
    """Return the field of metadata.json that records in which dicts the ranks had different keys, as {name: value}.

    The result is empty if there are no such dicts, if their keys are too many to record, or if a key has no JSON form.

    Examples:
        >>> unions_field({("optim", "lr"): {"type"}}), unions_field({("optim",): {(1, 2)}}), unions_field({})
        ({'united': [[['optim', 'lr'], ['type']]]}, {}, {})
    """
    pairs = [[list(path), sorted(keys, key=str)] for path, keys in unions.items()]
    is_sound = all(_are_entries(entries) for pair in pairs for entries in pair)
    few = sum(len(path) + len(keys) for path, keys in pairs) <= _MOST_ENTRIES
    return {_UNIONS: pairs} if pairs and is_sound and few else {}


def unions_of(fields: Mapping[str, Any]) -> United:
    """Return the dicts in which ranks had different keys when they saved, as `unions_field` recorded them.

    Args:
        fields: Fields of metadata.json.

    Returns:
        A mapping from the path of each such dict in the common state to the keys that every rank had in it; empty if
        metadata.json has no such field.

    Raises:
        CorruptCheckpoint: the field is invalid.

    Examples:
        >>> unions_of({"united": [[["optim", "lr"], ["type"]]]})
        {('optim', 'lr'): frozenset({'type'})}
    """
    pairs = fields.get(_UNIONS, [])
    if not isinstance(pairs, list) or not all(
        isinstance(pair, list) and len(pair) == 2 and all(map(_are_entries, pair)) for pair in pairs
    ):
        raise CorruptCheckpoint(error_text(f"open: {_UNIONS!r} in metadata.json is invalid", found=repr(pairs)[:200]))
    return {tuple(path): frozenset(keys) for path, keys in pairs}


def _are_entries(entries: Any) -> bool:
    return isinstance(entries, list) and all(type(entry) in (str, int) for entry in entries)
