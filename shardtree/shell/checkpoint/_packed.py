"""Columns (descriptions of a rank's shards) as compact messages between ranks; equal parts are sent only once.

Ranks of a mesh hold parts of the same tensors, with equal shapes and different offsets. So columns are split into a
list of the rank's distinct places (box, flat range, and whether it is a main replica) and a table of the shards (key,
kind, and number of the place in that list). A regular layout has one place for each pair of shape and spec. Often
several ranks have the same table, byte by byte, and differ only in their places: then one of them sends the table. No
regularity is required: if every shard has its own flat range, each has its own place.
"""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np

from ...core.geometry import Column, as_int64, begins, narrowed, row_numbers
from ...core.layouts import (
    ShardColumns,
    TensorKind,
    join_agreed,
    join_columns,
    kind_problems,
    packed_kinds,
    select_rows,
    unpacked_kinds,
)
from ..storage import digest
from ..world import World, gather

_TOGETHER = 2**20
"""Size in bytes up to which a rank receives all tables at once; sending them takes less time than another round."""
_LEVEL = 1
"""zlib's level: names that differ in numbers shrink to a tenth at any level, and this one is the fastest."""


@dataclass(frozen=True, slots=True)
class PackedColumns:
    """A rank's columns as bytes: a table of the shards, and a list of their distinct places.

    Attributes:
        rank: The rank.
        digest: Hash of `table`.
        table: Keys, their kinds (dtype and shape), and for each shard an index into the keys and an index into
            `places`; None in a message that leaves it for a later one.
        places: Distinct places of shards (box, flat range, main replica or not), in the order of first occurrence.
    """

    rank: int
    digest: str
    table: bytes | None
    places: bytes


def pack_columns(columns: ShardColumns, rank: int) -> PackedColumns:
    """Return a rank's columns in packed form, including `table`.

    Examples:
        >>> import torch, shardtree as st
        >>> def pack(rank):
        ...     shards = [st.ShardedTensor.from_rank_offsets(key, torch.zeros(2), (0, rank, 4)) for key in "abc"]
        ...     return pack_columns(st.layouts.shard_columns(shards, rank), rank)
        >>> pack(0).digest == pack(3).digest, pack(0).places == pack(3).places
        (True, False)
    """
    number, first = _places(columns)
    places = (columns.offset, columns.shape, columns.start, columns.stop, columns.main)
    kind, dtypes, axes, prepend_axes, boxes = packed_kinds(columns.kinds)
    table = _to_bytes((columns.keys, dtypes), (kind, axes, prepend_axes, boxes, columns.key, number))
    return PackedColumns(rank, digest(table), table, _to_bytes((), [column[first] for column in places]))


def _places(columns: ShardColumns) -> tuple[Column, Column]:
    """Number the distinct places of shards: combinations of box, flat range, and main replica or not.

    Returns:
        For each shard, the number of its place; and for each place, the index of its first shard.
    """
    boxes = (*columns.offset.T, *columns.shape.T)
    number, _ = row_numbers((*boxes, columns.start, columns.stop, columns.main.astype(np.int64)))
    order = np.argsort(number, kind="stable")
    first = order[begins(number[order])]
    # Places are numbered by first occurrence: numbers by value would give ranks with the same table different ones.
    place_of = np.empty_like(first)
    place_of[np.argsort(first)] = np.arange(first.size)
    return place_of[number], np.sort(first)


def unpack_columns(parts: Sequence[PackedColumns]) -> list[ShardColumns]:
    """Return the columns of packed messages that have their tables; columns with equal tables share keys and kinds.

    Examples:
        >>> import torch, shardtree as st
        >>> columns = st.layouts.shard_columns([st.ShardedTensor.from_rank_offsets("w", torch.zeros(2), (0, 1, 4))], 7)
        >>> (again,) = unpack_columns([pack_columns(columns, 7)])
        >>> again.keys, again.offset.tolist(), again.rank.tolist()
        (('w',), [[2]], [7])
    """
    return list(_unpack_each(parts))


def _unpack_each(parts: Sequence[PackedColumns]) -> Iterator[ShardColumns]:
    tables = {part.digest: part.table for part in parts}
    contents = {name: _table(table) for name, table in tables.items() if table is not None}
    return (_columns(contents[part.digest], part) for part in parts)


