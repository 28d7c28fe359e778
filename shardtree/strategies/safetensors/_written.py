"""What one rank wrote, and tells the others before the commit."""

from __future__ import annotations

from dataclasses import dataclass

from ...geometry import Column
from ...layouts import ShardColumns
from ...storage import Hashes


@dataclass(frozen=True, slots=True, eq=False)
class Written:
    """What one rank wrote.

    Attributes:
        files: names of its data files.
        lengths: theirs, in bytes.
        hashes: of their blocks, file by file; None where none are wanted.
        columns: the tensor shards that it wrote.
        file: number of the rank's file for each shard, int64 (shards,).
        byte: where each shard begins in it, int64 (shards,).
        objects: unique key, file, byte and length in bytes of each object.
        totals: what each shard adds to its tensor's fingerprint, uint64 (shards,); None where none is asked for.
    """

    files: tuple[str, ...]
    lengths: tuple[int, ...]
    hashes: tuple[Hashes | None, ...]
    columns: ShardColumns
    file: Column
    byte: Column
    objects: tuple[tuple[str, int, int, int], ...]
    totals: Hashes | None = None
