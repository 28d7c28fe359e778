"""What ranks exchange before a save or load, whether it fits together, and which dicts of common states are unions."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import Any, TypeAlias

import numpy as np
import numpy.ma  # np.unique does at its first call: a signal handler that saves could come in between

from ...core import layouts
from ...core.geometry import Column, slices
from ...core.layouts import ObjectColumns, ShardColumns, TensorKind
from ...core.mapping import ShardedObject, ShardedTensor
from ...core.trees import United
from ...errors import CorruptCheckpoint, IntegrityError, MetadataError, error_text, rank_text
from ..storage import digest
from ..world import World
from ._packed import PackedColumns, pack_columns, send_tables, unpack_columns, without_long_table

# Layouts of all ranks that the caller passed: only their hash is exchanged

_Row: TypeAlias = tuple[str, TensorKind, tuple[int, ...], tuple[int, ...], int, int, bool]


@dataclass(frozen=True, slots=True, eq=False)
class KnownLayout:
    """All ranks' shards, as passed to this rank, once its own ones are known to be among them.

    Attributes:
        columns: all ranks' shards: by rank, of one rank by key and place.
        order: for each of this rank's rows, which of its tree's shards it is, int64 (own shards,).
        digest: the hash of the columns, the same for the same shards in any order.
    """

    columns: ShardColumns
    order: Column
    digest: str


def known_layout(doing: str, layout: object, shards: Sequence[ShardedTensor], rank: int, ranks: int) -> KnownLayout:
    """Return a layout that a caller gave, matched with a rank's own shards.

    Args:
        doing: "save" or "load".
        layout: the columns of all ranks, rows in any order.
        shards: what this rank's tree holds.
        rank: this one.
        ranks: how many there are.

    Raises:
        MetadataError: it isn't a layout.
        IntegrityError: it names ranks that aren't there, or this rank's rows aren't its shards.
    """
    if not isinstance(layout, ShardColumns):
        expected, fix = "ShardColumns", "Pass what layout_of, dtensor_layout, mesh_columns or tree_columns returns."
        raise MetadataError(
            error_text(f"{doing}: not a layout", found=type(layout).__name__, expected=expected, fix=fix)
        )
    beyond = sorted(set(layout.rank[(layout.rank < 0) | (layout.rank >= ranks)].tolist()))
    if beyond:
        expected, fix = f"ranks 0 to {ranks - 1}", "Pass the rows of the ranks that take part, numbered as they are."
        what = f"{doing}: the layout has shards of ranks that aren't there"
        raise IntegrityError(error_text(what, found=rank_text(beyond), expected=expected, fix=fix))
    columns = _with_used_keys(layouts.join_columns([layout]))
    columns = layouts.select_rows(columns, _place_order(columns))
    own = layouts.shard_columns(shards, rank)
    order = _place_order(own)
    layout_rows = _rows(layouts.select_rows(columns, np.flatnonzero(columns.rank == rank)))
    tree_rows = _rows(layouts.select_rows(own, order))
    if layout_rows != tree_rows:
        fix = "Compute the layout for this tree, on this number of ranks, and number the ranks as the world does."
        what = f"{doing}: the layout isn't that of the tree on rank {rank}"
        raise IntegrityError(error_text(what, offenders=_differences(layout_rows, tree_rows), fix=fix))
    return KnownLayout(columns, order, _digest(columns))


def _with_used_keys(columns: ShardColumns) -> ShardColumns:
    """Return columns without the keys that no row is of, as `select_rows` leaves them."""
    is_used = np.bincount(columns.key, minlength=len(columns.keys)) > 0
    return replace(
        columns,
        keys=tuple(compress(columns.keys, is_used)),
        kinds=tuple(compress(columns.kinds, is_used)),
        key=(np.cumsum(is_used) - 1)[columns.key],
    )


def _place_order(columns: ShardColumns) -> Column:
    """Return the rows by rank, then by key and place."""
    places = (*columns.shape.T[::-1], *columns.offset.T[::-1])
    return np.lexsort((columns.main, columns.stop, columns.start, *places, columns.key, columns.rank))


def _rows(columns: ShardColumns) -> list[_Row]:
    """Return rows as values that can be compared, whatever other rows there are."""
    lists = (columns.key, columns.offset, columns.shape, columns.start, columns.stop, columns.main)
    rows = zip(*(each.tolist() for each in lists), strict=True)
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
    # Without the leading axes that only pad: layouts of the same shards may come with wider matrices.
    first = columns.offset.shape[1] - width
    boxes = columns.offset[:, first:], columns.shape[:, first:]
    names = repr([(key, str(kind)) for key, kind in zip(columns.keys, columns.kinds, strict=True)])
    others = columns.key, columns.start, columns.stop, columns.rank, columns.main
    return digest(b"".join([names.encode(), *(np.ascontiguousarray(each).tobytes() for each in (*others, *boxes))]))


@dataclass(frozen=True, slots=True, eq=False)
class LayoutDescription:
    """One rank's part of a layout, without data.

    Attributes:
        columns: its tensor shards, packed if there are other ranks; nothing where all ranks know them already.
        objects: its sharded objects.
        common: the hash of its common tree, None where that doesn't matter.
        layout: the hash of all ranks' tensor shards, None where they aren't known.
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
    """Return what a rank, of that many, sends the others about its shards, without what they know."""
    # All ranks have a known layout already: only its hash travels.
    own = layouts.shard_columns(tensors if layout is None else (), rank)
    columns = pack_columns(own, rank) if ranks > 1 else own
    digest_of_all = None if layout is None else layout.digest
    return LayoutDescription(columns, layouts.object_columns(objects, rank), common, digest_of_all)


