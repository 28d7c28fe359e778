"""A stored array: its shape, how it is cut into chunk files, and what these are called."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from ...errors import CorruptCheckpoint, error_text

_MOST_AXES = 64
_MOST_BYTES = 2**58

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StoredArray:
    """What the metadata of one array says.

    Attributes:
        name: the array's folder in the checkpoint.
        key: the tensor's key.
        dtype: the tensor's.
        shape: the tensor's.
        chunk: shape of what one file holds; files at an edge are as long as others.
        inner: shape of the chunks inside of a file, None where it holds one.
        prefix: what chunk files' names begin with: "c" in zarr v3, nothing in v2.
        separator: what stands between the numbers in a chunk file's name.
        fill: the value of elements that aren't stored, as JSON; None where there is none.
        raw: whether files are plain row-major bytes.
        index_first: whether a file with inner chunks begins with the index of these, rather than ends with it.
        index_checked: whether that index is followed by its CRC.
        document: the metadata, as a JSON object.
    """

    name: str
    key: str
    dtype: torch.dtype
    shape: Shape
    chunk: Shape
    inner: Shape | None = None
    prefix: str = "c"
    separator: str = "."
    fill: Any = None
    raw: bool = True
    index_first: bool = False
    index_checked: bool = True
    document: Any = None

    @property
    def counts(self) -> Shape:
        """How many files there are along each axis; a scalar counts as one axis of one element."""
        return tuple(-(-size // step) for size, step in zip(self.box, self.step, strict=True))

    @property
    def box(self) -> Shape:
        """The shape, of a scalar (1,)."""
        return self.shape or (1,)

    @property
    def step(self) -> Shape:
        """The shape of what one file holds, of a scalar (1,)."""
        return self.chunk or (1,)

    @property
    def file_bytes(self) -> int:
        """How many bytes the elements of one file take, those beyond an edge included."""
        return prod(self.chunk) * self.dtype.itemsize

    def file_name(self, cell: Shape) -> str:
        """Return the name of the file at a place of the grid.

        Examples:
            >>> StoredArray("w", "w", torch.float32, (4, 6), (2, 3)).file_name((0, 1))
            'w/c.0.1'
        """
        numbers = [str(number) for number in (cell if self.shape else ())]
        prefix = [self.prefix] if self.prefix else []
        return f"{self.name}/{self.separator.join([*prefix, *numbers]) or '0'}"


def checked_shapes(shapes: Iterator[Any] | tuple[Any, ...], item_size: int, what: str) -> list[Shape]:
    """Return an array's shape and those of its chunks as tuples, the first one with as many axes as the others.

    Raises:
        CorruptCheckpoint: one isn't a list of numbers, is out of range, or is a chunk without elements.

    Examples:
        >>> checked_shapes(([4, 6], [2, 3]), 4, "w")
        [(4, 6), (2, 3)]
    """
    found: list[Shape] = []
    for number, shape in enumerate(shapes):
        least = 1 if number else 0
        sound = isinstance(shape, list) and len(shape) <= _MOST_AXES
        if not (sound and all(type(size) is int and least <= size <= _MOST_BYTES for size in shape)):
            raise _unsound(what, f"shape {shape!r}"[:200], f"at most {_MOST_AXES} sizes of {least} or more")
        if prod(max(size, 1) for size in shape) * item_size > _MOST_BYTES:
            raise _unsound(what, f"shape {shape!r}"[:200], "fewer elements")
        if found and len(shape) != len(found[0]):
            raise _unsound(what, f"chunks of {len(shape)} axes", f"{len(found[0])} axes, like the array")
        found.append(tuple(shape))
    return found


def _unsound(what: str, found: str, expected: str) -> CorruptCheckpoint:
    fix = "The file was damaged or made by another program; load another checkpoint."
    return CorruptCheckpoint(error_text(f"open: {what} is not sound", found=found, expected=expected, fix=fix))
