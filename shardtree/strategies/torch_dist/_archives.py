"""Archives of torch.save in data files: where each lies, numbered in the order of files and bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ...geometry import Column
from ...storage import StoredFile
from ._metadata_file import Ints, Place

_MOST_BYTES = 2.0**60


@dataclass(frozen=True, slots=True, eq=False)
class Archives:
    """All archives of a checkpoint.

    Attributes:
        names: the key of each one's tensor, or the name of its object.
        shapes: of each one's tensor, None for an object.
        start: where each one's payload begins in an imagined file that holds nothing else, int64 (archives,).
        payload: in bytes; an object is all payload, int64 (archives,).
        file: number of the file, int64 (archives,).
        byte: where the archive begins in the file, int64 (archives,).
        length: of the archive, in bytes, int64 (archives,).
        files: names of the files.
        refused: why an archive can't be read, by its number.
        imagined: the imagined file.
    """

    names: Sequence[str]
    shapes: Sequence[Ints | None]
    start: Column
    payload: Column
    file: Column
    byte: Column
    length: Column
    files: tuple[str, ...]
    refused: Mapping[int, str]
    imagined: StoredFile

    def at(self, byte: Column) -> Column:
        """Return the numbers of the archives in which bytes of the imagined file lie, int64 (bytes,)."""
        return np.asarray(np.searchsorted(self.start, byte, side="right") - 1, dtype=np.int64)


def archives_of(
    names: Sequence[str], places: Sequence[Place], shapes: Sequence[Ints | None], payload: Column
) -> tuple[Archives, Column]:
    """Return archives in the order in which they lie, and each given one's number there, int64 (archives,).

    Args:
        names: key of the tensor, or name of the object, of each.
        places: where each lies.
        shapes: of each one's tensor, None for an object.
        payload: bytes of each tensor; objects follow after the tensors, and an object is all payload.

    Raises:
        ValueError: a place is no stretch of a file, or they are too large.
    """
    files = sorted({place.file for place in places})
    for name in files:
        name.encode()  # what can't be encoded is no name of a file; storage says which others aren't
    numbers = {name: number for number, name in enumerate(files)}
    file = np.array([numbers[place.file] for place in places], dtype=np.int64)
    byte = np.array([place.byte for place in places], dtype=np.int64)
    length = np.array([place.length for place in places], dtype=np.int64)
    payload = np.append(payload, length[payload.size :])
    for column in (byte, length, payload):
        if (column < 0).any() or (column > _MOST_BYTES).any() or payload.astype(np.float64).sum() > _MOST_BYTES:
            raise ValueError("an archive's place or size is out of range")
    order = np.lexsort((byte, file))
    number = np.empty_like(order)
    number[order] = np.arange(order.size)
    payload = payload[order]
    end = np.cumsum(payload + 1)
    archives = Archives(
        names=[names[row] for row in order.tolist()],
        shapes=[shapes[row] for row in order.tolist()],
        start=end - payload - 1,
        payload=payload,
        file=file[order],
        byte=byte[order],
        length=length[order],
        files=tuple(files),
        refused={int(number[row]): place.refusal for row, place in enumerate(places) if place.refusal},
        imagined=StoredFile("archives", int(end[-1]) if end.size else 0),
    )
    return archives, number
