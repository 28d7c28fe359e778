"""Flat shards as Megatron-Core 0.8 to 0.15 stored them: ranges of flattened grid cells, with their true place."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from ._metadata_file import Ints, TensorEntry


@dataclass(frozen=True, slots=True, eq=False)
class Boxes:
    """The chunks of one tensor: boxes of it, or flat ranges of such boxes.

    Attributes:
        global_shape: of the tensor.
        offsets: of each box.
        shapes: of each box.
        starts: first element of each flat range, -1 for a whole box.
        stops: one past its last element, -1 for a whole box.
    """

    global_shape: Ints
    offsets: list[Ints]
    shapes: list[Ints]
    starts: list[int]
    stops: list[int]


def true_boxes(entry: TensorEntry) -> Boxes:
    """Return where a stored tensor's chunks lie in the tensor that was sharded.

    A tensor that was cut into a grid of cells, each of which ranks shared as flat ranges, was stored as one of shape
    (grid, elements of a cell). `.metadata` says the true shape beside it.

    Raises:
        ValueError: the chunks aren't ranges of such cells.

    Examples:
        >>> entry = TensorEntry(None, (2, 1, 24), [(1, 0, 9)], [(1, 1, 15)], [], grid_shape=(8, 6))
        >>> boxes = true_boxes(entry)
        >>> boxes.global_shape, boxes.offsets, boxes.shapes, boxes.starts, boxes.stops
        ((8, 6), [(4, 0)], [(4, 6)], [9], [24])
    """
    if entry.grid_shape is None:
        none = [-1] * len(entry.offsets)
        return Boxes(entry.shape, entry.offsets, entry.shapes, none, none)
    cell = _cell(entry.shape, entry.grid_shape)
    for offset, shape in zip(entry.offsets, entry.shapes, strict=True):
        if shape[:-1] != (1,) * len(cell) or not 0 <= offset[-1] <= offset[-1] + shape[-1] <= entry.shape[-1]:
            raise ValueError(f"its chunk {shape} at {offset} isn't a range of one cell of {entry.shape}")
    offsets = [tuple(at * size for at, size in zip(offset, cell, strict=False)) for offset in entry.offsets]
    starts = [offset[-1] for offset in entry.offsets]
    stops = [start + shape[-1] for start, shape in zip(starts, entry.shapes, strict=True)]
    return Boxes(entry.grid_shape, offsets, [cell] * len(offsets), starts, stops)


def _cell(stored: Ints, shape: Ints) -> Ints:
    """Return the shape of one cell of a grid."""
    fits = len(stored) == len(shape) + 1 and all(
        count > 0 and size % count == 0 for size, count in zip(shape, stored, strict=False)
    )
    cell = tuple(size // count for size, count in zip(shape, stored, strict=False)) if fits else ()
    if not fits or prod(cell) != stored[-1]:
        raise ValueError(f"it is stored as {stored}, which is no grid of flattened cells of {shape}")
    return cell