@dataclass(slots=True, eq=False)
class AlikeColumns:
    """Packed columns of many ranks; columns that are equal on several ranks are stored once.

    So ranks form sets with equal columns. The sets are indexed from 0, in the order in which they were added.

    Attributes:
        ranks: Mapping from the packed columns to the ranks that have them, in ascending order.
        tables: Distinct tables of the columns, by hash.
    """

    ranks: dict[PackedColumns, list[int]] = field(default_factory=dict)
    tables: dict[str, bytes | None] = field(default_factory=dict)

    def add(self, columns: ShardColumns, rank: int) -> None:
        """Add a rank's columns; ranks must be added in ascending order.

        Examples:
            >>> import torch, shardtree as st
            >>> parts = AlikeColumns()
            >>> for rank in range(4):
            ...     shard = st.ShardedTensor.from_rank_offsets("w", torch.zeros(2), (0, rank % 2, 2))
            ...     parts.add(st.layouts.shard_columns([shard], rank), rank)
            >>> [(ranks, columns.offset.tolist()) for columns, ranks in parts]
            [([0, 2], [[0]]), ([1, 3], [[2]])]
        """
        part = pack_columns(columns, 0)
        part = replace(part, table=self.tables.setdefault(part.digest, part.table))
        self.ranks.setdefault(part, []).append(rank)

    def __iter__(self) -> Iterator[tuple[ShardColumns, list[int]]]:
        """Yield (columns, ranks) for each set of ranks with equal columns; columns are unpacked one at a time.

        The attribute `columns.rank` holds the index of the set instead of a rank.
        """
        parts = [replace(part, rank=number) for number, part in enumerate(self.ranks)]
        return zip(_unpack_each(parts), self.ranks.values(), strict=True)

    @property
    def alike(self) -> list[Column]:
        """Sets of ranks with equal columns, each an ascending int64 array; the argument `alike` of `plan_reads`."""
        return [np.array(ranks, dtype=np.int64) for ranks in self.ranks.values()]

    def join(self) -> ShardColumns:
        """Return the columns of all sets of ranks, joined; `rank` holds the index of each row's set instead of a rank.

        Raises:
            IntegrityError: ranks differ about a key's global shape, dtype or prepended axes.
        """
        parts = [columns for columns, _ in self]
        if kind_problems(parts):
            join_columns(self.select(lambda columns: np.arange(len(columns))))  # raises, and names ranks, not numbers
        return join_agreed(parts)

    def select(self, rows: Callable[[ShardColumns], Column]) -> list[ShardColumns]:
        """Return the columns of every rank, in ascending order of ranks, with selected rows only.

        Args:
            rows: Function from columns to the indices of the rows to select.
        """
        by_rank: dict[int, ShardColumns] = {}
        for columns, ranks in self:
            part = select_rows(columns, rows(columns))
            by_rank |= {rank: replace(part, rank=np.full_like(part.rank, rank)) for rank in ranks}
        return [by_rank[rank] for rank in sorted(by_rank)]


_Table: TypeAlias = tuple[tuple[str, ...], tuple[TensorKind, ...], Column, Column]


def _table(content: bytes) -> _Table:
    (keys, dtypes), (kind, axes, prepend_axes, boxes, key, number) = _from_bytes(content)
    return keys, unpacked_kinds((kind, dtypes, axes, prepend_axes, boxes)), key, number


def _columns(table: _Table, part: PackedColumns) -> ShardColumns:
    keys, kinds, key, number = table
    _, places = _from_bytes(part.places)
    offset, shape, start, stop, main = (column.take(number, axis=0) for column in places)
    return ShardColumns(keys, kinds, key, offset, shape, start, stop, np.full_like(key, part.rank), main)


def _to_bytes(names: Any, arrays: Sequence[Any]) -> bytes:
    # Arrays are pickled as bytes: pickled arrays may share objects, and then equal arrays give other bytes. They are
    # narrowed, since coordinates are small, and the time of the compression grows with the number of bytes.
    plain = [(array.dtype.char, array.shape, array.tobytes()) for array in map(narrowed, arrays)]
    return zlib.compress(pickle.dumps((names, plain), protocol=pickle.HIGHEST_PROTOCOL), _LEVEL)


def _from_bytes(content: bytes) -> tuple[Any, list[Any]]:
    names, arrays = pickle.loads(zlib.decompress(content))
    columns = [np.frombuffer(data, dtype=char).reshape(shape) for char, shape, data in arrays]
    return names, [*map(as_int64, columns)]


# Long tables are sent later, each by one of its ranks.


def without_long_table(part: PackedColumns, ranks: int) -> PackedColumns:
    """Return the message that a rank sends first: its packed columns, without `table` if that is long.

    A table is long if tables of this length from all ranks would exceed 1 MiB together. `send_tables` sends it later.

    Examples:
        >>> import torch, shardtree as st
        >>> part = pack_columns(st.layouts.shard_columns([]), 0)
        >>> [without_long_table(part, ranks).table is None for ranks in (2, 100_000)]
        [False, True]
    """
    return part if part.table is None or len(part.table) * ranks <= _TOGETHER else replace(part, table=None)


def send_tables(world: World, own: PackedColumns, parts: Sequence[PackedColumns]) -> list[PackedColumns]:
    """Return all ranks' messages, each with the table of the rank's shards.

    Long tables, which the first messages lack, are sent now, by one all-gather. If there are none, nothing is sent.

    Args:
        world: Ranks that take part.
        own: This rank's message, with its table.
        parts: First message of each rank, by rank.
    """
    sent = {part.digest: part.table for part in parts if part.table is not None}
    # Among the ranks of a table, the lowest sends it; every rank computes the same senders.
    sender = {part.digest: part.rank for part in reversed(parts) if part.digest not in sent}
    if not sender:
        return list(parts)
    by_rank = gather(world, "send tables", lambda: own.table if sender.get(own.digest) == own.rank else None)
    tables = sent | {name: by_rank[rank] for name, rank in sender.items()}
    return [replace(part, table=tables[part.digest]) for part in parts]
