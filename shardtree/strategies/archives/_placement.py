"""Which box of a tensor a rank's part of a DTensor is, by the placements and the rank's position on the mesh."""

from __future__ import annotations

from math import prod

from ...codec.archives import DTensorParts

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offset and shape."""


def chunk(length: int, pieces: int, number: int) -> tuple[int, int]:
    """Return where a piece of an interval begins, and how long it is, cut as torch.chunk does.

    Pieces of the length divided by their number, rounded up, then a shorter one, then empty ones.

    Examples:
        >>> [chunk(10, 4, number) for number in range(4)], [chunk(3, 4, number)[1] for number in range(4)]
        ([(0, 3), (3, 3), (6, 3), (9, 1)], [1, 1, 1, 0])
    """
    size = -(-length // pieces)
    begin = min(number * size, length)
    return begin, min(size, length - begin)


def placed_box(shape: tuple[int, ...], parts: DTensorParts) -> Box:
    """Return the box that a rank holds.

    Args:
        shape: of the global tensor.
        parts: the placements, and the rank's position.

    Raises:
        ValueError: the rank holds terms of a sum, or the placements contradict each other or the shape.

    Examples:
        >>> from shardtree.codec.archives import Placement
        >>> rows, left = Placement("shard", 0), Placement("strided", 0, 2)
        >>> placed_box((8, 6), DTensorParts((rows,), (4,), (1,), 1))
        ((2, 0), (2, 6))
        >>> placed_box((8, 6), DTensorParts((left, rows), (2, 2), (1, 0), 2))  # FSDP2 over tensor parallelism
        ((2, 0), (2, 6))
    """
    offset, lengths = [0] * len(shape), list(shape)
    for axis in _in_order(parts, len(shape)):
        dim = parts.placements[axis].dim
        begin, lengths[dim] = chunk(lengths[dim], parts.sizes[axis], parts.position[axis])
        offset[dim] += begin
    return tuple(offset), tuple(lengths)


def _in_order(parts: DTensorParts, axes: int) -> list[int]:
    """Return the mesh's axes that cut, in the order in which they do."""
    cuts = [axis for axis, placement in enumerate(parts.placements) if placement.kind in ("shard", "strided")]
    for axis, placement in enumerate(parts.placements):
        if placement.kind == "partial":
            raise ValueError("a Partial placement: ranks hold terms of a sum, not parts of a tensor")
        if axis in cuts and not 0 <= placement.dim < axes:
            raise ValueError(f"a cut of axis {placement.dim} of a tensor with {axes} axes")
        # FSDP2 over tensor parallelism: it cuts what the axes to its right left, though it stands to their left.
        right = [other for other in cuts if other > axis and parts.placements[other].dim == placement.dim]
        if placement.kind == "strided" and placement.split_factor != prod(parts.sizes[other] for other in right):
            raise ValueError(f"a _StridedShard with split_factor {placement.split_factor} left of {len(right)} cuts")
    plain = [axis for axis in cuts if parts.placements[axis].kind == "shard"]
    strided = [axis for axis in cuts if parts.placements[axis].kind == "strided"]
    return [*plain, *reversed(strided)]
