"""What `.metadata` says, in columns: its tensors with their chunks, and the places of all archives."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from ...geometry import Column
from ._pickled_columns import Ints

Paths = dict[str, tuple[str | int, ...]]


@dataclass(frozen=True, slots=True, eq=False)
class Places:
    """Where archives lie.

    Attributes:
        file: names of the files, one for each place.
        byte: where each archive begins in its file, int64 (places,).
        length: in bytes, int64 (places,).
        refusals: why an archive can't be read, as text, by its place's number.
    """

    file: Sequence[str]
    byte: Column
    length: Column
    refusals: Mapping[int, str]


@dataclass(frozen=True, slots=True, eq=False)
class TensorEntry:
    """The entry of one tensor in `.metadata`; numbers aren't checked further.

    Attributes:
        dtype: None if this torch lacks it.
        shape: global shape.
        offsets: of its chunks, int64 (chunks, axes).
        shapes: of its chunks, int64 (chunks, axes).
        places: numbers of its chunks' places, int64 (chunks,).
        grid_shape: the shape of the whole tensor, if `shape` is a grid of flattened cells; else None.
    """

    dtype: torch.dtype | None
    shape: Ints
    offsets: Column
    shapes: Column
    places: Column
    grid_shape: Ints | None = None

    @property
    def boxes(self) -> list[tuple[Ints, Ints]]:
        """Each chunk's offset and shape."""
        pairs = zip(self.offsets.tolist(), self.shapes.tolist(), strict=True)
        return [(tuple(offset), tuple(shape)) for offset, shape in pairs]


@dataclass(frozen=True, slots=True, eq=False)
class TensorEntries(Mapping[str, TensorEntry]):
    """The entries of all tensors, by key, made when they are asked for.

    As columns they go to other ranks in a small part of the time that entries would take.

    Attributes:
        number: of each key, from 0.
        kinds: the dtype of each tensor, None if this torch lacks it.
        wholes: the global shape of each.
        edges: the number of each one's first chunk, and how many chunks there are in all.
        offsets: of the chunks, left-aligned, int64 (chunks, axes).
        shapes: of the chunks, left-aligned, int64 (chunks, axes).
        places: numbers of the chunks' places, int64 (chunks,).
        grid_shapes: true shapes of those that are grids of flattened cells, by key.
    """

    number: dict[str, int]
    kinds: Sequence[torch.dtype | None]
    wholes: Sequence[Ints]
    edges: Sequence[int]
    offsets: Column
    shapes: Column
    places: Column
    grid_shapes: Mapping[str, Ints]

    def __getitem__(self, key: str) -> TensorEntry:
        """Return the entry of a tensor."""
        at = self.number[key]
        whole, rows = self.wholes[at], slice(self.edges[at], self.edges[at + 1])
        width = len(whole)
        boxes = self.offsets[rows, :width], self.shapes[rows, :width]
        return TensorEntry(self.kinds[at], whole, *boxes, self.places[rows], self.grid_shapes.get(key))

    def __contains__(self, key: object) -> bool:
        """Return whether there is such a tensor; no entry is made."""
        return key in self.number

    def __iter__(self) -> Iterator[str]:
        """Return the keys, in the file's order."""
        return iter(self.number)

    def __len__(self) -> int:
        """Return how many tensors there are."""
        return len(self.number)


@dataclass(frozen=True, slots=True, eq=False)
class MetadataFile:
    """The content of `.metadata`.

    Attributes:
        tensors: by key.
        values: the number of the place of each pickled value, by name.
        paths: where in the nested state each name was; None if that isn't stored.
        places: of all archives.
    """

    tensors: Mapping[str, TensorEntry]
    values: dict[str, int]
    paths: Paths | None
    places: Places