def brief(description: LayoutDescription | None, ranks: int) -> LayoutDescription | None:
    """Return what a rank says at first of that many: `complete` sends the rest."""
    if description is None or isinstance(description.columns, ShardColumns):
        return description
    return replace(description, columns=without_long_table(description.columns, ranks))


def complete(
    world: World, own: LayoutDescription | None, descriptions: Sequence[LayoutDescription | None]
) -> list[LayoutDescription | None]:
    """Return all ranks' descriptions with what was left out of them; one all-gather if something was, else none.

    Args:
        world: the ranks.
        own: this rank's, with all.
        descriptions: by rank, as they were sent; None from a rank that sent none.
    """
    parts = [each for each in descriptions if each is not None]
    messages = [each.columns for each in parts if not isinstance(each.columns, ShardColumns)]
    if own is None or isinstance(own.columns, ShardColumns) or len(messages) < len(descriptions):
        return list(descriptions)
    messages = send_tables(world, own.columns, messages)
    return [replace(each, columns=message) for each, message in zip(parts, messages, strict=True)]


def check_together(
    doing: str, descriptions: Sequence[LayoutDescription], layout: KnownLayout | None = None, *, tiling: bool = True
) -> ShardColumns:
    """Return all ranks' shards, after checking that they fit together.

    Args:
        doing: "save" or "load".
        descriptions: by rank.
        layout: the one of all ranks that this rank was given.
        tiling: whether each element and object must have one main replica; else only given layouts are compared.

    Raises:
        IntegrityError: ranks disagree about a tensor, an element or an object has no main replica, or more than one;
            or the ranks were given different layouts.
    """
    # Known layouts need no exchange, but their hash stays: a rank with another mesh in its configuration would write
    # other replicas than the rest expect, and the checkpoint would lack them.
    if len({part.layout for part in descriptions}) > 1:
        raise _different_layouts(doing, [part.layout for part in descriptions])
    columns = [part.columns for part in descriptions]
    if layout is not None:
        parts = [layout.columns]
    elif messages := [each for each in columns if not isinstance(each, ShardColumns)]:
        parts = unpack_columns(messages)
    else:
        parts = [each for each in columns if isinstance(each, ShardColumns)]
    if tiling:
        return layouts.join_checked(parts, [part.objects for part in descriptions])
    return layouts.join_agreed(parts)


def _different_layouts(doing: str, digests: Sequence[str | None]) -> IntegrityError:
    ranks: dict[str | None, list[int]] = defaultdict(list)
    for rank, each in enumerate(digests):
        ranks[each].append(rank)
    lines = [f"{rank_text(own)}: {'none' if each is None else f'layout {each[:12]}'}" for each, own in ranks.items()]
    fix = "Compute it from the same mesh and specs, or from the same DTensors, on every rank."
    return IntegrityError(error_text(f"{doing}: the ranks were given different layouts", offenders=lines, fix=fix))


def check_common(commons: Sequence[Any]) -> None:
    """Raise unless all ranks have the same common tree; holes in dicts don't count.

    Args:
        commons: each rank's common tree, by rank.

    Raises:
        IntegrityError: names every path, the ranks and all values.
    """
    # An error, where Megatron-Core logs a warning on the rank that differs and stores rank 0's state.
    problems = layouts.common_problems(commons)
    if problems:
        fix = (
            "Wrap what belongs to a rank in a ShardedObject, or in a LocalNonpersistentObject if it needn't be stored. "
            "Where ranks have keys of their own, as pipeline stages do, SaveOptions(common='union') stores all. "
            "preprocess_common_before_consistancy_check leaves values out of the comparison only: of these rank 0's "
            "are stored, and the other ranks' are lost."
        )
        lines = map(str, problems)
        raise IntegrityError(error_text("save: the ranks' common states differ", offenders=lines, fix=fix))


# Where a common state is the union of ranks' dicts, as metadata.json says it in the formats of our own

_UNIONS = "united"
_MOST_ENTRIES = 10_000  # entries, so that metadata.json stays small; beyond, a load returns the whole union


def unions_field(unions: United) -> dict[str, Any]:
    """Return the field of metadata.json; nothing where no dict was united, or entries can't be said in JSON.

    Examples:
        >>> unions_field({("optim", "lr"): {"type"}}), unions_field({("optim",): {(1, 2)}}), unions_field({})
        ({'united': [[['optim', 'lr'], ['type']]]}, {}, {})
    """
    pairs = [[list(path), sorted(keys, key=str)] for path, keys in unions.items()]
    is_sound = all(_are_entries(entries) for pair in pairs for entries in pair)
    few = sum(len(path) + len(keys) for path, keys in pairs) <= _MOST_ENTRIES
    return {_UNIONS: pairs} if pairs and is_sound and few else {}


def unions_of(fields: Mapping[str, Any]) -> United:
    """Return of which dicts of a checkpoint's common state ranks had keys of their own, as far as it says so.

    Raises:
        CorruptCheckpoint: the field isn't one that a save writes.

    Examples:
        >>> unions_of({"united": [[["optim", "lr"], ["type"]]]})
        {('optim', 'lr'): frozenset({'type'})}
    """
    pairs = fields.get(_UNIONS, [])
    if not isinstance(pairs, list) or not all(
        isinstance(pair, list) and len(pair) == 2 and all(map(_are_entries, pair)) for pair in pairs
    ):
        raise CorruptCheckpoint(error_text(f"open: {_UNIONS!r} in metadata.json is not sound", found=repr(pairs)[:200]))
    return {tuple(path): frozenset(keys) for path, keys in pairs}


def _are_entries(entries: Any) -> bool:
    return isinstance(entries, list) and all(type(entry) in (str, int) for entry in entries)
