"""What one rank's data files look like: which entry lies where, before a byte is written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ...codec import Entry, encode_header
from ...geometry import Column
from ._entries import Entries, Shard, entries_of, select_entries

HEADER_BYTES = 64 * 1024 * 1024
"""A new part begins before a header passes this; readers of safetensors refuse headers of over 100 MB."""

FILE_BYTES = 64 * 1024 * 1024
"""Less isn't worth a file, and a thread that writes it, of its own."""


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """One data file: its header, then its entries, one after the other.

    Attributes:
        header: the file's first bytes.
        entries: in the order in which they lie in the file.
        byte: where each entry begins in the file, int64 (entries,).
    """

    header: bytes
    entries: Entries
    byte: Column

    @property
    def length(self) -> int:
        """The file's length in bytes."""
        return len(self.header) + int(self.entries.length.sum())


def parts(
    shards: Sequence[Shard], *, allow_pickle: bool, most_files: int = 1, header_bytes: int = HEADER_BYTES
) -> tuple[Part, ...]:
    """Return the data files that a rank writes for its shards; none if it has nothing to write.

    Args:
        shards: tensor shards with data, and objects.
        allow_pickle: whether objects that the codec can't hold are pickled.
        most_files: over so many, of about the same length, large shards are spread; headers may ask for more.
        header_bytes: the most that a header may take.

    Raises:
        UnsupportedValue: a dtype or an object can't be stored.
    """
    entries = entries_of(shards, allow_pickle=allow_pickle)
    # Falling item sizes keep every entry aligned to its items without gaps, which the format forbids.
    order = np.lexsort((_key_order(entries.keys), -entries.item_size))
    files = min(most_files, int(entries.length.sum()) // FILE_BYTES)
    length, header_length = entries.length[order], _header_lengths(entries)[order]
    return tuple(
        _part(select_entries(entries, order[group]))
        for share in _shares(length, files)
        for group in _groups(share, header_length[share], header_bytes)
    )


def part_name(save_id: str, rank: int, ranks: int, part: int) -> str:
    """Return the name of a rank's data file.

    Examples:
        >>> part_name("save-1", 0, 4, 0), part_name("save-1", 3, 4, 2)
        ('save-1/00000-of-00004.safetensors', 'save-1/00003-of-00004-2.safetensors')
    """
    suffix = f"-{part}" if part else ""
    return f"{save_id}/{rank:05d}-of-{ranks:05d}{suffix}.safetensors"


def _key_order(keys: Sequence[str]) -> Column:
    """Return the position of each key among all of them, sorted."""
    position = {key: number for number, key in enumerate(sorted(dict.fromkeys(keys)))}
    return np.array([position[key] for key in keys], dtype=np.int64)


def _shares(length: Column, files: int) -> list[Column]:
    """Return rows, in order, in at most so many groups of about as many bytes: each goes where its middle lies."""
    rows = np.arange(len(length))
    if files < 2 or not len(length):
        return [rows] if len(length) else []
    ends = np.cumsum(length)
    middles = 2 * ends - length
    file = np.minimum(middles * files // max(1, 2 * int(ends[-1])), files - 1)
    return np.split(rows, np.flatnonzero(np.diff(file)) + 1)


def _header_lengths(entries: Entries) -> Column:
    """Return the most that each entry takes in a header."""
    # A character takes at most six bytes in JSON; 200 leaves room for the numbers of a shape and the offsets.
    most = [6 * len(key) + 24 * len(shape) + 200 for key, shape in zip(entries.keys, entries.shapes, strict=True)]
    return np.array(most, dtype=np.int64)


def _groups(rows: Column, length: Column, most: int) -> Iterator[Column]:
    """Yield rows, in order, in groups of bounded length; only a single row is a longer one."""
    ends = np.cumsum(length)
    start = 0
    while start < len(rows):
        before = ends[start - 1] if start else 0
        stop = max(start + 1, int(np.searchsorted(ends, before + most, side="right")))
        yield rows[start:stop]
        start = stop


def _part(entries: Entries) -> Part:
    ends = np.cumsum(entries.length)
    starts = ends - entries.length
    columns = (_names(entries.keys), entries.tags, entries.shapes, starts.tolist(), ends.tolist())
    header = encode_header(list(map(Entry, *columns)), {"format": "pt"})
    return Part(header, entries, len(header) + starts)


def _names(keys: Sequence[str]) -> Sequence[str]:
    """Return the names of a file's entries: their keys, or others where these are taken."""
    taken = {"__metadata__"}
    if len(taken.union(keys)) == len(keys) + 1:
        return keys
    names = []
    for position, key in enumerate(keys):
        names.append(_free_name(key, position, taken))
        taken.add(names[-1])
    return names


def _free_name(key: str, position: int, taken: set[str]) -> str:
    name, number = key, position
    while name in taken:
        name, number = f"{key}#{number}", number + 1
    return name
