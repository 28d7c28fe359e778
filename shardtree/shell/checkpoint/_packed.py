"""One rank's columns as a message, and the part of it that ranks of a mesh have in common, which is sent once.

Such ranks hold parts of the same tensors, cut in the same ways, at other coordinates. So columns are a table (keys,
kinds, and for each shard the number of its place) and places, of which a regular layout has no more than shapes and
specs. Tables of ranks that are alike are the same bytes: one of these ranks sends them. Nothing is assumed: flat
ranges, of which each shard has its own, are as many places as shards.
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
"""Bytes of tables that a rank hears at most before equal ones are sent once: less than the wait of one more round."""
_LEVEL = 1
"""Of zlib: names that differ by numbers shrink to a tenth at any level, and this is the fastest."""


@dataclass(frozen=True, slots=True)
class PackedColumns:
    """One rank's columns as bytes.

    Attributes:
        rank: whose they are.
        digest: the hash of the table.
        table: the keys, their kinds, and the key and the number of the place of each shard; None until it is sent.
        places: the different boxes and flat ranges, in the order in which they occur.
    """

    rank: int
    digest: str
    table: bytes | None
    places: bytes


def pack_columns(columns: ShardColumns, rank: int) -> PackedColumns:
    """Return the columns of one rank, packed with their table.

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
    return PackedColumns(rank, digest(table), table, _to_bytes((), [each[first] for each in places]))


def _places(columns: ShardColumns) -> tuple[Column, Column]:
    """Return the number of each shard's place, and for each place the first shard that is there."""
    boxes = (*columns.offset.T, *columns.shape.T)
    number, _ = row_numbers((*boxes, columns.start, columns.stop, columns.main.astype(np.int64)))
    order = np.argsort(number, kind="stable")
    first = order[begins(number[order])]
    # In the order of their first shards, not by value: that would number the places of each rank in another way.
    place_of = np.empty_like(first)
    place_of[np.argsort(first)] = np.arange(first.size)
    return place_of[number], np.sort(first)


def unpack_columns(parts: Sequence[PackedColumns]) -> list[ShardColumns]:
    """Return columns that were packed, once their tables are there; those of equal tables share keys and kinds.

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
    """The columns of many ranks in little memory: packed, and those of ranks that are alike once.

    Attributes:
        ranks: those that have the same columns, ascending, by these.
        tables: those of the columns, by hash: each is kept once.
    """

    ranks: dict[PackedColumns, list[int]] = field(default_factory=dict)
    tables: dict[str, bytes | None] = field(default_factory=dict)

    def add(self, columns: ShardColumns, rank: int) -> None:
        """Add a rank's columns; ranks come in order.

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
        """Yield columns, unpacked one at a time, and the ranks that have them; they are numbered instead of by rank."""
        parts = [replace(part, rank=number) for number, part in enumerate(self.ranks)]
        return zip(_unpack_each(parts), self.ranks.values(), strict=True)

    @property
    def alike(self) -> list[Column]:
        """The ranks of each, as plans take them."""
        return [np.array(ranks, dtype=np.int64) for ranks in self.ranks.values()]

    def join(self) -> ShardColumns:
        """Return all columns that differ as one; their rank is a number, as when they are iterated over.

        Raises:
            IntegrityError: ranks differ about a key's global shape, dtype or prepended axes.
        """
        parts = [columns for columns, _ in self]
        if kind_problems(parts):
            join_columns(self.select(lambda columns: np.arange(len(columns))))  # raises, and names ranks, not numbers
        return join_agreed(parts)

    def select(self, rows: Callable[[ShardColumns], Column]) -> list[ShardColumns]:
        """Return the chosen rows of every rank's columns, by rank."""
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
    offset, shape, start, stop, main = (each.take(number, axis=0) for each in places)
    return ShardColumns(keys, kinds, key, offset, shape, start, stop, np.full_like(key, part.rank), main)


def _to_bytes(names: Any, arrays: Sequence[Any]) -> bytes:
    # As bytes, since pickled arrays share objects with each other, and equal ones needn't be equal bytes. As narrow
    # integers, since coordinates are small, and compressing takes as long as there are bytes.
    plain = [(each.dtype.char, each.shape, each.tobytes()) for each in map(narrowed, arrays)]
    return zlib.compress(pickle.dumps((names, plain), protocol=pickle.HIGHEST_PROTOCOL), _LEVEL)


def _from_bytes(content: bytes) -> tuple[Any, list[Any]]:
    names, arrays = pickle.loads(zlib.decompress(content))
    columns = [np.frombuffer(data, dtype=char).reshape(shape) for char, shape, data in arrays]
    return names, [*map(as_int64, columns)]


# Tables that are long are sent by one of the ranks that have them


def without_long_table(part: PackedColumns, ranks: int) -> PackedColumns:
    """Return what a rank says at first: without its table, where the tables of that many ranks would be long together.

    Examples:
        >>> import torch, shardtree as st
        >>> part = pack_columns(st.layouts.shard_columns([]), 0)
        >>> [without_long_table(part, ranks).table is None for ranks in (2, 100_000)]
        [False, True]
    """
    return part if part.table is None or len(part.table) * ranks <= _TOGETHER else replace(part, table=None)


def send_tables(world: World, own: PackedColumns, parts: Sequence[PackedColumns]) -> list[PackedColumns]:
    """Return what all ranks said with the tables that they left out; one all-gather if some did, else none.

    Args:
        world: the ranks.
        own: this rank's, with its table.
        parts: by rank, as all ranks heard them.
    """
    there = {part.digest: part.table for part in parts if part.table is not None}
    # The lowest rank of those that have a table speaks for them all. Every rank finds the same one.
    speaker = {part.digest: part.rank for part in reversed(parts) if part.digest not in there}
    if not speaker:
        return list(parts)
    by_rank = gather(world, "send tables", lambda: own.table if speaker.get(own.digest) == own.rank else None)
    tables = there | {name: by_rank[rank] for name, rank in speaker.items()}
    return [replace(part, table=tables[part.digest]) for part in parts]
