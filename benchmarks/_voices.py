"""A world in which one rank is real, and what the others say was packed beforehand, as they would pack it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import islice
from typing import Any, TypeVar

import numpy as np

import shardtree as st
from shardtree.checkpoint._consistency import Description, brief
from shardtree.checkpoint._packed import PackedColumns, pack_columns, without_long_table
from shardtree.checkpoint.loading._auto import Place
from shardtree.layouts import ShardColumns, object_columns, select_rows, shard_columns
from shardtree.plans import level_writes
from shardtree.strategies.index import RankFiles
from shardtree.world import World
from shardtree.world._world import pack, unpack

from ._many import Case, by_rank, rng_state

T = TypeVar("T")
HEAD = 4096
"""Bytes of a file before its first shard."""


@dataclass(frozen=True, slots=True)
class Lap:
    """What rank 0 did until it met the others.

    Attributes:
        phase: where they met.
        seconds: of the processor, since they met before.
        said: bytes.
        heard: bytes, from all together.
    """

    phase: str
    seconds: float
    said: int
    heard: int


class Enough(Exception):
    """Raised where a measured call needn't go on."""


Voices = dict[str, Callable[[bytes], Iterable[bytes]]]
"""By phase, from what rank 0 says there to what each of the others says."""


class OneOfMany(World):
    """Rank 0 of many. The time in which the others' messages are made isn't counted.

    Attributes:
        laps: one for each time that ranks met.
        kept: by phase, what the others said; given to another world, it is said there again.
    """

    def __init__(self, ranks: int, voices: Voices, kept: dict[str, list[bytes]], last: str | None = None) -> None:
        """Begin the first lap.

        Args:
            ranks: how many there are.
            voices: what the others say.
            kept: what they said before.
            last: the phase after which `Enough` is raised; None to go on.
        """
        super().__init__(0, ranks, 600.0)
        self._voices, self.kept, self._last = voices, kept, last
        self.laps: list[Lap] = []
        self._begin = time.process_time()

    def all_gather(self, value: T) -> list[T]:
        """Return the value, and those of the others."""
        outcome: Any = value
        seconds = time.process_time() - self._begin
        if outcome.failure is not None:
            raise RuntimeError(outcome.failure.text)
        if outcome.phase in self._voices and outcome.phase not in self.kept:
            self.kept[outcome.phase] = list(self._voices[outcome.phase](outcome.packed))
        # Where nothing is said for the others, they say the same: nothing, or that they agree.
        others = self.kept.get(outcome.phase, [outcome.packed] * (self.size - 1))
        heard = len(outcome.packed) + sum(map(len, others))
        self.laps.append(Lap(outcome.phase, seconds, len(outcome.packed), heard))
        if outcome.phase == self._last:
            raise Enough
        self._begin = time.process_time()
        return [value, *(replace(outcome, packed=packed) for packed in others)]

    def broadcast(self, value: T, root: int = 0) -> T:
        """Return the value, which only rank 0 has."""
        outcome: Any = value
        self.laps.append(Lap(outcome.phase, time.process_time() - self._begin, len(outcome.packed), 0))
        self._begin = time.process_time()
        return value

    def _never(self, *_: Any) -> Any:
        raise NotImplementedError("no save or load that is measured here does it")

    barrier = all_to_all = send = recv = _never


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class ManyFiles(st.storage.MemoryStorage):
    """A folder in memory that has other ranks' files too, but for their bytes.

    Attributes:
        others: their lengths.
    """

    others: dict[str, int] = field(default_factory=dict)

    def length(self, name: str) -> int | None:
        """Return a file's length; None if there is none."""
        return self.others[name] if name in self.others else super(ManyFiles, self).length(name)


Packed = Sequence[PackedColumns]


def voices(case: Case, columns: ShardColumns, storage: ManyFiles) -> Voices:
    """Return what all ranks but the first say in a save to the storage, and in a load."""
    packed = cache(lambda: [pack_columns(held, rank) for rank, held in enumerate(by_rank(columns, case.ranks))])
    described = partial(_descriptions, case, packed)
    return {
        "save: describe shards": partial(described, lambda description: (description, None)),
        "load: describe target": partial(described, lambda description: ({}, description, Place("another", False))),
        "load: describe reads": lambda _: (pack("", _reads(part, case.ranks)) for part in packed()[1:]),
        "send tables": partial(_tables, packed),
        "save: write": partial(_written, case, columns, storage),
    }


def _descriptions(
    case: Case, packed: Callable[[], Packed], message: Callable[[Description | None], Any], own: bytes
) -> Iterator[bytes]:
    mine = next(each for each in unpack("", own) if isinstance(each, Description))
    for rank in range(1, case.ranks):
        objects = object_columns([rng_state(rank, case.ranks)], rank)
        held = replace(mine.columns, rank=rank) if case.known else packed()[rank]
        yield pack("", message(brief(Description(held, objects, mine.common, mine.layout), case.ranks)))


def _reads(part: PackedColumns, ranks: int) -> Packed:
    """Return what a rank says that it reads in the dtype that is stored, and that it converts: nothing."""
    none = pack_columns(shard_columns([]), part.rank)
    return [without_long_table(each, ranks) for each in (part, none)]


def _tables(packed: Callable[[], Packed], own: bytes) -> Iterator[bytes]:
    said = {packed()[0].digest}
    for part in packed()[1:]:
        yield pack("", None if part.digest in said else part.table)
        said.add(part.digest)


def _written(case: Case, columns: ShardColumns, storage: ManyFiles, packed: bytes) -> Iterator[bytes]:
    (mine,) = unpack("", packed)
    written = select_rows(columns, np.flatnonzero(level_writes(columns, case.ranks)))
    for rank, held in islice(enumerate(by_rank(written, case.ranks)), 1, None):
        end = HEAD + np.cumsum(held.elements * held.item_size[held.key])
        name, length = mine.files[0].replace("/00000-", f"/{rank:05}-"), int(end.max(initial=HEAD))
        storage.others[name] = length
        begin = end - held.elements * held.item_size[held.key]
        yield pack("", [RankFiles((name,), (length,), (None,), held, np.zeros_like(begin), begin, ())])


def lengths_of(written: Sequence[bytes]) -> dict[str, int]:
    """Return the lengths of the files that others said that they wrote."""
    parts = (unpack("", packed)[0] for packed in written)
    return {name: length for part in parts for name, length in zip(part.files, part.lengths, strict=True)}
